# mypy: allow-untyped-defs, allow-incomplete-defs
"""Uniform numbers: the upper bits of an element's hash, as many as the type's mantissa holds (float16 11,
bfloat16 8, float32 24, float64 all 32), as a fraction: exact, and below 1.

The kernel writes each element once, and reads nothing but the seed.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megacompile.kernels._triton import ceil_div, launch, runs_triton, tl, triton
from megacompile.kernels.random_numbers import BLOCK, hash_chunks, random_bits
from megacompile.kernels.registry import OpSpec, declare

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


@torch.library.custom_op("megacompile::uniform", mutates_args=())
def uniform_op(rng: Tensor, shape: Sequence[int], dtype: torch.dtype, site: int) -> Tensor:
    """Numbers from [0, 1) of a shape and floating-point dtype.

    ``rng`` is int64 of shape [2], (seed, base site); the call's own site is ``rng[1] + site``.
    """
    return uniform(rng, shape, dtype, site)


@uniform_op.register_fake
def _(rng: Tensor, shape: Sequence[int], dtype: torch.dtype, site: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=rng.device)


declare(OpSpec("uniform", draws=(0, 3)))
