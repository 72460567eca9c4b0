"""What launches the kernels of ``mamba2_chunk_scan.py``, and which inputs they take."""

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
from megacompile.kernels.mamba2_backward_kernels import (
    mamba2_backward_decays_kernel,
    mamba2_backward_groups_kernel,
    mamba2_backward_pairs_kernel,
    mamba2_backward_x_kernel,
)
from megacompile.kernels.mamba2_kernels import (
    mamba2_pass_kernel,
    mamba2_scan_kernel,
    mamba2_scores_kernel,
    mamba2_states_kernel,
)
from megacompile.kernels.mamba2_reference import CHUNK, SPAN, Inputs

MAX_WIDTH = 256  # of B and C
_PASSED = 1024  # elements of a state that a program takes through the spans
PART = 16  # heads whose pairs a program adds up
_WARPS = {86: 8, 89: 8, 120: 8}  # of the first kernel, which spills there with four
_SMALL = 80, 86, 89, 120  # where pairs, dB and dC of wide x spill unless loads run ahead
MAX_GRID = 65535  # CUDA's, beyond the first dimension


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch, tokens and heads."""
    return [x.stride(d) for x in tensors for d in range(3)]


def _dense(x: Tensor) -> Tensor:
    """Columns side by side, tokens of a chunk less than 2**31 elements apart."""
    return x if x.stride(-1) == 1 and x.stride(1) * CHUNK < 1 << 31 else x.contiguous()


def _all_dense(given: Inputs) -> Inputs:
    x, B, C = map(_dense, (given.x, given.B, given.C))
    return Inputs(x, given.dt, given.A.contiguous(), B, C, given.D.contiguous())


def _columns(width: int, most: int = 64) -> int:
    """How many a program takes at a time."""
    return min(most, max(16, next_power_of_2(width)))


def _spans(given: Inputs) -> dict[str, Any]:
    """Constants that kernels share which go through chunks of a span."""
    return {"ACC": accumulator(given.x.dtype), "SPAN": SPAN // CHUNK, "CHUNK": CHUNK}


def _sizes(given: Inputs, most: int = MAX_WIDTH, stages: int = 2) -> dict[str, Any]:
    """The same, with columns of B and C."""
    inner = given.B.shape[3]
    return {"DIM": inner, "BLOCK_D": _columns(inner, most), "num_stages": stages, **_spans(given)}


def _states(x: Tensor, B: Tensor, given: Inputs, kept: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Before each span, of what is written by x along B. With ``kept``, those of the forward: the gradients
    of the states behind each span, of what is read by x along B; ``factors``, and ``carried``."""
    batch, tokens, heads, width = x.shape
    back = kept is not None
    states = x.new_empty(given.states_shape, dtype=wide(x.dtype))
    decays = states.new_empty(batch, heads, len(states))
    sizes = _sizes(given)
    blocks = ceil_div(sizes["DIM"] * width, _PASSED)
    factors = states.new_empty(batch, heads, ceil_div(tokens, CHUNK), 3, CHUNK) if back else decays
    carried = states.new_empty(batch, heads, len(states), blocks) if back else decays
    columns = _columns(width, 32 if sizes["BLOCK_D"] > 128 else 64)  # held in registers
    of_heads = states.stride(0), heads, heads // B.shape[2]
    launch(
        mamba2_states_kernel,
        (len(states) * ceil_div(width, columns), heads, batch),
        *(x, given.dt, given.A, B, states, decays, factors),
        *(*_strides(x, given.dt, B), *of_heads, tokens),
        num_warps=_WARPS.get(arch_of(x), 4),
        BACK=back,
        V_DIM=width,
        BLOCK_V=columns,
        **sizes,
    )
    launch(
        mamba2_pass_kernel,
        (blocks, heads, batch),
        *(states, decays, kept if back else states, carried, *of_heads, len(states)),
        BACK=back,
        ACC=sizes["ACC"],
        DIM=sizes["DIM"],
        V_DIM=width,
        BLOCK=_PASSED,
    )
    return states, factors, carried


def _scores(given: Inputs) -> Tensor:
    """C B^T of the pairs of each span."""
    batch, tokens, groups, _ = given.B.shape
    chunks, span = ceil_div(tokens, CHUNK), SPAN // CHUNK
    similar = given.B.new_empty(batch, groups, chunks, span, CHUNK, CHUNK, dtype=wide(given.B.dtype))
    launch(
        mamba2_scores_kernel,
        (chunks * span, groups, batch),
        *(given.B, given.C, similar, *_strides(given.B, given.C), groups, tokens),
        **_sizes(given),
    )
    return similar


