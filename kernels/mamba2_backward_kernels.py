# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Triton kernels of ``mamba2_chunk_scan.py``'s backward; conventions are those of ``mamba2_kernels.py``.

The forward's kernels go before: the second leaves the gradient dS' of the state behind every span, the first
``factors`` on its way. Then one makes the gradient of x, one that of C B^T and what pairs give to decays, one
those of C and of B, and one that of dt. With s the sum of A dt from a span's begin, e its last, i >= j tokens
of the span, and dX the gradient of X:

    du_j = sum_i C_i·B_j exp(s_i - s_j) dout_i + exp(e - s_j) dS'^T B_j         dx = dt du + D dout
    d(C B^T)_ij = sum of a group's heads of exp(s_i - s_j) dout_i·u_j
    dC_i = sum_j d(C B^T)_ij B_j + sum of heads of exp(s_i) S dout_i
    dB_j = sum_i d(C B^T)_ij C_i + sum of heads of exp(e - s_j) dS' u_j

To the decay of a token come all that passes it: pairs i >= t > j of its span, what is read of the state at
it or behind it, what is written before it, and the state that the span carries. These are sums, never
differences of sums, which would lose digits where most of a pair's gradient is its token's own.
"""

from megacompile.kernels._triton import tl, triton
from megacompile.kernels.attention_kernels import matrix, place, store_rows
from megacompile.kernels.gated_delta_backward_kernels import load_tile
from megacompile.kernels.mamba2_kernels import columns_of, factors_of, load_chunk, state_of


@triton.jit
def load_turned(ptr, CHUNK: tl.constexpr):
    """[CHUNK, CHUNK], transposed."""
    at = tl.arange(0, CHUNK)
    return tl.load(ptr + at[None, :] * CHUNK + at[:, None])


@triton.jit
def span_of(chunk, tokens, SPAN: tl.constexpr, CHUNK: tl.constexpr):
    """(the span that a chunk is in, its first chunk, the first one behind it)."""
    span = chunk // SPAN
    return span, span * SPAN, tl.minimum(span * SPAN + SPAN, tl.cdiv(tokens, CHUNK))


@triton.jit
def last_sum(factors_ptr, line, chunk, tokens, CHUNK: tl.constexpr):
    """The sum of A dt from a span's begin to a chunk's end."""
    number = line.to(tl.int64) * tl.cdiv(tokens, CHUNK) + chunk
    return tl.load(factors_ptr + number * (3 * CHUNK) + CHUNK - 1)


@triton.jit
def mamba2_backward_x_kernel(
    x_ptr, b_ptr, d_ptr, grad_ptr, similar_ptr, factors_ptr, states_ptr,
    dx_ptr, by_dt_ptr, given_ptr, written_ptr, skipped_ptr,
    x_batch, x_token, x_head, b_batch, b_token, b_head, grad_batch, grad_token, grad_head,
    states_span, heads, group, tokens,
    SPAN: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of dx of a head's chunk, and sums over them [batch, heads, chunks, blocks,
    CHUNK]: du·x; of du·u what is given to later chunks of the span, and what is written to the state; dout·x.
    Grid: (chunks and blocks of columns) x heads x batch."""
    batch, head, line = place(heads)
    chunk, v_col = columns_of(V_DIM, BLOCK_V)
    span, _, behind = span_of(chunk, tokens, SPAN, CHUNK)
    at = tl.arange(0, CHUNK)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    begin = chunk * CHUNK
    grad_ptr = matrix(grad_ptr, batch, grad_batch, head, grad_head)
    groups = heads // group
    cell = (batch.to(tl.int64) * groups + head // group) * tl.cdiv(tokens, CHUNK) + chunk
    similar_ptr += cell * (SPAN * CHUNK * CHUNK)
    own = factors_of(factors_ptr, line, chunk, tokens, CHUNK)
    s = tl.load(own)
    dt = tl.load(own + CHUNK)
    end = tl.sum(tl.where(at == CHUNK - 1, s, 0.0), axis=0)
    falling = tl.exp(end - s)
    du = tl.zeros((CHUNK, BLOCK_V), dtype=ACC)
    for n in range(1, behind - chunk):
        s_n = tl.load(factors_of(factors_ptr, line, chunk + n, tokens, CHUNK))
        scores = load_turned(similar_ptr + n * (SPAN + 1) * (CHUNK * CHUNK), CHUNK)
        scores *= falling[:, None] * tl.exp(s_n - end)[None, :]
        grad = load_chunk(grad_ptr, begin + n * CHUNK, grad_token, tokens, v_col, V_DIM, CHUNK)
        du += tl.dot(scores.to(dtype), grad, input_precision="ieee", out_dtype=ACC)
    x = load_chunk(matrix(x_ptr, batch, x_batch, head, x_head), begin, x_token, tokens, v_col, V_DIM, CHUNK)
    to = (line.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * CHUNK + at
    tl.store(given_ptr + to, tl.sum(du * x.to(ACC), axis=1) * dt)
    scores = load_turned(similar_ptr, CHUNK)
    scores *= tl.exp(tl.where(at[:, None] <= at[None, :], s[None, :] - s[:, None], float("-inf")))
    grad = load_chunk(grad_ptr, begin, grad_token, tokens, v_col, V_DIM, CHUNK)
    du += tl.dot(scores.to(dtype), grad, input_precision="ieee", out_dtype=ACC)
    b_ptr = matrix(b_ptr, batch, b_batch, head // group, b_head)
    of = state_of(states_ptr, span, states_span, head, heads, group, batch, DIM, V_DIM)
    written = tl.zeros((CHUNK, BLOCK_V), dtype=ACC)
    for start in range(0, DIM, BLOCK_D):
        col = start + tl.arange(0, BLOCK_D)
        b = load_chunk(b_ptr, begin, b_token, tokens, col, DIM, CHUNK)
        state = load_tile(of, col, group * V_DIM, DIM, v_col, V_DIM).to(dtype)
        written += tl.dot(b, state, input_precision="ieee", out_dtype=ACC)
    falling *= tl.exp(last_sum(factors_ptr, line, behind - 1, tokens, CHUNK) - end)
    written *= falling[:, None]
    du += written
    x = x.to(ACC)
    grad = grad.to(ACC)
    tl.store(by_dt_ptr + to, tl.sum(du * x, axis=1))
    tl.store(written_ptr + to, tl.sum(written * x, axis=1) * dt)
    tl.store(skipped_ptr + to, tl.sum(grad * x, axis=1))
    dx = du * dt[:, None] + grad * tl.load(d_ptr + head).to(ACC)
    dx_ptr += (batch.to(tl.int64) * tokens * heads + head) * V_DIM
    store_rows(dx_ptr, begin + at, heads * V_DIM, tokens, v_col, V_DIM, dx)


@triton.jit
def mamba2_backward_pairs_kernel(
    x_ptr, grad_ptr, similar_ptr, factors_ptr, d_similar_ptr, pairs_ptr,
    x_batch, x_token, x_head, grad_batch, grad_token, grad_head,
    cells, heads, group, tokens,
    SPAN: tl.constexpr, PART: tl.constexpr, ACC: tl.constexpr, V_DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: for PART heads of a group, pairs of a chunk's tokens with those of a chunk before it in
    its span, or of itself: the sum of d(C B^T), and what decays of each head get, ``pairs`` [batch, heads,
    chunks, SPAN, CHUNK], the sum of a token's pairs, or in its own chunk of those that pass it. Grid: (chunks
    and SPAN) x ``cells``, parts of groups, x batch."""
    batch, cell, line = place(cells)
    chunk = tl.program_id(0) // SPAN
    n = SPAN - 1 - tl.program_id(0) % SPAN
    if n <= chunk % SPAN:
        at = tl.arange(0, CHUNK)
        parts = tl.cdiv(group, PART)
        first = cell // parts * group + cell % parts * PART
        members = tl.minimum(group - cell % parts * PART, PART)
        number = chunk * SPAN + n
        pair = (line // parts).to(tl.int64) * tl.num_programs(0) + number
        similar = load_tile(similar_ptr + pair * (CHUNK * CHUNK), at, CHUNK, CHUNK, at, CHUNK)
        d_similar = tl.zeros((CHUNK, CHUNK), dtype=ACC)
        for member in range(members):
            head = first + member
            of_grad = matrix(grad_ptr, batch, grad_batch, head, grad_head)
            of_x = matrix(x_ptr, batch, x_batch, head, x_head)
            d_scores = tl.zeros((CHUNK, CHUNK), dtype=ACC)
            for start in tl.static_range(0, V_DIM, BLOCK_V):
                v_col = start + tl.arange(0, BLOCK_V)
                grad = load_chunk(of_grad, chunk * CHUNK, grad_token, tokens, v_col, V_DIM, CHUNK)
                x = load_chunk(of_x, (chunk - n) * CHUNK, x_token, tokens, v_col, V_DIM, CHUNK)
                d_scores += tl.dot(grad, tl.trans(x), input_precision="ieee", out_dtype=ACC)
            row = batch * heads + head
            s = tl.load(factors_of(factors_ptr, row, chunk, tokens, CHUNK))
            other = factors_of(factors_ptr, row, chunk - n, tokens, CHUNK)
            to = pairs_ptr + (row.to(tl.int64) * tl.num_programs(0) + number) * CHUNK + at
            if n == 0:
                dt = tl.load(other + CHUNK)
                seen = at[:, None] >= at[None, :]
                d_scores *= tl.exp(tl.where(seen, s[:, None] - s[None, :], float("-inf"))) * dt[None, :]
                before = tl.cumsum(d_scores * similar, axis=1)
                across = tl.sum(tl.where(at[:, None] > at[None, :], before, 0.0), axis=0)
                tl.store(to + 1, across, mask=at < CHUNK - 1)
                tl.store(to, dt * 0, mask=at == 0)
            else:
                end = last_sum(factors_ptr, row, chunk - n, tokens, CHUNK)
                d_scores *= tl.exp(s - end)[:, None] * tl.load(other + 2 * CHUNK)[None, :]
                tl.store(to, tl.sum(d_scores * similar, axis=1))
            d_similar += d_scores
        to = line.to(tl.int64) * tl.num_programs(0) + number
        store_rows(d_similar_ptr + to * (CHUNK * CHUNK), at, CHUNK, CHUNK, at, CHUNK, d_similar)


@triton.jit
def mamba2_backward_groups_kernel(
    x_ptr, b_ptr, c_ptr, d_similar_ptr, factors_ptr, states_ptr, to_ptr, risen_ptr,
    x_batch, x_token, x_head, b_batch, b_token, b_head, c_batch, c_token, c_head,
    states_span, groups, group, parts, tokens,
    BACK: tl.constexpr, SPAN: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_D columns of dC of a group's chunk, with the gradient of the results for x, and for
    each head what is read of the state, ``risen`` [batch, heads, chunks, blocks, CHUNK]. With BACK those of
    dB, of x and the gradient of the states. Grid: (chunks and blocks of columns) x groups x batch."""
    batch, index, line = place(groups)
    chunk, col = columns_of(DIM, BLOCK_D)
    span, first, behind = span_of(chunk, tokens, SPAN, CHUNK)
    at = tl.arange(0, CHUNK)
    begin = chunk * CHUNK
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    b_ptr = matrix(b_ptr, batch, b_batch, index, b_head)
    c_ptr = matrix(c_ptr, batch, c_batch, index, c_head)
    if not BACK:
        c = load_chunk(c_ptr, begin, c_token, tokens, col, DIM, CHUNK).to(ACC)
    found = tl.zeros((CHUNK, BLOCK_D), dtype=ACC)
    for member in range(group):
        head = index * group + member
        of_x = matrix(x_ptr, batch, x_batch, head, x_head)
        of_state = state_of(states_ptr, span, states_span, head, groups * group, group, batch, DIM, V_DIM)
        through = tl.zeros((CHUNK, BLOCK_D), dtype=ACC)
        for start in tl.static_range(0, V_DIM, BLOCK_V):
            v_col = start + tl.arange(0, BLOCK_V)
            x = load_chunk(of_x, begin, x_token, tokens, v_col, V_DIM, CHUNK)
            state = load_tile(of_state, col, group * V_DIM, DIM, v_col, V_DIM).to(dtype)
            through += tl.dot(x, tl.trans(state), input_precision="ieee", out_dtype=ACC)
        row = batch * groups * group + head
        own = factors_of(factors_ptr, row, chunk, tokens, CHUNK)
        s = tl.load(own)
        if BACK:
            end = last_sum(factors_ptr, row, behind - 1, tokens, CHUNK)
            through *= (tl.exp(end - s) * tl.load(own + CHUNK))[:, None]
        else:
            through *= tl.exp(s)[:, None]
            to = (row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * CHUNK
            tl.store(risen_ptr + to + at, tl.sum(through * c, axis=1))
        found += through
    line = line.to(tl.int64) * parts
    for n in tl.static_range(SPAN):
        later = chunk + n if BACK else chunk
        if (later < behind) & (later - n >= first):
            total = tl.zeros((CHUNK, CHUNK), dtype=ACC)
            for part in range(parts):
                tile = ((line + part) * tl.cdiv(tokens, CHUNK) + later) * SPAN + n
                of = d_similar_ptr + tile * (CHUNK * CHUNK)
                total += load_turned(of, CHUNK) if BACK else load_tile(of, at, CHUNK, CHUNK, at, CHUNK)
            if BACK:
                other = load_chunk(c_ptr, later * CHUNK, c_token, tokens, col, DIM, CHUNK)
            else:
                other = load_chunk(b_ptr, (later - n) * CHUNK, b_token, tokens, col, DIM, CHUNK)
            found += tl.dot(total.to(dtype), other, input_precision="ieee", out_dtype=ACC)
    to_ptr += (batch.to(tl.int64) * tokens * groups + index) * DIM
    store_rows(to_ptr, begin + at, groups * DIM, tokens, col, DIM, found)


@triton.jit
def load_sums(ptr, line, chunk, chunks, CHUNK: tl.constexpr, BLOCKS: tl.constexpr):
    """Of a chunk's tokens, over blocks of columns."""
    ptr += (line.to(tl.int64) * chunks + chunk) * (BLOCKS * CHUNK) + tl.arange(0, CHUNK)
    total = tl.load(ptr)
    for block in tl.static_range(1, BLOCKS):
        total += tl.load(ptr + block * CHUNK)
    return total


@triton.jit
def mamba2_backward_decays_kernel(
    a_ptr, factors_ptr, pairs_ptr, by_dt_ptr, given_ptr, written_ptr, skipped_ptr, risen_ptr,
    carried_ptr, ddt_ptr, totals_ptr,
    heads, tokens, passed,
    SPAN: tl.constexpr, ACC: tl.constexpr, CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr, READ: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    """One program: ddt of a head's chunk, and its share of dA and dD, ``totals`` [2, heads, batch, chunks].
    ``carried`` has so many blocks as are ``passed``, ``risen`` READ, the other sums BLOCKS. Grid: chunks x
    heads x batch."""
    batch, head, line = place(heads)
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    span, first, behind = span_of(chunk, tokens, SPAN, CHUNK)
    at = tl.arange(0, CHUNK)
    n = tl.arange(0, SPAN)
    parts = tl.arange(0, PASSED)
    spans = line.to(tl.int64) * tl.cdiv(tokens, SPAN * CHUNK) + span
    carried = tl.load(carried_ptr + spans * passed + parts, mask=parts < passed, other=0.0)
    passing = tl.sum(carried, axis=0)
    for before in range(1, chunk - first + 1):
        passing += tl.sum(load_sums(written_ptr, line, chunk - before, chunks, CHUNK, BLOCKS), axis=0)
    own = pairs_ptr + (line.to(tl.int64) * chunks + chunk) * (SPAN * CHUNK)
    of_pairs = n[:, None] * CHUNK + at[None, :]
    later_ones = load_sums(risen_ptr, line, chunk, chunks, CHUNK, READ)
    inside = (n > 0) & (n <= chunk - first)
    later_ones += tl.sum(tl.load(own + of_pairs, mask=inside[:, None], other=0.0), axis=0)
    earlier_ones = load_sums(written_ptr, line, chunk, chunks, CHUNK, BLOCKS)
    earlier_ones += load_sums(given_ptr, line, chunk, chunks, CHUNK, BLOCKS)
    for after in range(1, behind - chunk):
        passing += tl.sum(load_sums(risen_ptr, line, chunk + after, chunks, CHUNK, READ), axis=0)
        of = own + after * (SPAN * CHUNK)
        inside = (n > after) & (n <= chunk + after - first)
        passing += tl.sum(tl.sum(tl.load(of + of_pairs, mask=inside[:, None], other=0.0), axis=1), axis=0)
    behind_it = at[:, None] >= at[None, :]
    decays = tl.sum(tl.where(behind_it, later_ones[:, None], earlier_ones[:, None]), axis=0)
    decays += tl.load(own + at) + passing
    dt = tl.load(factors_of(factors_ptr, line, chunk, tokens, CHUNK) + CHUNK)
    ddt = decays * tl.load(a_ptr + head).to(ACC) + load_sums(by_dt_ptr, line, chunk, chunks, CHUNK, BLOCKS)
    row = chunk * CHUNK + at
    to = ddt_ptr + (batch.to(tl.int64) * tokens + row) * heads + head
    tl.store(to, ddt.to(ddt_ptr.dtype.element_ty), mask=row < tokens)
    share = (head.to(tl.int64) * tl.num_programs(2) + batch) * chunks + chunk
    tl.store(totals_ptr + share, tl.sum(decays * dt, axis=0))
    share += chunks.to(tl.int64) * heads * tl.num_programs(2)
    skipped = load_sums(skipped_ptr, line, chunk, chunks, CHUNK, BLOCKS)
    tl.store(totals_ptr + share, tl.sum(skipped, axis=0))
