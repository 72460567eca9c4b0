# mypy: allow-untyped-defs, allow-incomplete-defs
"""SwiGLU with clamped inputs, as in GPT-OSS (arXiv:2508.10925), on one packed projection.

    g = min(gate, limit)        u = min(max(up, -limit), limit)
    y = (u + 1) * g * sigmoid(alpha * g)

both: [..., 2N], any float type, any strides: gate in its even columns and up in its odd ones where
``interleaved``, otherwise gate in its first half. y: [..., N]. A clamped element has no gradient; one at
the limit itself has it where torch's clamp gives it (before 2.14). Saves its input alone. Both halves in
one tensor: their gradients land in one, where slices of it would be padded and added. All pairs are one row
where they interleave and tensors are contiguous.

The kernel computes in float32 (float64 for float64), one program per 1024 pairs of a row. Traffic per pair: 3
elements forward, 5 backward.
"""

from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import (
    as_rows,
    as_tiles,
    launch_columns,
    runs_triton,
    tile_at,
    tl,
    triton,
    wide,
)
from megacompile.kernels.eager_form import EagerForm, normal, rows_of
from megacompile.kernels.glu import BLOCK
from megacompile.kernels.registry import OpPass, OpSpec, Twin, declare
from megacompile.kernels.row_chunks import by_rows, flat

# Whether this torch's clamp has a gradient where a value is the limit itself. Not asked of autograd: that
# starts threads and counts GPUs in every process that imports this, and its forks could do neither.
AT_LIMIT = torch.__version__ < "2.14"


