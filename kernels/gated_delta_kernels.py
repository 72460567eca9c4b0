# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Triton kernels of ``gated_delta_rule.py``'s forward, whose symbols they share.

The first makes what a chunk needs beside the state, for all chunks at once; the second carries the state of
some value columns through the chunks; the third does so once more, for a backward, through each span from the
state that was kept before it. Products take q and k as they are given: their norms, decays and
strengths are factors of rows and columns, applied to what comes out of a product or goes into it.

Of each value head and chunk there are, in the type of q: ``solves``, (1 + tril(K K^T * D, -1) diag(beta))^-1,
and ``scores``, tril(Q K^T * D) diag(beta), [CHUNK, CHUNK] each; and in ACC, for each token, four ``factors``:
those of k and of q where they read the state, that of k where it writes it, the chunk's decay. So both are
applied to W / beta, which is ``solved``: exact where beta is zero, and what the gradient of beta needs.
Tokens that a last chunk lacks are zeros that decay nothing.
"""

from megacompile.kernels._triton import tl, triton
from megacompile.kernels.attention_kernels import load_rows, matrix, place, store_rows


@triton.jit
def with_blocks_below(
    inverse, lower, SIZE: tl.constexpr, CHUNK: tl.constexpr, ACC: tl.constexpr, TYPE: tl.constexpr
):
    """From inverses A, B, A, B, ... of the blocks of SIZE on the diagonal those of blocks of twice the size,
    [[A, 0], [-B C A, B]] with C what lies below A. Products of TYPE."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    below = tl.where((i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE != j // SIZE), lower, 0.0)
    known = inverse.to(TYPE)
    half = tl.dot(below.to(TYPE), known, input_precision="ieee", out_dtype=ACC)
    return inverse - tl.dot(known, half.to(TYPE), input_precision="ieee", out_dtype=ACC)


@triton.jit
def unit_inverse(lower, CHUNK: tl.constexpr, ACC: tl.constexpr, TYPE: tl.constexpr):
    """(1 + lower)^-1 of a strictly lower triangular [CHUNK, CHUNK].

    Blocks of 16 on the diagonal by forward substitution, all at once, in ACC. From two blocks' inverses A and
    B with C below A, that of both: -B C A takes the place of C; products of TYPE.
    """
    BLOCK: tl.constexpr = 16
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    block = tl.arange(0, BLOCKS)
    same = block[:, None, None, None] == block[None, None, :, None]
    row = tl.arange(0, BLOCK)
    on = tl.sum(tl.where(same, tl.reshape(lower, (BLOCKS, BLOCK, BLOCKS, BLOCK)), 0.0), axis=2)
    solved = tl.where((row[:, None] == row[None, :])[None], 1.0, 0.0).to(ACC) + tl.zeros_like(on)
    for n in range(1, BLOCK):
        here = (row == n)[None, :, None]
        line = tl.sum(tl.where(here, on, 0.0), axis=1)
        found = tl.sum(line[:, :, None] * solved, axis=1)
        solved -= tl.where(here, found[:, None, :], 0.0)
    whole = tl.reshape(tl.where(same, solved[:, :, None, :], 0.0), (CHUNK, CHUNK))
    whole = with_blocks_below(whole, lower, BLOCK, CHUNK, ACC, TYPE)
    return with_blocks_below(whole, lower, 2 * BLOCK, CHUNK, ACC, TYPE)


@triton.jit
def row_norm(squares, NORMALISED: tl.constexpr):
    """What the rows are multiplied by whose sums of squares these are."""
    return 1.0 / tl.sqrt(squares + 1e-6) if NORMALISED else tl.full(squares.shape, 1.0, squares.dtype)


@triton.jit
def load_gates(ptr, batch, batch_stride, head, head_stride, row, row_stride, rows):
    """One number of a head for each row, zero outside."""
    at = matrix(ptr, batch, batch_stride, head, head_stride) + row.to(tl.int64) * row_stride
    return tl.load(at, mask=row < rows, other=0.0)


