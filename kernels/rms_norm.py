# mypy: allow-untyped-defs, allow-incomplete-defs
"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467); saves only rstd.

    rstd = (mean(x**2) + eps) ** -0.5        y = x * rstd * (weight + offset)

Two variants differ in where the low precision begins. ``cast_early=True`` (Llama, Qwen, Mistral): ``x *
rstd`` is cast to x's type and then multiplied by the weight. ``cast_early=False`` (Gemma with ``offset=1``;
OLMo 2 and ``torch.nn.RMSNorm`` with ``offset=0``): the product is cast.

x: [..., N], any float type, any strides. weight: [N] or None. y: [..., N] of x's type (promoted with the
weight's under ``cast_early``). rstd: [...] float32 (float64 for float64 x), the type that everything is
computed in.

Both kernels also serve ``add_rms_norm``, with a residual. Traffic per element of x: 2 elements forward (4
with a residual), 3 backward (4).

The last dimension is normed. Kernels hold whole rows, 2048 elements of short rows to a program or one row,
and compute in the type of rstd: float32, or float64 for float64 x. References take a few rows at a time, and
keep sums over rows in the type of rstd.
"""

from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import (
    MAX_ROW,
    accumulator,
    as_rows,
    ceil_div,
    launch,
    persistent,
    row_tile,
    row_vector,
    runs_triton,
    tl,
    triton,
    wide,
)
from megacompile.kernels.eager_form import EPS, EagerForm, normal, rows_of
from megacompile.kernels.registry import OpPass, OpSpec, declare
from megacompile.kernels.row_chunks import by_rows, flat

# Rows of a backward beyond which torch takes over: registers would spill.
MAX_RMS_NORM_BACKWARD = 16384  # dw


Variant = tuple[float, bool]
"""offset, cast_early."""


@triton.jit
def rms_norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rstd_ptr,
    x_stride, residual_stride, rows, columns, eps, offset,
    HAS_WEIGHT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, CAST_EARLY: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y and rstd of BLOCK_M rows; with a residual, of the rounded sum, which is written too."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (col < columns)[None, :]
    out = row[:, None] * columns + col[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0)
    if HAS_RESIDUAL:
        at = residual_ptr + row[:, None] * residual_stride + col[None, :]
        residual = tl.load(at, mask=inside, other=0.0)
        x = (x.to(ACC) + residual.to(ACC)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + out, x, mask=inside)
    wide_x = x.to(ACC)
    rstd = 1.0 / tl.sqrt(tl.sum(wide_x * wide_x, axis=1) / columns + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = wide_x * rstd[:, None]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + col, mask=col < columns, other=0.0).to(ACC) + offset
        if CAST_EARLY:
            y = y.to(x.dtype).to(ACC)
        y = y * weight[None, :]
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dw_ptr,
    grad_stride, grad_sum_stride, x_stride, rows, columns, offset,
    HAS_WEIGHT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, CAST_EARLY: tl.constexpr, WIDE: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """With n = x * rstd and g = grad * (weight + offset):

        dx = (g - n * mean(g * n)) * rstd (+ grad_sum)        dw = sum over rows of grad * n

    Persistent, one to four programs per processor, walking over tiles of BLOCK_M rows; its share of dw stays
    in registers and is written once, dw is the sum of the shares.
    WIDE: rows so long that registers would spill; weight and x are then read twice.
    """
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + col, mask=col < columns, other=0.0).to(ACC) + offset
        dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for tile in range(program, tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        inside = (row < rows)[:, None] & (col < columns)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0)
        at = grad_ptr + row[:, None] * grad_stride + col[None, :]
        grad = tl.load(at, mask=inside, other=0.0).to(ACC)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normal = x.to(ACC) * rstd[:, None]
        if HAS_WEIGHT:
            if CAST_EARLY:
                dw += grad * normal.to(x.dtype).to(ACC)
            else:
                dw += grad * normal
            if WIDE:
                weight = tl.load(weight_ptr + col, mask=col < columns, other=0.0).to(ACC) + offset
            grad = grad * weight[None, :]
        mean = tl.sum(grad * normal, axis=1) / columns
        if WIDE:
            at = x_ptr + row[:, None] * x_stride + col[None, :]
            x = tl.load(at, mask=inside, other=0.0, volatile=True)
            normal = x.to(ACC) * rstd[:, None]
        dx = (grad - normal * mean[:, None]) * rstd[:, None]
        if HAS_RESIDUAL:
            at = grad_sum_ptr + row[:, None] * grad_sum_stride + col[None, :]
            dx += tl.load(at, mask=inside, other=0.0).to(ACC)
        out = dx_ptr + row[:, None] * columns + col[None, :]
        tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(dw_ptr + program * columns + col, tl.sum(dw, axis=0), mask=col < columns)


def rms_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, cast_early: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x + residual or an empty tensor, rstd)."""
    y = empty_output(x, weight, cast_early)
    total = x.new_empty(x.shape if residual is not None else 0)
    rstd = x.new_empty(x.shape[:-1], dtype=wide(x.dtype))
    rows = as_rows(x)
    others = rows if residual is None else as_rows(residual)
    tile = row_tile(rows.shape[1])
    launch(
        rms_norm_forward_kernel,
        (ceil_div(rows.shape[0], tile.block_m),),
        *(rows, others, row_vector(weight, rows), y, total, rstd),
        *(rows.stride(0), others.stride(0), *rows.shape, eps, offset),
        HAS_WEIGHT=weight is not None,
        HAS_RESIDUAL=residual is not None,
        CAST_EARLY=cast_early,
        ACC=accumulator(x.dtype),
        **tile.options,
    )
    return y, total, rstd


