# mypy: allow-untyped-defs, allow-incomplete-defs
"""Random numbers that depend on (seed, site, element index) and nothing else: dropout, uniform ones.

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
from functools import partial

import torch
from torch import Tensor

from megacompile.kernels._triton import (
    AotCase,
    accumulator,
    aot_cases,
    ceil_div,
    launch,
    runs_triton,
    tl,
    triton,
    wide,
)

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


# ------------------------------------------------------------------------------------------------------------
# Dropout: element i of a site is kept when ``hash(seed, site, i) >> 8 >= round(p * 2**24)``.
#
# The kernel computes in float32 (float64 for float64); it reads and writes each element once.


def threshold(p: float) -> int:
    """The least 24-bit hash that is kept when elements are dropped with probability p."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability must lie in [0, 1], not {p}")
    return round(p * (1 << 24))


def dropout_mask(
    rng: Tensor, site: int, shape: Sequence[int], p: float, device: torch.device | str | None = None
) -> Tensor:
    """Return the mask of the elements that dropout keeps.

    Args:
        rng: int64 [2], (seed, base site); the effective site is ``rng[1] + site``.
        site: which dropout of the model this is.
        shape: of the mask; element i is the i-th in row-major order.
        p: probability of dropping an element.
        device: of the mask; where None, that of ``rng``.

    Returns:
        bool ``shape``, contiguous, True where kept. Scratch memory: 4 MiB, whatever the shape.
    """
    least = threshold(p)
    device = rng.device if device is None else torch.device(device)
    keep = torch.empty(math.prod(shape), dtype=torch.bool, device=device)
    for part, x in hash_chunks(rng, site, keep.numel(), device):
        torch.ge(x.bitwise_right_shift_(8), least, out=keep[part])
    return keep.view(tuple(shape))


@triton.jit
def dropout_kernel(x_ptr, rng_ptr, y_ptr, site, count, least, scale, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """y = x * scale where the hash reaches ``least``, else 0."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    keep = (random_bits(rng_ptr, site, start, BLOCK) >> 8).to(tl.int32) >= least
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(ACC)
    y = tl.where(keep, x * scale, 0.0).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, mask=at < count)


def dropout_triton(x: Tensor, rng: Tensor, site: int, p: float) -> Tensor:
    """``dropout`` by the kernel."""
    out = x.new_empty(x.shape)
    launch(
        dropout_kernel,
        (ceil_div(x.numel(), BLOCK),),
        *(x.contiguous(), rng.contiguous(), out, site, x.numel()),
        *(threshold(p), 1.0 / (1.0 - p) if p < 1.0 else 0.0),
        ACC=accumulator(x.dtype),
        BLOCK=BLOCK,
    )
    return out


def dropout_reference(x: Tensor, rng: Tensor, site: int, p: float) -> Tensor:
    """``dropout`` in plain torch."""
    keep = dropout_mask(rng, site, x.shape, p, x.device)
    scaled = x.to(wide(x.dtype)) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return torch.where(keep, scaled, 0.0).to(x.dtype).contiguous()


def dropout(x: Tensor, rng: Tensor, site: int, p: float) -> Tensor:
    """x / (1 - p) where ``dropout_mask`` keeps, else 0; its own backward on the gradient of y.

    Args:
        x: any shape and float type; element i is the i-th in row-major order.
        rng: int64 [2] on x's device, (seed, base site).
        site: added to the base site.
        p: probability of dropping an element.

    Returns:
        x's shape and type, contiguous. (Not a registered operator: the compiler's own dropout is.)
    """
    run = dropout_triton if runs_triton(x) else dropout_reference
    return run(x, rng, site, p)


@aot_cases("dropout")
def _dropout_aot() -> list[AotCase]:
    def case(dtype: torch.dtype) -> None:
        rng = torch.empty(2, dtype=torch.int64, device="meta")
        dropout_triton(torch.empty((4096, 4096), dtype=dtype, device="meta"), rng, 3, 0.1)

    return [("bf16", partial(case, torch.bfloat16)), ("fp32", partial(case, torch.float32))]


# ------------------------------------------------------------------------------------------------------------
# Uniform numbers: the upper bits of an element's hash, as many as the type's mantissa holds (float16 11,
# bfloat16 8, float32 24, float64 all 32), as a fraction: exact, and below 1.
#
# The kernel writes each element once, and reads nothing but the seed.


BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 32}


@triton.jit
def uniform_kernel(rng_ptr, y_ptr, site, count, unit, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """y = the upper BITS of the hash * unit, which is 2**-BITS."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    words = random_bits(rng_ptr, site, start, BLOCK) >> (32 - BITS)
    y = words.to(tl.float64 if BITS == 32 else tl.float32) * unit
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < count)


def uniform_triton(rng: Tensor, shape: Sequence[int], dtype: torch.dtype, site: int) -> Tensor:
    """``uniform`` by the kernel."""
    out = rng.new_empty(tuple(shape), dtype=dtype)
    bits = BITS[dtype]
    grid = (ceil_div(out.numel(), BLOCK),)
    launch(uniform_kernel, grid, rng.contiguous(), out, site, out.numel(), 2.0**-bits, BITS=bits, BLOCK=BLOCK)
    return out


def uniform_reference(rng: Tensor, shape: Sequence[int], dtype: torch.dtype, site: int) -> Tensor:
    """``uniform`` in plain torch. Scratch memory: 4 MiB and one chunk, whatever the shape."""
    bits = BITS[dtype]
    out = torch.empty(math.prod(shape), dtype=dtype, device=rng.device)
    for part, words in hash_chunks(rng, site, out.numel(), rng.device):
        out[part] = words.bitwise_right_shift_(32 - bits)
    return out.mul_(2.0**-bits).view(tuple(shape))


def uniform(rng: Tensor, shape: Sequence[int], dtype: torch.dtype, site: int) -> Tensor:
    """Numbers from [0, 1), ``shape`` and ``dtype`` (a floating-point type), contiguous, on ``rng``'s device.

    Args:
        rng: int64 [2], (seed, base site).
        shape: of the result; element i is the i-th in row-major order.
        dtype: of the result.
        site: added to the base site.
    """
    run = uniform_triton if runs_triton(rng) else uniform_reference
    return run(rng, shape, dtype, site)


@aot_cases("uniform")
def _uniform_aot() -> list[AotCase]:
    def case(dtype: torch.dtype) -> None:
        uniform_triton(torch.empty(2, dtype=torch.int64, device="meta"), (4096, 4096), dtype, 3)

    return [("bf16", partial(case, torch.bfloat16)), ("fp32", partial(case, torch.float32))]
