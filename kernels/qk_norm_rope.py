# mypy: allow-untyped-defs, allow-incomplete-defs
"""RMSNorm of each head and its rotation in one pass, as Qwen3 and Gemma 3 treat queries and keys.

    n = x * rstd        y = rotate(n * (weight + offset))        rstd = (mean(x**2) + eps) ** -0.5

``rotate`` is that of :mod:`~megacompile.kernels.rope`, for pairs (i, i + R/2) of the first R columns; the
others pass. x: [B, H, T, D], any float type, any strides. weight: [D]. cos, sin: [B or 1, 1, T, R], R even, R
<= D; they get no gradient. y: [B, H, T, D] of x's type, a token's heads side by side in memory if they are in
x. rstd: [B, H, T, 1] float32 (float64 for float64 x), the type that everything between x and y is computed
in: where norm and rotation are two operators, what passes between them is rounded.

With d the gradient of y, rotated back, and g = d * (weight + offset):

    dx = (g - n * mean(g * n)) * rstd        dw = sum over rows of d * n

Saves x, weight, cos, sin, rstd. A program holds heads of one token, so that their row of cos and sin is
read once: about 4096 elements forward; 2048 at a time backward, which is persistent and adds up its share
of dw. Traffic per element of x: 2 elements forward, 3 backward; norm and rotation apart take 4 and 5.

A tile of the kernels is BLOCK_H heads of one token. A head's columns are a and b, the two halves that are
rotated, of HALF columns each, and c, the PASS columns that stay, if any. ``x_batch``, ``x_token``, ``x_head``
are x's strides; columns have stride one.
"""

from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import (
    RowTile,
    accumulator,
    ceil_div,
    launch,
    next_power_of_2,
    persistent,
    runs_triton,
    tl,
    triton,
    wide,
)
from megacompile.kernels.eager_form import EagerForm, Shape, heads_of, normal
from megacompile.kernels.registry import OpPass, OpSpec, declare
from megacompile.kernels.rms_norm import rms_norm_eager
from megacompile.kernels.rope import load_halves, rope_eager, rotate, rotated, turned
from megacompile.kernels.row_chunks import by_rows

MAX_WIDTH = 1024  # of a head; torch takes over beyond


@triton.jit
def qk_norm_rope_forward_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, y_ptr, rstd_ptr,
    x_batch, x_token, x_head, y_batch, y_token, y_head, rstd_batch, rstd_token, rstd_head,
    cos_batch, cos_token, sin_batch, sin_token,
    tokens, heads, rotary, width, eps, offset,
    ACC: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """y and rstd of one tile."""
    at = tl.program_id(0).to(tl.int64)
    batch, token = at // tokens, at % tokens
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]).to(tl.int64)
    x_row = x_ptr + batch * x_batch + token * x_token + head * x_head
    y_row = y_ptr + batch * y_batch + token * y_token + head * y_head
    cos_row = cos_ptr + batch * cos_batch + token * cos_token
    sin_row = sin_ptr + batch * sin_batch + token * sin_token
    out: tl.constexpr = y_ptr.dtype.element_ty
    half = rotary // 2
    col = tl.arange(0, HALF)[None, :]
    known = col < half
    inside = (head < heads) & known
    a, b = load_halves(x_row, half, col, inside, ACC)
    squares = tl.sum(a * a + b * b, axis=1)[:, None]
    if PASS > 0:
        rest = rotary + tl.arange(0, PASS)[None, :]
        beyond = (head < heads) & (rest < width)
        c = tl.load(x_row + rest, mask=beyond, other=0.0).to(ACC)
        squares += tl.sum(c * c, axis=1)[:, None]
    rstd = 1.0 / tl.sqrt(squares / width + eps)
    tl.store(rstd_ptr + batch * rstd_batch + token * rstd_token + head * rstd_head, rstd, mask=head < heads)
    weight_a, weight_b = load_halves(weight_ptr, half, col, known, ACC)
    a *= rstd * (weight_a + offset)
    b *= rstd * (weight_b + offset)
    cos_a, cos_b = load_halves(cos_row, half, col, known, ACC)
    sin_a, sin_b = load_halves(sin_row, half, col, known, ACC)
    a, b = rotate(a, b, cos_a, sin_a, cos_b, sin_b, False)
    tl.store(y_row + col, a.to(out), mask=inside)
    tl.store(y_row + half + col, b.to(out), mask=inside)
    if PASS > 0:
        c *= rstd * (tl.load(weight_ptr + rest, mask=rest < width, other=0.0).to(ACC) + offset)
        tl.store(y_row + rest, c.to(out), mask=beyond)


