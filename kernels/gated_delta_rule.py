# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), as Qwen3-Next's linear attention computes it.

Each value head has a state S [Dk, Dv], zero at first, and for each token t

    S = exp(g_t) S        S = S + beta_t k_t (v_t - S^T k_t)^T        out_t = S^T q_t / sqrt(Dk)

with q and k divided by sqrt(sum of squares + 1e-6) before, where ``normalised``. q, k: [B, T, G, Dk].
v: [B, T, H, Dv], G dividing H; g, beta: [B, T, H]. out: [B, T, H, Dv] of q's type. Computed in float32
(float64 for float64 q); products of the kernels take q's type and accumulate in float32. Saves the inputs and
the states before every 256th token.

Tokens are taken in chunks of 64. With c the sum of g from a chunk's start, z its last, D_ij = exp(c_i - c_j),
W what the chunk writes, and S the state before it:

    W = (1 + tril(beta K K^T * D, -1))^-1 (beta (V - exp(c) K S))
    out = exp(c) Q S + tril(Q K^T * D) W        S' = exp(z) S + (exp(z - c) K)^T W

so that all but S is a product of matrices. The forward is two kernels on bfloat16: one makes the inverse and
the scores of every chunk, one goes through the chunks for some columns of S. Traffic, in elements per token
and value head: 2 Dk and 128 by the first; 2 Dk and 128 for each block of columns, and 2 Dv, by the second.
The 128 are there for all tokens between the two.

The backward is four kernels for each 4,096 tokens of all rows, from right to left, by the formulas of
``gated_delta_backward_kernels.py``; between them lie, for so many tokens, 128 + Dv + Dk Dv / 32 elements per
token and value head. The states' way there and back is rounded to q's type where a product takes it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megacompile.kernels._triton import AotCase, aot_cases, ceil_div, wide
from megacompile.kernels.benchmark import Cost, Operation, Shape, normal
from megacompile.kernels.gated_delta_launchers import (
    LAUNCHES,
    backward_triton,
    forward_triton,
    parts_of,
    runs_kernels,
)
from megacompile.kernels.gated_delta_reference import (
    CHUNK,
    SPAN,
    Inputs,
    backward_reference,
    eager,
    forward_reference,
    spans_of,
)
from megacompile.kernels.registry import Arguments, Kernel, OpPass, OpSpec, RecurrenceChunk, declare


@torch.library.custom_op("megacompile::gated_delta_rule", mutates_args=())
def gated_delta_rule_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalised: bool = True
) -> tuple[Tensor, Tensor]:
    """(out, states that the backward starts from); see the module's docstring."""
    run = forward_triton if runs_kernels(q, k, v) else forward_reference
    return run(Inputs(q, k, v, g, beta, normalised))


@torch.library.custom_op("megacompile::gated_delta_rule_backward", mutates_args=())
def gated_delta_rule_backward_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, normalised: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, g, beta."""
    run = backward_triton if runs_kernels(q, k, v) else backward_reference
    dq, dk, dv, dg, dbeta = run(grad, Inputs(q, k, v, g, beta, normalised), states)
    return dq, dk, dv, dg, dbeta


@gated_delta_rule_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalised: bool = True
) -> tuple[Tensor, Tensor]:
    shape = Inputs(q, k, v, g, beta, normalised).state_shape
    states = q.new_empty((spans_of(q.shape[1]), *shape), dtype=wide(q.dtype))
    return q.new_empty(v.shape), states


@gated_delta_rule_backward_op.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:5])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.normalised = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*gated_delta_rule_backward_op(grad, *ctx.saved_tensors, ctx.normalised), None)


gated_delta_rule_op.register_autograd(_backward, setup_context=_setup)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalised: bool = True
) -> Tensor:
    """out, differentiable in q, k, v, g, beta."""
    out: Tensor = gated_delta_rule_op(q, k, v, g, beta, normalised)[0]
    return out


def gated_delta_rule_flops(
    q: Any, k: Any, v: Any, *_: Any, out_val: Any = None, products: Any = (2, 2, 3), **__: Any
) -> int:
    """Those of the products: so many, for each token, of its chunk's tokens with Dk of each key head, with
    Dv of each value head, and of Dk with Dv; and the inverse."""
    batch, tokens, groups, width = q
    heads, inner = v[2:]
    of_keys, of_values, of_states = products
    each = of_keys * CHUNK * width * groups
    each += heads * (of_values * CHUNK * inner + of_states * width * inner + CHUNK * CHUNK // 2)
    return int(2 * batch * ceil_div(tokens, CHUNK) * CHUNK * each)


def gated_delta_rule_backward_flops(
    grad: Any, q: Any, k: Any, v: Any, *_: Any, out_val: Any = None, **__: Any
) -> int:
    """The same, of the forward's states once more and of the gradients."""
    return gated_delta_rule_flops(q, k, v, products=(5, 5, 8))


