# mypy: allow-untyped-defs, allow-incomplete-defs
"""Random numbers that depend on (seed, site, element index) and nothing else.

A recompute in another order, on another device or at another thread count draws the same numbers, so none
is ever saved. The hash of an element, all in 32-bit unsigned arithmetic (``mix`` is Wellons' bijective
finaliser, nullprogram.com/blog/2018/07/31, with the constants of his later two-round search; avalanche bias
0.107):

    mix(x):  x ^= x >> 16;  x *= 0x21f0aaad;  x ^= x >> 15;  x *= 0x735a2d97;  x ^= x >> 15
    key(c):  h = c;  for w in (seed_lo, seed_hi, site_lo, site_hi):  h = mix((h ^ w) + 0x9e3779b9)
    hash:    mix(mix(i_lo ^ key(0x243f6a88)) + key(0x85a308d3) + i_hi * 0x9e3779b9)

Two keys make 64 bits: with one, two of some ten thousand (step, site) pairs would already share a
mask. Both multipliers of ``mix`` stay below 2**31, so int64 tensors compute it without overflow.

Kernels take 1024 elements to a program.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megacompile.kernels._triton import tl, triton

LOW = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
KEY_0 = 0x243F6A88
KEY_1 = 0x85A308D3
CHUNK = 1 << 18
BLOCK = 1024


def _mix_(x: Tensor, scratch: Tensor) -> Tensor:
    """Wellons' finaliser in place on int64 values below 2**32."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x.bitwise_xor_(torch.bitwise_right_shift(x, shift, out=scratch))
        x.mul_(factor).bitwise_and_(LOW)
    return x.bitwise_xor_(torch.bitwise_right_shift(x, 15, out=scratch))


def dropout_keys(rng: Tensor, site: int) -> Tensor:
    """The two 32-bit keys of a site.

    Args:
        rng: int64 [2], (seed, base site).
        site: added to the base site.

    Returns:
        int64 [2], each below 2**32, on ``rng``'s device (no host synchronisation).
    """
    words = torch.stack((rng[0], rng[1] + site))
    words = torch.stack((words, words >> 32), dim=1).flatten().bitwise_and_(LOW)
    keys = torch.tensor((KEY_0, KEY_1), dtype=torch.int64, device=rng.device)
    scratch = torch.empty_like(keys)
    for word in words:
        _mix_(keys.bitwise_xor_(word).add_(GOLDEN).bitwise_and_(LOW), scratch)
    return keys


def hash_chunks(rng: Tensor, site: int, count: int, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """(elements, their 32-bit hashes as int64) in chunks; the buffer is used again."""
    first, second = dropout_keys(rng.to(device), site).unbind()
    buffer = torch.empty((2, min(count, CHUNK)), dtype=torch.int64, device=device)
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        x, scratch = buffer[0, :size], buffer[1, :size]
        low = start & LOW
        torch.arange(low, low + size, out=x)
        _mix_(x.bitwise_xor_(first), scratch)
        x.add_(second).add_((start >> 32) * GOLDEN & LOW).bitwise_and_(LOW)
        yield slice(start, start + size), _mix_(x, scratch)


def random_words(rng: Tensor, site: int, shape: Sequence[int], device: torch.device | None = None) -> Tensor:
    """The 32-bit hash of every element: int64 ``shape``, contiguous, in [0, 2**32)."""
    device = rng.device if device is None else device
    words = torch.empty(math.prod(shape), dtype=torch.int64, device=device)
    for part, x in hash_chunks(rng, site, words.numel(), device):
        words[part] = x
    return words.view(tuple(shape))


@triton.jit
def mix(x):
    """Wellons' finaliser on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def absorb(key, word):
    """Fold a 64-bit word into a key, low half first."""
    key = mix((key ^ word.to(tl.uint32)) + 0x9E3779B9)
    return mix((key ^ (word >> 32).to(tl.uint32)) + 0x9E3779B9)


@triton.jit
def random_bits(rng_ptr, site, start, BLOCK: tl.constexpr):
    """The 32-bit hashes of elements [start, start + BLOCK); start is an int64 multiple of BLOCK."""
    seed = tl.load(rng_ptr)
    where = tl.load(rng_ptr + 1) + site
    first = absorb(absorb(tl.full((), 0x243F6A88, tl.uint32), seed), where)
    second = absorb(absorb(tl.full((), 0x85A308D3, tl.uint32), seed), where)
    second = second + (start >> 32).to(tl.uint32) * 0x9E3779B9
    low = start.to(tl.uint32) + tl.arange(0, BLOCK).to(tl.uint32)
    return mix(mix(low ^ first) + second)
