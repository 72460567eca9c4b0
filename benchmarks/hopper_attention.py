"""Attention for Hopper in Gluon, which no GPU has run: a candidate for the place of our Triton kernels there.

What it computes, the conventions of tensors and the bounds of loops are those of
:mod:`megacompile.kernels.attention`, whose functions ``key_range``, ``visible`` and ``capped`` are compiled
here once more, as Gluon. Heads are up to 128 wide, types have 16 bits, the chip is 9.0.

One program has 128 rows: two groups of four warps with 64 rows each, whose products read shared memory
(wgmma), and one warp that fetches tiles (TMA). A ring of STAGES tiles lies between them. Each stage has two
barriers in shared memory: ``ready`` counts the bytes that arrived, ``empty`` the groups that have read them.
A use of a stage is a phase; the parity of the phase tells it from the one before. There is no barrier of all
warps inside the loop, so that one group multiplies while the other exponentiates. ``arrive`` is preceded by
a barrier of the group's own warps, which Triton inserts: without it the first warp could let a stage be
filled twice while another still waits for it (triton#10035); the gate looks for it.

No atomics, a fixed order of sums: equal inputs give equal bits.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megacompile.kernels import attention, cross_entropy_tiles
from megacompile.kernels._triton import HAS_TRITON, arch_of, ceil_div, launch, next_power_of_2, pointer
from megacompile.kernels.attention import Rule
from megacompile.kernels.attention_sinks import sink_gradient

if HAS_TRITON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Triton 3.9 renamed it.
    load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
else:  # kernels are only defined
    from megacompile.kernels._triton import tl as gl
    from megacompile.kernels._triton import triton as gluon


def as_gluon(function: Any) -> Any:
    """Compile a function of our Triton kernels as Gluon, too."""
    return gluon.jit(function.fn) if HAS_TRITON else function


key_range, query_range, visible = map(
    as_gluon, (attention.key_range, attention.query_range, attention.visible)
)
statistics, probability, slope, matrix = map(
    as_gluon, (attention.statistics, attention.probability, attention.slope, attention.matrix)
)
capped = as_gluon(cross_entropy_tiles.capped)

ARCH, MAX_DIM = 90, 128
ROWS, HALF = 128, 64  # of a program, and of each of its groups


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """NUMBER barriers, each of which ends a phase by ARRIVALS arrivals and the bytes that these expect."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def fetch(desc, batch, head, row, smem, ready):
    """Ask for a tile of one head, zero outside of it; ``ready`` ends its phase when the tile is there."""
    mbarrier.expect(ready, desc.block_type.nbytes)
    load_tile(desc, [batch, head, row, 0], ready, smem)