@triton.jit
def load_pair(row_ptr, start, columns, INTERLEAVED: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """(gate, up) from column ``start`` on, as ACC; interleaved ones are loaded as they lie, wide.

    The mask does not double ``columns``, which wraps from 2**30 on.
    """
    if INTERLEAVED:
        wide_col = 2 * start + tl.arange(0, 2 * BLOCK)
        x = tl.load(row_ptr + wide_col, mask=wide_col - columns < columns, other=0.0)
        gate, up = tl.split(tl.reshape(x, (BLOCK, 2)))
    else:
        col = start + tl.arange(0, BLOCK)
        gate = tl.load(row_ptr + col, mask=col < columns, other=0.0)
        up = tl.load(row_ptr + columns + col, mask=col < columns, other=0.0)
    return gate.to(ACC), up.to(ACC)


@triton.jit
def clamped(gate, up, limit):
    """min(gate, limit) and up within [-limit, limit]; NaN stays NaN."""
    gate = tl.where(gate > limit, limit, gate)
    return gate, tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@triton.jit
def clamped_glu_forward_kernel(
    both_ptr, y_ptr, both_stride, columns, limit, alpha,
    INTERLEAVED: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y, BLOCK columns of a row."""
    row, start = tile_at(columns, BLOCK)
    col = start + tl.arange(0, BLOCK)
    gate, up = load_pair(both_ptr + row * both_stride, start, columns, INTERLEAVED, ACC, BLOCK)
    gate, up = clamped(gate, up, limit)
    y = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
    tl.store(y_ptr + row * columns + col, y.to(y_ptr.dtype.element_ty), mask=col < columns)


@triton.jit
def clamped_glu_backward_kernel(
    grad_ptr, both_ptr, dboth_ptr, grad_stride, both_stride, columns, limit, alpha,
    INTERLEAVED: tl.constexpr, AT_LIMIT: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dgate = grad * (u + 1) * (g * sigmoid(alpha * g))', dup = grad * g * sigmoid(alpha * g)."""
    row, start = tile_at(columns, BLOCK)
    col = start + tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + row * grad_stride + col, mask=col < columns, other=0.0).to(ACC)
    gate, up = load_pair(both_ptr + row * both_stride, start, columns, INTERLEAVED, ACC, BLOCK)
    if AT_LIMIT:
        free_gate, free_up = gate <= limit, (up <= limit) & (up >= -limit)
    else:
        free_gate, free_up = gate < limit, (up < limit) & (up > -limit)
    gate, up = clamped(gate, up, limit)
    share = 1.0 / (1.0 + tl.exp(-alpha * gate))
    value = gate * share
    dgate = tl.where(free_gate, grad * (up + 1.0) * (share + alpha * value * (1.0 - share)), 0.0)
    dup = tl.where(free_up, grad * value, 0.0)
    dgate, dup = dgate.to(dboth_ptr.dtype.element_ty), dup.to(dboth_ptr.dtype.element_ty)
    out_ptr = dboth_ptr + row * 2 * columns
    if INTERLEAVED:
        wide_col = 2 * start + tl.arange(0, 2 * BLOCK)
        pair = tl.reshape(tl.join(dgate, dup), (2 * BLOCK,))
        tl.store(out_ptr + wide_col, pair, mask=wide_col - columns < columns)
    else:
        tl.store(out_ptr + col, dgate, mask=col < columns)
        tl.store(out_ptr + columns + col, dup, mask=col < columns)


def _rows_or_tiles(both: Tensor, interleaved: bool, *halves: Tensor) -> list[Tensor]:
    """[rows, columns] each; halves of a row are not side by side, so there rows stay rows."""
    return as_tiles(both, *halves) if interleaved else [as_rows(x) for x in (both, *halves)]


def clamped_glu_triton(both: Tensor, limit: float, alpha: float, interleaved: bool) -> Tensor:
    """y; see above."""
    y = _empty_output(both)
    (rows,) = _rows_or_tiles(both, interleaved)
    columns = rows.shape[1] // 2
    launch_columns(
        *(clamped_glu_forward_kernel, rows.shape[0], columns, BLOCK, both.dtype),
        *(rows, y, rows.stride(0), columns, limit, alpha),
        INTERLEAVED=interleaved,
    )
    return y


def clamped_glu_backward_triton(
    grad: Tensor, both: Tensor, limit: float, alpha: float, interleaved: bool, dboth: Tensor
) -> None:
    """Fill dboth, contiguous; it may be both where that is contiguous."""
    rows, grads = _rows_or_tiles(both, interleaved, grad)
    columns = rows.shape[1] // 2
    launch_columns(
        *(clamped_glu_backward_kernel, rows.shape[0], columns, BLOCK, both.dtype),
        *(grads, rows, dboth, grads.stride(0), rows.stride(0), columns, limit, alpha),
        INTERLEAVED=interleaved,
        AT_LIMIT=AT_LIMIT,
    )


def _empty_output(both: Tensor) -> Tensor:
    """A contiguous tensor of y's shape and type."""
    return both.new_empty((*both.shape[:-1], both.shape[-1] // 2))


def _gate_and_up(both: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of (gate, up)."""
    if interleaved:
        return both[..., ::2], both[..., 1::2]
    gate, up = both.chunk(2, dim=-1)
    return gate, up


def clamped_glu_reference(both: Tensor, limit: float, alpha: float, interleaved: bool) -> Tensor:
    """y in plain torch."""
    y = _empty_output(both)

    def rows(both: Tensor) -> tuple[Tensor]:
        gate, up = _gate_and_up(both.to(wide(both.dtype)), interleaved)
        gate = gate.clamp(max=limit)
        return ((up.clamp(-limit, limit) + 1.0) * (gate * torch.sigmoid(alpha * gate)),)

    by_rows(rows, (flat(both),), (flat(y),))
    return y


def clamped_glu_backward_reference(
    grad: Tensor, both: Tensor, limit: float, alpha: float, interleaved: bool, dboth: Tensor
) -> None:
    """``clamped_glu_backward_triton`` in plain torch."""

    def rows(grad: Tensor, both: Tensor) -> tuple[Tensor]:
        d = both.to(wide(both.dtype), copy=True)
        gate, up = _gate_and_up(d, interleaved)
        within = torch.le if AT_LIMIT else torch.lt
        free_gate, free_up = within(gate, limit), within(up.abs(), limit)
        g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
        share = torch.sigmoid(alpha * g)
        slope = share + alpha * g * share * (1.0 - share)
        gate.copy_(torch.where(free_gate, grad * (u + 1.0) * slope, 0.0))
        up.copy_(torch.where(free_up, grad * (g * share), 0.0))
        return (d,)

    by_rows(rows, (flat(grad), flat(both)), (flat(dboth),))


@torch.library.custom_op("megacompile::clamped_glu", mutates_args=())
def clamped_glu_op(both: Tensor, limit: float, alpha: float, interleaved: bool) -> Tensor:
    """y; see above."""
    if both.ndim == 0 or both.shape[-1] % 2:
        raise ValueError("clamped_glu needs gate and up in one tensor with an even number of columns")
    run = clamped_glu_triton if runs_triton(both) else clamped_glu_reference
    return run(both, limit, alpha, interleaved)


@torch.library.custom_op("megacompile::clamped_glu_backward", mutates_args=())
def clamped_glu_backward_op(
    grad: Tensor, both: Tensor, limit: float, alpha: float, interleaved: bool
) -> Tensor:
    """The gradient of both."""
    dboth = both.new_empty(both.shape)
    _clamped_glu_backward_into(grad, both, limit, alpha, interleaved, dboth)
    return dboth


@torch.library.custom_op("megacompile::clamped_glu_backward_", mutates_args=("both",))
def clamped_glu_backward_inplace_op(
    grad: Tensor, both: Tensor, limit: float, alpha: float, interleaved: bool
) -> None:
    """Write the gradient over both, which is contiguous. For emitted code."""
    if not both.is_contiguous():
        raise ValueError("clamped_glu_backward_ writes over contiguous tensors alone")
    _clamped_glu_backward_into(grad, both, limit, alpha, interleaved, both)


def _clamped_glu_backward_into(
    grad: Tensor, both: Tensor, limit: float, alpha: float, interleaved: bool, dboth: Tensor
) -> None:
    run = clamped_glu_backward_triton if runs_triton(both) else clamped_glu_backward_reference
    run(grad, both, limit, alpha, interleaved, dboth)


clamped_glu_op.register_fake(lambda both, *_: _empty_output(both))
clamped_glu_backward_op.register_fake(lambda grad, both, *_: both.new_empty(both.shape))


def _clamped_glu_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    both, *ctx.rule = inputs
    ctx.save_for_backward(both)


def _clamped_glu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (both,) = ctx.saved_tensors
    return clamped_glu_backward_op(grad, both, *ctx.rule), None, None, None


clamped_glu_op.register_autograd(_clamped_glu_backward, setup_context=_clamped_glu_setup)


def clamped_glu(both: Tensor, limit: float = 7.0, alpha: float = 1.702, interleaved: bool = True) -> Tensor:
    """y, differentiable in both; the defaults are GPT-OSS's."""
    y: Tensor = clamped_glu_op(both, limit, alpha, interleaved)
    return y


def _clamped_glu_eager(both: Tensor) -> Tensor:
    """GPT-OSS's, of gate and up in alternating columns."""
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


declare(
    OpSpec(
        "clamped_glu",
        OpPass(),
        OpPass(twin=Twin("clamped_glu_backward_", (1,))),
        along="elements",
        gates=True,
        eager=(
            EagerForm(
                "clamped_glu",
                ("tokens", "columns"),
                (16384, 5760),
                lambda s, g: [normal(g, *s, scale=4.0)],
                1,
                _clamped_glu_eager,
                clamped_glu,
                rows_of,
            ),
        ),
    )
)
