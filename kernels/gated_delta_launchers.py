"""What launches the kernels of ``gated_delta_rule.py``, and which inputs they take."""

from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import (
    accumulator,
    arch_of,
    ceil_div,
    launch,
    next_power_of_2,
    on_gpu,
    runs_triton,
    wide,
)
from megacompile.kernels.gated_delta_backward_kernels import (
    gated_delta_backward_k_kernel,
    gated_delta_backward_pairs_kernel,
    gated_delta_backward_q_kernel,
    gated_delta_backward_state_kernel,
)
from megacompile.kernels.gated_delta_kernels import (
    gated_delta_chunk_kernel,
    gated_delta_forward_kernel,
    gated_delta_states_kernel,
)
from megacompile.kernels.gated_delta_reference import CHUNK, SPAN, SPAN_CHUNKS, Inputs, spans_of

MIN_WIDTH, MAX_WIDTH = 64, 128  # of a key; the least one in bfloat16
HELD = 4096  # tokens of all rows whose states a backward holds at a time
LAUNCHES = 2, 6  # of a forward; of each part of a backward, beside the first state's zeros
MAX_GRID = 65535  # CUDA's, beyond the first dimension
# Columns of the state that a program carries, and its warps: 10.0 spills with four, 12.0 with 32 columns.
_CARRIED = {80: (32, 4), 90: (32, 4), 100: (32, 8), 103: (32, 8)}
# Columns at a time of states in a backward, and where dk takes others: more spill.
_READ, _OF_KEYS = {90: 64, 100: 64, 103: 64}, {86: 32, 89: 32}