@triton.jit
def similarities(
    q_ptr, k_ptr, row, q_token, k_token, tokens,
    NORMALISED: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Products of q with k, of k with k, and what rows of q and of k are multiplied by."""
    scores = tl.zeros((CHUNK, CHUNK), dtype=ACC)
    products = tl.zeros((CHUNK, CHUNK), dtype=ACC)
    q_squares = tl.zeros((CHUNK,), dtype=ACC)
    k_squares = tl.zeros((CHUNK,), dtype=ACC)
    for start in range(0, DIM, BLOCK_D):
        col = start + tl.arange(0, BLOCK_D)
        q = load_rows(q_ptr, row, q_token, tokens, col, DIM)
        k = load_rows(k_ptr, row, k_token, tokens, col, DIM)
        scores += tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=ACC)
        products += tl.dot(k, tl.trans(k), input_precision="ieee", out_dtype=ACC)
        q_squares += tl.sum(q.to(ACC) * q.to(ACC), axis=1)
        k_squares += tl.sum(k.to(ACC) * k.to(ACC), axis=1)
    return scores, products, row_norm(q_squares, NORMALISED), row_norm(k_squares, NORMALISED)


@triton.jit
def gated_delta_chunk_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, solves_ptr, scores_ptr, factors_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    g_batch, g_token, g_head, beta_batch, beta_token, beta_head,
    heads, group, tokens, scale,
    NORMALISED: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a chunk of one value head. Grid: chunks x value heads x batch."""
    batch, head, line = place(heads)
    chunk = tl.program_id(0)
    at = tl.arange(0, CHUNK)
    row = chunk * CHUNK + at
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    q_ptr = matrix(q_ptr, batch, q_batch, head // group, q_head)
    k_ptr = matrix(k_ptr, batch, k_batch, head // group, k_head)
    scores, products, q_norm, k_norm = similarities(
        q_ptr, k_ptr, row, q_token, k_token, tokens, NORMALISED, ACC, DIM, CHUNK, BLOCK_D
    )
    q_norm *= scale
    c = tl.cumsum(load_gates(g_ptr, batch, g_batch, head, g_head, row, g_token, tokens).to(ACC), axis=0)
    z = tl.sum(tl.where(at == CHUNK - 1, c, 0.0), axis=0)
    number = line.to(tl.int64) * tl.num_programs(0) + chunk
    to = factors_ptr + number * (4 * CHUNK) + at
    risen = tl.exp(c)
    tl.store(to, risen * k_norm)
    tl.store(to + CHUNK, risen * q_norm)
    beta = load_gates(beta_ptr, batch, beta_batch, head, beta_head, row, beta_token, tokens).to(ACC)
    tl.store(to + 2 * CHUNK, tl.exp(z - c) * k_norm * beta)
    tl.store(to + 3 * CHUNK, tl.exp(z) + tl.zeros_like(c))
    decay = tl.exp(tl.where(at[:, None] >= at[None, :], c[:, None] - c[None, :], float("-inf")))
    decay *= (k_norm * beta)[None, :]
    tile = number * CHUNK * CHUNK
    store_rows(scores_ptr + tile, at, CHUNK, CHUNK, at, CHUNK, scores * decay * q_norm[:, None])
    lower = tl.where(at[:, None] > at[None, :], products * decay * k_norm[:, None], 0.0)
    store_rows(solves_ptr + tile, at, CHUNK, CHUNK, at, CHUNK, unit_inverse(lower, CHUNK, ACC, dtype))


@triton.jit
def advance(state, k, v, solves_ptr, factors_ptr, begin, ACC: tl.constexpr, CHUNK: tl.constexpr):
    """Some columns of a chunk whose first token is number ``begin``: the state before it in the type of k,
    ``solved``, and the state behind it."""
    at = tl.arange(0, CHUNK)
    of = factors_ptr + begin * 4 + at
    before = state.to(k.dtype)
    lacking = v.to(ACC) - tl.dot(k, before, input_precision="ieee", out_dtype=ACC) * tl.load(of)[:, None]
    solves = tl.load(solves_ptr + begin * CHUNK + at[:, None] * CHUNK + at[None, :])
    solved = tl.dot(solves, lacking.to(k.dtype), input_precision="ieee", out_dtype=ACC)
    write = (solved * tl.load(of + 2 * CHUNK)[:, None]).to(k.dtype)
    state *= tl.load(factors_ptr + begin * 4 + 3 * CHUNK)
    return before, solved, state + tl.dot(tl.trans(k), write, input_precision="ieee", out_dtype=ACC)


@triton.jit
def gated_delta_forward_kernel(
    q_ptr, k_ptr, v_ptr, solves_ptr, scores_ptr, factors_ptr, out_ptr, states_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    out_batch, out_token, out_head, states_span,
    heads, group, tokens,
    SPAN: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of the state of one value head, through all chunks; it keeps the state
    before every SPAN-th. Grid: blocks of columns x value heads x batch."""
    batch, head, line = place(heads)
    at = tl.arange(0, CHUNK)
    col = tl.arange(0, BLOCK_D)
    v_col = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    q_ptr = matrix(q_ptr, batch, q_batch, head // group, q_head)
    k_ptr = matrix(k_ptr, batch, k_batch, head // group, k_head)
    v_ptr = matrix(v_ptr, batch, v_batch, head, v_head)
    out_ptr = matrix(out_ptr, batch, out_batch, head, out_head)
    chunks = tl.cdiv(tokens, CHUNK)
    first = line.to(tl.int64) * chunks * CHUNK
    states_ptr += line.to(tl.int64) * DIM * V_DIM
    q_at = at[:, None] * q_token + col[None, :]
    k_at = at[:, None] * k_token + col[None, :]
    v_at = at[:, None] * v_token + v_col[None, :]
    out_at = at[:, None] * out_token + v_col[None, :]
    state = tl.zeros((BLOCK_D, BLOCK_V), dtype=ACC)
    for chunk in range(chunks):
        begin = first + chunk * CHUNK
        if chunk % SPAN == 0:
            to = states_ptr + (begin - first) // (SPAN * CHUNK) * states_span
            inside = (col < DIM)[:, None] & (v_col < V_DIM)[None, :]
            tl.store(to + col[:, None] * V_DIM + v_col[None, :], state, mask=inside)
        row = chunk * CHUNK + at[:, None]
        skip = begin - first
        k_mask = (row < tokens) & (col < DIM)[None, :]
        v_mask = (row < tokens) & (v_col < V_DIM)[None, :]
        k = tl.load(k_ptr + skip * k_token + k_at, mask=k_mask, other=0.0)
        v = tl.load(v_ptr + skip * v_token + v_at, mask=v_mask, other=0.0)
        before, solved, state = advance(state, k, v, solves_ptr, factors_ptr, begin, ACC, CHUNK)
        q = tl.load(q_ptr + skip * q_token + q_at, mask=k_mask, other=0.0)
        reads = tl.load(factors_ptr + begin * 4 + CHUNK + at)
        out = tl.dot(q, before, input_precision="ieee", out_dtype=ACC) * reads[:, None]
        scores = tl.load(scores_ptr + begin * CHUNK + at[:, None] * CHUNK + at[None, :])
        out += tl.dot(scores, solved.to(dtype), input_precision="ieee", out_dtype=ACC)
        tl.store(out_ptr + skip * out_token + out_at, out.to(dtype), mask=v_mask)


@triton.jit
def gated_delta_states_kernel(
    k_ptr, v_ptr, solves_ptr, factors_ptr, states_ptr, solved_ptr, before_ptr,
    k_batch, k_token, k_head, v_batch, v_token, v_head, states_span,
    heads, group, tokens,
    SPAN: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of the state of one value head, through the chunks of one span, from the
    state before it. Grid: spans x blocks of columns, value heads, batch."""
    batch, head, line = place(heads)
    blocks = tl.cdiv(V_DIM, BLOCK_V)
    span = tl.program_id(0) // blocks
    at = tl.arange(0, CHUNK)
    col = tl.arange(0, BLOCK_D)
    v_col = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    k_ptr = matrix(k_ptr, batch, k_batch, head // group, k_head)
    v_ptr = matrix(v_ptr, batch, v_batch, head, v_head)
    chunks = tl.cdiv(tokens, CHUNK)
    first = line.to(tl.int64) * chunks
    states_ptr += span.to(tl.int64) * states_span + line.to(tl.int64) * DIM * V_DIM
    solved_ptr += line.to(tl.int64) * tokens * V_DIM
    state = load_rows(states_ptr, col, V_DIM, DIM, v_col, V_DIM).to(ACC)
    for chunk in range(span * SPAN, tl.minimum(span * SPAN + SPAN, chunks)):
        row = chunk * CHUNK + at
        k = load_rows(k_ptr, row, k_token, tokens, col, DIM)
        v = load_rows(v_ptr, row, v_token, tokens, v_col, V_DIM)
        number = first + chunk
        before, solved, state = advance(state, k, v, solves_ptr, factors_ptr, number * CHUNK, ACC, CHUNK)
        store_rows(before_ptr + number * DIM * V_DIM, col, V_DIM, DIM, v_col, V_DIM, before)
        store_rows(solved_ptr, row, V_DIM, tokens, v_col, V_DIM, solved)
