# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Triton kernels of ``mamba2_chunk_scan.py``'s forward, whose symbols they share; its backward launches
the first three again.

The first computes what each span of chunks adds to a state of zeros, for all spans at once; the second goes
through the spans, element by element, and leaves the state before each in the place of what it adds; the
third makes C_i · B_j for a chunk's tokens and those of its own and earlier chunks of the span, once for all
heads of a group; the fourth computes the results from these and the state before the span. A head's states
are matrices [N, P] whose rows lie heads of a group x P apart. Products take the type of x and accumulate in
ACC, which ``similar`` [batch, groups, chunks, SPAN, CHUNK, CHUNK] is in: of a chunk with itself, with the one
before it, and so on. Tokens that a last chunk lacks are zeros that decay nothing.

With BACK the first two go the other way: what a span adds to the gradient of the state before it, with C for
B and the gradient of the results for x, and the gradient of the state behind each span.
"""

from megacompile.kernels._triton import tl, triton
from megacompile.kernels.attention_kernels import load_rows, matrix, place, store_rows, within


@triton.jit
def chunk_decays(dt_ptr, begin, dt_token, rate, tokens, ACC: tl.constexpr, CHUNK: tl.constexpr):
    """dt, c and z of a chunk."""
    at = tl.arange(0, CHUNK)
    row = begin + at
    dt = tl.load(dt_ptr + row.to(tl.int64) * dt_token, mask=row < tokens, other=0.0).to(ACC)
    c = tl.cumsum(dt * rate, axis=0)
    return dt, c, tl.sum(tl.where(at == CHUNK - 1, c, 0.0), axis=0)


@triton.jit
def load_chunk(ptr, begin, stride, tokens, col, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, col] of a matrix from row ``begin`` on, zero outside of it; CHUNK rows span less than 2**31."""
    at = tl.arange(0, CHUNK)
    inside = within(begin + at, tokens, col, COLUMNS)
    return tl.load(
        ptr + begin.to(tl.int64) * stride + (at[:, None] * stride + col[None, :]), mask=inside, other=0.0
    )


@triton.jit
def columns_of(V_DIM: tl.constexpr, BLOCK_V: tl.constexpr):
    """(what this program is the first columns of, its columns): blocks of columns follow each other."""
    blocks: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    return tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)