@gluon.jit
def fetch_for_queries(
    q_desc, k_desc, v_desc, grad_desc, shared, batch, head, kv_head, tiles,
    GRAD: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Fetch queries of both groups, with GRAD gradients too, then keys and values as stages become empty."""
    q_smem, k_smem, v_smem, grad_smem, q_ready, k_ready, v_ready, k_empty, v_empty = shared
    start, low, steps = tiles
    for half in gl.static_range(2):
        row = start + half * 64
        fetch(q_desc, batch, head, row, q_smem.index(half), q_ready.index(half))
        if GRAD:
            fetch(grad_desc, batch, head, row, grad_smem.index(half), q_ready.index(half))
    for step in range(steps):
        stage = step % STAGES
        phase = step // STAGES & 1
        key = low + step * BLOCK_N
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        fetch(k_desc, batch, kv_head, key, k_smem.index(stage), k_ready.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        fetch(v_desc, batch, kv_head, key, v_smem.index(stage), v_ready.index(stage))


@gluon.jit
def attend(
    half: gl.constexpr, shared, pointers, sizes, tiles,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAPPED: gl.constexpr, SINKS: gl.constexpr,
    BOUNDED: gl.constexpr, V_DIM: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr,
):  # fmt: skip
    """One group: results and log-sum-exps of 64 queries."""
    q_smem, k_smem, v_smem, _, q_ready, k_ready, v_ready, k_empty, v_empty = shared
    sinks_ptr, first_ptr, last_ptr, out_ptr, lse_ptr = pointers
    head, out_row, queries, keys, scale, window, softcap = sizes
    start, low, steps = tiles
    LOG2E: gl.constexpr = 1.4426950408889634
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    results: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, results, 2)
    offset = keys - queries
    begin_row = start + half * 64
    row = begin_row + gl.arange(0, 64, gl.SliceLayout(1, scores))
    _, _, all_low, all_high, first, last = key_range(
        begin_row, row, first_ptr, last_ptr, offset, keys, window, queries,
        CAUSAL, WINDOW, BOUNDED, 64, BLOCK_N,
    )  # fmt: skip
    unit = LOG2E if CAPPED else scale * LOG2E
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, scores))
    out = gl.zeros([64, BLOCK_V], gl.float32, results)
    none = gl.zeros([64, BLOCK_N], gl.float32, scores)
    q = q_smem.index(half).reshape([64, BLOCK_D])
    mbarrier.wait(q_ready.index(half), 0)
    for step in range(steps):
        stage = step % STAGES
        phase = step // STAGES & 1
        begin = low + step * BLOCK_N
        mbarrier.wait(k_ready.index(stage), phase)
        k = k_smem.index(stage).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
        s = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        if CAPPED:
            s = capped(s * scale, softcap, CAPPED)
        if (begin < all_low) | (begin + BLOCK_N > all_high):
            key = begin + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
            seen = visible(
                gl.expand_dims(row, 1) + offset, gl.expand_dims(key, 0), keys, gl.expand_dims(first, 1),
                gl.expand_dims(last, 1), window, CAUSAL, WINDOW, BOUNDED,
            )  # fmt: skip
            s = gl.where(seen, s, float("-inf"))
        above = gl.maximum(top, gl.max(s, axis=1) * unit)
        base = gl.where(above == float("-inf"), 0.0, above)
        shrink = gl.exp2(top - base)
        p = gl.exp2(s * unit - gl.expand_dims(base, 1))
        total = total * shrink + gl.sum(p, axis=1)
        out = out * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, results)), 1)
        p = gl.convert_layout(p.to(v_smem.dtype), operand)
        mbarrier.wait(v_ready.index(stage), phase)
        out = warpgroup_mma(p, v_smem.index(stage).reshape([BLOCK_N, BLOCK_V]), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out])
        mbarrier.arrive(v_empty.index(stage), count=1)
        top = above
    if SINKS:
        sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2E
        above = gl.maximum(top, sink)
        shrink = gl.exp2(top - above)
        total = total * shrink + gl.exp2(sink - above)
        out = out * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, results)), 1)
        top = above
    gl.store(lse_ptr + row, (top + gl.log2(total)) / LOG2E, mask=row < queries)
    total = gl.convert_layout(gl.where(total > 0.0, total, 1.0), gl.SliceLayout(1, results))
    store_tile(out_ptr, begin_row, out_row, queries, out / gl.expand_dims(total, 1), V_DIM, BLOCK_V, results)


@gluon.jit
def store_tile(
    ptr, start, stride, rows, value, DIM: gl.constexpr, BLOCK: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Store 64 rows of BLOCK columns as far as rows and columns exist, in the type of ``ptr``."""
    row = start + gl.arange(0, 64, gl.SliceLayout(1, layout))
    col = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    inside = gl.expand_dims(row < rows, 1) & gl.expand_dims(col < DIM, 0)
    at = gl.expand_dims(row.to(gl.int64) * stride, 1) + gl.expand_dims(col, 0)
    gl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=inside)


