# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Triton kernels of the gated delta rule's backward; conventions are those of ``gated_delta_kernels.py``.

Behind the forward's first kernel comes its third, which leaves ``solved`` and the state before every chunk.
Here, one carries the state's gradient back through all chunks, and leaves that of v and the state's gradient
behind every chunk. Of these one makes, for each chunk and value head, what pairs of tokens have to do with,
and two, for each chunk and key head, the gradients of q, and of k, g and beta; they go through the value
heads of their key head, so no sum depends on an order that changes.

With L what the chunk lacks of v, U = ``solved``, S the state before the chunk, and dX the gradient of X:

    U = solves L      dU = scores^T dout + falling K dS'      dv = dL = solves^T dU
    dS = exp(z) dS' + (exp(c) Q)^T dout - (exp(c) K)^T dv

``solves`` and ``scores`` have the gradients -dv U^T and dout U^T of what they are made of, lower triangles
of which count. Where c or beta is a factor of something, its gradient is that of the thing times the thing
(beta: without the factor): each term is as small as its decay.
"""

from megacompile.kernels._triton import tl, triton
from megacompile.kernels.attention_kernels import load_rows, matrix, place, store_rows, within
from megacompile.kernels.gated_delta_kernels import load_gates, row_norm, similarities


@triton.jit
def load_tile(ptr, row, stride, rows, col, COLUMNS: tl.constexpr):
    """As ``load_rows``, of rows less than 2**31 elements apart: int64 offsets of whole tiles spill."""
    at = ptr + row[:, None] * stride + col[None, :]
    return tl.load(at, mask=within(row, rows, col, COLUMNS), other=0.0)


@triton.jit
def gated_delta_backward_state_kernel(
    q_ptr, k_ptr, grad_ptr, solves_ptr, scores_ptr, factors_ptr, d_state_ptr, dv_ptr, behind_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, grad_batch, grad_token, grad_head,
    dv_batch, dv_token, dv_head,
    heads, group, tokens,
    ACC: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of the gradient of one value head's state, back through all chunks; it
    takes up what ``d_state`` holds and leaves there that of the first chunk's state. Grid: blocks of columns
    x value heads x batch."""
    batch, head, line = place(heads)
    at = tl.arange(0, CHUNK)
    col = tl.arange(0, BLOCK_D)
    v_col = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    q_ptr = matrix(q_ptr, batch, q_batch, head // group, q_head)
    k_ptr = matrix(k_ptr, batch, k_batch, head // group, k_head)
    grad_ptr = matrix(grad_ptr, batch, grad_batch, head, grad_head)
    dv_ptr = matrix(dv_ptr, batch, dv_batch, head, dv_head)
    chunks = tl.cdiv(tokens, CHUNK)
    first = line.to(tl.int64) * chunks * CHUNK
    q_at = at[None, :] * q_token + col[:, None]
    k_at = at[:, None] * k_token + col[None, :]
    grad_at = at[:, None] * grad_token + v_col[None, :]
    dv_at = at[:, None] * dv_token + v_col[None, :]
    d_state_ptr += line.to(tl.int64) * DIM * V_DIM
    d_state = load_rows(d_state_ptr, col, V_DIM, DIM, v_col, V_DIM)
    for step in range(chunks):
        chunk = chunks - 1 - step
        begin = first + chunk * CHUNK
        skip = begin - first
        there = chunk * CHUNK + at < tokens
        q_mask = there[None, :] & (col < DIM)[:, None]
        k_mask = there[:, None] & (col < DIM)[None, :]
        v_mask = there[:, None] & (v_col < V_DIM)[None, :]
        of = factors_ptr + begin * 4 + at
        square = begin * CHUNK + at[None, :] * CHUNK + at[:, None]  # transposed
        behind = d_state.to(dtype)
        store_rows(behind_ptr + begin // CHUNK * DIM * V_DIM, col, V_DIM, DIM, v_col, V_DIM, behind)
        k = tl.load(k_ptr + skip * k_token + k_at, mask=k_mask, other=0.0)
        grad = tl.load(grad_ptr + skip * grad_token + grad_at, mask=v_mask, other=0.0)
        d_solved = tl.dot(k, behind, input_precision="ieee", out_dtype=ACC) * tl.load(of + 2 * CHUNK)[:, None]
        scores = tl.load(scores_ptr + square)
        d_solved += tl.dot(scores, grad, input_precision="ieee", out_dtype=ACC)
        solves = tl.load(solves_ptr + square)
        dv = tl.dot(solves, d_solved.to(dtype), input_precision="ieee", out_dtype=ACC)
        tl.store(dv_ptr + skip * dv_token + dv_at, dv.to(dtype), mask=v_mask)
        d_state *= tl.load(factors_ptr + begin * 4 + 3 * CHUNK)
        by_k = (dv * -tl.load(of)[:, None]).to(dtype)
        d_state += tl.dot(tl.trans(k), by_k, input_precision="ieee", out_dtype=ACC)
        q = tl.load(q_ptr + skip * q_token + q_at, mask=q_mask, other=0.0)
        by_q = (grad.to(ACC) * tl.load(of + CHUNK)[:, None]).to(dtype)
        d_state += tl.dot(q, by_q, input_precision="ieee", out_dtype=ACC)
    store_rows(d_state_ptr, col, V_DIM, DIM, v_col, V_DIM, d_state)


@triton.jit
def along(x, direction, squared_norm, NORMALISED: tl.constexpr):
    """x without what a norm takes away: its part along rows of ``direction``."""
    if NORMALISED:
        x -= direction * (tl.sum(direction * x, axis=1) * squared_norm)[:, None]
    return x


@triton.jit
def gated_delta_backward_pairs_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, grad_ptr, dv_ptr, solved_ptr, d_scores_ptr, d_products_ptr, sums_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, g_batch, g_token, g_head,
    beta_batch, beta_token, beta_head, grad_batch, grad_token, grad_head, dv_batch, dv_token, dv_head,
    heads, group, tokens, columns, scale,
    NORMALISED: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: what pairs of a chunk's tokens give for one value head: the gradients of Q K^T and K K^T
    with normalised q and k, and the first of ``sums``, what c and beta get by them. Grid: chunks x value
    heads x batch."""
    batch, head, line = place(heads)
    chunk = tl.program_id(0)
    at = tl.arange(0, CHUNK)
    row = chunk * CHUNK + at
    grad_ptr = matrix(grad_ptr, batch, grad_batch, head, grad_head)
    dv_ptr = matrix(dv_ptr, batch, dv_batch, head, dv_head)
    solved_ptr += line.to(tl.int64) * tokens * V_DIM
    d_scores = tl.zeros((CHUNK, CHUNK), dtype=ACC)
    d_products = tl.zeros((CHUNK, CHUNK), dtype=ACC)
    for start in range(0, columns, BLOCK_V):
        v_col = start + tl.arange(0, BLOCK_V)
        grad = load_rows(grad_ptr, row, grad_token, tokens, v_col, V_DIM)
        dv = load_rows(dv_ptr, row, dv_token, tokens, v_col, V_DIM)
        solved = load_rows(solved_ptr, row, V_DIM, tokens, v_col, V_DIM)
        d_scores += tl.dot(grad, tl.trans(solved), input_precision="ieee", out_dtype=ACC)
        d_products -= tl.dot(dv, tl.trans(solved), input_precision="ieee", out_dtype=ACC)
    q_ptr = matrix(q_ptr, batch, q_batch, head // group, q_head)
    k_ptr = matrix(k_ptr, batch, k_batch, head // group, k_head)
    scores, products, q_norm, k_norm = similarities(
        q_ptr, k_ptr, row, q_token, k_token, tokens, NORMALISED, ACC, DIM, CHUNK, BLOCK_D
    )
    c = tl.cumsum(load_gates(g_ptr, batch, g_batch, head, g_head, row, g_token, tokens).to(ACC), axis=0)
    beta = load_gates(beta_ptr, batch, beta_batch, head, beta_head, row, beta_token, tokens).to(ACC)
    lower = at[:, None] >= at[None, :]
    decay = tl.exp(tl.where(lower, c[:, None] - c[None, :], float("-inf")))
    d_scores *= decay
    d_products = tl.where(at[:, None] > at[None, :], d_products * decay, 0.0)
    pairs = d_scores * scores * (q_norm * scale)[:, None] + d_products * products * k_norm[:, None]
    pairs *= k_norm[None, :]
    of_beta = tl.sum(pairs, axis=0)
    of_c = tl.sum(pairs * beta[None, :], axis=1) - of_beta * beta
    number = line.to(tl.int64) * tl.num_programs(0) + chunk
    tl.store(sums_ptr + number * (3 * CHUNK) + at, of_c)
    tl.store(sums_ptr + number * (3 * CHUNK) + CHUNK + at, of_beta)
    tile = number * CHUNK * CHUNK
    store_rows(d_scores_ptr + tile, at, CHUNK, CHUNK, at, CHUNK, d_scores * beta[None, :])
    store_rows(d_products_ptr + tile, at, CHUNK, CHUNK, at, CHUNK, d_products * beta[None, :])


@triton.jit
def load_sum(ptr, key_line, group, ACC: tl.constexpr, CHUNK: tl.constexpr):
    """Over the value heads of a key head, of [CHUNK, CHUNK] of this program's chunk."""
    at = tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK, CHUNK), dtype=ACC)
    for member in range(group):
        number = (key_line * group + member).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        total += load_tile(ptr + number * CHUNK * CHUNK, at, CHUNK, CHUNK, at, CHUNK).to(ACC)
    return total


@triton.jit
def gated_delta_backward_q_kernel(
    q_ptr, k_ptr, g_ptr, grad_ptr, before_ptr, behind_ptr, d_scores_ptr, sums_ptr, dq_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, g_batch, g_token, g_head,
    grad_batch, grad_token, grad_head, dq_batch, dq_token, dq_head,
    groups, group, tokens, columns, scale,
    NORMALISED: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: dq of a chunk of one key head, over its value heads; what c gets by it and by the state
    that decays is the last of ``sums``. Grid: chunks x key heads x batch."""
    batch, key_head, key_line = place(groups)
    at = tl.arange(0, CHUNK)
    start = tl.program_id(0).to(tl.int64) * CHUNK
    row = start + at
    rest = tokens - tl.program_id(0) * CHUNK
    col = tl.arange(0, BLOCK_D)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    q_ptr = matrix(q_ptr, batch, q_batch, key_head, q_head) + start * q_token
    k_ptr = matrix(k_ptr, batch, k_batch, key_head, k_head) + start * k_token
    q = load_tile(q_ptr, at, q_token, rest, col, DIM).to(ACC)
    unit = row_norm(tl.sum(q * q, axis=1), NORMALISED)
    dq = tl.zeros((CHUNK, BLOCK_D), dtype=ACC)
    for member in range(group):
        head = key_head * group + member
        number = (key_line * group + member).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        of_grad = matrix(grad_ptr, batch, grad_batch, head, grad_head) + start * grad_token
        read = tl.zeros((CHUNK, BLOCK_D), dtype=ACC)
        carried = tl.zeros((BLOCK_D, BLOCK_V), dtype=ACC)
        for begin in range(0, columns, BLOCK_V):
            v_col = begin + tl.arange(0, BLOCK_V)
            grad = load_tile(of_grad, at, grad_token, rest, v_col, V_DIM)
            before = load_tile(before_ptr + number * DIM * V_DIM, col, V_DIM, DIM, v_col, V_DIM)
            behind = load_tile(behind_ptr + number * DIM * V_DIM, col, V_DIM, DIM, v_col, V_DIM)
            read += tl.dot(grad, tl.trans(before), input_precision="ieee", out_dtype=ACC)
            carried += before.to(ACC) * behind.to(ACC)
        c = tl.cumsum(load_gates(g_ptr, batch, g_batch, head, g_head, row, g_token, tokens).to(ACC), axis=0)
        read *= tl.exp(c)[:, None]
        q = load_tile(q_ptr, at, q_token, rest, col, DIM).to(ACC)
        by_c = tl.sum(read * q, axis=1) * (unit * scale)
        z = tl.sum(tl.where(at == CHUNK - 1, c, 0.0), axis=0)
        by_c += tl.where(at == CHUNK - 1, tl.exp(z) * tl.sum(tl.sum(carried, axis=1), axis=0), 0.0)
        tl.store(sums_ptr + number * (3 * CHUNK) + 2 * CHUNK + at, by_c)
        dq += read
    k = load_tile(k_ptr, at, k_token, rest, col, DIM)
    k_norm = row_norm(tl.sum(k.to(ACC) * k.to(ACC), axis=1), NORMALISED)
    d_scores = load_sum(d_scores_ptr, key_line, group, ACC, CHUNK) * k_norm[None, :]
    dq += tl.dot(d_scores.to(dtype), k, input_precision="ieee", out_dtype=ACC)
    q = load_tile(q_ptr, at, q_token, rest, col, DIM).to(ACC)
    dq = along(dq, q, unit * unit, NORMALISED) * (unit * scale)[:, None]
    store_rows(matrix(dq_ptr, batch, dq_batch, key_head, dq_head), row, dq_token, tokens, col, DIM, dq)


@triton.jit
def gated_delta_backward_k_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, dv_ptr, solved_ptr, before_ptr, behind_ptr,
    d_scores_ptr, d_products_ptr, sums_ptr, dk_ptr, dg_ptr, dbeta_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, g_batch, g_token, g_head,
    beta_batch, beta_token, beta_head, dv_batch, dv_token, dv_head,
    dk_batch, dk_token, dk_head, dg_batch, dg_token, dg_head,
    groups, group, tokens, columns, scale,
    NORMALISED: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: dk of a chunk of one key head, over its value heads, and their dg and dbeta, which have
    equal strides. Grid: chunks x key heads x batch."""
    batch, key_head, key_line = place(groups)
    at = tl.arange(0, CHUNK)
    start = tl.program_id(0).to(tl.int64) * CHUNK
    rest = tokens - tl.program_id(0) * CHUNK
    col = tl.arange(0, BLOCK_D)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    g_ptr += start * g_token
    beta_ptr += start * beta_token
    q_ptr = matrix(q_ptr, batch, q_batch, key_head, q_head) + start * q_token
    k_ptr = matrix(k_ptr, batch, k_batch, key_head, k_head) + start * k_token
    k = load_tile(k_ptr, at, k_token, rest, col, DIM).to(ACC)
    unit = row_norm(tl.sum(k * k, axis=1), NORMALISED)
    dk = tl.zeros((CHUNK, BLOCK_D), dtype=ACC)
    for member in range(group):
        head = key_head * group + member
        line = (key_line * group + member).to(tl.int64)
        number = line * tl.num_programs(0) + tl.program_id(0)
        of_dv = matrix(dv_ptr, batch, dv_batch, head, dv_head) + start * dv_token
        of_solved = solved_ptr + (line * tokens + start) * V_DIM
        read = tl.zeros((CHUNK, BLOCK_D), dtype=ACC)
        for begin in range(0, columns, BLOCK_V):
            v_col = begin + tl.arange(0, BLOCK_V)
            dv = load_tile(of_dv, at, dv_token, rest, v_col, V_DIM)
            before = load_tile(before_ptr + number * DIM * V_DIM, col, V_DIM, DIM, v_col, V_DIM)
            read -= tl.dot(dv, tl.trans(before), input_precision="ieee", out_dtype=ACC)
        c = tl.cumsum(load_gates(g_ptr, batch, g_batch, head, g_head, at, g_token, rest).to(ACC), axis=0)
        read *= tl.exp(c)[:, None]
        dk += read
        k = load_tile(k_ptr, at, k_token, rest, col, DIM).to(ACC)
        d_c = tl.sum(read * k, axis=1) * unit
        write = tl.zeros((CHUNK, BLOCK_D), dtype=ACC)
        for begin in range(0, columns, BLOCK_V):
            v_col = begin + tl.arange(0, BLOCK_V)
            solved = load_tile(of_solved, at, V_DIM, rest, v_col, V_DIM)
            behind = load_tile(behind_ptr + number * DIM * V_DIM, col, V_DIM, DIM, v_col, V_DIM)
            write += tl.dot(solved, tl.trans(behind), input_precision="ieee", out_dtype=ACC)
        z = tl.sum(tl.where(at == CHUNK - 1, c, 0.0), axis=0)
        write *= tl.exp(z - c)[:, None]
        beta = load_gates(beta_ptr, batch, beta_batch, head, beta_head, at, beta_token, rest).to(ACC)
        dk += write * beta[:, None]
        k = load_tile(k_ptr, at, k_token, rest, col, DIM).to(ACC)
        fallen = tl.sum(write * k, axis=1) * unit
        sums = sums_ptr + number * (3 * CHUNK) + at
        dbeta = tl.load(sums + CHUNK) + fallen
        d_c += tl.load(sums) + tl.load(sums + 2 * CHUNK)
        fallen *= beta
        behind_it = at[:, None] >= at[None, :]
        dg = tl.sum(tl.where(behind_it, d_c[:, None], fallen[:, None]), axis=0)
        to = batch.to(tl.int64) * dg_batch + start * dg_token + head * dg_head + at * dg_token
        tl.store(dg_ptr + to, dg.to(dg_ptr.dtype.element_ty), mask=at < rest)
        tl.store(dbeta_ptr + to, dbeta.to(dbeta_ptr.dtype.element_ty), mask=at < rest)
    q = load_tile(q_ptr, at, q_token, rest, col, DIM)
    q_norm = row_norm(tl.sum(q.to(ACC) * q.to(ACC), axis=1), NORMALISED) * scale
    d_scores = tl.trans(load_sum(d_scores_ptr, key_line, group, ACC, CHUNK)) * q_norm[None, :]
    dk += tl.dot(d_scores.to(dtype), q, input_precision="ieee", out_dtype=ACC)
    d_products = load_sum(d_products_ptr, key_line, group, ACC, CHUNK)
    both = (d_products + tl.trans(d_products)) * unit[None, :]
    k = load_tile(k_ptr, at, k_token, rest, col, DIM)
    dk += tl.dot(both.to(dtype), k, input_precision="ieee", out_dtype=ACC)
    dk = along(dk, k.to(ACC), unit * unit, NORMALISED) * unit[:, None]
    dk_ptr = matrix(dk_ptr, batch, dk_batch, key_head, dk_head) + start * dk_token
    store_rows(dk_ptr, at, dk_token, rest, col, DIM, dk)