def forward_triton(given: Inputs) -> tuple[Tensor, Tensor]:
    """(out, states before each span)."""
    given = _all_dense(given)
    x, C = given.x, given.C
    batch, tokens, heads, width = x.shape
    states, *_ = _states(x, given.B, given)
    out, similar, columns = states.new_empty(x.shape), _scores(given), _columns(width)
    launch(
        mamba2_scan_kernel,
        (ceil_div(tokens, CHUNK) * ceil_div(width, columns), heads, batch),
        *(x, given.dt, given.A, C, given.D, similar, states, out),
        *(*_strides(x, given.dt, C, out), states.stride(0), heads, heads // C.shape[2], tokens),
        V_DIM=width,
        BLOCK_V=columns,
        **_sizes(given),
    )
    return out, states


def backward_triton(grad: Tensor, given: Inputs, states: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x, dt, A, B, C, D; that of the results is rounded to x's type, which products take."""
    given, grad, states = _all_dense(given), _dense(grad.to(given.x.dtype)), states.contiguous()
    behind, factors, carried = _states(grad, given.C, given, states)
    similar = _scores(given)
    d_x, sums = _launch_x(grad, given, similar, factors, behind)
    d_similar, pairs = _launch_pairs(grad, given, similar, factors)
    d_C, risen = _launch_groups(grad, given, d_similar, factors, states, back=False)
    d_B, _ = _launch_groups(given.x, given, d_similar, factors, behind, back=True)
    d_dt, totals = _launch_decays(given, factors, pairs, sums, risen, carried)
    d_A, d_D = (t.sum((1, 2)).to(x.dtype) for t, x in zip(totals, (given.A, given.D), strict=True))
    return d_x, d_dt, d_A, d_B, d_C, d_D


def _launch_x(
    grad: Tensor, given: Inputs, similar: Tensor, factors: Tensor, behind: Tensor
) -> tuple[Tensor, Tensor]:
    """dx, and sums of tokens over columns of x."""
    batch, tokens, heads, width = given.x.shape
    columns = _columns(width)
    chunks, blocks = factors.shape[2], ceil_div(width, columns)
    d_x, sums = given.x.new_empty(given.x.shape), factors.new_empty(4, batch, heads, chunks, blocks, CHUNK)
    launch(
        mamba2_backward_x_kernel,
        (chunks * blocks, heads, batch),
        *(given.x, given.B, given.D, grad, similar, factors, behind, d_x, *sums),
        *(*_strides(given.x, given.B, grad), behind.stride(0), heads, heads // given.B.shape[2], tokens),
        V_DIM=width,
        BLOCK_V=columns,
        **_sizes(given, 32, stages=1),
    )
    return d_x, sums


def _launch_pairs(grad: Tensor, given: Inputs, similar: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """d(C B^T) of parts of a group's heads, and what decays of each head get by pairs."""
    batch, tokens, heads, width = given.x.shape
    groups, chunks, span = similar.shape[1:4]
    parts = ceil_div(heads // groups, PART)
    d_similar = similar.new_empty(batch, groups * parts, *similar.shape[2:])
    pairs = similar.new_empty(batch, heads, chunks, span, CHUNK)
    launch(
        mamba2_backward_pairs_kernel,
        (chunks * span, groups * parts, batch),
        *(given.x, grad, similar, factors, d_similar, pairs, *_strides(given.x, grad)),
        *(groups * parts, heads, heads // groups, tokens),
        PART=PART,
        V_DIM=width,
        BLOCK_V=_columns(width),
        num_stages=2 if arch_of(similar) in _SMALL else 1,
        **_spans(given),
    )
    return d_similar, pairs


def _launch_groups(
    x: Tensor, given: Inputs, d_similar: Tensor, factors: Tensor, states: Tensor, *, back: bool
) -> tuple[Tensor, Tensor]:
    """dC and what is read of the states, or ``back`` dB."""
    batch, tokens, groups, inner = given.B.shape
    heads, width = x.shape[2:]
    columns, ahead = _columns(inner), width > 64 and arch_of(x) in _SMALL
    blocks, chunks = ceil_div(inner, columns), factors.shape[2]
    found = given.B.new_empty(given.B.shape)
    risen = factors if back else factors.new_empty(batch, heads, chunks, blocks, CHUNK)
    launch(
        mamba2_backward_groups_kernel,
        (chunks * blocks, groups, batch),
        *(x, given.B, given.C, d_similar, factors, states, found, risen),
        *(*_strides(x, given.B, given.C), states.stride(0)),
        *(groups, heads // groups, d_similar.shape[1] // groups, tokens),
        BACK=back,
        V_DIM=width,
        BLOCK_V=_columns(width, 32 if ahead else 64),
        **_sizes(given, columns, stages=2 if ahead else 1),
    )
    return found, risen


def _launch_decays(
    given: Inputs, factors: Tensor, pairs: Tensor, sums: Tensor, risen: Tensor, carried: Tensor
) -> tuple[Tensor, Tensor]:
    """d_dt, and parts of dA and dD."""
    batch, heads, chunks = factors.shape[:3]
    d_dt, totals = given.dt.new_empty(given.dt.shape), factors.new_empty(2, heads, batch, chunks)
    passed = carried.shape[3]
    launch(
        mamba2_backward_decays_kernel,
        (chunks, heads, batch),
        *(given.A, factors, pairs, *sums, risen, carried, d_dt, totals),
        *(heads, given.dt.shape[1], passed),
        num_warps=1,
        BLOCKS=sums.shape[4],
        READ=risen.shape[3],
        PASSED=next_power_of_2(passed),
        **_spans(given),
    )
    return d_dt, totals


def runs_kernels(x: Tensor, B: Tensor, C: Tensor) -> bool:
    """Whether forward and backward launch kernels: B and C up to 256 wide, a grid and states that fit; on a
    GPU, bfloat16.

    float16 lacks the range for long memories; exact float32 products pass by the tensor cores.
    """
    same = x.dtype == B.dtype == C.dtype and x.dtype != torch.float16
    fits = max(x.shape[0], x.shape[2]) <= MAX_GRID and B.shape[3] <= MAX_WIDTH and x.numel() > 0
    fits &= x.shape[2] * x.shape[3] * MAX_WIDTH < 1 << 31
    return runs_triton(x) and same and fits and (x.dtype == torch.bfloat16 or not on_gpu(x))
