# mypy: allow-untyped-defs, allow-incomplete-defs
"""Gated activations (Shazeer 2020, arXiv:2002.05202): ``y = activation(gate) * up``.

activation: ``silu`` (SwiGLU), ``gelu_tanh``, ``gelu_erf`` (GeGLU, Hendrycks and Gimpel 2016,
arXiv:1606.08415), ``relu``. gate, up: [..., N], one shape and float type, any strides (the halves of a
packed projection need no copy). y: [..., N]. Saves its inputs alone and recomputes the activation in the
backward. Where tensors are contiguous, all elements are one row.

The kernel computes in float32 (float64 for float64), one program per 1024 columns of a row. Traffic per
element: 3 elements forward, 5 backward.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megacompile.kernels._triton import (
    as_tiles,
    launch_columns,
    runs_triton,
    tile_at,
    tl,
    triton,
    wide,
)
from megacompile.kernels.eager_form import EagerForm, normal, rows_of
from megacompile.kernels.registry import OpPass, OpSpec, Twin, declare
from megacompile.kernels.row_chunks import by_rows, flat

BLOCK = 1024


ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf", "relu")
TANH_SCALE = math.sqrt(2.0 / math.pi)
TANH_CUBE = 0.044715


@triton.jit
def activate(x, KIND: tl.constexpr):
    """(activation, its derivative) at x."""
    if KIND == 0:
        gate = 1.0 / (1.0 + tl.exp(-x))
        value = x * gate
        slope = gate + value * (1.0 - gate)
    elif KIND == 1:
        # tanh(u) = 2 * sigmoid(2u) - 1, so gelu_tanh(x) = x * sigmoid(2u).
        gate = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        value = x * gate
        slope = gate + value * (1.0 - gate) * (1.5957691216057308 + 0.21406619616364698 * x * x)
    elif KIND == 2:
        gate = 0.5 * (1.0 + tl.erf(0.7071067811865476 * x))
        value = x * gate
        slope = gate + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        slope = tl.where(x > 0.0, 1.0, 0.0).to(x.dtype)
        value = tl.where(x > 0.0, x, 0.0)
    return value, slope


@triton.jit
def load_tile(ptr, stride, columns, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of a row of a matrix, as ACC, those of this program."""
    row, start = tile_at(columns, BLOCK)
    col = start + tl.arange(0, BLOCK)
    return tl.load(ptr + row * stride + col, mask=col < columns, other=0.0).to(ACC)


