# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Triton kernels of ``attention.py``: forward, delta, dq, dk and dv.

Tensors are addressed by the strides of batch, head and row; their last dimension is contiguous.
``first`` and ``last`` are int32 [B, S] where BOUNDED. Everything that is exponentiated is in base 2.
"""

from megacompile.kernels._triton import tl, triton
from megacompile.kernels.cross_entropy_tiles import capped


@triton.jit
def visible(
    query, key, keys, first, last, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
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
    """(least, end) of the keys that queries [start, start + BLOCK_M) see, and their documents."""
    low = 0
    high = keys
    if CAUSAL:
        high = tl.minimum(high, start + BLOCK_M + offset)
    if WINDOW:
        low = tl.maximum(low, start + offset - window + 1)
        if not CAUSAL:
            high = tl.minimum(high, start + BLOCK_M + offset + window - 1)
    first = rows
    last = rows
    if BOUNDED:
        first = tl.load(first_ptr + rows, mask=rows < queries, other=keys)
        last = tl.load(last_ptr + rows, mask=rows < queries, other=0)
        low = tl.maximum(low, tl.min(first, axis=0))
        high = tl.minimum(high, tl.max(last, axis=0))
    return low // BLOCK_N * BLOCK_N, high, first, last


@triton.jit
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, first_ptr, last_ptr, out_ptr, lse_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row,
    heads, group, queries, keys, dim, v_dim, scale, window, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head; long rows (late queries) start first."""
    LOG2E: tl.constexpr = 1.4426950408889634
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    v_col = tl.arange(0, BLOCK_V)
    q_at = q_ptr + batch * q_batch + head * q_head + row[:, None].to(tl.int64) * q_row
    q = tl.load(q_at + col[None, :], mask=(row < queries)[:, None] & (col < dim)[None, :], other=0.0)
    k_ptr += batch * k_batch + (head // group) * k_head
    v_ptr += batch * v_batch + (head // group) * v_head
    first_ptr += batch * queries
    last_ptr += batch * queries
    offset = keys - queries
    low, high, first, last = key_range(
        start, row, first_ptr, last_ptr, offset, keys, window, queries,
        CAUSAL, WINDOW, BOUNDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    top = tl.full((BLOCK_M,), float("-inf"), dtype=ACC)
    total = tl.zeros((BLOCK_M,), dtype=ACC)
    out = tl.zeros((BLOCK_M, BLOCK_V), dtype=ACC)
    for begin in range(low, high, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        k_at = k_ptr + key[None, :].to(tl.int64) * k_row + col[:, None]
        k = tl.load(k_at, mask=(key < keys)[None, :] & (col < dim)[:, None], other=0.0)
        s = tl.dot(q, k, input_precision=PRECISION, out_dtype=ACC) * scale
        s = capped(s, softcap, CAPPED) * LOG2E
        seen = visible(
            row[:, None] + offset, key[None, :], keys, first[:, None], last[:, None], window,
            CAUSAL, WINDOW, BOUNDED,
        )  # fmt: skip
        s = tl.where(seen, s, float("-inf"))
        above = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(above == float("-inf"), 0.0, above)
        shrink = tl.exp2(top - base)
        p = tl.exp2(s - base[:, None])
        v_at = v_ptr + key[:, None].to(tl.int64) * v_row + v_col[None, :]
        v = tl.load(v_at, mask=(key < keys)[:, None] & (v_col < v_dim)[None, :], other=0.0)
        total = total * shrink + tl.sum(p, axis=1)
        update = tl.dot(p.to(v.dtype), v, input_precision=PRECISION, out_dtype=ACC)
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
    tl.store(lse_ptr + tl.program_id(1) * queries + row, lse, mask=row < queries)
    out_at = out_ptr + batch * out_batch + head * out_head + row[:, None].to(tl.int64) * out_row
    inside = (row < queries)[:, None] & (v_col < v_dim)[None, :]
    tl.store(out_at + v_col[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def attention_delta_kernel(
    out_ptr, grad_ptr, delta_ptr,
    out_batch, out_head, out_row, grad_batch, grad_head, grad_row, heads, queries, v_dim,
    ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """delta[i] = sum(out[i] * grad[i]), which is also the softmax's sum of p * dp."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_V)[None, :]
    inside = (row < queries)[:, None] & (col < v_dim)
    far = row[:, None].to(tl.int64)
    out_at = out_ptr + batch * out_batch + head * out_head + far * out_row + col
    grad_at = grad_ptr + batch * grad_batch + head * grad_head + far * grad_row + col
    out = tl.load(out_at, mask=inside, other=0.0).to(ACC)
    grad = tl.load(grad_at, mask=inside, other=0.0).to(ACC)
    at = delta_ptr + tl.program_id(1) * queries + row
    tl.store(at, tl.sum(out * grad, axis=1), mask=row < queries)


@triton.jit
def slope(s, seen, lse, dp, delta, softcap, CAPPED: tl.constexpr):
    """(p, ds) from scaled scores, before the scale; the arguments broadcast."""
    LOG2E: tl.constexpr = 1.4426950408889634
    s = capped(s, softcap, CAPPED)
    p = tl.where(seen, tl.exp2((s - lse) * LOG2E), 0.0)
    ds = p * (dp - delta)
    if CAPPED:
        ds = ds * (1.0 - (s / softcap) * (s / softcap))
    return p, ds


@triton.jit
def attention_backward_q_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, first_ptr, last_ptr, dq_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    grad_batch, grad_head, grad_row,
    heads, group, queries, keys, dim, v_dim, scale, window, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: dq of BLOCK_M queries of one head; dq is contiguous."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    v_col = tl.arange(0, BLOCK_V)
    far = row[:, None].to(tl.int64)
    q_inside = (row < queries)[:, None] & (col < dim)[None, :]
    q_at = q_ptr + batch * q_batch + head * q_head + far * q_row + col[None, :]
    q = tl.load(q_at, mask=q_inside, other=0.0)
    grad_at = grad_ptr + batch * grad_batch + head * grad_head + far * grad_row + v_col[None, :]
    grad = tl.load(grad_at, mask=(row < queries)[:, None] & (v_col < v_dim)[None, :], other=0.0)
    line = tl.program_id(1) * queries + row
    lse = tl.load(lse_ptr + line, mask=row < queries, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    delta = tl.load(delta_ptr + line, mask=row < queries, other=0.0)
    k_ptr += batch * k_batch + (head // group) * k_head
    v_ptr += batch * v_batch + (head // group) * v_head
    first_ptr += batch * queries
    last_ptr += batch * queries
    offset = keys - queries
    low, high, first, last = key_range(
        start, row, first_ptr, last_ptr, offset, keys, window, queries,
        CAUSAL, WINDOW, BOUNDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    for begin in range(low, high, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        far_key = key[:, None].to(tl.int64)
        k_at = k_ptr + far_key * k_row + col[None, :]
        k = tl.load(k_at, mask=(key < keys)[:, None] & (col < dim)[None, :], other=0.0)
        v_at = v_ptr + far_key * v_row + v_col[None, :]
        v = tl.load(v_at, mask=(key < keys)[:, None] & (v_col < v_dim)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC) * scale
        dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION, out_dtype=ACC)
        seen = visible(
            row[:, None] + offset, key[None, :], keys, first[:, None], last[:, None], window,
            CAUSAL, WINDOW, BOUNDED,
        )  # fmt: skip
        _, ds = slope(s, seen, lse[:, None], dp, delta[:, None], softcap, CAPPED)
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION, out_dtype=ACC)
    dq_at = dq_ptr + line[:, None].to(tl.int64) * dim + col[None, :]
    tl.store(dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=q_inside)


@triton.jit
def attention_backward_kv_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, first_ptr, last_ptr, dk_ptr, dv_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    grad_batch, grad_head, grad_row,
    heads, group, queries, keys, dim, v_dim, scale, window, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: dk and dv of BLOCK_N keys of one key head, over all query heads of its group."""
    groups = heads // group
    batch = (tl.program_id(1) // groups).to(tl.int64)
    kv_head = tl.program_id(1) % groups
    start = tl.program_id(0) * BLOCK_N
    key = start + tl.arange(0, BLOCK_N)
    col = tl.arange(0, BLOCK_D)
    v_col = tl.arange(0, BLOCK_V)
    far_key = key[:, None].to(tl.int64)
    k_inside = (key < keys)[:, None] & (col < dim)[None, :]
    v_inside = (key < keys)[:, None] & (v_col < v_dim)[None, :]
    k_at = k_ptr + batch * k_batch + kv_head * k_head + far_key * k_row + col[None, :]
    k = tl.load(k_at, mask=k_inside, other=0.0)
    v_at = v_ptr + batch * v_batch + kv_head * v_head + far_key * v_row + v_col[None, :]
    v = tl.load(v_at, mask=v_inside, other=0.0)
    first_ptr += batch * queries
    last_ptr += batch * queries
    offset = keys - queries
    low = 0
    high = queries
    if CAUSAL:
        low = tl.maximum(low, start - offset)
    if WINDOW:
        high = tl.minimum(high, start + BLOCK_N - 1 + window - offset)
        if not CAUSAL:
            low = tl.maximum(low, start - window + 1 - offset)
    if BOUNDED:
        # A document's queries are its keys, so its bounds are those of what sees this key.
        low = tl.maximum(low, tl.min(tl.load(first_ptr + key, mask=key < keys, other=keys), axis=0))
        high = tl.minimum(high, tl.max(tl.load(last_ptr + key, mask=key < keys, other=0), axis=0))
    low = low // BLOCK_M * BLOCK_M
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    dv = tl.zeros((BLOCK_N, BLOCK_V), dtype=ACC)
    for member in range(group):
        head = kv_head * group + member
        q_base = q_ptr + batch * q_batch + head * q_head
        grad_base = grad_ptr + batch * grad_batch + head * grad_head
        line = (batch * heads + head) * queries
        for begin in range(low, high, BLOCK_M):
            row = begin + tl.arange(0, BLOCK_M)
            far = row[:, None].to(tl.int64)
            q_inside = (row < queries)[:, None] & (col < dim)[None, :]
            q = tl.load(q_base + far * q_row + col[None, :], mask=q_inside, other=0.0)
            g_inside = (row < queries)[:, None] & (v_col < v_dim)[None, :]
            grad_at = grad_base + far * grad_row + v_col[None, :]
            grad = tl.load(grad_at, mask=g_inside, other=0.0)
            lse = tl.load(lse_ptr + line + row, mask=row < queries, other=float("inf"))
            lse = tl.where(lse == float("-inf"), float("inf"), lse)
            delta = tl.load(delta_ptr + line + row, mask=row < queries, other=0.0)
            first = row
            last = row
            if BOUNDED:
                first = tl.load(first_ptr + row, mask=row < queries, other=keys)
                last = tl.load(last_ptr + row, mask=row < queries, other=0)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=ACC) * scale
            dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION, out_dtype=ACC)
            seen = visible(
                row[None, :] + offset, key[:, None], keys, first[None, :], last[None, :], window,
                CAUSAL, WINDOW, BOUNDED,
            )  # fmt: skip
            p, ds = slope(s, seen, lse[None, :], dp, delta[None, :], softcap, CAPPED)
            dv += tl.dot(p.to(grad.dtype), grad, input_precision=PRECISION, out_dtype=ACC)
            dk += tl.dot(ds.to(q.dtype), q, input_precision=PRECISION, out_dtype=ACC)
    out_line = (tl.program_id(1) * keys + key)[:, None].to(tl.int64)
    dk_at, dv_at = dk_ptr + out_line * dim + col[None, :], dv_ptr + out_line * v_dim + v_col[None, :]
    tl.store(dk_at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=k_inside)
    tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), mask=v_inside)