@triton.jit
def qk_norm_rope_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, rstd_ptr, dx_ptr, dw_ptr,
    grad_batch, grad_token, grad_head, x_batch, x_token, x_head, dx_batch, dx_token, dx_head,
    rstd_batch, rstd_token, rstd_head, cos_batch, cos_token, sin_batch, sin_token,
    rows, tokens, heads, rotary, width, offset,
    ACC: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """dx, and each program's share of dw; ``rows`` are those of cos and sin, all tokens of the batch.

    Persistent: a program walks over tiles, keeps its share of dw in registers and writes it once.
    """
    half = rotary // 2
    col = tl.arange(0, HALF)[None, :]
    known = col < half
    weight_a, weight_b = load_halves(weight_ptr, half, col, known, ACC)
    weight_a, weight_b = weight_a + offset, weight_b + offset
    dw_a = tl.zeros((BLOCK_H, HALF), dtype=ACC)
    dw_b = tl.zeros((BLOCK_H, HALF), dtype=ACC)
    if PASS > 0:
        rest = rotary + tl.arange(0, PASS)[None, :]
        weight_c = tl.load(weight_ptr + rest, mask=rest < width, other=0.0).to(ACC) + offset
        dw_c = tl.zeros((BLOCK_H, PASS), dtype=ACC)
    out: tl.constexpr = dx_ptr.dtype.element_ty
    blocks = tl.cdiv(heads, BLOCK_H)
    for tile in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        at = (tile // blocks).to(tl.int64)
        batch, token = at // tokens, at % tokens
        head = (tile % blocks * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]).to(tl.int64)
        grad_row = grad_ptr + batch * grad_batch + token * grad_token + head * grad_head
        x_row = x_ptr + batch * x_batch + token * x_token + head * x_head
        dx_row = dx_ptr + batch * dx_batch + token * dx_token + head * dx_head
        rstd_row = rstd_ptr + batch * rstd_batch + token * rstd_token + head * rstd_head
        cos_row = cos_ptr + batch * cos_batch + token * cos_token
        sin_row = sin_ptr + batch * sin_batch + token * sin_token
        inside = (head < heads) & known
        rstd = tl.load(rstd_row, mask=head < heads, other=0.0)
        a, b = load_halves(grad_row, half, col, inside, ACC)
        normal_a, normal_b = load_halves(x_row, half, col, inside, ACC)
        normal_a, normal_b = normal_a * rstd, normal_b * rstd
        cos_a, cos_b = load_halves(cos_row, half, col, known, ACC)
        sin_a, sin_b = load_halves(sin_row, half, col, known, ACC)
        a, b = rotate(a, b, cos_a, sin_a, cos_b, sin_b, True)
        dw_a += a * normal_a
        dw_b += b * normal_b
        a *= weight_a
        b *= weight_b
        along = tl.sum(a * normal_a + b * normal_b, axis=1)[:, None]
        if PASS > 0:
            beyond = (head < heads) & (rest < width)
            c = tl.load(grad_row + rest, mask=beyond, other=0.0).to(ACC)
            normal_c = tl.load(x_row + rest, mask=beyond, other=0.0).to(ACC) * rstd
            dw_c += c * normal_c
            c *= weight_c
            along += tl.sum(c * normal_c, axis=1)[:, None]
            tl.store(dx_row + rest, ((c - normal_c * (along / width)) * rstd).to(out), mask=beyond)
        mean = along / width
        tl.store(dx_row + col, ((a - normal_a * mean) * rstd).to(out), mask=inside)
        tl.store(dx_row + half + col, ((b - normal_b * mean) * rstd).to(out), mask=inside)
    share = dw_ptr + tl.program_id(0) * width + col
    tl.store(share, tl.sum(dw_a, axis=0)[None, :], mask=known)
    tl.store(share + half, tl.sum(dw_b, axis=0)[None, :], mask=known)
    if PASS > 0:
        at_rest = dw_ptr + tl.program_id(0) * width + rest
        tl.store(at_rest, tl.sum(dw_c, axis=0)[None, :], mask=rest < width)


