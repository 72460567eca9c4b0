# mypy: allow-untyped-defs, allow-incomplete-defs
"""Mamba-2's scan, the state space dual (Dao and Gu 2024, arXiv:2405.21060), as its models compute it.

Each head has a state S [N, P], zero at first, and for each token t

    S = exp(A dt_t) S + dt_t B_t x_t^T        out_t = S^T C_t + D x_t

x: [B, T, H, P]. dt: [B, T, H], not negative. A, D: [H], A negative. B, C: [B, T, G, N], G dividing H. out:
[B, T, H, P]. Computed in float32 (float64 for float64 x), as is out: the models norm it before they round it.
Saves the inputs and the states before every 256th token.

Tokens are taken in chunks of 64. With c the sum of A dt from a chunk's start, z its last, u = dt x, and S the
state before the chunk:

    out = tril(C B^T * exp(c_i - c_j)) u + exp(c) C S + D x        S' = exp(z) S + B^T (exp(z - c) u)

so that all but S is a product of matrices. In torch C B^T, C S and the last product take all heads of a group
at once. On bfloat16 the forward is four kernels: what each span of 256 tokens adds to a state, the states
before the spans, C B^T of the pairs of a span, and the results. Traffic, where B and C stay in the cache: x
twice, out once; states, float32, four times; C B^T, 256 float32 for each token and group, twice.

The backward is eight, behind a copy of the gradient of out in x's type: the first two from right to left, for
the gradients of the states behind the spans, and C B^T again; then dx; the gradient of C B^T, and what pairs
give to decays; dC; dB; ddt. Traffic: x, dx and that copy nine times, the gradient of out once; states seven
times, C B^T three times, its gradient three times for each 16 heads; and about 30 float32 for each token and
head.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megacompile.kernels._triton import AotCase, aot_cases, ceil_div, wide
from megacompile.kernels.benchmark import Cost, Operation, Shape, normal
from megacompile.kernels.mamba2_launchers import backward_triton, forward_triton, runs_kernels
from megacompile.kernels.mamba2_reference import (
    CHUNK,
    SPAN,
    Inputs,
    backward_reference,
    eager,
    forward_reference,
)
from megacompile.kernels.registry import Arguments, Kernel, OpPass, OpSpec, RecurrenceChunk, declare


@torch.library.custom_op("megacompile::mamba2_chunk_scan", mutates_args=())
def mamba2_chunk_scan_op(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, states that the backward starts from); see the module's docstring."""
    run = forward_triton if runs_kernels(x, B, C) else forward_reference
    return run(Inputs(x, dt, A, B, C, D))


