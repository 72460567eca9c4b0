# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rotary position embedding: alone, out of place or in place, and in one pass with a norm of each head."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import (
    AotCase,
    RowTile,
    accumulator,
    aot_cases,
    by_rows,
    ceil_div,
    launch,
    next_power_of_2,
    persistent,
    runs_triton,
    tl,
    triton,
    wide,
)
from megacompile.kernels.norms import rms_norm_eager
from megacompile.kernels.registry import (
    Arguments,
    Kernel,
    Operation,
    OpPass,
    OpSpec,
    Shape,
    Twin,
    declare,
    elementwise,
    heads_of,
    normal,
)

# ------------------------------------------------------------------------------------------------------------
# Rotary position embedding (Su et al. 2021, arXiv:2104.09864).
#
# For each pair (a, b) of the first R columns:
#
#     y_a = x_a * cos_a - x_b * sin_a        y_b = x_b * cos_b + x_a * sin_b
#
# Pairs are (i, i + R/2) where ``interleaved=False`` (GPT-NeoX, Llama) and (2i, 2i + 1) otherwise (GPT-J,
# Cohere); columns from R on pass through (partial rotary). x: [..., D] with up to four dimensions, any
# strides. cos, sin: [..., R], broadcastable to x's leading dimensions, R even, R <= D (for x [batch, heads,
# tokens, D], [batch or 1, 1, tokens, R]). They get no gradient. Saves cos and sin alone: the backward is the
# transposed rotation of the gradient.
#
# One kernel does both, in float32 (float64 for float64). A program rotates about 4096 elements: BLOCK_H
# indices of a dimension along which cos and sin do not vary (heads, mostly), so that their row is read once.
# Traffic per element: a read and a write; in place, columns from R on are not touched.


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


def _turned_heads(given: Arguments) -> str:
    """Name heads, their width, and how they are turned: ``32x128 partial``."""
    shape = given["x" if "x" in given else "grad"].shape
    words = [f"{shape[1] if len(shape) > 3 else 1}x{shape[-1]}"]
    words += ["partial"] if given["cos"].shape[-1] < shape[-1] else []
    words += ["interleaved"] if given.get("interleaved") else []
    return " ".join(words)


def _rope_eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Llama's, on [batch, heads, tokens, width]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def _turned(shape: Shape, g: torch.Generator) -> list[Tensor]:
    batch, heads, tokens, width = shape
    angles = torch.outer(torch.arange(tokens), 1e4 ** (-torch.arange(0, width, 2) / width)).repeat(1, 2)
    x = normal(g, batch, tokens, heads, width).transpose(1, 2)
    return [x, angles.cos().double()[None, None], angles.sin().double()[None, None]]