@triton.jit
def state_of(ptr, span, states_span, head, heads, group, batch, DIM: tl.constexpr, V_DIM: tl.constexpr):
    """Where a head's state of a span is."""
    first = (batch.to(tl.int64) * heads + head // group * group) * DIM + head % group
    return ptr + span.to(tl.int64) * states_span + first * V_DIM


@triton.jit
def factors_of(ptr, line, chunk, tokens, CHUNK: tl.constexpr):
    """Where a head's ``factors`` of a chunk's tokens are."""
    number = line.to(tl.int64) * tl.cdiv(tokens, CHUNK) + chunk
    return ptr + number * (3 * CHUNK) + tl.arange(0, CHUNK)


@triton.jit
def mamba2_states_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, states_ptr, decays_ptr, factors_ptr,
    x_batch, x_token, x_head, dt_batch, dt_token, dt_head, b_batch, b_token, b_head,
    states_span, heads, group, tokens,
    BACK: tl.constexpr, SPAN: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of what a span adds to a head's state, and the span's decay; with BACK
    also ``factors`` [batch, heads, chunks, 3, CHUNK]: the sum of A dt from the span's begin, dt, and dt exp(z
    - c). Grid: (spans and blocks of columns) x heads x batch."""
    batch, head, line = place(heads)
    span, v_col = columns_of(V_DIM, BLOCK_V)
    col = tl.arange(0, BLOCK_D)
    x_ptr = matrix(x_ptr, batch, x_batch, head, x_head)
    b_ptr = matrix(b_ptr, batch, b_batch, head // group, b_head)
    dt_ptr = matrix(dt_ptr, batch, dt_batch, head, dt_head)
    rate = tl.load(a_ptr + head).to(ACC)
    state = tl.zeros((BLOCK_D, BLOCK_V), dtype=ACC)
    passed = rate * 0
    chunks = tl.minimum(tl.cdiv(tokens, CHUNK) - span * SPAN, SPAN)
    for n in range(chunks):
        chunk = span * SPAN + (n if BACK else chunks - 1 - n)
        begin = chunk * CHUNK
        dt, c, z = chunk_decays(dt_ptr, begin, dt_token, rate, tokens, ACC, CHUNK)
        if BACK:
            weight = tl.exp(c + passed)
            to = factors_of(factors_ptr, line, chunk, tokens, CHUNK)
            tl.store(to, c + passed)
            tl.store(to + CHUNK, dt)
            tl.store(to + 2 * CHUNK, dt * tl.exp(z - c))
        else:
            weight = dt * tl.exp(z - c + passed)
        b = load_chunk(b_ptr, begin, b_token, tokens, col, DIM, CHUNK)
        x = load_chunk(x_ptr, begin, x_token, tokens, v_col, V_DIM, CHUNK)
        written = (x.to(ACC) * weight[:, None]).to(x.dtype)
        state += tl.dot(tl.trans(b), written, input_precision="ieee", out_dtype=ACC)
        passed += z
    to = state_of(states_ptr, span, states_span, head, heads, group, batch, DIM, V_DIM)
    store_rows(to, col, group * V_DIM, DIM, v_col, V_DIM, state)
    spans = tl.cdiv(tokens, SPAN * CHUNK)
    tl.store(decays_ptr + line.to(tl.int64) * spans + span, tl.exp(passed))


@triton.jit
def mamba2_pass_kernel(
    states_ptr, decays_ptr, kept_ptr, carried_ptr, states_span, heads, group, spans,
    BACK: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK elements of a head's state through all spans. With BACK also what a span's decay
    gets by the state that it carries, the forward's being ``kept``; in parts, [batch, heads, spans, blocks].
    Grid: blocks x heads x batch."""
    batch, head, line = place(heads)
    block = tl.program_id(0)
    element = block * BLOCK + tl.arange(0, BLOCK)
    inside = element < DIM * V_DIM
    offset = element // V_DIM * group * V_DIM + element % V_DIM
    first = line.to(tl.int64) * spans
    state = tl.zeros((BLOCK,), dtype=ACC)
    for n in range(spans):
        span = block * 0 + (spans - 1 - n if BACK else n)
        at = state_of(states_ptr, span, states_span, head, heads, group, batch, DIM, V_DIM) + offset
        added = tl.load(at, mask=inside, other=0.0)
        tl.store(at, state, mask=inside)
        decay = tl.load(decays_ptr + first + span)
        state *= decay
        if BACK:
            of = state_of(kept_ptr, span, states_span, head, heads, group, batch, DIM, V_DIM) + offset
            carried = tl.sum(state * tl.load(of, mask=inside, other=0.0), axis=0)
            tl.store(carried_ptr + (first + span) * tl.num_programs(0) + block, carried)
        state += added