def _tile(x: Tensor, rotary: int, elements: int) -> tuple[RowTile, dict[str, Any]]:
    """A tile of about so many elements of x, at most 32 per thread, and the keywords that launch it."""
    half = next_power_of_2(rotary // 2)
    rest = next_power_of_2(x.shape[3] - rotary) if rotary < x.shape[3] else 0
    columns = next_power_of_2(2 * half + rest)
    heads = min(next_power_of_2(x.shape[1]), max(1, elements // columns))
    tile = RowTile(heads, columns, min(max(heads * columns // 512, 1), 4))
    return tile, {"BLOCK_H": heads, "HALF": half, "PASS": rest, "num_warps": tile.num_warps}


def _columns_dense(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _head_strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, tokens and heads."""
    return [x.stride(d) for x in tensors for d in (0, 2, 1)]


def _tables(x: Tensor, *tables: Tensor) -> tuple[list[Tensor], list[int]]:
    """cos and sin for all of x's batch, and their strides of batch and tokens."""
    spread = [_columns_dense(t).expand(len(x), 1, *t.shape[2:]) for t in tables]
    return spread, [t.stride(d) for t in spread for d in (0, 2)]


def qk_norm_rope_triton(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(y, rstd)."""
    y, rstd = _empty_heads(x), _empty_rstd(x)
    x, (tables, table_strides) = _columns_dense(x), _tables(x, cos, sin)
    batch, heads, tokens, width = x.shape
    tile, constants = _tile(x, cos.shape[3], 4096)
    launch(
        qk_norm_rope_forward_kernel,
        (batch * tokens, ceil_div(heads, tile.block_m)),
        *(x, weight.contiguous(), *tables, y, rstd),
        *(*_head_strides(x, y, rstd), *table_strides),
        *(tokens, heads, cos.shape[3], width, eps, offset),
        ACC=accumulator(x.dtype),
        **constants,
    )
    return y, rstd


def qk_norm_rope_backward_triton(
    grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """(dx, dw)."""
    dx = _empty_heads(x)
    x, grad, (tables, table_strides) = _columns_dense(x), _columns_dense(grad), _tables(x, cos, sin)
    batch, heads, tokens, width = x.shape
    tile, constants = _tile(x, cos.shape[3], 2048)
    tiles = batch * tokens * ceil_div(heads, tile.block_m)
    programs = persistent(tile, tiles * tile.block_m, x.device)
    shares = x.new_empty((programs, width), dtype=rstd.dtype)
    launch(
        qk_norm_rope_backward_kernel,
        (programs,),
        *(grad, x, weight.contiguous(), *tables, rstd, dx, shares),
        *(*_head_strides(grad, x, dx, rstd), *table_strides),
        *(batch * tokens, tokens, heads, cos.shape[3], width, offset),
        ACC=accumulator(x.dtype),
        **constants,
    )
    return dx, shares.sum(0).to(weight.dtype)


def _check_qk_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> None:
    rotary, width = cos.shape[-1], x.shape[-1]
    if x.ndim != 4 or weight.shape != (width,):
        raise ValueError(f"qk_norm_rope takes four dimensions and a weight of one head, not {list(x.shape)}")
    if rotary % 2 or not 0 < rotary <= width or cos.shape != sin.shape:
        raise ValueError(f"qk_norm_rope cannot rotate {width} columns by {rotary} cosines")
    if cos.shape[1:3] != (1, x.shape[2]) or cos.shape[0] not in (1, len(x)):
        raise ValueError(f"qk_norm_rope takes tables for each token, not {list(cos.shape)}")


def _empty_heads(x: Tensor) -> Tensor:
    """Return an empty tensor of x's [batch, heads, tokens, width], with heads next to each other in memory
    where they are in x."""
    return _empty_heads_of(x, x.shape[3], x.dtype)


def _empty_rstd(x: Tensor) -> Tensor:
    """One value for each head and token, laid out as ``_empty_heads``."""
    return _empty_heads_of(x, 1, wide(x.dtype))


def _empty_heads_of(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    batch, heads, tokens, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((batch, tokens, heads, width), dtype=dtype).transpose(1, 2)
    return x.new_empty((batch, heads, tokens, width), dtype=dtype)


def qk_norm_rope_reference(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(y, rstd) in plain torch."""
    y, rstd = _empty_heads(x), _empty_rstd(x)

    def rows(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        values = x.to(rstd.dtype)
        scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
        normal = values * scale * (weight.to(rstd.dtype) + offset)
        return rotated(normal, cos, sin, interleaved=False, transposed=False), scale

    by_rows(rows, _by_token(x, cos, sin), _by_token(y, rstd))
    return y, rstd


def qk_norm_rope_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """(dx, dw) in plain torch."""
    dx, dtype = _empty_heads(x), rstd.dtype
    dw = x.new_zeros(weight.shape, dtype=dtype)

    def rows(x: Tensor, rstd: Tensor, grad: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        normal = x.to(dtype) * rstd
        grad = rotated(grad.to(dtype), cos, sin, interleaved=False, transposed=True)
        share = (grad * normal).sum((0, 1, 2))
        grad = grad * (weight.to(dtype) + offset)
        return (grad - normal * (grad * normal).mean(-1, keepdim=True)) * rstd, share

    by_rows(rows, _by_token(x, rstd, grad, cos, sin), _by_token(dx), (dw,))
    return dx, dw.to(weight.dtype)


def _by_token(*tensors: Tensor) -> list[Tensor]:
    """[tokens, heads, batch, width] each."""
    return [t.transpose(0, 2) for t in tensors]


@torch.library.custom_op("megacompile::qk_norm_rope", mutates_args=())
def qk_norm_rope_op(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(y, rstd); see above."""
    _check_qk_norm_rope(x, weight, cos, sin)
    fits = runs_triton(x) and x.shape[3] <= MAX_WIDTH
    run = qk_norm_rope_triton if fits else qk_norm_rope_reference
    return run(x, weight, cos, sin, eps, offset)


@torch.library.custom_op("megacompile::qk_norm_rope_backward", mutates_args=())
def qk_norm_rope_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """(dx, dw)."""
    fits = runs_triton(x) and x.shape[3] <= MAX_WIDTH
    run = qk_norm_rope_backward_triton if fits else qk_norm_rope_backward_reference
    return run(grad, x, weight, cos, sin, rstd, offset)


@qk_norm_rope_op.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_heads(x), _empty_rstd(x)


@qk_norm_rope_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_heads(x), torch.empty_like(weight, memory_format=torch.contiguous_format)


def _qk_norm_rope_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, _, ctx.offset = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1])


def _qk_norm_rope_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw = qk_norm_rope_backward_op(grad, *ctx.saved_tensors, ctx.offset)
    return dx, dw, None, None, None, None


qk_norm_rope_op.register_autograd(_qk_norm_rope_backward, setup_context=_qk_norm_rope_setup)


def qk_norm_rope(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, offset: float = 0.0
) -> Tensor:
    """y alone, differentiable in x and weight."""
    y: Tensor = qk_norm_rope_op(x, weight, cos, sin, eps, offset)[0]
    return y


def _qk_norm_rope_eager(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Qwen3's, of each head."""
    return rope_eager(rms_norm_eager(x, weight), cos, sin)


def _normed_and_turned(shape: Shape, g: torch.Generator) -> list[Tensor]:
    x, cos, sin = turned(shape, g)
    return [x, normal(g, shape[-1]), cos, sin]


declare(
    OpSpec(
        "qk_norm_rope",
        OpPass(),
        OpPass(launches=3, sums=True),
        along="elements",
        eager=(
            EagerForm(
                "qk_norm_rope",
                ("batch", "heads", "tokens", "width"),
                (2, 32, 8192, 128),
                _normed_and_turned,
                2,
                _qk_norm_rope_eager,
                qk_norm_rope,
                heads_of,
            ),
        ),
    )
)
