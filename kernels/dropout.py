# mypy: allow-untyped-defs, allow-incomplete-defs
"""Dropout: element i of a site is kept when ``hash(seed, site, i) >> 8 >= round(p * 2**24)``.

The masks of the operator come from this counter, not from a hidden generator, so a recomputed forward repeats
the first one bit for bit. The kernel computes in float32 (float64 for float64); it reads and writes each
element once.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import (
    accumulator,
    ceil_div,
    launch,
    runs_triton,
    tl,
    triton,
    wide,
)
from megacompile.kernels.random_numbers import BLOCK, hash_chunks, random_bits
from megacompile.kernels.registry import OpSpec, declare


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
        site: the number of this dropout in the model.
        shape: of the mask; element i is the i-th in row-major order.
        p: probability of dropping an element.
        device: of the mask; None: that of ``rng``.

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
        x's shape and type, contiguous. (Not a registered operator: :func:`dropout_op` is.)
    """
    run = dropout_triton if runs_triton(x) else dropout_reference
    return run(x, rng, site, p)


@torch.library.custom_op("megacompile::dropout", mutates_args=())
def dropout_op(x: Tensor, rng: Tensor, site: int, p: float) -> Tensor:
    """Zero elements of ``x`` with probability ``p`` and scale the rest by 1 / (1 - p).

    ``rng`` is int64 of shape [2], (seed, base site); the call's own site is ``rng[1] + site``.
    The operator is linear in ``x``, hence its own backward.
    """
    if runs_triton(x):
        return dropout_triton(x, rng, site, p)
    keep = dropout_mask(rng, site, x.shape, p, x.device)
    return torch.where(keep, x * (1.0 / (1.0 - p)) if p < 1.0 else x, torch.zeros((), dtype=x.dtype))


@dropout_op.register_fake
def _(x: Tensor, rng: Tensor, site: int, p: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _dropout_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rng, ctx.site, ctx.p = inputs
    ctx.save_for_backward(rng)


def _dropout_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (rng,) = ctx.saved_tensors
    return torch.ops.megacompile.dropout(grad, rng, ctx.site, ctx.p), None, None, None


dropout_op.register_autograd(_dropout_backward, setup_context=_dropout_setup)


declare(OpSpec("dropout", draws=(1, 2)))
