# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

For each pair (a, b) of the first R columns:

    y_a = x_a * cos_a - x_b * sin_a        y_b = x_b * cos_b + x_a * sin_b

Pairs are (i, i + R/2) where ``interleaved=False`` (GPT-NeoX, Llama) and (2i, 2i + 1) otherwise (GPT-J,
Cohere); columns from R on pass through (partial rotary). x: [..., D] with up to four dimensions, any
strides. cos, sin: [..., R], broadcastable to x's leading dimensions, R even, R <= D (for x [batch, heads,
tokens, D], [batch or 1, 1, tokens, R]). They get no gradient. Saves cos and sin alone: the backward is the
transposed rotation of the gradient.

One kernel does both, in float32 (float64 for float64). A program rotates about 4096 elements: BLOCK_H
indices of a dimension along which cos and sin do not vary (heads, mostly), so that their row is read once.
Traffic per element: a read and a write; in place, columns from R on are not touched.
"""

from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import (
    accumulator,
    ceil_div,
    launch,
    next_power_of_2,
    runs_triton,
    tl,
    triton,
    wide,
)
from megacompile.kernels.eager_form import EagerForm, Shape, heads_of, normal
from megacompile.kernels.registry import OpPass, OpSpec, Twin, declare
from megacompile.kernels.row_chunks import by_rows


@triton.jit
def rotate(a, b, cos_a, sin_a, cos_b, sin_b, TRANSPOSED: tl.constexpr):
    """The rotation of a pair, or its transpose."""
    if TRANSPOSED:
        return a * cos_a + b * sin_b, b * cos_b - a * sin_a
    return a * cos_a - b * sin_a, b * cos_b + a * sin_b


@triton.jit
def load_halves(row, half, col, mask, ACC: tl.constexpr):
    """Columns ``col`` of a row's two halves, as ACC, zero where ``mask`` is not."""
    a = tl.load(row + col, mask=mask, other=0.0).to(ACC)
    b = tl.load(row + half + col, mask=mask, other=0.0).to(ACC)
    return a, b


