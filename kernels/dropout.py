"""Dropout whose mask is a function of (seed, site, element index) and nothing else.

Element i of a site is kept when ``hash(seed, site, i) >> 8 >= round(p * 2**24)``, so a recompute
in another order, on another device or at another thread count drops the same elements, and no mask
is ever saved. The hash, all in 32-bit unsigned arithmetic (``mix`` is Wellons' bijective finaliser,
nullprogram.com/blog/2018/07/31, with the constants of his later two-round search; avalanche bias
0.107):

    mix(x):  x ^= x >> 16;  x *= 0x21f0aaad;  x ^= x >> 15;  x *= 0x735a2d97;  x ^= x >> 15
    key(c):  h = c;  for w in (seed_lo, seed_hi, site_lo, site_hi):  h = mix((h ^ w) + 0x9e3779b9)
    hash:    mix(mix(i_lo ^ key(0x243f6a88)) + key(0x85a308d3) + i_hi * 0x9e3779b9)

Two keys make 64 bits: with one, two of some ten thousand (step, site) pairs would already share a
mask. Both multipliers of ``mix`` stay below 2**31, so int64 tensors compute it without overflow.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LOW = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
KEY_0 = 0x243F6A88
KEY_1 = 0x85A308D3
CHUNK = 1 << 18


def threshold(p: float) -> int:
    """The least 24-bit hash that is kept when elements are dropped with probability p."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability must lie in [0, 1], not {p}")
    return round(p * (1 << 24))


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


def dropout_mask(
    rng: Tensor, site: int, shape: Sequence[int], p: float, device: torch.device | str | None = None
) -> Tensor:
    """Which elements dropout keeps.

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
    count = math.prod(shape)
    keep = torch.empty(count, dtype=torch.bool, device=device)
    first, second = dropout_keys(rng.to(device), site).unbind()
    buffer = torch.empty((2, min(count, CHUNK)), dtype=torch.int64, device=device)
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        x, scratch = buffer[0, :size], buffer[1, :size]
        low = start & LOW
        torch.arange(low, low + size, out=x)
        _mix_(x.bitwise_xor_(first), scratch)
        x.add_(second).add_((start >> 32) * GOLDEN & LOW).bitwise_and_(LOW)
        _mix_(x, scratch).bitwise_right_shift_(8)
        torch.ge(x, least, out=keep[start : start + size])
    return keep.view(tuple(shape))