def _runs_kernels(given: Arguments) -> bool:
    return runs_kernels(given["q"], given["k"], given["v"])


def _launches(backward: bool, by_span: int, by_chunk: int) -> Callable[[Arguments], int]:
    """Count our kernels, or in plain torch launches for each span of tokens, and for each chunk."""

    def count(given: Arguments) -> int:
        q = given["q"]
        if _runs_kernels(given):
            forward, part = LAUNCHES
            return 1 + part * len(parts_of(*q.shape[:2])) if backward else forward
        return by_span * ceil_div(q.shape[1], SPAN) + by_chunk * ceil_div(q.shape[1], CHUNK)

    return count


def _kernels(**products: tuple[float, ...]) -> tuple[Kernel, ...]:
    return tuple(
        Kernel("gated_delta_rule", f"gated_delta_{name}_kernel", each) for name, each in products.items()
    )


def _chunk_flops(width: int, inner: int) -> int:
    q, v = (1, CHUNK, 1, width), (1, CHUNK, 1, inner)
    return gated_delta_rule_flops(q, q, v)


def _chunk_backward_flops(width: int, inner: int) -> int:
    q, v = (1, CHUNK, 1, width), (1, CHUNK, 1, inner)
    return gated_delta_rule_backward_flops(v, q, q, v)


def _costs(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
    batch, groups, heads, tokens, width, inner = shape
    q, v = (batch, tokens, groups, width), (batch, tokens, heads, inner)
    keys, values = 2 * torch.Size(q).numel() * itemsize, 2 * torch.Size(v).numel() * itemsize
    forward, backward = gated_delta_rule_flops(q, q, v), gated_delta_rule_backward_flops(v, q, q, v)
    return Cost(keys + values, forward), Cost(2 * keys + 3 * values // 2, backward)


def _inputs(shape: Shape, g: torch.Generator) -> list[Tensor]:
    batch, groups, heads, tokens, width, inner = shape
    q, k = (normal(g, batch, tokens, groups, width) for _ in range(2))
    gates = -F.softplus(normal(g, batch, tokens, heads))
    beta = normal(g, batch, tokens, heads).sigmoid()
    return [q, k, normal(g, batch, tokens, heads, inner), gates, beta]


def _shape_of(shapes: Sequence[Shape], constants: Sequence[str]) -> Shape | None:
    (batch, tokens, groups, width), _, (*_, heads, inner) = shapes[:3]
    return (batch, groups, heads, tokens, width, inner) if tuple(constants) == ("True",) else None


declare(
    OpSpec(
        "gated_delta_rule",
        OpPass(
            gated_delta_rule_flops,
            _launches(False, 45, 11),
            kernels=_kernels(chunk=(2, 0, 0), forward=(0, 2, 3)),
            chunk=RecurrenceChunk(CHUNK, SPAN, _chunk_flops),
        ),
        OpPass(
            gated_delta_rule_backward_flops,
            _launches(True, 125, 17),
            kernels=_kernels(
                chunk=(2, 0, 0),
                states=(0, 1, 2),
                backward_state=(0, 2, 3),
                backward_pairs=(2, 2, 0),
                backward_q=(1, 0, 1),
                backward_k=(2, 0, 2),
            ),
            chunk=RecurrenceChunk(CHUNK, SPAN, _chunk_backward_flops),
        ),
        variant=lambda given: f"{given['q'].shape[-1]}/{given['v'].shape[-1]}",
        runs_kernels=_runs_kernels,
        benchmarks=(
            Operation(
                "gated_delta_rule",
                ("batch", "groups", "heads", "tokens", "width", "inner"),
                ((2, 16, 32, 4096, 128, 128),),
                _inputs,
                5,
                eager,
                _costs,
                gated_delta_rule,
                _shape_of,
            ),
        ),
    )
)


@aot_cases
def _aot() -> list[AotCase]:
    def case(groups: int, heads: int, width: int, inner: int) -> None:
        q = torch.empty((2, 4096, groups, width), dtype=torch.bfloat16, device="meta")
        v = torch.empty((2, 4096, heads, inner), dtype=torch.bfloat16, device="meta")
        beta = v[..., 0].contiguous()
        given = Inputs(q, q, v, beta.float(), beta, True)
        out, states = forward_triton(given)
        backward_triton(out, given, states)

    return [
        ("128/128 bf16", partial(case, 16, 32, 128, 128)),
        ("96/192 bf16", partial(case, 30, 30, 96, 192)),
    ]
