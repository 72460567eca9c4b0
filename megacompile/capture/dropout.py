"""Dropout as an operator whose masks come from a counter, not from a hidden generator: element i of a call
depends on (seed, call site, i) alone, so a recomputed forward repeats the first one bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import runs_triton
from megacompile.kernels.dropout import dropout_mask, dropout_triton
from megacompile.kernels.registry import Kernel, OpPass, OpSpec, declare


@torch.library.custom_op("megacompile::dropout", mutates_args=())
def dropout(x: Tensor, rng: Tensor, site: int, p: float) -> Tensor:
    """Zero elements of ``x`` with probability ``p`` and scale the rest by 1 / (1 - p).

    ``rng`` is int64 of shape [2], (seed, base site); the call's own site is ``rng[1] + site``.
    The operator is linear in ``x``, hence its own backward.
    """
    if runs_triton(x):
        return dropout_triton(x, rng, site, p)
    keep = dropout_mask(rng, site, x.shape, p, x.device)
    return torch.where(keep, x * (1.0 / (1.0 - p)) if p < 1.0 else x, torch.zeros((), dtype=x.dtype))


@dropout.register_fake
def _(x: Tensor, rng: Tensor, site: int, p: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _dropout_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, rng, ctx.site, ctx.p = inputs
    ctx.save_for_backward(rng)


def _dropout_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (rng,) = ctx.saved_tensors
    return torch.ops.megacompile.dropout(grad, rng, ctx.site, ctx.p), None, None, None


dropout.register_autograd(_dropout_backward, setup_context=_dropout_setup)
declare(OpSpec("dropout", OpPass(kernels=(Kernel("dropout", "dropout_kernel"),)), draws=(1, 2)))
