"""RMSNorm of each head and its rotation in one pass, as Qwen3 and Gemma 3 treat queries and keys.

    n = x * rstd        y = rotate(n * (weight + offset))        rstd = (mean(x**2) + eps) ** -0.5

``rotate`` is that of ``rope.py`` for pairs (i, i + R/2) of the first R columns; the others pass.
x: [B, H, T, D], any float type, any strides. weight: [D]. cos, sin: [B or 1, 1, T, R], R even, R <= D; they
get no gradient. y: [B, H, T, D] of x's type, a token's heads side by side in memory if they are in x. rstd:
[B, H, T, 1] float32 (float64 for float64 x), the type that everything between x and y is computed in: where
norm and rotation are two operators, what passes between them is rounded.

With d the gradient of y, rotated back, and g = d * (weight + offset):

    dx = (g - n * mean(g * n)) * rstd        dw = sum over rows of d * n

Saves x, weight, cos, sin, rstd. A program holds heads of one token, so that their row of cos and sin is read
once: about 4096 elements forward; 2048 at a time backward, which is persistent and adds up its share of dw.
Traffic per element of x: 2 elements forward, 3 backward; norm and rotation apart take 4 and 5.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import (
    AotCase,
    RowTile,
    accumulator,
    aot_cases,
    ceil_div,
    launch,
    next_power_of_2,
    persistent,
    runs_triton,
)
from megacompile.kernels.benchmark import Operation, Shape, elementwise, heads_of, normal
from megacompile.kernels.norm_reference import (
    empty_heads,
    empty_rstd,
    qk_norm_rope_backward_reference,
    qk_norm_rope_reference,
)
from megacompile.kernels.qk_norm_rope_kernels import (
    qk_norm_rope_backward_kernel,
    qk_norm_rope_forward_kernel,
)
from megacompile.kernels.registry import Kernel, OpPass, OpSpec, declare
from megacompile.kernels.rms_norm import eager as normed
from megacompile.kernels.rope import eager as rotated
from megacompile.kernels.rope import turned, turned_heads

MAX_WIDTH = 1024  # of a head; torch takes over beyond


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
    """Of batch, tokens and heads."""
    return [x.stride(d) for x in tensors for d in (0, 2, 1)]


def _tables(x: Tensor, *tables: Tensor) -> tuple[list[Tensor], list[int]]:
    """cos and sin for all of x's batch, and their strides of batch and tokens."""
    spread = [_columns_dense(t).expand(len(x), 1, *t.shape[2:]) for t in tables]
    return spread, [t.stride(d) for t in spread for d in (0, 2)]


def forward_triton(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(y, rstd)."""
    y, rstd = empty_heads(x), empty_rstd(x)
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


def backward_triton(
    grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """(dx, dw)."""
    dx = empty_heads(x)
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


def _check(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> None:
    rotary, width = cos.shape[-1], x.shape[-1]
    if x.ndim != 4 or weight.shape != (width,):
        raise ValueError(f"qk_norm_rope takes four dimensions and a weight of one head, not {list(x.shape)}")
    if rotary % 2 or not 0 < rotary <= width or cos.shape != sin.shape:
        raise ValueError(f"qk_norm_rope cannot rotate {width} columns by {rotary} cosines")
    if cos.shape[1:3] != (1, x.shape[2]) or cos.shape[0] not in (1, len(x)):
        raise ValueError(f"qk_norm_rope takes tables for each token, not {list(cos.shape)}")


@torch.library.custom_op("megacompile::qk_norm_rope", mutates_args=())
def qk_norm_rope_op(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(y, rstd); see the module's docstring."""
    _check(x, weight, cos, sin)
    fits = runs_triton(x) and x.shape[3] <= MAX_WIDTH
    run = forward_triton if fits else qk_norm_rope_reference
    return run(x, weight, cos, sin, eps, offset)


@torch.library.custom_op("megacompile::qk_norm_rope_backward", mutates_args=())
def qk_norm_rope_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """(dx, dw)."""
    fits = runs_triton(x) and x.shape[3] <= MAX_WIDTH
    run = backward_triton if fits else qk_norm_rope_backward_reference
    return run(grad, x, weight, cos, sin, rstd, offset)


@qk_norm_rope_op.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_heads(x), empty_rstd(x)


@qk_norm_rope_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_heads(x), torch.empty_like(weight, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, _, ctx.offset = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw = qk_norm_rope_backward_op(grad, *ctx.saved_tensors, ctx.offset)
    return dx, dw, None, None, None, None


qk_norm_rope_op.register_autograd(_backward, setup_context=_setup)


def qk_norm_rope(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, offset: float = 0.0
) -> Tensor:
    """y alone, differentiable in x and weight."""
    y: Tensor = qk_norm_rope_op(x, weight, cos, sin, eps, offset)[0]
    return y


def _eager(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Qwen3's, of each head."""
    return rotated(normed(x, weight), cos, sin)


def _normed(shape: Shape, g: torch.Generator) -> list[Tensor]:
    x, cos, sin = turned(shape, g)
    return [x, normal(g, shape[-1]), cos, sin]


declare(
    OpSpec(
        "qk_norm_rope",
        OpPass(kernels=(Kernel("qk_norm_rope", "qk_norm_rope_forward_kernel"),)),
        OpPass(launches=3, sums=True, kernels=(Kernel("qk_norm_rope", "qk_norm_rope_backward_kernel"),)),
        along="elements",
        variant=turned_heads,
        benchmarks=(
            Operation(
                "qk_norm_rope",
                ("batch", "heads", "tokens", "width"),
                ((2, 32, 8192, 128), (2, 8, 8192, 128)),
                _normed,
                2,
                _eager,
                elementwise(1, 1, 3),
                qk_norm_rope,
                heads_of,
            ),
        ),
    )
)


@aot_cases
def _aot() -> list[AotCase]:
    def case(heads: int, width: int, rotary: int, dtype: torch.dtype) -> None:
        x = torch.empty((2, 4096, heads, width), dtype=dtype, device="meta").transpose(1, 2)
        table = torch.empty((1, 1, 4096, rotary), dtype=dtype, device="meta")
        given = x, x[0, 0, 0], table, table
        y, rstd = forward_triton(*given, 1e-6, 0.0)
        backward_triton(y, *given, rstd, 0.0)

    shapes = ((32, 128), (8, 128), (16, 64), (8, 256))
    cases = [(f"{h}x{w} bf16", partial(case, h, w, w, torch.bfloat16)) for h, w in shapes]
    return [
        *cases,
        ("16x256 partial bf16", partial(case, 16, 256, 64, torch.bfloat16)),
        ("32x128 fp32", partial(case, 32, 128, 128, torch.float32)),
    ]
