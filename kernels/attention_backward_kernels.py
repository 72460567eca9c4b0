# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Triton kernels of attention's backward: delta, then dq over keys, then dk and dv over queries.

Conventions are those of ``attention_kernels.py``. Traffic: dq reads q and grad once, k and v once per
block of queries; dk and dv read k and v once, q and grad once per block of keys and member of the group.
"""

from megacompile.kernels._triton import tl, triton
from megacompile.kernels.attention_kernels import key_range, load_rows, matrix, place, store_rows, visible
from megacompile.kernels.cross_entropy_tiles import capped


@triton.jit
def attention_delta_kernel(
    out_ptr, grad_ptr, delta_ptr,
    out_batch, out_head, out_row, grad_batch, grad_head, grad_row, heads, queries,
    V_DIM: tl.constexpr, ACC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """delta[i] = sum(out[i] * grad[i]), which is also the softmax's sum of p * dp; reads both once."""
    batch, head, line = place(heads)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_V)
    out_ptr = matrix(out_ptr, batch, out_batch, head, out_head)
    grad_ptr = matrix(grad_ptr, batch, grad_batch, head, grad_head)
    out = load_rows(out_ptr, row, out_row, queries, col, V_DIM).to(ACC)
    grad = load_rows(grad_ptr, row, grad_row, queries, col, V_DIM).to(ACC)
    tl.store(delta_ptr + line.to(tl.int64) * queries + row, tl.sum(out * grad, axis=1), mask=row < queries)


@triton.jit
def statistics(lse_ptr, delta_ptr, row, rows):
    """(lse in base 2, delta) of queries; an infinite lse, and so no probability, where they see no key."""
    LOG2E: tl.constexpr = 1.4426950408889634
    lse = tl.load(lse_ptr + row, mask=row < rows, other=float("inf"))
    delta = tl.load(delta_ptr + row, mask=row < rows, other=0.0)
    return tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E, delta


@triton.jit
def probability(s, lse, scale, CAPPED: tl.constexpr):
    """exp(s - lse) of masked scores, scaled where they are capped; lse in base 2."""
    LOG2E: tl.constexpr = 1.4426950408889634
    return tl.exp2(s * (LOG2E if CAPPED else scale * LOG2E) - lse)


@triton.jit
def slope(s, p, dp, delta, softcap, CAPPED: tl.constexpr):
    """ds before the scale, from scores that are capped and not masked; the arguments broadcast."""
    ds = p * (dp - delta)
    if CAPPED:
        part = s * (1.0 / softcap)
        ds = ds * (1.0 - part * part)
    return ds


