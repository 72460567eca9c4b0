# mypy: allow-untyped-defs, allow-incomplete-defs
"""Gated activations, of gate and up apart, and of one packed projection whose values are clamped.

Kernels compute in float32 (float64 for float64), one program per 1024 columns or pairs of a row. Traffic per
element or pair: 3 elements forward, 5 backward.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megacompile.kernels._triton import (
    AotCase,
    aot_cases,
    as_rows,
    as_tiles,
    by_rows,
    flat,
    launch_columns,
    runs_triton,
    tile_at,
    tl,
    triton,
    wide,
)
from megacompile.kernels.registry import (
    Kernel,
    Operation,
    OpPass,
    OpSpec,
    Twin,
    declare,
    elementwise,
    normal,
    rows_of,
)

BLOCK = 1024


# ------------------------------------------------------------------------------------------------------------
# Gated activations (Shazeer 2020, arXiv:2002.05202): ``y = activation(gate) * up``.
#
# activation: ``silu`` (SwiGLU), ``gelu_tanh``, ``gelu_erf`` (GeGLU, Hendrycks and Gimpel 2016,
# arXiv:1606.08415), ``relu``. gate, up: [..., N], one shape and float type, any strides (the halves of a
# packed projection need no copy). y: [..., N]. Saves its inputs alone and recomputes the activation in the
# backward. Where tensors are contiguous, all elements are one row.


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


def _kind(activation: str) -> int:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, not {activation!r}")
    return ACTIVATIONS.index(activation)


def glu_triton(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """y; see above."""
    y = gate.new_empty(gate.shape)
    gates, ups = as_tiles(gate, up)
    given = gates, ups, y, gates.stride(0), ups.stride(0), gates.shape[1]
    launch_columns(glu_forward_kernel, *gates.shape, BLOCK, gate.dtype, *given, KIND=_kind(activation))
    return y


def glu_backward_triton(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, dgate: Tensor, dup: Tensor
) -> None:
    """Fill dgate and dup, which may be gate and up where these are contiguous."""
    grads, gates, ups = as_tiles(grad, gate, up)
    strides = [x.stride(0) for x in (grads, gates, ups)]
    given = grads, gates, ups, dgate, dup, *strides, gates.shape[1]
    launch_columns(glu_backward_kernel, *gates.shape, BLOCK, gate.dtype, *given, KIND=_kind(activation))


def _activate(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """(activation, its derivative) at x, in x's type."""
    kind = _kind(activation)
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
        OpPass(kernels=(Kernel("glu_forward_kernel"),)),
        OpPass(twin=Twin("glu_backward_", (1, 2)), kernels=(Kernel("glu_backward_kernel"),)),
        along="elements",
        variant=lambda given: str(given["activation"]),
        benchmarks=(
            Operation(
                "glu",
                ("tokens", "width"),
                ((8192, 14336), (8192, 28672)),
                lambda s, g: [normal(g, *s), normal(g, *s)],
                2,
                _glu_eager,
                elementwise(2, 1, 5),
                glu,
                rows_of,
                lambda liger, gate, up: liger.liger_swiglu(gate, up),
            ),
        ),
    )
)


@aot_cases("glu")
def _glu_aot() -> list[AotCase]:
    def case(activation: str, dtype: torch.dtype, packed: bool) -> None:
        both = torch.empty((4096, 2 * 14336), dtype=dtype, device="meta")
        gate, up = both.chunk(2, dim=-1)
        if not packed:
            gate, up = torch.empty_like(gate), torch.empty_like(up)
        y = glu_triton(gate, up, activation)
        glu_backward_triton(y, gate, up, activation, torch.empty_like(y), torch.empty_like(y))

    cases = [(f"{a} bf16", partial(case, a, torch.bfloat16, False)) for a in ACTIVATIONS]
    cases.append(("silu bf16 packed", partial(case, "silu", torch.bfloat16, True)))
    return [*cases, ("silu fp32", partial(case, "silu", torch.float32, False))]


# ------------------------------------------------------------------------------------------------------------
# SwiGLU with clamped inputs, as in GPT-OSS (arXiv:2508.10925), on one packed projection.
#
#     g = min(gate, limit)        u = min(max(up, -limit), limit)
#     y = (u + 1) * g * sigmoid(alpha * g)
#
# both: [..., 2N], any float type, any strides: gate in its even columns and up in its odd ones where
# ``interleaved``, otherwise gate in its first half. y: [..., N]. A clamped element has no gradient; one at
# the limit itself has it where torch's clamp gives it (before 2.14). Saves its input alone. Both halves in
# one tensor: their gradients land in one, where slices of it would be padded and added. All pairs are one row
# where they interleave and tensors are contiguous.


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


def _rows(both: Tensor, interleaved: bool, *halves: Tensor) -> list[Tensor]:
    """[rows, columns] each; halves of a row are not side by side, so there rows stay rows."""
    return as_tiles(both, *halves) if interleaved else [as_rows(x) for x in (both, *halves)]


def clamped_glu_triton(both: Tensor, limit: float, alpha: float, interleaved: bool) -> Tensor:
    """y; see above."""
    y = _empty_output(both)
    (rows,) = _rows(both, interleaved)
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
    rows, grads = _rows(both, interleaved, grad)
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
        OpPass(kernels=(Kernel("clamped_glu_forward_kernel"),)),
        OpPass(
            twin=Twin("clamped_glu_backward_", (1,)),
            kernels=(Kernel("clamped_glu_backward_kernel"),),
        ),
        along="elements",
        variant=lambda given: "interleaved" if given["interleaved"] else "halves",
        benchmarks=(
            Operation(
                "clamped_glu",
                ("tokens", "columns"),
                ((16384, 5760),),
                lambda s, g: [normal(g, *s, scale=4.0)],
                1,
                _clamped_glu_eager,
                lambda s, itemsize: elementwise(2, 1, 5)((s[0], s[1] // 2), itemsize),
                clamped_glu,
                rows_of,
            ),
        ),
    )
)


@aot_cases("clamped_glu")
def _clamped_glu_aot() -> list[AotCase]:
    def case(dtype: torch.dtype, interleaved: bool) -> None:
        both = torch.empty((4096, 2 * 2880), dtype=dtype, device="meta")
        y = clamped_glu_triton(both, 7.0, 1.702, interleaved)
        clamped_glu_backward_triton(y, both, 7.0, 1.702, interleaved, both)

    return [
        ("interleaved bf16", partial(case, torch.bfloat16, True)),
        ("halves bf16", partial(case, torch.bfloat16, False)),
        ("interleaved fp32", partial(case, torch.float32, True)),
    ]