def _dense(x: Tensor) -> Tensor:
    """Columns side by side, tokens of a chunk less than 2**31 elements apart."""
    return x if x.stride(-1) == 1 and x.stride(1) * CHUNK < 1 << 31 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch, tokens and heads."""
    return [x.stride(d) for x in tensors for d in range(3)]


def _sizes(q: Tensor) -> dict[str, Any]:
    return {"ACC": accumulator(q.dtype), "DIM": q.shape[3], "CHUNK": CHUNK}


def _launch_chunks(q: Tensor, k: Tensor, given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """(solves, scores, factors) of every chunk."""
    batch, tokens, groups, width = q.shape
    heads, chunks = given.v.shape[2], ceil_div(tokens, CHUNK)
    solves, scores = q.new_empty(2, batch, heads, chunks, CHUNK, CHUNK)
    factors = q.new_empty(batch, heads, chunks, 4, CHUNK, dtype=wide(q.dtype))
    launch(
        gated_delta_chunk_kernel,
        (chunks, heads, batch),
        *(q, k, given.g, given.beta, solves, scores, factors),
        *_strides(q, k, given.g, given.beta),
        *(heads, heads // groups, tokens, width**-0.5),
        NORMALISED=given.normalised,
        BLOCK_D=32,
        num_stages=2,
        **_sizes(q),
    )
    return solves, scores, factors


def forward_triton(given: Inputs) -> tuple[Tensor, Tensor]:
    """(out, states before each span)."""
    q, k, v = map(_dense, (given.q, given.k, given.v))
    batch, tokens, groups, width = q.shape
    heads, inner = v.shape[2:]
    columns, warps = _CARRIED.get(arch_of(q), (16, 4))
    solves, scores, factors = _launch_chunks(q, k, given)
    out = q.new_empty(v.shape)
    states = factors.new_empty(spans_of(tokens), *given.state_shape)
    launch(
        gated_delta_forward_kernel,
        (ceil_div(inner, columns), heads, batch),
        *(q, k, v, solves, scores, factors, out, states),
        *_strides(q, k, v, out),
        *(states.stride(0), heads, heads // groups, tokens),
        SPAN=SPAN_CHUNKS,
        V_DIM=inner,
        BLOCK_D=max(16, next_power_of_2(width)),
        BLOCK_V=columns,
        num_warps=warps,
        num_stages=2,
        **_sizes(q),
    )
    return out, states


def parts_of(batch: int, tokens: int) -> list[slice]:
    """The tokens that a backward goes through at a time: spans, of about HELD tokens in all rows."""
    step = SPAN * max(1, HELD // (SPAN * batch))
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def backward_triton(grad: Tensor, given: Inputs, states: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta."""
    grad, q, k, v = map(_dense, (grad, given.q, given.k, given.v))
    given, states = Inputs(q, k, v, given.g, given.beta, given.normalised), states.contiguous()
    found = tuple(x.new_empty(x.shape) for x in (q, k, v, given.g, given.beta))
    d_state = states.new_zeros(given.state_shape)
    for part in reversed(parts_of(*q.shape[:2])):
        kept, into = states[part.start // SPAN :], tuple(x[:, part] for x in found)
        backward_part(grad[:, part], given.of(part), kept, d_state, into)
    return found


def backward_part(
    grad: Tensor, given: Inputs, states: Tensor, d_state: Tensor, found: tuple[Tensor, ...]
) -> None:
    """Gradients of some spans into ``found``; d_state, of the state behind them, becomes that before them."""
    q, k, v, dv = given.q, given.k, given.v, found[2]
    batch, tokens, groups, width = q.shape
    heads, inner = v.shape[2:]
    chunks, group, columns = ceil_div(tokens, CHUNK), heads // groups, _READ.get(arch_of(q), 32)
    solves, scores, factors = _launch_chunks(q, k, given)
    before, behind = q.new_empty(2, batch, heads, chunks, width, inner)
    solved = q.new_empty(batch, heads, tokens, inner)
    sizes = {"BLOCK_D": max(16, next_power_of_2(width)), "V_DIM": inner, "num_stages": 2, **_sizes(q)}
    launch(
        gated_delta_states_kernel,
        (spans_of(tokens) * ceil_div(inner, columns), heads, batch),
        *(k, v, solves, factors, states, solved, before, *_strides(k, v)),
        *(states.stride(0), heads, group, tokens),
        SPAN=SPAN_CHUNKS,
        BLOCK_V=columns,
        **sizes,
    )
    launch(
        gated_delta_backward_state_kernel,
        (ceil_div(inner, 32), heads, batch),
        *(q, k, grad, solves, scores, factors, d_state, dv, behind, *_strides(q, k, grad, dv)),
        *(heads, group, tokens),
        BLOCK_V=32,
        **sizes,
    )
    # Their gradients take the places of ``scores`` and of what ``solves`` is made of.
    _launch_gradients(grad, given, (solved, before, behind, scores, solves), found, columns, sizes)


def _launch_gradients(
    grad: Tensor,
    given: Inputs,
    trail: tuple[Tensor, ...],
    found: tuple[Tensor, ...],
    columns: int,
    sizes: dict[str, Any],
) -> None:
    """What is left to do for all chunks at once."""
    q, k, g, beta = given.q, given.k, given.g, given.beta
    solved, before, behind, d_scores, d_products = trail
    dq, dk, dv, dg, dbeta = found
    batch, tokens, groups, width = q.shape
    heads, chunks, inner = *before.shape[1:3], dv.shape[3]
    sums = q.new_empty(batch, heads, chunks, 3, CHUNK, dtype=wide(q.dtype))
    numbers = heads // groups, tokens, inner, width**-0.5
    sizes = {**sizes, "NORMALISED": given.normalised}
    launch(
        gated_delta_backward_pairs_kernel,
        (chunks, heads, batch),
        *(q, k, g, beta, grad, dv, solved, d_scores, d_products, sums),
        *(*_strides(q, k, g, beta, grad, dv), heads, *numbers),
        BLOCK_V=64,
        **{**sizes, "BLOCK_D": 32},
    )
    launch(
        gated_delta_backward_q_kernel,
        (chunks, groups, batch),
        *(q, k, g, grad, before, behind, d_scores, sums, dq),
        *(*_strides(q, k, g, grad, dq), groups, *numbers),
        BLOCK_V=columns,
        num_warps=8,
        **sizes,
    )
    launch(
        gated_delta_backward_k_kernel,
        (chunks, groups, batch),
        *(q, k, g, beta, dv, solved, before, behind, d_scores, d_products, sums, dk, dg, dbeta),
        *(*_strides(q, k, g, beta, dv, dk, dg), groups, *numbers),
        BLOCK_V=_OF_KEYS.get(arch_of(q), 64),
        num_warps=8,
        **sizes,
    )


def runs_kernels(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether forward and backward of these launch kernels: keys up to 128 wide, a grid that fits; on a GPU,
    bfloat16, of which keys have at least 64 columns.

    float16 lacks the range for the norms of long keys; exact float32 products pass by the tensor cores.
    Narrow keys are too much alike for what is rounded to bfloat16: gradients by keys of 16 columns were off
    by 0.022 of their scale.
    """
    same = q.dtype == k.dtype == v.dtype and q.dtype != torch.float16
    fits = max(v.shape[0], v.shape[2]) <= MAX_GRID and q.shape[3] <= MAX_WIDTH and v.numel() > 0
    low = q.dtype == torch.bfloat16
    return runs_triton(q) and same and fits and (q.shape[3] >= MIN_WIDTH if low else not on_gpu(q))