def _rope_liger(liger: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate half of the heads as queries and half as keys, which Liger rotates together."""
    q, k = x.chunk(2, 1)
    return torch.cat(liger.liger_rope(q, k, cos[:, 0], sin[:, 0]), 1)


_ROPE_KERNELS = (Kernel("rope_kernel"),)
declare(
    OpSpec(
        "rope",
        OpPass(twin=Twin("rope_", (0,), lambda a: (*(*a, False)[:4], False)), kernels=_ROPE_KERNELS),
        OpPass(twin=Twin("rope_", (0,), lambda a: (*a[:4], True)), kernels=_ROPE_KERNELS),
        along="elements",
        variant=_turned_heads,
        benchmarks=(
            Operation(
                "rope",
                ("batch", "heads", "tokens", "width"),
                ((2, 32, 8192, 128), (2, 8, 8192, 128)),
                _turned,
                1,
                _rope_eager,
                elementwise(1, 1, 2),
                rope,
                heads_of,
                _rope_liger,
            ),
        ),
    )
)


@aot_cases("rope")
def _rope_aot() -> list[AotCase]:
    def case(heads: int, width: int, rotary: int, interleaved: bool) -> None:
        x = torch.empty((2, 4096, heads, width), dtype=torch.bfloat16, device="meta")
        cos = torch.empty((1, 1, 4096, rotary), dtype=torch.bfloat16, device="meta")
        x = x.transpose(1, 2)
        for transposed in (False, True):
            rope_triton(x, cos, cos, interleaved, transposed, torch.empty_like(x))
        rope_triton(x, cos, cos, interleaved, False, x)

    return [
        ("32x128 bf16", partial(case, 32, 128, 128, False)),
        ("8x64 bf16", partial(case, 8, 64, 64, False)),
        ("32x128 partial bf16", partial(case, 32, 128, 32, False)),
        ("32x128 interleaved bf16", partial(case, 32, 128, 128, True)),
    ]


# ------------------------------------------------------------------------------------------------------------
# RMSNorm of each head and its rotation in one pass, as Qwen3 and Gemma 3 treat queries and keys.
#
#     n = x * rstd        y = rotate(n * (weight + offset))        rstd = (mean(x**2) + eps) ** -0.5
#
# ``rotate`` is that above, for pairs (i, i + R/2) of the first R columns; the others pass. x: [B, H,
# T, D], any float type, any strides. weight: [D]. cos, sin: [B or 1, 1, T, R], R even, R <= D; they get no
# gradient. y: [B, H, T, D] of x's type, a token's heads side by side in memory if they are in x. rstd: [B, H,
# T, 1] float32 (float64 for float64 x), the type that everything between x and y is computed in: where norm
# and rotation are two operators, what passes between them is rounded.
#
# With d the gradient of y, rotated back, and g = d * (weight + offset):
#
#     dx = (g - n * mean(g * n)) * rstd        dw = sum over rows of d * n
#
# Saves x, weight, cos, sin, rstd. A program holds heads of one token, so that their row of cos and sin is
# read once: about 4096 elements forward; 2048 at a time backward, which is persistent and adds up its share
# of dw. Traffic per element of x: 2 elements forward, 3 backward; norm and rotation apart take 4 and 5.
#
# A tile of the kernels is BLOCK_H heads of one token. A head's columns are a and b, the two halves that are
# rotated, of HALF columns each, and c, those that pass, where there are any, of PASS. ``x_batch``,
# ``x_token``, ``x_head`` are x's strides; columns have stride one.


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


def _strides(*tensors: Tensor) -> list[int]:
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
        *(*_strides(x, y, rstd), *table_strides),
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
        *(*_strides(grad, x, dx, rstd), *table_strides),
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
    return _rope_eager(rms_norm_eager(x, weight), cos, sin)


def _normed_and_turned(shape: Shape, g: torch.Generator) -> list[Tensor]:
    x, cos, sin = _turned(shape, g)
    return [x, normal(g, shape[-1]), cos, sin]


declare(
    OpSpec(
        "qk_norm_rope",
        OpPass(kernels=(Kernel("qk_norm_rope_forward_kernel"),)),
        OpPass(launches=3, sums=True, kernels=(Kernel("qk_norm_rope_backward_kernel"),)),
        along="elements",
        variant=_turned_heads,
        benchmarks=(
            Operation(
                "qk_norm_rope",
                ("batch", "heads", "tokens", "width"),
                ((2, 32, 8192, 128), (2, 8, 8192, 128)),
                _normed_and_turned,
                2,
                _qk_norm_rope_eager,
                elementwise(1, 1, 3),
                qk_norm_rope,
                heads_of,
            ),
        ),
    )
)


@aot_cases("qk_norm_rope")
def _qk_norm_rope_aot() -> list[AotCase]:
    def case(heads: int, width: int, rotary: int, dtype: torch.dtype) -> None:
        x = torch.empty((2, 4096, heads, width), dtype=dtype, device="meta").transpose(1, 2)
        table = torch.empty((1, 1, 4096, rotary), dtype=dtype, device="meta")
        given = x, x[0, 0, 0], table, table
        y, rstd = qk_norm_rope_triton(*given, 1e-6, 0.0)
        qk_norm_rope_backward_triton(y, *given, rstd, 0.0)

    shapes = ((32, 128), (8, 128), (16, 64), (8, 256))
    cases = [(f"{h}x{w} bf16", partial(case, h, w, w, torch.bfloat16)) for h, w in shapes]
    return [
        *cases,
        ("16x256 partial bf16", partial(case, 16, 256, 64, torch.bfloat16)),
        ("32x128 fp32", partial(case, 32, 128, 128, torch.float32)),
    ]
