# mypy: allow-untyped-defs, allow-incomplete-defs
"""Float32 in 16-bit pieces: split masters, and stochastic rounding to bfloat16.

Split: ``high = bits + 0x8000 >> 16`` (as bfloat16: the value to nearest, ties up), ``low = bits -
(high << 16)`` (int16); ``join`` gives back all 2**32 patterns. Stochastic rounding (Gupta et al.
2015, arXiv:1502.02551; for bfloat16 weights Zamirai et al. 2020, arXiv:2010.06192): add 16 uniform
bits below the cut, then truncate, so that the expectation is the value; the bits are the counter
hash of ``dropout.py``, a function of (seed, site, element).

All tensors flat or of one shape; sources are not changed. One program takes 1024 elements; each is read
and written once (split and join: 8 bytes an element, stochastic rounding: 6).
"""

from functools import partial

import torch
from torch import Tensor

from megacompile.kernels._triton import AotCase, aot_cases, ceil_div, launch, runs_triton, tl, triton
from megacompile.kernels.dropout import random_bits, random_words

BLOCK = 1024


@triton.jit
def joined(high, low):
    """The float32 of a bfloat16 and an int16 half."""
    bits = (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def halves(x):
    """(bfloat16, int16) of a float32."""
    bits = x.to(tl.int32, bitcast=True)
    high = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, bits.to(tl.int16)


@triton.jit
def join_kernel(high_ptr, low_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """float32 from halves."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    high = tl.load(high_ptr + at, mask=inside)
    tl.store(out_ptr + at, joined(high, tl.load(low_ptr + at, mask=inside)), mask=inside)


@triton.jit
def split_kernel(x_ptr, high_ptr, low_ptr, count, BLOCK: tl.constexpr):
    """Halves of float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    high, low = halves(tl.load(x_ptr + at, mask=inside))
    tl.store(high_ptr + at, high, mask=inside)
    tl.store(low_ptr + at, low, mask=inside)


@triton.jit
def stochastic_round_kernel(x_ptr, rng_ptr, out_ptr, site, count, BLOCK: tl.constexpr):
    """bfloat16 of bits + 16 uniform bits, truncated; what is not finite is cast."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(x_ptr + at, mask=inside)
    bits = x.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    noise = (random_bits(rng_ptr, site, start, BLOCK) & 0xFFFF).to(tl.int32)
    rounded = ((bits + noise) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(out_ptr + at, tl.where(finite, rounded, x.to(tl.bfloat16)), mask=inside)


def join_triton(high: Tensor, low: Tensor, out: Tensor) -> None:
    """``join_halves`` by the kernel."""
    blocks = ceil_div(out.numel(), BLOCK)
    launch(join_kernel, (blocks,), high, low, out, out.numel(), BLOCK=BLOCK)


def split_triton(x: Tensor, high: Tensor, low: Tensor) -> None:
    """``split_halves`` by the kernel."""
    launch(split_kernel, (ceil_div(x.numel(), BLOCK),), x, high, low, x.numel(), BLOCK=BLOCK)


def stochastic_round_triton(x: Tensor, rng: Tensor, site: int) -> Tensor:
    """``stochastic_round`` by the kernel."""
    out = torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    blocks = ceil_div(x.numel(), BLOCK)
    given = x.contiguous(), rng.contiguous(), out, site, x.numel()
    launch(stochastic_round_kernel, (blocks,), *given, BLOCK=BLOCK)
    return out


def join_reference(high: Tensor, low: Tensor) -> Tensor:
    """The float32 values of bfloat16 and int16 halves, in plain torch."""
    return ((high.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low) in plain torch."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def stochastic_round_reference(x: Tensor, rng: Tensor, site: int) -> Tensor:
    """``stochastic_round`` in plain torch."""
    bits = x.contiguous().view(torch.int32)
    noise = (random_words(rng, site, x.shape, x.device) & 0xFFFF).int()
    rounded = ((bits + noise) >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.where(x.isfinite(), rounded, x.bfloat16())


@torch.library.custom_op("megacompile::join_halves", mutates_args=())
def join_halves(high: Tensor, low: Tensor) -> Tensor:
    """float32 from bfloat16 ``high`` and int16 ``low`` of one shape."""
    if not runs_triton(high):
        return join_reference(high.contiguous(), low)
    out = high.new_empty(high.shape, dtype=torch.float32)
    join_triton(high.contiguous(), low.contiguous(), out)
    return out


@torch.library.custom_op("megacompile::split_halves", mutates_args=())
def split_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """(bfloat16 high, int16 low) from float32."""
    if not runs_triton(x):
        return split_reference(x)
    high = x.new_empty(x.shape, dtype=torch.bfloat16)
    low = x.new_empty(x.shape, dtype=torch.int16)
    split_triton(x.contiguous(), high, low)
    return high, low


@torch.library.custom_op("megacompile::stochastic_round", mutates_args=())
def stochastic_round(x: Tensor, rng: Tensor, site: int) -> Tensor:
    """bfloat16 whose expectation is the float32 x; rng: int64 [2], as in ``dropout``."""
    run = stochastic_round_triton if runs_triton(x) else stochastic_round_reference
    return run(x, rng, site)


@join_halves.register_fake
def _(high: Tensor, low: Tensor) -> Tensor:
    return high.new_empty(high.shape, dtype=torch.float32)


@split_halves.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.bfloat16), x.new_empty(x.shape, dtype=torch.int16)


@stochastic_round.register_fake
def _(x: Tensor, rng: Tensor, site: int) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.bfloat16)


@aot_cases
def _aot() -> list[AotCase]:
    x = torch.empty(1 << 20, device="meta")
    high, low = x.bfloat16(), x.to(torch.int16)
    rng = torch.empty(2, dtype=torch.int64, device="meta")
    return [
        ("join", partial(join_triton, high, low, x)),
        ("split", partial(split_triton, x, high, low)),
        ("stochastic", partial(stochastic_round_triton, x, rng, 3)),
    ]