@triton.jit
def mamba2_scores_kernel(
    b_ptr, c_ptr, similar_ptr,
    b_batch, b_token, b_head, c_batch, c_token, c_head,
    groups, tokens,
    SPAN: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: a chunk of one group with itself, or with one before it in its span. Grid: (chunks and
    SPAN) x groups x batch."""
    batch, group, line = place(groups)
    chunk = tl.program_id(0) // SPAN
    n = SPAN - 1 - tl.program_id(0) % SPAN
    if n <= chunk % SPAN:
        at = tl.arange(0, CHUNK)
        col = tl.arange(0, BLOCK_D)
        b_ptr = matrix(b_ptr, batch, b_batch, group, b_head)
        c_ptr = matrix(c_ptr, batch, c_batch, group, c_head)
        read = load_chunk(c_ptr, chunk * CHUNK, c_token, tokens, col, DIM, CHUNK)
        b = load_chunk(b_ptr, (chunk - n) * CHUNK, b_token, tokens, col, DIM, CHUNK)
        similar = tl.dot(read, tl.trans(b), input_precision="ieee", out_dtype=ACC)
        to = line.to(tl.int64) * tl.num_programs(0) + chunk * SPAN + n
        store_rows(similar_ptr + to * (CHUNK * CHUNK), at, CHUNK, CHUNK, at, CHUNK, similar)


@triton.jit
def mamba2_scan_kernel(
    x_ptr, dt_ptr, a_ptr, c_ptr, d_ptr, similar_ptr, states_ptr, out_ptr,
    x_batch, x_token, x_head, dt_batch, dt_token, dt_head, c_batch, c_token, c_head,
    out_batch, out_token, out_head,
    states_span, heads, group, tokens,
    SPAN: tl.constexpr, ACC: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V columns of a head's results of a chunk. Grid: (chunks and blocks of columns) x
    heads x batch."""
    batch, head, _ = place(heads)
    chunk, v_col = columns_of(V_DIM, BLOCK_V)
    at = tl.arange(0, CHUNK)
    col = tl.arange(0, BLOCK_D)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_ptr = matrix(x_ptr, batch, x_batch, head, x_head)
    dt_ptr = matrix(dt_ptr, batch, dt_batch, head, dt_head)
    rate = tl.load(a_ptr + head).to(ACC)
    begin = chunk * CHUNK
    span = chunk // SPAN
    row = span * SPAN * CHUNK + tl.arange(0, SPAN * CHUNK)
    dt = tl.load(dt_ptr + row.to(tl.int64) * dt_token, mask=row < begin, other=0.0).to(ACC)
    before = tl.sum(dt * rate, axis=0)
    dt, own, _ = chunk_decays(dt_ptr, begin, dt_token, rate, tokens, ACC, CHUNK)
    c_ptr = matrix(c_ptr, batch, c_batch, head // group, c_head)
    read = load_chunk(c_ptr, begin, c_token, tokens, col, DIM, CHUNK)
    of = state_of(states_ptr, span, states_span, head, heads, group, batch, DIM, V_DIM)
    state = load_rows(of, col, group * V_DIM, DIM, v_col, V_DIM).to(dtype)
    out = tl.dot(read, state, input_precision="ieee", out_dtype=ACC) * tl.exp(own + before)[:, None]
    line = (batch.to(tl.int64) * (heads // group) + head // group) * tl.cdiv(tokens, CHUNK) + chunk
    similar_ptr += line * (SPAN * CHUNK * CHUNK)
    scores = load_rows(similar_ptr, at, CHUNK, CHUNK, at, CHUNK)
    scores *= tl.exp(tl.where(at[:, None] >= at[None, :], own[:, None] - own[None, :], float("-inf")))
    x = load_chunk(x_ptr, begin, x_token, tokens, v_col, V_DIM, CHUNK)
    out += tl.dot((scores * dt[None, :]).to(dtype), x, input_precision="ieee", out_dtype=ACC)
    out += x.to(ACC) * tl.load(d_ptr + head).to(ACC)
    between = rate * 0
    for n in range(1, chunk - span * SPAN + 1):
        begin_n = begin - n * CHUNK
        dt, c, z = chunk_decays(dt_ptr, begin_n, dt_token, rate, tokens, ACC, CHUNK)
        scores = load_rows(similar_ptr + n * (CHUNK * CHUNK), at, CHUNK, CHUNK, at, CHUNK)
        scores *= tl.exp(own + between)[:, None] * (dt * tl.exp(z - c))[None, :]
        x = load_chunk(x_ptr, begin_n, x_token, tokens, v_col, V_DIM, CHUNK)
        out += tl.dot(scores.to(dtype), x, input_precision="ieee", out_dtype=ACC)
        between += z
    out_ptr = matrix(out_ptr, batch, out_batch, head, out_head)
    store_rows(out_ptr, begin + at, out_token, tokens, v_col, V_DIM, out)