def rms_norm_backward_triton(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, variant: Variant
) -> tuple[Tensor, Tensor]:
    """(dx, dw); dw is empty where there is no weight."""
    offset, cast_early = variant
    dx = x.new_empty(x.shape)
    rows, grads = as_rows(x), as_rows(grad)
    sums = grads if grad_sum is None else as_rows(grad_sum)
    tile = row_tile(rows.shape[1])
    programs = persistent(tile, rows.shape[0], x.device)
    shares = x.new_empty((programs, rows.shape[1]), dtype=rstd.dtype)
    launch(
        rms_norm_backward_kernel,
        (programs,),
        *(grads, sums, rows, row_vector(weight, rows), rstd.contiguous(), dx, shares),
        *(grads.stride(0), sums.stride(0), rows.stride(0), *rows.shape, offset),
        HAS_WEIGHT=weight is not None,
        HAS_RESIDUAL=grad_sum is not None,
        CAST_EARLY=cast_early,
        WIDE=tile.block_n > 8192,
        ACC=accumulator(x.dtype),
        **tile.options,
    )
    return dx, x.new_empty(0) if weight is None else shares.sum(0).to(weight.dtype)


def empty_output(x: Tensor, weight: Tensor | None, cast_early: bool) -> Tensor:
    """A contiguous tensor of y's shape and type."""
    if weight is None or not cast_early:
        return x.new_empty(x.shape)
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, cast_early: bool
) -> tuple[Tensor, Tensor]:
    """(y, rstd) in plain torch."""
    y = empty_output(x, weight, cast_early)
    rstd = x.new_empty(x.shape[:-1], dtype=wide(x.dtype))

    def rows(x: Tensor) -> tuple[Tensor, Tensor]:
        values = x.to(rstd.dtype)
        scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
        y = values * scale
        if weight is None:
            return y, scale
        if cast_early:
            return y.to(x.dtype) * (weight + offset if offset else weight), scale
        return y * (weight.to(y.dtype) + offset), scale

    by_rows(rows, (flat(x),), (flat(y), rstd.view(-1, 1)))
    return y, rstd


def rms_norm_backward_reference(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, variant: Variant
) -> tuple[Tensor, Tensor]:
    """(dx, dw) in plain torch; dw is empty where there is no weight."""
    offset, cast_early = variant
    dx, dtype = x.new_empty(x.shape), rstd.dtype
    dw = x.new_zeros(0 if weight is None else weight.shape[0], dtype=dtype)

    def rows(x: Tensor, rstd: Tensor, grad: Tensor, *grad_sum: Tensor) -> tuple[Tensor, ...]:
        normal, grad = x.to(dtype) * rstd, grad.to(dtype)
        sums: tuple[Tensor, ...] = ()
        if weight is not None:
            sums = ((grad * (normal.to(x.dtype).to(dtype) if cast_early else normal)).sum(0),)
            grad = grad * (weight.to(dtype) + offset)
        dx = (grad - normal * (grad * normal).mean(-1, keepdim=True)) * rstd
        return (sum(grad_sum, start=dx), *sums)

    given = [flat(x), rstd.reshape(-1, 1), flat(grad)]
    given += [] if grad_sum is None else [flat(grad_sum)]
    by_rows(rows, given, (flat(dx),), () if weight is None else (dw,))
    return dx, dw.to(x.dtype if weight is None else weight.dtype)


@torch.library.custom_op("megacompile::rms_norm", mutates_args=())
def rms_norm_op(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, cast_early: bool
) -> tuple[Tensor, Tensor]:
    """(y, rstd); see above."""
    if not runs_triton(x) or x.shape[-1] > MAX_ROW:
        return rms_norm_reference(x, weight, eps, offset, cast_early)
    y, _, rstd = rms_norm_triton(x, None, weight, eps, offset, cast_early)
    return y, rstd


@torch.library.custom_op("megacompile::rms_norm_backward", mutates_args=())
def rms_norm_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, cast_early: bool
) -> tuple[Tensor, Tensor]:
    """(dx, dw); dw is empty where there is no weight."""
    fits = runs_triton(x) and x.shape[-1] <= MAX_RMS_NORM_BACKWARD
    run = rms_norm_backward_triton if fits else rms_norm_backward_reference
    return run(grad, None, x, weight, rstd, (offset, cast_early))


@rms_norm_op.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast_early: bool) -> tuple[Tensor, Tensor]:
    rstd = x.new_empty(x.shape[:-1], dtype=wide(x.dtype))
    return empty_output(x, weight, cast_early), rstd


@rms_norm_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0) if weight is None else torch.empty_like(weight)


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, ctx.offset, ctx.cast_early = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _rms_norm_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    dx, dw = rms_norm_backward_op(grad, x, weight, rstd, ctx.offset, ctx.cast_early)
    return dx, None if weight is None else dw, None, None, None


rms_norm_op.register_autograd(_rms_norm_backward, setup_context=_rms_norm_setup)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, offset: float = 0.0, cast_early: bool = True
) -> Tensor:
    """y alone, differentiable in x and weight."""
    y: Tensor = rms_norm_op(x, weight, eps, offset, cast_early)[0]
    return y


def rms_norm_eager(x: Tensor, weight: Tensor) -> Tensor:
    """As Llama's: the product with the weight is in x's type."""
    y = x.to(wide(x.dtype))
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


# A backward also launches the sum of the shares of dw, and its conversion.
declare(
    OpSpec(
        "rms_norm",
        OpPass(),
        OpPass(launches=3, sums=True),
        along="rows",
        eager=(
            EagerForm(
                "rms_norm",
                ("tokens", "width"),
                (8192, 4096),
                lambda s, g: [normal(g, *s), normal(g, s[1])],
                2,
                rms_norm_eager,
                rms_norm,
                rows_of,
            ),
        ),
    )
)