@triton.jit
def glu_forward_kernel(
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, columns,
    KIND: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = activation(gate) * up."""
    row, start = tile_at(columns, BLOCK)
    col = start + tl.arange(0, BLOCK)
    gate = load_tile(gate_ptr, gate_stride, columns, ACC, BLOCK)
    up = load_tile(up_ptr, up_stride, columns, ACC, BLOCK)
    value, _ = activate(gate, KIND)
    y = (value * up).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * columns + col, y, mask=col < columns)


@triton.jit
def glu_backward_kernel(
    grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, grad_stride, gate_stride, up_stride, columns,
    KIND: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dgate = grad * up * activation'(gate), dup = grad * activation(gate)."""
    row, start = tile_at(columns, BLOCK)
    col = start + tl.arange(0, BLOCK)
    grad = load_tile(grad_ptr, grad_stride, columns, ACC, BLOCK)
    gate = load_tile(gate_ptr, gate_stride, columns, ACC, BLOCK)
    up = load_tile(up_ptr, up_stride, columns, ACC, BLOCK)
    value, slope = activate(gate, KIND)
    out = row * columns + col
    tl.store(dgate_ptr + out, (grad * up * slope).to(dgate_ptr.dtype.element_ty), mask=col < columns)
    tl.store(dup_ptr + out, (grad * value).to(dup_ptr.dtype.element_ty), mask=col < columns)


def _activation_number(activation: str) -> int:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, not {activation!r}")
    return ACTIVATIONS.index(activation)


def glu_triton(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """y; see above."""
    y = gate.new_empty(gate.shape)
    gates, ups = as_tiles(gate, up)
    given = gates, ups, y, gates.stride(0), ups.stride(0), gates.shape[1]
    launch_columns(
        glu_forward_kernel, *gates.shape, BLOCK, gate.dtype, *given, KIND=_activation_number(activation)
    )
    return y


def glu_backward_triton(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, dgate: Tensor, dup: Tensor
) -> None:
    """Fill dgate and dup, which may be gate and up where these are contiguous."""
    grads, gates, ups = as_tiles(grad, gate, up)
    strides = [x.stride(0) for x in (grads, gates, ups)]
    given = grads, gates, ups, dgate, dup, *strides, gates.shape[1]
    launch_columns(
        glu_backward_kernel, *gates.shape, BLOCK, gate.dtype, *given, KIND=_activation_number(activation)
    )


def _activate(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """(activation, its derivative) at x, in x's type."""
    kind = _activation_number(activation)
    if kind == 3:
        return x.relu(), (x > 0).to(x.dtype)
    if kind == 2:
        gate = 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))
        return x * gate, gate + x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    inner, slope = x, torch.ones_like(x)
    if kind == 1:
        inner = 2.0 * TANH_SCALE * (x + TANH_CUBE * x**3)
        slope = 2.0 * TANH_SCALE * (1.0 + 3.0 * TANH_CUBE * x * x)
    gate = torch.sigmoid(inner)
    return x * gate, gate + x * gate * (1.0 - gate) * slope


def glu_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """y in plain torch."""
    y = gate.new_empty(gate.shape)

    def rows(gate: Tensor, up: Tensor) -> tuple[Tensor]:
        return (_activate(gate.to(wide(gate.dtype)), activation)[0] * up,)

    by_rows(rows, (flat(gate), flat(up)), (flat(y),))
    return y


def glu_backward_reference(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, dgate: Tensor, dup: Tensor
) -> None:
    """``glu_backward_triton`` in plain torch."""

    def rows(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = _activate(gate.to(wide(gate.dtype)), activation)
        return grad * up.to(value.dtype) * slope, grad * value

    by_rows(rows, (flat(grad), flat(gate), flat(up)), (flat(dgate), flat(dup)))


@torch.library.custom_op("megacompile::glu", mutates_args=())
def glu_op(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError("glu needs gate and up of one shape and type")
    run = glu_triton if runs_triton(gate) else glu_reference
    return run(gate, up, activation)


@torch.library.custom_op("megacompile::glu_backward", mutates_args=())
def glu_backward_op(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """(dgate, dup)."""
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _glu_backward_into(grad, gate, up, activation, dgate, dup)
    return dgate, dup


@torch.library.custom_op("megacompile::glu_backward_", mutates_args=("gate", "up"))
def glu_backward_inplace_op(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    """Write dgate over gate and dup over up, both contiguous. For emitted code."""
    if not (gate.is_contiguous() and up.is_contiguous()):
        raise ValueError("glu_backward_ writes over contiguous tensors alone")
    _glu_backward_into(grad, gate, up, activation, gate, up)


def _glu_backward_into(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, dgate: Tensor, dup: Tensor
) -> None:
    run = glu_backward_triton if runs_triton(gate) else glu_backward_reference
    run(grad, gate, up, activation, dgate, dup)


@glu_op.register_fake
def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape)


@glu_backward_op.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _glu_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _glu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    return *glu_backward_op(grad, gate, up, ctx.activation), None


glu_op.register_autograd(_glu_backward, setup_context=_glu_setup)


def glu(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up, differentiable in both."""
    y: Tensor = glu_op(gate, up, activation)
    return y


def _glu_eager(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's product."""
    return F.silu(gate) * up


declare(
    OpSpec(
        "glu",
        OpPass(),
        OpPass(twin=Twin("glu_backward_", (1, 2))),
        along="elements",
        gates=True,
        eager=(
            EagerForm(
                "glu",
                ("tokens", "width"),
                (8192, 14336),
                lambda s, g: [normal(g, *s), normal(g, *s)],
                2,
                _glu_eager,
                glu,
                rows_of,
            ),
        ),
    )
)