@triton.jit
def attention_backward_q_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, first_ptr, last_ptr, dq_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    grad_batch, grad_head, grad_row,
    heads, group, queries, keys, scale, window, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    BOUNDED: tl.constexpr, ACC: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: dq of BLOCK_M queries of one head; dq is contiguous."""
    batch, head, line = place(heads)
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    v_col = tl.arange(0, BLOCK_V)
    q = load_rows(matrix(q_ptr, batch, q_batch, head, q_head), row, q_row, queries, col, DIM)
    grad_ptr = matrix(grad_ptr, batch, grad_batch, head, grad_head)
    grad = load_rows(grad_ptr, row, grad_row, queries, v_col, V_DIM)
    at = line.to(tl.int64) * queries
    lse, delta = statistics(lse_ptr + at, delta_ptr + at, row, queries)
    k_ptr = matrix(k_ptr, batch, k_batch, head // group, k_head)
    v_ptr = matrix(v_ptr, batch, v_batch, head // group, v_head)
    first_ptr += batch.to(tl.int64) * queries
    last_ptr += batch.to(tl.int64) * queries
    offset = keys - queries
    low, high, all_low, all_high, first, last = key_range(
        start, row, first_ptr, last_ptr, offset, keys, window, queries,
        CAUSAL, WINDOW, BOUNDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=ACC)
    for begin in range(low, high, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, key, k_row, keys, col, DIM)
        v = load_rows(v_ptr, key, v_row, keys, v_col, V_DIM)
        s = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC)
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee", out_dtype=ACC)
        if CAPPED:
            s = capped(s * scale, softcap, CAPPED)
        p = probability(s, lse[:, None], scale, CAPPED)
        if (begin < all_low) | (begin + BLOCK_N > all_high):
            seen = visible(
                row[:, None] + offset, key[None, :], keys, first[:, None], last[:, None], window,
                CAUSAL, WINDOW, BOUNDED,
            )  # fmt: skip
            p = tl.where(seen, p, 0.0)
        ds = slope(s, p, dp, delta[:, None], softcap, CAPPED)
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee", out_dtype=ACC)
    store_rows(dq_ptr + line.to(tl.int64) * queries * DIM, row, DIM, queries, col, DIM, dq * scale)


@triton.jit
def attention_backward_kv_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, first_ptr, last_ptr, dk_ptr, dv_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    grad_batch, grad_head, grad_row,
    heads, group, queries, keys, scale, window, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    BOUNDED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ACC: tl.constexpr,
    DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: dk (KEYS), dv (VALUES) of BLOCK_N keys of one key head, over its group's query heads."""
    batch, kv_head, kv_line = place(heads // group)
    start = tl.program_id(0) * BLOCK_N
    key = start + tl.arange(0, BLOCK_N)
    col = tl.arange(0, BLOCK_D)
    v_col = tl.arange(0, BLOCK_V)
    k = load_rows(matrix(k_ptr, batch, k_batch, kv_head, k_head), key, k_row, keys, col, DIM)
    v_ptr = matrix(v_ptr, batch, v_batch, kv_head, v_head)
    if KEYS:
        v = load_rows(v_ptr, key, v_row, keys, v_col, V_DIM)
    first_ptr += batch.to(tl.int64) * queries
    last_ptr += batch.to(tl.int64) * queries
    offset = keys - queries
    # Queries [low, high) see some of these keys, those in [all_low, all_high) see all.
    low = 0
    high = queries
    all_low = 0
    all_high = tl.where(start + BLOCK_N <= keys, queries + BLOCK_M, 0)
    if CAUSAL:
        low = tl.maximum(low, start - offset)
        all_low = tl.maximum(all_low, start + BLOCK_N - 1 - offset)
    if WINDOW:
        high = tl.minimum(high, start + BLOCK_N - 1 + window - offset)
        all_high = tl.minimum(all_high, start + window - offset)
        if not CAUSAL:
            low = tl.maximum(low, start - window + 1 - offset)
            all_low = tl.maximum(all_low, start + BLOCK_N - window - offset)
    if BOUNDED:
        # A document's queries are its keys, so its bounds are those of what sees this key.
        begins = tl.load(first_ptr + key, mask=key < keys, other=keys)
        ends = tl.load(last_ptr + key, mask=key < keys, other=0)
        low = tl.maximum(low, tl.min(begins, axis=0))
        high = tl.minimum(high, tl.max(ends, axis=0))
        all_low = tl.maximum(all_low, tl.max(begins, axis=0))
        all_high = tl.minimum(all_high, tl.min(ends, axis=0))
    low = low // BLOCK_M * BLOCK_M
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=ACC)
    dv = tl.zeros((BLOCK_N, BLOCK_V), dtype=ACC)
    for member in range(group):
        head = kv_head * group + member
        q_base = matrix(q_ptr, batch, q_batch, head, q_head)
        grad_base = matrix(grad_ptr, batch, grad_batch, head, grad_head)
        line = (batch * heads + head).to(tl.int64) * queries
        for begin in range(low, high, BLOCK_M):
            row = begin + tl.arange(0, BLOCK_M)
            q = load_rows(q_base, row, q_row, queries, col, DIM)
            grad = load_rows(grad_base, row, grad_row, queries, v_col, V_DIM)
            lse, delta = statistics(lse_ptr + line, delta_ptr + line, row, queries)
            s = tl.dot(k, tl.trans(q), input_precision="ieee", out_dtype=ACC)
            if CAPPED:
                s = capped(s * scale, softcap, CAPPED)
            p = probability(s, lse[None, :], scale, CAPPED)
            if (begin < all_low) | (begin + BLOCK_M > all_high):
                first = row
                last = row
                if BOUNDED:
                    first = tl.load(first_ptr + row, mask=row < queries, other=keys)
                    last = tl.load(last_ptr + row, mask=row < queries, other=0)
                seen = visible(
                    row[None, :] + offset, key[:, None], keys, first[None, :], last[None, :], window,
                    CAUSAL, WINDOW, BOUNDED,
                )  # fmt: skip
                p = tl.where(seen, p, 0.0)
            if VALUES:
                dv += tl.dot(p.to(grad.dtype), grad, input_precision="ieee", out_dtype=ACC)
            if KEYS:
                dp = tl.dot(v, tl.trans(grad), input_precision="ieee", out_dtype=ACC)
                ds = slope(s, p, dp, delta[None, :], softcap, CAPPED)
                dk += tl.dot(ds.to(q.dtype), q, input_precision="ieee", out_dtype=ACC)
    if KEYS:
        store_rows(dk_ptr + kv_line.to(tl.int64) * keys * DIM, key, DIM, keys, col, DIM, dk * scale)
    if VALUES:
        store_rows(dv_ptr + kv_line.to(tl.int64) * keys * V_DIM, key, V_DIM, keys, v_col, V_DIM, dv)
