# mypy: allow-untyped-defs, allow-incomplete-defs
"""LayerNorm (Ba et al. 2016, arXiv:1607.06450); saves mean and rstd.

    y = (x - mean(x)) * rstd * weight + bias        rstd = (var(x) + eps) ** -0.5

x: [..., N], any float type, any strides. weight, bias: [N] or None. y: [..., N] of x's type. mean, rstd:
[...] float32 (float64 for float64 x). The variance is that of centred values, in a second pass over
registers: E[x**2] - E[x]**2 cancels for rows far from zero.

Traffic per element of x: 2 elements forward, 3 backward.

The last dimension is normed. Kernels hold whole rows, 2048 elements of short rows to a program or one row,
and compute in the type of rstd: float32, or float64 for float64 x. References take a few rows at a time, and
keep sums over rows in the type of rstd.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
MAX_LAYER_NORM_BACKWARD = 8192  # dw and db


@triton.jit
def layer_norm_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, x_stride, rows, columns, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y, mean and rstd of BLOCK_M rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (col < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0).to(ACC)
    mean = tl.sum(x, axis=1) / columns
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / columns + eps)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = centred * rstd[:, None]
    if HAS_WEIGHT:
        y = y * tl.load(weight_ptr + col, mask=col < columns, other=0.0).to(ACC)[None, :]
    if HAS_BIAS:
        y = y + tl.load(bias_ptr + col, mask=col < columns, other=0.0).to(ACC)[None, :]
    out = y_ptr + row[:, None] * columns + col[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr,
    grad_stride, x_stride, rows, columns,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """With n = (x - mean) * rstd and g = grad * weight, sums over rows for dw and db:

        dx = (g - mean(g) - n * mean(g * n)) * rstd        dw = sum of grad * n        db = sum of grad

    Persistent, one to three programs per processor, walking over tiles of BLOCK_M rows; its shares of dw and
    db stay in registers and are written once.
    """
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)[None, :]
    share = program * columns + col
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + col, mask=col < columns, other=0.0).to(ACC)
        dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    if HAS_BIAS:
        db = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    for tile in range(program, tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        inside = (row < rows)[:, None] & (col < columns)
        x = tl.load(x_ptr + row[:, None] * x_stride + col, mask=inside, other=0.0).to(ACC)
        at = grad_ptr + row[:, None] * grad_stride + col
        grad = tl.load(at, mask=inside, other=0.0).to(ACC)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normal = tl.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0)
        if HAS_BIAS:
            db += grad
        if HAS_WEIGHT:
            dw += grad * normal
            grad = grad * weight
        along = tl.sum(grad * normal, axis=1) / columns
        level = tl.sum(grad, axis=1) / columns
        dx = (grad - level[:, None] - normal * along[:, None]) * rstd[:, None]
        out = dx_ptr + row[:, None] * columns + col
        tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(dw_ptr + share, tl.sum(dw, axis=0, keep_dims=True), mask=col < columns)
    if HAS_BIAS:
        tl.store(db_ptr + share, tl.sum(db, axis=0, keep_dims=True), mask=col < columns)


def layer_norm_triton(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd)."""
    y, mean, rstd = _layer_norm_outputs(x)
    rows = as_rows(x)
    tile = row_tile(rows.shape[1])
    launch(
        layer_norm_forward_kernel,
        (ceil_div(rows.shape[0], tile.block_m),),
        *(rows, row_vector(weight, rows), row_vector(bias, rows), y, mean, rstd),
        *(rows.stride(0), *rows.shape, eps),
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        ACC=accumulator(x.dtype),
        **tile.options,
    )
    return y, mean, rstd


def layer_norm_backward_triton(
    grad: Tensor, x: Tensor, weight: Tensor | None, has_bias: bool, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, db), the latter two empty where they do not exist."""
    dx = x.new_empty(x.shape)
    rows, grads = as_rows(x), as_rows(grad)
    tile = row_tile(rows.shape[1], per_thread=8)
    programs = persistent(tile, rows.shape[0], x.device)
    shares = x.new_empty((2, programs, rows.shape[1]), dtype=rstd.dtype)
    launch(
        layer_norm_backward_kernel,
        (programs,),
        *(grads, rows, row_vector(weight, rows), mean.contiguous(), rstd.contiguous(), dx, *shares),
        *(grads.stride(0), rows.stride(0), *rows.shape),
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=has_bias,
        ACC=accumulator(x.dtype),
        **tile.options,
    )
    dtype = x.dtype if weight is None else weight.dtype
    present = weight is not None, has_bias
    dw, db = (
        share.sum(0).to(dtype) if there else x.new_empty(0)
        for share, there in zip(shares, present, strict=True)
    )
    return dx, dw, db


def _layer_norm_outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd), contiguous."""
    mean = x.new_empty(x.shape[:-1], dtype=wide(x.dtype))
    return x.new_empty(x.shape), mean, torch.empty_like(mean)


