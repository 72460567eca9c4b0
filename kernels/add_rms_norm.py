# mypy: allow-untyped-defs, allow-incomplete-defs
"""Residual addition and RMSNorm in one pass: ``sum = x + residual; y = rms_norm(sum)``.

x, residual: [..., N], one type, any strides. y, sum: [..., N]; sum is rounded to that type before it is
normalised, as two separate operators would. The backward adds the gradient that reaches sum on its other
way (the residual stream). Saves sum and rstd; sum replaces x as the saved activation.

The kernels are those of :mod:`~megacompile.kernels.rms_norm`.
"""

from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import MAX_ROW, runs_triton, wide
from megacompile.kernels.eager_form import EagerForm, normal, rows_of
from megacompile.kernels.registry import OpPass, OpSpec, declare
from megacompile.kernels.rms_norm import (
    empty_output,
    rms_norm_backward_reference,
    rms_norm_backward_triton,
    rms_norm_eager,
    rms_norm_reference,
    rms_norm_triton,
)

# Rows of a backward beyond which torch takes over: registers would spill.
MAX_ADD_RMS_NORM_BACKWARD = 8192  # the second gradient takes registers too


@torch.library.custom_op("megacompile::add_rms_norm", mutates_args=())
def add_rms_norm_op(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, cast_early: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, sum, rstd); see above."""
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError("add_rms_norm needs x and residual of one shape and type")
    if runs_triton(x) and x.shape[-1] <= MAX_ROW:
        return rms_norm_triton(x, residual, weight, eps, offset, cast_early)
    total = (x + residual).contiguous()
    y, rstd = rms_norm_reference(total, weight, eps, offset, cast_early)
    return y, total, rstd


@torch.library.custom_op("megacompile::add_rms_norm_backward", mutates_args=())
def add_rms_norm_backward_op(
    grad: Tensor,
    grad_sum: Tensor,
    total: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    cast_early: bool,
) -> tuple[Tensor, Tensor]:
    """(gradient of x and of residual, dw)."""
    fits = runs_triton(total) and total.shape[-1] <= MAX_ADD_RMS_NORM_BACKWARD
    run = rms_norm_backward_triton if fits else rms_norm_backward_reference
    return run(grad, grad_sum, total, weight, rstd, (offset, cast_early))


@add_rms_norm_op.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, cast_early: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[:-1], dtype=wide(x.dtype))
    return empty_output(x, weight, cast_early), x.new_empty(x.shape), rstd


@add_rms_norm_backward_op.register_fake
def _(grad: Tensor, grad_sum: Tensor, total: Tensor, weight: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    dw = total.new_empty(0) if weight is None else torch.empty_like(weight)
    return total.new_empty(total.shape), dw


def _add_rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, weight, _, ctx.offset, ctx.cast_early = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(output[1], weight, output[2])


def _add_rms_norm_backward(ctx: Any, grad: Tensor, grad_sum: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    total, weight, rstd = ctx.saved_tensors
    dx, dw = add_rms_norm_backward_op(grad, grad_sum, total, weight, rstd, ctx.offset, ctx.cast_early)
    return dx, dx, None if weight is None else dw, None, None, None


add_rms_norm_op.register_autograd(_add_rms_norm_backward, setup_context=_add_rms_norm_setup)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast_early: bool = True,
) -> tuple[Tensor, Tensor]:
    """(y, sum), differentiable in x, residual and weight."""
    y, total, _ = add_rms_norm_op(x, residual, weight, eps, offset, cast_early)
    return y, total


def _add_rms_norm_eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A residual addition and Llama's norm of the sum."""
    total = x + residual
    return rms_norm_eager(total, weight), total


declare(
    OpSpec(
        "add_rms_norm",
        OpPass(),
        OpPass(launches=3, sums=True),
        along="rows",
        eager=(
            EagerForm(
                "add_rms_norm",
                ("tokens", "width"),
                (8192, 4096),
                lambda s, g: [normal(g, *s), normal(g, *s), normal(g, s[1])],
                3,
                _add_rms_norm_eager,
                add_rms_norm,
                rows_of,
            ),
        ),
    )
)
