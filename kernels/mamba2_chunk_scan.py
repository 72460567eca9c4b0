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
twice, out once; states, float32, four times; C B^T, 256 float32 for each token and group, twice. The backward
is plain torch.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megacompile.kernels._triton import (
    AotCase,
    accumulator,
    aot_cases,
    arch_of,
    ceil_div,
    launch,
    next_power_of_2,
    on_gpu,
    runs_triton,
    wide,
)
from megacompile.kernels.mamba2_kernels import (
    mamba2_pass_kernel,
    mamba2_scan_kernel,
    mamba2_scores_kernel,
    mamba2_states_kernel,
)
from megacompile.kernels.mamba2_reference import (
    CHUNK,
    SPAN,
    Inputs,
    backward_reference,
    forward_reference,
)

MAX_WIDTH = 256  # of B and C
_PASSED = 1024  # elements of a state that a program takes through the spans
_WARPS = {86: 8, 89: 8, 120: 8}  # of the first kernel, which spills there with four
MAX_GRID = 65535  # CUDA's, beyond the first dimension


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch, tokens and heads."""
    return [x.stride(d) for x in tensors for d in range(3)]


def _dense(x: Tensor) -> Tensor:
    """Columns side by side, tokens of a chunk less than 2**31 elements apart."""
    return x if x.stride(-1) == 1 and x.stride(1) * CHUNK < 1 << 31 else x.contiguous()


def _sizes(given: Inputs) -> dict[str, Any]:
    """Constants that kernels of chunks share."""
    inner = given.B.shape[3]
    padded = max(16, next_power_of_2(inner))
    chunks = {"SPAN": SPAN // CHUNK, "CHUNK": CHUNK, "BLOCK_D": padded, "num_stages": 2}
    return {"ACC": accumulator(given.x.dtype), "DIM": inner, **chunks}


def _states(given: Inputs) -> Tensor:
    """Before each span."""
    batch, _, heads, width = given.x.shape
    states = given.x.new_empty(given.states_shape, dtype=wide(given.x.dtype))
    decays = states.new_empty(batch, heads, len(states))
    sizes = _sizes(given)
    columns = min(32 if sizes["BLOCK_D"] > 128 else 64, max(16, next_power_of_2(width)))  # held in registers
    of_heads = states.stride(0), heads, heads // given.B.shape[2]
    launch(
        mamba2_states_kernel,
        (len(states) * ceil_div(width, columns), heads, batch),
        *(given.x, given.dt, given.A, given.B, states, decays),
        *(*_strides(given.x, given.dt, given.B), *of_heads, given.x.shape[1]),
        num_warps=_WARPS.get(arch_of(given.x), 4),
        V_DIM=width,
        BLOCK_V=columns,
        **sizes,
    )
    launch(
        mamba2_pass_kernel,
        (ceil_div(sizes["DIM"] * width, _PASSED), heads, batch),
        *(states, decays, *of_heads, len(states)),
        ACC=sizes["ACC"],
        DIM=sizes["DIM"],
        V_DIM=width,
        BLOCK=_PASSED,
    )
    return states


def _results(given: Inputs, states: Tensor) -> Tensor:
    x, B, C = given.x, given.B, given.C
    batch, tokens, heads, width = x.shape
    chunks, groups, span = ceil_div(tokens, CHUNK), B.shape[2], SPAN // CHUNK
    out = states.new_empty(x.shape)
    similar = states.new_empty(batch, groups, chunks, span, CHUNK, CHUNK)
    columns = min(64, max(16, next_power_of_2(width)))
    launch(
        mamba2_scores_kernel,
        (chunks * span, groups, batch),
        *(B, C, similar, *_strides(B, C), groups, tokens),
        **_sizes(given),
    )
    launch(
        mamba2_scan_kernel,
        (chunks * ceil_div(width, columns), heads, batch),
        *(x, given.dt, given.A, C, given.D, similar, states, out),
        *(*_strides(x, given.dt, C, out), states.stride(0), heads, heads // groups, tokens),
        V_DIM=width,
        BLOCK_V=columns,
        **_sizes(given),
    )
    return out


def forward_triton(given: Inputs) -> tuple[Tensor, Tensor]:
    """(out, states before each span)."""
    x, B, C = map(_dense, (given.x, given.B, given.C))
    dense = Inputs(x, given.dt, given.A.contiguous(), B, C, given.D.contiguous())
    states = _states(dense)
    return _results(dense, states), states


def runs_kernels(x: Tensor, B: Tensor, C: Tensor) -> bool:
    """Whether a forward launches kernels: B and C up to 256 wide, a grid that fits; on a GPU, bfloat16.

    float16 lacks the range for long memories; exact float32 products pass by the tensor cores.
    """
    same = x.dtype == B.dtype == C.dtype and x.dtype != torch.float16
    fits = max(x.shape[0], x.shape[2]) <= MAX_GRID and B.shape[3] <= MAX_WIDTH and x.numel() > 0
    return runs_triton(x) and same and fits and (x.dtype == torch.bfloat16 or not on_gpu(x))


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
    d_x, d_dt, d_A, d_B, d_C, d_D = backward_reference(grad, Inputs(x, dt, A, B, C, D), states)
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


@register_flop_formula(torch.ops.megacompile.mamba2_chunk_scan)
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


@register_flop_formula(torch.ops.megacompile.mamba2_chunk_scan_backward)
def mamba2_chunk_scan_backward_flops(
    grad: Any, x: Any, dt: Any, A: Any, B: Any, *_: Any, out_val: Any = None, **__: Any
) -> int:
    """The same, of the forward's scores and states once more and of the gradients."""
    return mamba2_chunk_scan_flops(x, dt, A, B, products=(3, 2, 6))


@aot_cases
def _aot() -> list[AotCase]:
    def case(heads: int, width: int, groups: int, inner: int) -> None:
        x = torch.empty((1, 4096, heads, width), dtype=torch.bfloat16, device="meta")
        B = torch.empty((1, 4096, groups, inner), dtype=torch.bfloat16, device="meta")
        of_heads = x[0, 0, :, 0].contiguous()
        forward_triton(Inputs(x, x[..., 0].contiguous(), of_heads.float(), B, B, of_heads))

    return [
        ("128/64 bf16", partial(case, 128, 64, 8, 128)),
        ("256/128 bf16", partial(case, 32, 128, 2, 256)),
    ]