def layer_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) in plain torch."""
    y, mean, rstd = _layer_norm_outputs(x)

    def rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = x.to(mean.dtype)
        middle = values.mean(-1, keepdim=True)
        centred = values - middle
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        y = centred * scale
        if weight is not None:
            y = y * weight.to(y.dtype)
        return y if bias is None else y + bias.to(y.dtype), middle, scale

    by_rows(rows, (flat(x),), (flat(y), mean.view(-1, 1), rstd.view(-1, 1)))
    return y, mean, rstd


def layer_norm_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor | None, has_bias: bool, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, db) in plain torch."""
    dx, dtype = x.new_empty(x.shape), rstd.dtype
    present = weight is not None, has_bias
    dw, db = (x.new_zeros(x.shape[-1] if there else 0, dtype=dtype) for there in present)

    def rows(x: Tensor, mean: Tensor, rstd: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        normal, grad = (x.to(dtype) - mean) * rstd, grad.to(dtype)
        sums = [(grad * normal).sum(0)] if weight is not None else []
        sums += [grad.sum(0)] if has_bias else []
        if weight is not None:
            grad = grad * weight.to(dtype)
        along = (grad * normal).mean(-1, keepdim=True)
        return (grad - grad.mean(-1, keepdim=True) - normal * along) * rstd, *sums

    given = flat(x), mean.reshape(-1, 1), rstd.reshape(-1, 1), flat(grad)
    by_rows(rows, given, (flat(dx),), [s for s, there in zip((dw, db), present, strict=True) if there])
    result = x.dtype if weight is None else weight.dtype
    return dx, dw.to(result), db.to(result)


@torch.library.custom_op("megacompile::layer_norm", mutates_args=())
def layer_norm_op(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd); see above."""
    if not runs_triton(x) or x.shape[-1] > MAX_ROW:
        return layer_norm_reference(x, weight, bias, eps)
    return layer_norm_triton(x, weight, bias, eps)


@torch.library.custom_op("megacompile::layer_norm_backward", mutates_args=())
def layer_norm_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor | None, has_bias: bool, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, db), the latter two empty where they do not exist."""
    if not runs_triton(x) or x.shape[-1] > MAX_LAYER_NORM_BACKWARD:
        return layer_norm_backward_reference(grad, x, weight, has_bias, mean, rstd)
    return layer_norm_backward_triton(grad, x, weight, has_bias, mean, rstd)


@layer_norm_op.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _layer_norm_outputs(x)


@layer_norm_backward_op.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor | None, has_bias: bool, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    like = x if weight is None else weight
    width = x.shape[-1]
    dw = x.new_empty(0) if weight is None else torch.empty_like(weight)
    return x.new_empty(x.shape), dw, like.new_empty(width) if has_bias else x.new_empty(0)


def _layer_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, _ = inputs
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(x, weight, output[1], output[2])


def _layer_norm_backward(ctx: Any, grad: Tensor, _mean: Tensor, _rstd: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    dx, dw, db = layer_norm_backward_op(grad, x, weight, ctx.has_bias, mean, rstd)
    return dx, None if weight is None else dw, db if ctx.has_bias else None, None


layer_norm_op.register_autograd(_layer_norm_backward, setup_context=_layer_norm_setup)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """y alone, differentiable in x, weight and bias."""
    y: Tensor = layer_norm_op(x, weight, bias, eps)[0]
    return y


def _layer_norm_eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """torch's."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


declare(
    OpSpec(
        "layer_norm",
        OpPass(),
        OpPass(launches=5, sums=True),
        along="rows",
        eager=(
            EagerForm(
                "layer_norm",
                ("tokens", "width"),
                (8192, 4096),
                lambda s, g: [normal(g, *s), normal(g, s[1]), normal(g, s[1])],
                3,
                _layer_norm_eager,
                lambda x, w, b: layer_norm(x, w, b, EPS),
                rows_of,
            ),
        ),
    )
)