@gluon.jit
def hopper_attention_forward_kernel(
    q_desc, k_desc, v_desc, sinks_ptr, first_ptr, last_ptr, out_ptr, lse_ptr,
    out_batch, out_head, out_row, heads, group, queries, keys, scale, window, softcap,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAPPED: gl.constexpr, SINKS: gl.constexpr,
    BOUNDED: gl.constexpr, DIM: gl.constexpr, V_DIM: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M = 128 queries of one head; long rows (late queries) start first."""
    batch = gl.program_id(2)
    head = gl.program_id(1)
    start = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK_M
    first_ptr += batch.to(gl.int64) * queries
    last_ptr += batch.to(gl.int64) * queries
    lse_ptr += (batch * heads + head).to(gl.int64) * queries
    out_ptr = matrix(out_ptr, batch, out_batch, head, out_head)
    # One range for all partitions: each counts the same phases.
    low, high, _, _, _, _ = key_range(
        start, start + gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0])), first_ptr, last_ptr,
        keys - queries, keys, window, queries, CAUSAL, WINDOW, BOUNDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    steps = (gl.maximum(high - low, 0) + BLOCK_N - 1) // BLOCK_N
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, 64, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_V], v_desc.layout)
    q_ready = barriers(2, 1)
    k_ready = barriers(STAGES, 1)
    v_ready = barriers(STAGES, 1)
    k_empty = barriers(STAGES, 2)
    v_empty = barriers(STAGES, 2)
    fence_async_shared()
    shared = (q_smem, k_smem, v_smem, q_smem, q_ready, k_ready, v_ready, k_empty, v_empty)
    pointers = (sinks_ptr, first_ptr, last_ptr, out_ptr, lse_ptr)
    sizes = (head, out_row, queries, keys, scale, window, softcap)
    tiles = (start, low, steps)
    gl.warp_specialize(
        [
            (attend, (
                0, shared, pointers, sizes, tiles, CAUSAL, WINDOW, CAPPED, SINKS, BOUNDED,
                V_DIM, STAGES, BLOCK_N, BLOCK_D, BLOCK_V,
            )),
            (attend, (
                1, shared, pointers, sizes, tiles, CAUSAL, WINDOW, CAPPED, SINKS, BOUNDED,
                V_DIM, STAGES, BLOCK_N, BLOCK_D, BLOCK_V,
            )),
            (fetch_for_queries, (
                q_desc, k_desc, v_desc, q_desc, shared, batch, head, head // group, tiles,
                False, STAGES, BLOCK_N,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def query_gradients(
    half: gl.constexpr, shared, pointers, sizes, tiles,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAPPED: gl.constexpr, BOUNDED: gl.constexpr,
    DIM: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr,
):  # fmt: skip
    """One group: dq of 64 queries."""
    q_smem, k_smem, v_smem, grad_smem, q_ready, k_ready, v_ready, k_empty, v_empty = shared
    lse_ptr, delta_ptr, first_ptr, last_ptr, dq_ptr = pointers
    queries, keys, scale, window, softcap = sizes
    start, low, steps = tiles
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    results: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, results, 2)
    offset = keys - queries
    begin_row = start + half * 64
    row = begin_row + gl.arange(0, 64, gl.SliceLayout(1, scores))
    _, _, all_low, all_high, first, last = key_range(
        begin_row, row, first_ptr, last_ptr, offset, keys, window, queries,
        CAUSAL, WINDOW, BOUNDED, 64, BLOCK_N,
    )  # fmt: skip
    lse, delta = statistics(lse_ptr, delta_ptr, row, queries)
    dq = gl.zeros([64, BLOCK_D], gl.float32, results)
    none = gl.zeros([64, BLOCK_N], gl.float32, scores)
    q = q_smem.index(half).reshape([64, BLOCK_D])
    grad = grad_smem.index(half).reshape([64, BLOCK_V])
    mbarrier.wait(q_ready.index(half), 0)
    for step in range(steps):
        stage = step % STAGES
        phase = step // STAGES & 1
        begin = low + step * BLOCK_N
        k = k_smem.index(stage).reshape([BLOCK_N, BLOCK_D])
        v = v_smem.index(stage).reshape([BLOCK_N, BLOCK_V])
        mbarrier.wait(k_ready.index(stage), phase)
        s = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(stage), phase)
        dp = warpgroup_mma(grad, v.permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        if CAPPED:
            s = capped(s * scale, softcap, CAPPED)
        p = probability(s, gl.expand_dims(lse, 1), scale, CAPPED)
        if (begin < all_low) | (begin + BLOCK_N > all_high):
            key = begin + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
            seen = visible(
                gl.expand_dims(row, 1) + offset, gl.expand_dims(key, 0), keys, gl.expand_dims(first, 1),
                gl.expand_dims(last, 1), window, CAUSAL, WINDOW, BOUNDED,
            )  # fmt: skip
            p = gl.where(seen, p, 0.0)
        steep = slope(s, p, 1.0, 0.0, softcap, CAPPED)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(v_empty.index(stage), count=1)
        ds = steep * (dp - gl.expand_dims(delta, 1))
        dq = warpgroup_mma(gl.convert_layout(ds.to(k_smem.dtype), operand), k, dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(k_empty.index(stage), count=1)
    store_tile(dq_ptr, begin_row, DIM, queries, dq * scale, DIM, BLOCK_D, results)


@gluon.jit
def hopper_attention_backward_q_kernel(
    q_desc, k_desc, v_desc, grad_desc, lse_ptr, delta_ptr, first_ptr, last_ptr, dq_ptr,
    heads, group, queries, keys, scale, window, softcap,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAPPED: gl.constexpr,
    BOUNDED: gl.constexpr, DIM: gl.constexpr, V_DIM: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr,
):  # fmt: skip
    """One program: dq of BLOCK_M = 128 queries of one head; dq is contiguous."""
    batch = gl.program_id(2)
    head = gl.program_id(1)
    start = (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK_M
    first_ptr += batch.to(gl.int64) * queries
    last_ptr += batch.to(gl.int64) * queries
    line = (batch * heads + head).to(gl.int64) * queries
    low, high, _, _, _, _ = key_range(
        start, start + gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [4], [0])), first_ptr, last_ptr,
        keys - queries, keys, window, queries, CAUSAL, WINDOW, BOUNDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    steps = (gl.maximum(high - low, 0) + BLOCK_N - 1) // BLOCK_N
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, 64, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, BLOCK_V], v_desc.layout)
    grad_smem = gl.allocate_shared_memory(grad_desc.dtype, [2, 1, 1, 64, BLOCK_V], grad_desc.layout)
    q_ready = barriers(2, 2)
    k_ready = barriers(STAGES, 1)
    v_ready = barriers(STAGES, 1)
    k_empty = barriers(STAGES, 2)
    v_empty = barriers(STAGES, 2)
    fence_async_shared()
    shared = (q_smem, k_smem, v_smem, grad_smem, q_ready, k_ready, v_ready, k_empty, v_empty)
    pointers = (lse_ptr + line, delta_ptr + line, first_ptr, last_ptr, dq_ptr + line * DIM)
    sizes = (queries, keys, scale, window, softcap)
    tiles = (start, low, steps)
    gl.warp_specialize(
        [
            (query_gradients, (
                0, shared, pointers, sizes, tiles, CAUSAL, WINDOW, CAPPED, BOUNDED,
                DIM, STAGES, BLOCK_N, BLOCK_D, BLOCK_V,
            )),
            (query_gradients, (
                1, shared, pointers, sizes, tiles, CAUSAL, WINDOW, CAPPED, BOUNDED,
                DIM, STAGES, BLOCK_N, BLOCK_D, BLOCK_V,
            )),
            (fetch_for_queries, (
                q_desc, k_desc, v_desc, grad_desc, shared, batch, head, head // group, tiles,
                True, STAGES, BLOCK_N,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def fetch_for_keys(
    q_desc, k_desc, v_desc, grad_desc, lse_desc, delta_desc, shared, batch, head, kv_head, line, group, tiles,
    STAGES: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Fetch keys and values of both groups, then queries, gradients and their statistics, head by head."""
    q_smem, k_smem, v_smem, grad_smem, lse_smem, delta_smem, k_ready, ready, empty = shared
    start, low, steps = tiles
    for half in gl.static_range(2):
        key = start + half * 64
        fetch(k_desc, batch, kv_head, key, k_smem.index(half), k_ready.index(half))
        fetch(v_desc, batch, kv_head, key, v_smem.index(half), k_ready.index(half))
    turn = 0
    for member in range(group):
        for step in range(steps):
            stage = turn % STAGES
            row = low + step * BLOCK_M
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            here = ready.index(stage)
            fetch(q_desc, batch, head + member, row, q_smem.index(stage), here)
            fetch(grad_desc, batch, head + member, row, grad_smem.index(stage), here)
            mbarrier.expect(here, lse_desc.block_type.nbytes)
            load_tile(lse_desc, [line + member, row], here, lse_smem.index(stage))
            mbarrier.expect(here, delta_desc.block_type.nbytes)
            load_tile(delta_desc, [line + member, row], here, delta_smem.index(stage))
            turn += 1


@gluon.jit
def key_gradients(
    half: gl.constexpr, shared, pointers, sizes, tiles,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAPPED: gl.constexpr, BOUNDED: gl.constexpr,
    DIM: gl.constexpr, V_DIM: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr,
):  # fmt: skip
    """One group: dk and dv of 64 keys, over the queries of all heads that share them."""
    q_smem, k_smem, v_smem, grad_smem, lse_smem, delta_smem, k_ready, ready, empty = shared
    first_ptr, last_ptr, dk_ptr, dv_ptr = pointers
    group, queries, keys, scale, window, softcap = sizes
    start, low, steps = tiles
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    of_keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    of_values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    column: gl.constexpr = gl.SliceLayout(0, scores)
    offset = keys - queries
    begin_key = start + half * 64
    key = begin_key + gl.arange(0, 64, gl.SliceLayout(1, scores))
    _, _, all_low, all_high = query_range(
        begin_key, key, first_ptr, last_ptr, offset, keys, window, queries,
        CAUSAL, WINDOW, BOUNDED, BLOCK_M, 64,
    )  # fmt: skip
    first = key
    last = key
    if BOUNDED:
        last = gl.load(last_ptr + key, mask=key < keys, other=0)
        if not CAUSAL:
            first = gl.load(first_ptr + key, mask=key < keys, other=keys)
    dk = gl.zeros([64, BLOCK_D], gl.float32, of_keys)
    dv = gl.zeros([64, BLOCK_V], gl.float32, of_values)
    none = gl.zeros([64, BLOCK_M], gl.float32, scores)
    k = k_smem.index(half).reshape([64, BLOCK_D])
    v = v_smem.index(half).reshape([64, BLOCK_V])
    mbarrier.wait(k_ready.index(half), 0)
    turn = 0
    for _member in range(group):
        for step in range(steps):
            stage = turn % STAGES
            begin = low + step * BLOCK_M
            mbarrier.wait(ready.index(stage), turn // STAGES & 1)
            q = q_smem.index(stage).reshape([BLOCK_M, BLOCK_D])
            grad = grad_smem.index(stage).reshape([BLOCK_M, BLOCK_V])
            lse = lse_smem.index(stage).reshape([BLOCK_M]).load(column)
            s = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, grad.permute((1, 0)), none, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            if CAPPED:
                s = capped(s * scale, softcap, CAPPED)
            p = probability(s, gl.expand_dims(lse, 0), scale, CAPPED)
            if (begin < all_low) | (begin + BLOCK_M > all_high):
                row = gl.expand_dims(begin + gl.arange(0, BLOCK_M, column), 0)
                seen = visible(
                    row + offset, gl.expand_dims(key, 1), keys, row, row, window, CAUSAL, WINDOW, False,
                )  # fmt: skip
                if BOUNDED:  # the queries of a document are its keys
                    seen = seen & (row < gl.expand_dims(last, 1))
                    if not CAUSAL:
                        seen = seen & (row >= gl.expand_dims(first, 1))
                p = gl.where(seen, p, 0.0)
            operand = gl.convert_layout(p.to(q_smem.dtype), gl.DotOperandLayout(0, of_values, 2))
            dv = warpgroup_mma(operand, grad, dv, is_async=True)
            steep = slope(s, p, 1.0, 0.0, softcap, CAPPED)
            delta = delta_smem.index(stage).reshape([BLOCK_M]).load(column)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = steep * (dp - gl.expand_dims(delta, 0))
            operand = gl.convert_layout(ds.to(q_smem.dtype), gl.DotOperandLayout(0, of_keys, 2))
            dk = warpgroup_mma(operand, q, dk, is_async=True)
            dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
            mbarrier.arrive(empty.index(stage), count=1)
            turn += 1
    store_tile(dk_ptr, begin_key, DIM, keys, dk * scale, DIM, BLOCK_D, of_keys)
    store_tile(dv_ptr, begin_key, V_DIM, keys, dv, V_DIM, BLOCK_V, of_values)


@gluon.jit
def hopper_attention_backward_kv_kernel(
    q_desc, k_desc, v_desc, grad_desc, lse_desc, delta_desc, first_ptr, last_ptr, dk_ptr, dv_ptr,
    heads, group, queries, keys, scale, window, softcap,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAPPED: gl.constexpr,
    BOUNDED: gl.constexpr, DIM: gl.constexpr, V_DIM: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_V: gl.constexpr,
):  # fmt: skip
    """One program: dk and dv of BLOCK_N = 128 keys of one key head; both are contiguous."""
    batch = gl.program_id(2)
    kv_head = gl.program_id(1)
    start = gl.program_id(0) * BLOCK_N
    first_ptr += batch.to(gl.int64) * queries
    last_ptr += batch.to(gl.int64) * queries
    kv_line = (batch * (heads // group) + kv_head).to(gl.int64) * keys
    low, high, _, _ = query_range(
        start, start + gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [4], [0])), first_ptr, last_ptr,
        keys - queries, keys, window, queries, CAUSAL, WINDOW, BOUNDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    steps = (gl.maximum(high - low, 0) + BLOCK_M - 1) // BLOCK_M
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 1, 64, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2, 1, 1, 64, BLOCK_V], v_desc.layout)
    grad_smem = gl.allocate_shared_memory(grad_desc.dtype, [STAGES, 1, 1, BLOCK_M, BLOCK_V], grad_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta_desc.layout)
    k_ready = barriers(2, 2)
    ready = barriers(STAGES, 4)
    empty = barriers(STAGES, 2)
    fence_async_shared()
    shared = (q_smem, k_smem, v_smem, grad_smem, lse_smem, delta_smem, k_ready, ready, empty)
    pointers = (first_ptr, last_ptr, dk_ptr + kv_line * DIM, dv_ptr + kv_line * V_DIM)
    sizes = (group, queries, keys, scale, window, softcap)
    tiles = (start, low, steps)
    head = kv_head * group
    gl.warp_specialize(
        [
            (key_gradients, (
                0, shared, pointers, sizes, tiles, CAUSAL, WINDOW, CAPPED, BOUNDED,
                DIM, V_DIM, STAGES, BLOCK_M, BLOCK_D, BLOCK_V,
            )),
            (key_gradients, (
                1, shared, pointers, sizes, tiles, CAUSAL, WINDOW, CAPPED, BOUNDED,
                DIM, V_DIM, STAGES, BLOCK_M, BLOCK_D, BLOCK_V,
            )),
            (fetch_for_keys, (
                q_desc, k_desc, v_desc, grad_desc, lse_desc, delta_desc, shared,
                batch, head, kv_head, batch * heads + head, group, tiles, STAGES, BLOCK_M,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether these kernels take a call that our Triton kernels take."""
    widths = q.shape[-1], v.shape[-1]
    return (
        arch_of(q) == ARCH
        and q.element_size() == 2
        and max(widths) <= MAX_DIM
        and not any(width % 8 for width in widths)
        and attention.supports(q, k, v)
    )


def _block(width: int) -> int:
    return max(HALF, next_power_of_2(width))


def _descriptor(x: Tensor, rows: int) -> "TensorDescriptor":
    """Describe [B, H, S, D] for copies of ``rows`` rows of one head; what these cannot address is copied."""
    inner = 16 // x.element_size()
    if x.stride(-1) != 1 or x.data_ptr() % 16 or any(s % inner or s == 0 for s in x.stride()[:-1]):
        x = x.clone(memory_format=torch.contiguous_format)
    block = [1, 1, rows, _block(x.shape[-1])]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def _constants(q: Tensor, v: Tensor, rule: Rule, block_m: int, block_n: int, stages: int) -> dict[str, Any]:
    return {
        "CAUSAL": rule.causal,
        "WINDOW": rule.window > 0,
        "CAPPED": rule.softcap > 0,
        "BOUNDED": rule.bounds is not None,
        "DIM": q.shape[-1],
        "V_DIM": v.shape[-1],
        "STAGES": stages,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": _block(q.shape[-1]),
        "BLOCK_V": _block(v.shape[-1]),
    }


def hopper_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, stages: int = 2
) -> tuple[Tensor, Tensor]:
    """(out, lse), as :func:`megacompile.kernels.flash_attention_forward`."""
    batch, heads, queries, _ = q.shape
    out = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    rule = attention._reaching(q, k, rule)
    first, last = attention._bounds(rule.bounds, q, lse)
    launch(
        hopper_attention_forward_kernel,
        (ceil_div(queries, ROWS), heads, batch),
        *(_descriptor(x, rows) for x, rows in ((q, HALF), (k, ROWS), (v, ROWS))),
        *(pointer(rule.sinks, lse), first, last, out, lse),
        *out.stride()[:3],
        *attention._grid_sizes(q, k, v, rule),
        SINKS=rule.sinks is not None,
        **_constants(q, v, rule, ROWS, ROWS, stages),
    )
    return out, lse


def _padded(x: Tensor, value: float, block: int) -> "TensorDescriptor":
    """Describe [B, H, S] in float32 as one row for each head, filled with ``value`` up to whole tiles."""
    rows = F.pad(x.flatten(0, 1), (0, -x.shape[2] % block), value=value)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [1, block], layout)


def hopper_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule, stages: int = 3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks), as :func:`megacompile.kernels.flash_attention_backward`.

    ``stages`` are those of the kernel of dk and dv.
    """
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    grad, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, out))
    lse = lse.contiguous()
    rule = attention._reaching(q, k, rule)
    delta = attention._delta(out, grad, lse)
    first, last = attention._bounds(rule.bounds, q, lse)
    sizes = attention._grid_sizes(q, k, v, rule)
    # Queries that see no key have no probability, like those that do not exist.
    base2 = lse.masked_fill(lse == float("-inf"), float("inf")) * math.log2(math.e)
    # What a softcap needs beside the scores does not fit the registers with larger tiles.
    block_m, block_n = (32, 64) if rule.softcap else (HALF, ROWS)
    launch(
        hopper_attention_backward_kv_kernel,
        (ceil_div(k.shape[2], ROWS), k.shape[1], k.shape[0]),
        *(_descriptor(x, rows) for x, rows in ((q, block_m), (k, HALF), (v, HALF), (grad, block_m))),
        *(_padded(base2, float("inf"), block_m), _padded(delta, 0.0, block_m)),
        *(first, last, dk, dv),
        *sizes,
        **_constants(q, v, rule, block_m, ROWS, stages),
    )
    launch(
        hopper_attention_backward_q_kernel,
        (ceil_div(q.shape[2], ROWS), q.shape[1], q.shape[0]),
        *(_descriptor(x, rows) for x, rows in ((q, HALF), (k, block_n), (v, block_n), (grad, HALF))),
        *(lse, delta, first, last, dq),
        *sizes,
        **_constants(q, v, rule, ROWS, block_n, 2),
    )
    return dq, dk, dv, sink_gradient(lse, delta, rule.sinks)