@triton.jit
def rope_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr,
    x_stride_0, x_stride_1, x_stride_2, y_stride_0, y_stride_1, y_stride_2,
    cos_stride_0, cos_stride_1, cos_stride_2, sin_stride_0, sin_stride_1, sin_stride_2,
    size_1, heads, rotary, width,
    SHARED: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, PASS: tl.constexpr,
    ACC: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H heads of one token; SHARED: they use one row of cos and sin."""
    token = tl.program_id(0).to(tl.int64)
    first, second = token // size_1, token % size_1
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]).to(tl.int64)
    x_row = x_ptr + first * x_stride_0 + second * x_stride_1 + head * x_stride_2
    y_row = y_ptr + first * y_stride_0 + second * y_stride_1 + head * y_stride_2
    cos_row = cos_ptr + first * cos_stride_0 + second * cos_stride_1
    sin_row = sin_ptr + first * sin_stride_0 + second * sin_stride_1
    if not SHARED:
        cos_row = cos_row + tl.minimum(head, heads - 1) * cos_stride_2
        sin_row = sin_row + tl.minimum(head, heads - 1) * sin_stride_2
    out: tl.constexpr = y_ptr.dtype.element_ty
    if INTERLEAVED:
        col = tl.arange(0, BLOCK_R)[None, :]
        known = col < rotary
        inside = (head < heads) & known
        table: tl.constexpr = (1 if SHARED else BLOCK_H, BLOCK_R // 2, 2)
        x = tl.load(x_row + col, mask=inside, other=0.0).to(ACC)
        cos = tl.load(cos_row + col, mask=known, other=0.0).to(ACC)
        sin = tl.load(sin_row + col, mask=known, other=0.0).to(ACC)
        a, b = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_R // 2, 2)))
        cos_a, cos_b = tl.split(tl.reshape(cos, table))
        sin_a, sin_b = tl.split(tl.reshape(sin, table))
        a, b = rotate(a, b, cos_a, sin_a, cos_b, sin_b, TRANSPOSED)
        y = tl.reshape(tl.join(a, b), (BLOCK_H, BLOCK_R))
        tl.store(y_row + col, y.to(out), mask=inside)
    else:
        half = rotary // 2
        col = tl.arange(0, BLOCK_R // 2)[None, :]
        known = col < half
        inside = (head < heads) & known
        a, b = load_halves(x_row, half, col, inside, ACC)
        cos_a, cos_b = load_halves(cos_row, half, col, known, ACC)
        sin_a, sin_b = load_halves(sin_row, half, col, known, ACC)
        a, b = rotate(a, b, cos_a, sin_a, cos_b, sin_b, TRANSPOSED)
        tl.store(y_row + col, a.to(out), mask=inside)
        tl.store(y_row + half + col, b.to(out), mask=inside)
    if PASS > 0:
        rest = rotary + tl.arange(0, PASS)[None, :]
        inside = (head < heads) & (rest < width)
        tl.store(y_row + rest, tl.load(x_row + rest, mask=inside), mask=inside)


def _four(x: Tensor) -> Tensor:
    """x with leading dimensions of size one up to four dimensions."""
    if x.ndim > 4:
        raise ValueError(f"rope takes up to four dimensions, not {x.ndim}")
    return x[(None,) * (4 - x.ndim)]


def _layout(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[list[Tensor], bool]:
    """The four tensors in four dimensions, the third one that cos and sin share, if there is one.

    Where several are shared the largest is taken.
    """
    lead = _four(x).shape[:3]
    tables = [_four(t).expand(*lead, t.shape[-1]) for t in (cos, sin)]
    tables = [t if t.stride(-1) == 1 else t.contiguous() for t in tables]
    shared = [d for d in range(3) if not any(t.stride(d) for t in tables)]
    last = max(shared, key=lambda d: lead[d], default=2)
    return [t.transpose(last, 2) for t in (_four(x), _four(y), *tables)], bool(shared)


def rope_triton(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool, out: Tensor
) -> Tensor:
    """Rotate x into ``out``, which may be x itself (its last dimension must have stride one)."""
    if out.stride(-1) != 1:
        raise ValueError("rope writes to a tensor whose last dimension is contiguous")
    rotary, width = cos.shape[-1], x.shape[-1]
    (source, target, *tables), shared = _layout(x if x.stride(-1) == 1 else x.contiguous(), out, cos, sin)
    heads = source.shape[2]
    block_r = max(2, next_power_of_2(rotary))
    block_h = min(next_power_of_2(heads), max(1, 4096 // block_r))
    launch(
        rope_kernel,
        (source.shape[0] * source.shape[1], ceil_div(heads, block_h)),
        *(source, *tables, target),
        *(s for t in (source, target, *tables) for s in t.stride()[:3]),
        *(source.shape[1], heads, rotary, width),
        SHARED=shared,
        INTERLEAVED=interleaved,
        TRANSPOSED=transposed,
        PASS=0 if out is x or rotary == width else next_power_of_2(width - rotary),
        ACC=accumulator(x.dtype),
        BLOCK_H=block_h,
        BLOCK_R=block_r,
        num_warps=min(max(block_h * block_r // 512, 1), 4),
    )
    return out


def rope_reference(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool, y: Tensor
) -> Tensor:
    """Rotate x into y, which may be x itself, in plain torch."""
    lead = _four(x).shape[:3]
    longest = max(range(3), key=lambda d: lead[d])
    tables = (_four(t).expand(*lead, t.shape[-1]) for t in (cos, sin))
    given, out = ([t.transpose(0, longest) for t in part] for part in ((_four(x), *tables), (_four(y),)))

    def rows(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
        return (rotated(x, cos, sin, interleaved, transposed),)

    by_rows(rows, given, out)
    return y


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool) -> Tensor:
    """x rotated, in plain torch; ``transposed`` gives the gradient of x from that of y."""
    rotary, dtype = cos.shape[-1], wide(x.dtype)
    pairs = slice(0, rotary, 2), slice(1, rotary, 2)
    if not interleaved:
        pairs = slice(0, rotary // 2), slice(rotary // 2, rotary)
    a, b = (x[..., p].to(dtype) for p in pairs)
    (cos_a, cos_b), (sin_a, sin_b) = ([t[..., p].to(dtype) for p in pairs] for t in (cos, sin))
    y = torch.empty_like(x)
    y[..., rotary:] = x[..., rotary:]
    if transposed:
        y[..., pairs[0]], y[..., pairs[1]] = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        y[..., pairs[0]], y[..., pairs[1]] = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    return y


def _rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool, out: Tensor) -> Tensor:
    rotary = cos.shape[-1]
    if rotary % 2 or rotary > x.shape[-1] or sin.shape[-1] != rotary:
        raise ValueError(f"rope cannot rotate {x.shape[-1]} columns by {rotary} cosines")
    if not runs_triton(x):
        return rope_reference(x, cos, sin, interleaved, transposed, out)
    if out.stride(-1) == 1:
        return rope_triton(x, cos, sin, interleaved, transposed, out)
    rows = x.new_empty(x.shape)
    return out.copy_(rope_triton(x, cos, sin, interleaved, transposed, rows))


@torch.library.custom_op("megacompile::rope", mutates_args=())
def rope_op(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """y, with the strides of x where x is dense; see above."""
    return _rope(x, cos, sin, interleaved, False, torch.empty_like(x))


@torch.library.custom_op("megacompile::rope_backward", mutates_args=())
def rope_backward_op(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The gradient of x."""
    return _rope(grad, cos, sin, interleaved, True, torch.empty_like(grad))


@torch.library.custom_op("megacompile::rope_", mutates_args=("x",))
def rope_inplace_op(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, transposed: bool = False
) -> None:
    """Rotate x where it lies (``transposed``: the backward). Without autograd: for emitted code."""
    _rope(x, cos, sin, interleaved, transposed, x)


@rope_op.register_fake
@rope_backward_op.register_fake
def _(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


def _rope_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin)


def _rope_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    return rope_backward_op(grad, cos, sin, ctx.interleaved), None, None, None


rope_op.register_autograd(_rope_backward, setup_context=_rope_setup)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x rotated, differentiable in x."""
    y: Tensor = rope_op(x, cos, sin, interleaved)
    return y


def rope_eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Llama's, on [batch, heads, tokens, width]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def turned(shape: Shape, g: torch.Generator) -> list[Tensor]:
    batch, heads, tokens, width = shape
    angles = torch.outer(torch.arange(tokens), 1e4 ** (-torch.arange(0, width, 2) / width)).repeat(1, 2)
    x = normal(g, batch, tokens, heads, width).transpose(1, 2)
    return [x, angles.cos().double()[None, None], angles.sin().double()[None, None]]


declare(
    OpSpec(
        "rope",
        OpPass(twin=Twin("rope_", (0,), lambda a: (*(*a, False)[:4], False))),
        OpPass(twin=Twin("rope_", (0,), lambda a: (*a[:4], True))),
        along="elements",
        eager=(
            EagerForm(
                "rope",
                ("batch", "heads", "tokens", "width"),
                (2, 32, 8192, 128),
                turned,
                1,
                rope_eager,
                rope,
                heads_of,
            ),
        ),
    )
)
