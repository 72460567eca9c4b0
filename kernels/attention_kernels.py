# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Triton kernel of attention's forward, and what it shares with those of the backward.

Tensors are addressed by the strides of batch, head and row; their last dimension is contiguous.
``first`` and ``last`` are int32 [B, S] where BOUNDED. Everything that is exponentiated is in base 2.
Products take 16-bit tiles and accumulate in float32 (ACC); so do all sums. Grids are blocks x heads x
batch: with one flat dimension, what divides it stays live, and two kernels spill on 8.6 and 8.9. Head
and row are int64 where they meet a stride: a head's offset passes 2**31 in long sequences. Traffic: q
once; k and v once per block of queries that sees them.
"""

from megacompile.kernels._triton import tl, triton
from megacompile.kernels.cross_entropy_tiles import capped


@triton.jit
def visible(
    query, key, keys, first, last, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BOUNDED: tl.constexpr
):
    """Mask of the pairs that attend; the arguments broadcast against each other."""
    seen = (key < keys) & (query == query)
    if CAUSAL:
        seen = seen & (key <= query)
    if WINDOW:
        seen = seen & (query - key < window)
        if not CAUSAL:
            seen = seen & (key - query < window)
    if BOUNDED:
        seen = seen & (key >= first) & (key < last)
    return seen


@triton.jit
def key_range(
    start, rows, first_ptr, last_ptr, offset, keys, window, queries,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(least, end) of the keys that some of queries [start, start + BLOCK_M) see, the same of the keys that
    all of them see, and the queries' documents."""
    low = 0
    high = keys
    all_low = 0
    all_high = keys
    if CAUSAL:
        high = tl.minimum(high, start + BLOCK_M + offset)
        all_high = tl.minimum(all_high, start + offset + 1)
    if WINDOW:
        low = tl.maximum(low, start + offset - window + 1)
        all_low = tl.maximum(all_low, start + BLOCK_M + offset - window)
        if not CAUSAL:
            high = tl.minimum(high, start + BLOCK_M + offset + window - 1)
            all_high = tl.minimum(all_high, start + offset + window)
    first = rows
    last = rows
    if BOUNDED:
        first = tl.load(first_ptr + rows, mask=rows < queries, other=keys)
        last = tl.load(last_ptr + rows, mask=rows < queries, other=0)
        low = tl.maximum(low, tl.min(first, axis=0))
        high = tl.minimum(high, tl.max(last, axis=0))
        all_low = tl.maximum(all_low, tl.max(first, axis=0))
        all_high = tl.minimum(all_high, tl.min(last, axis=0))
    return low // BLOCK_N * BLOCK_N, high, all_low, all_high, first, last


@triton.jit
def place(heads):
    """(batch, head, both as one index) of this program; its block of rows is the grid's first axis."""
    return tl.program_id(2), tl.program_id(1), tl.program_id(2) * heads + tl.program_id(1)


@triton.jit
def matrix(ptr, batch, batch_stride, head, head_stride):
    """Where the matrix of one head begins; its offset is int64."""
    return ptr + batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride


@triton.jit
def within(row, rows, col, COLUMNS: tl.constexpr):
    """Which of [row, col] exist; columns are compared only where there are fewer than ``col`` counts."""
    inside = (row < rows)[:, None]
    if col.shape[0] != COLUMNS:
        inside = inside & (col < COLUMNS)[None, :]
    return inside


@triton.jit
def load_rows(ptr, row, stride, rows, col, COLUMNS: tl.constexpr):
    """[row, col] of a matrix whose rows lie ``stride`` apart, zero outside of it."""
    at = ptr + row[:, None].to(tl.int64) * stride + col[None, :]
    return tl.load(at, mask=within(row, rows, col, COLUMNS), other=0.0)


@triton.jit
def store_rows(ptr, row, stride, rows, col, COLUMNS: tl.constexpr, value):
    """The counterpart of ``load_rows``, in the type of ``ptr``."""
    at = ptr + row[:, None].to(tl.int64) * stride + col[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=within(row, rows, col, COLUMNS))


@triton.jit
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, first_ptr, last_ptr, out_ptr, lse_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row,
    heads, group, queries, keys, scale, window, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    BOUNDED: tl.constexpr, ACC: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head; long rows (late queries) start first."""
    LOG2E: tl.constexpr = 1.4426950408889634
    batch, head, line = place(heads)
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    v_col = tl.arange(0, BLOCK_V)
    q = load_rows(matrix(q_ptr, batch, q_batch, head, q_head), row, q_row, queries, col, DIM)
    k_ptr = matrix(k_ptr, batch, k_batch, head // group, k_head)
    v_ptr = matrix(v_ptr, batch, v_batch, head // group, v_head)
    first_ptr += batch.to(tl.int64) * queries
    last_ptr += batch.to(tl.int64) * queries
    offset = keys - queries
    low, high, all_low, all_high, first, last = key_range(
        start, row, first_ptr, last_ptr, offset, keys, window, queries,
        CAUSAL, WINDOW, BOUNDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    unit = LOG2E if CAPPED else scale * LOG2E
    top = tl.full((BLOCK_M,), float("-inf"), dtype=ACC)
    total = tl.zeros((BLOCK_M,), dtype=ACC)
    out = tl.zeros((BLOCK_M, BLOCK_V), dtype=ACC)
    for begin in range(low, high, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, key, k_row, keys, col, DIM)
        s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC)
        if CAPPED:
            s = capped(s * scale, softcap, CAPPED)
        if (begin < all_low) | (begin + BLOCK_N > all_high):
            seen = visible(
                row[:, None] + offset, key[None, :], keys, first[:, None], last[:, None], window,
                CAUSAL, WINDOW, BOUNDED,
            )  # fmt: skip
            s = tl.where(seen, s, float("-inf"))
        above = tl.maximum(top, tl.max(s, axis=1) * unit)
        base = tl.where(above == float("-inf"), 0.0, above)
        shrink = tl.exp2(top - base)
        p = tl.exp2(s * unit - base[:, None])
        v = load_rows(v_ptr, key, v_row, keys, v_col, V_DIM)
        total = total * shrink + tl.sum(p, axis=1)
        update = tl.dot(p.to(v.dtype), v, input_precision="ieee", out_dtype=ACC)
        out = out * shrink[:, None] + update
        top = above
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(ACC) * LOG2E
        above = tl.maximum(top, sink)
        shrink = tl.exp2(top - above)
        total = total * shrink + tl.exp2(sink - above)
        out = out * shrink[:, None]
        top = above
    out = out / tl.where(total > 0.0, total, 1.0)[:, None]
    lse = (top + tl.log2(total)) / LOG2E
    tl.store(lse_ptr + line.to(tl.int64) * queries + row, lse, mask=row < queries)
    out_ptr = matrix(out_ptr, batch, out_batch, head, out_head)
    store_rows(out_ptr, row, out_row, queries, v_col, V_DIM, out)