@torch.library.custom_op("megacompile::mamba2_chunk_scan_backward", mutates_args=())
def mamba2_chunk_scan_backward_op(
    grad: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, dt, A, B, C, D."""
    run = backward_triton if runs_kernels(x, B, C) else backward_reference
    d_x, d_dt, d_A, d_B, d_C, d_D = run(grad, Inputs(x, dt, A, B, C, D), states)
    return d_x, d_dt, d_A, d_B, d_C, d_D


@mamba2_chunk_scan_op.register_fake
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape, dtype=wide(x.dtype))
    return out, out.new_empty(Inputs(x, *rest).states_shape)


@mamba2_chunk_scan_backward_op.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:6])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = mamba2_chunk_scan_backward_op(grad, *ctx.saved_tensors)
    return found


mamba2_chunk_scan_op.register_autograd(_backward, setup_context=_setup)


def mamba2_chunk_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """out, differentiable in all inputs."""
    out: Tensor = mamba2_chunk_scan_op(x, dt, A, B, C, D)[0]
    return out


def mamba2_chunk_scan_flops(
    x: Any, dt: Any, A: Any, B: Any, *_: Any, out_val: Any = None, products: Any = (1, 1, 2), **__: Any
) -> int:
    """Those of the products: so many, for each token, of its chunk's tokens with N of each group, with P of
    each head, and of N with P of each head."""
    batch, tokens, heads, width = x
    groups, inner = B[2:]
    of_groups, of_heads, of_states = products
    each = of_groups * CHUNK * inner * groups
    each += heads * width * (of_heads * CHUNK + of_states * inner)
    return int(2 * batch * ceil_div(tokens, CHUNK) * CHUNK * each)


def mamba2_chunk_scan_backward_flops(
    grad: Any, x: Any, dt: Any, A: Any, B: Any, *_: Any, out_val: Any = None, **__: Any
) -> int:
    """The same, of the forward's scores and states once more and of the gradients."""
    return mamba2_chunk_scan_flops(x, dt, A, B, products=(3, 2, 6))


def _runs_kernels(given: Arguments) -> bool:
    return runs_kernels(given["x"], given["B"], given["C"])


def _launches(backward: bool, kernels: int, by_span: int, by_chunk: int) -> Callable[[Arguments], int]:
    """Count our kernels, the gradient's copy and sums of tokens among them, with copies of what they do not
    take as it lies; or in plain torch launches for each span of tokens, and for each chunk."""

    def count(given: Arguments) -> int:
        if _runs_kernels(given):
            copies: int = sum(given[name].stride(-1) != 1 for name in "xBC")
            rounded: int = sum(given[name].dtype != torch.float32 for name in "AD")
            return kernels + copies + backward * rounded
        tokens = given["x"].shape[1]
        return by_span * ceil_div(tokens, SPAN) + by_chunk * ceil_div(tokens, CHUNK)

    return count


def _moved(scores: int, heads: int, states: int, groups: int) -> Callable[[Arguments], int]:
    """Count the bytes of plain torch: how often numbers of these sizes are moved for each token."""

    def count(given: Arguments) -> int:
        if _runs_kernels(given):
            return 0
        batch, tokens, of_heads, width = given["x"].shape
        of_groups, inner = given["B"].shape[2:]
        each = of_heads * (scores * CHUNK + heads * width) + states * (of_heads * width * inner // CHUNK)
        each += groups * of_groups * inner
        return int(batch * ceil_div(tokens, CHUNK) * CHUNK * each * wide(given["x"].dtype).itemsize)

    return count


# Priced for so many heads of a group, where Dk is N and Dv is P. A token sees 2.5 chunks of its span; two
# chunks cost the kernel of pairs 0.37 of what one with itself does, whose row counts.
_HEADS = 16


def _kernels(**products: tuple[float, ...]) -> tuple[Kernel, ...]:
    return tuple(
        Kernel("mamba2_chunk_scan", f"mamba2_{name}_kernel", each) for name, each in products.items()
    )


def _chunk_flops(width: int, inner: int) -> int:
    x, B = (1, CHUNK, _HEADS, inner), (1, CHUNK, 1, width)
    return mamba2_chunk_scan_flops(x, x[:3], (_HEADS,), B)


def _chunk_backward_flops(width: int, inner: int) -> int:
    x, B = (1, CHUNK, _HEADS, inner), (1, CHUNK, 1, width)
    return mamba2_chunk_scan_backward_flops(x, x, x[:3], (_HEADS,), B)


def _costs(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
    """What is read in x's type, and results and their gradients in float32."""
    batch, groups, heads, tokens, width, inner = shape
    x, B = (batch, tokens, heads, width), (batch, tokens, groups, inner)
    values, read = torch.Size(x).numel(), (torch.Size(x).numel() + 2 * torch.Size(B).numel()) * itemsize
    given = x, x[:3], (heads,), B
    forward, backward = mamba2_chunk_scan_flops(*given), mamba2_chunk_scan_backward_flops(x, *given)
    return Cost(read + 4 * values, forward), Cost(2 * read + 4 * values, backward)


def _inputs(shape: Shape, g: torch.Generator) -> list[Tensor]:
    batch, groups, heads, tokens, width, inner = shape
    B, C = (normal(g, batch, tokens, groups, inner) for _ in range(2))
    dt, A = F.softplus(normal(g, batch, tokens, heads)), -normal(g, heads).exp()
    return [normal(g, batch, tokens, heads, width), dt, A, B, C, normal(g, heads)]


def _shape_of(shapes: Sequence[Shape], constants: Sequence[str]) -> Shape:
    (batch, tokens, heads, width), _, _, (*_, groups, inner) = shapes[:4]
    return batch, groups, heads, tokens, width, inner


declare(
    OpSpec(
        "mamba2_chunk_scan",
        OpPass(
            mamba2_chunk_scan_flops,
            _launches(False, 4, 41, 2),
            _moved(13, 25, 6, 10),
            kernels=_kernels(states=(0, 0, _HEADS), scores=(2.5, 0, 0), scan=(0, 2.5 * _HEADS, _HEADS)),
            chunk=RecurrenceChunk(CHUNK, SPAN, _chunk_flops, _HEADS, moved_bytes=8),
        ),
        OpPass(
            mamba2_chunk_scan_backward_flops,
            _launches(True, 11, 94, 4),
            _moved(24, 48, 15, 25),
            kernels=_kernels(
                states=(0, 0, _HEADS),
                scores=(2.5, 0, 0),
                backward_x=(0, 2.5 * _HEADS, _HEADS),
                backward_pairs=(0, 25, 0),
                backward_groups=(5, 0, 2 * _HEADS),
            ),
            chunk=RecurrenceChunk(CHUNK, SPAN, _chunk_backward_flops, _HEADS, moved_bytes=12),
        ),
        variant=lambda given: f"{given['B'].shape[-1]}/{given['x'].shape[-1]}",
        runs_kernels=_runs_kernels,
        benchmarks=(
            Operation(
                "mamba2_chunk_scan",
                ("batch", "groups", "heads", "tokens", "width", "inner"),
                ((1, 8, 128, 4096, 64, 128),),
                _inputs,
                6,
                eager,
                _costs,
                mamba2_chunk_scan,
                _shape_of,
            ),
        ),
    )
)


@aot_cases
def _aot() -> list[AotCase]:
    def case(heads: int, width: int, groups: int, inner: int) -> None:
        x = torch.empty((1, 4096, heads, width), dtype=torch.bfloat16, device="meta")
        B = torch.empty((1, 4096, groups, inner), dtype=torch.bfloat16, device="meta")
        of_heads = x[0, 0, :, 0].contiguous()
        given = Inputs(x, x[..., 0].contiguous(), of_heads.float(), B, B, of_heads)
        out, states = forward_triton(given)
        backward_triton(out, given, states)

    return [
        ("128/64 bf16", partial(case, 128, 64, 8, 128)),
        ("256/128 bf16", partial(case, 32, 128, 2, 256)),
    ]
