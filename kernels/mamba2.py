# mypy: allow-untyped-defs, allow-incomplete-defs
"""Mamba-2's scan, the state space dual (Dao and Gu 2024, arXiv:2405.21060), as its models compute it.

Each head has a state S [N, P], zero at first, and for each token t

    S = exp(A dt_t) S + dt_t B_t x_t^T        out_t = S^T C_t + D x_t

x: [B, T, H, P]. dt: [B, T, H], not negative. A, D: [H], A negative. B, C: [B, T, G, N], G dividing H. out:
[B, T, H, P]. Computed in float32 (float64 for float64 x), as is out: the models norm it before they round
it. Saves the inputs and the states before every 256th token.

Tokens are taken in chunks of 64. With c the sum of A dt from a chunk's start, z its last, u = dt x, and S
the state before the chunk:

    out = tril(C B^T * exp(c_i - c_j)) u + exp(c) C S + D x        S' = exp(z) S + B^T (exp(z - c) u)

so that all but S is a product of matrices. In torch C B^T, C S and the last product take all heads of a
group at once. On bfloat16 the forward is four kernels: what each span of 256 tokens adds to a state, the
states before the spans, C B^T of the pairs of a span, and the results. Traffic, where B and C stay in the
cache: x twice, out once; states, float32, four times; C B^T, 256 float32 for each token and group, twice.

The backward is eight, behind a copy of the gradient of out in x's type: the first two from right to left,
for the gradients of the states behind the spans, and C B^T again; then dx; the gradient of C B^T, and what
pairs give to decays; dC; dB; ddt. Traffic: x, dx and that copy nine times, the gradient of out once; states
seven times, C B^T three times, its gradient three times for each 16 heads; and about 30 float32 for each
token and head.

**In plain torch** the operator takes a few chunks of tokens at a time, from left to right and back.
Within a span of chunks everything but the state is computed for all chunks at once; the state goes from one
to the next. A forward keeps the state before each span, from which the backward computes the rest again.
Tensors of a span are [chunks, batch, groups, CHUNK, ...], wide. The heads of a group and P come last, so
that a product with B or C takes all of them at once.

**The Triton kernels of the forward**; the backward launches the first three again.

The first computes what each span of chunks adds to a state of zeros, for all spans at once; the second goes
through the spans, element by element, and leaves the state before each in the place of what it adds; the
third makes C_i · B_j for a chunk's tokens and those of its own and earlier chunks of the span, once for all
heads of a group; the fourth computes the results from these and the state before the span. A head's states
are matrices [N, P] whose rows lie heads of a group x P apart. Products take the type of x and accumulate in
ACC, which ``similar`` [batch, groups, chunks, SPAN, CHUNK, CHUNK] is in: of a chunk with itself, with the
one before it, and so on. Tokens that a last chunk lacks are zeros that decay nothing.

With BACK the first two go the other way: what a span adds to the gradient of the state before it, with C
for B and the gradient of the results for x, and the gradient of the state behind each span.

**The Triton kernels of the backward** keep the forward's conventions.

The forward's kernels go before: the second leaves the gradient dS' of the state behind every span, the
first ``factors`` on its way. Then one makes the gradient of x, one that of C B^T and what pairs give to
decays, one those of C and of B, and one that of dt. With s the sum of A dt from a span's begin, e its last,
i >= j tokens of the span, and dX the gradient of X:

    du_j = sum_i C_i·B_j exp(s_i - s_j) dout_i + exp(e - s_j) dS'^T B_j         dx = dt du + D dout
    d(C B^T)_ij = sum of a group's heads of exp(s_i - s_j) dout_i·u_j
    dC_i = sum_j d(C B^T)_ij B_j + sum of heads of exp(s_i) S dout_i
    dB_j = sum_i d(C B^T)_ij C_i + sum of heads of exp(e - s_j) dS' u_j

To the decay of a token come all that passes it: pairs i >= t > j of its span, what is read of the state at
it or behind it, what is written before it, and the state that the span carries. These are sums, never
differences of sums, which would lose digits where most of a pair's gradient is its token's own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile.kernels._triton import (
    accumulator,
    arch_of,
    ceil_div,
    launch,
    next_power_of_2,
    on_gpu,
    runs_triton,
    tl,
    triton,
    wide,
)
from megacompile.kernels.attention import load_rows, matrix, place, store_rows, within
from megacompile.kernels.eager_form import EagerForm, Shape, normal
from megacompile.kernels.gated_delta import load_tile
from megacompile.kernels.registry import Arguments, OpPass, OpSpec, declare
from megacompile.kernels.token_chunks import decays, dense_tokens, in_chunks, out_of_chunks, token_strides

CHUNK = 64  # tokens that see each other by scores, and earlier ones through the state
SPAN = 4 * CHUNK  # tokens between two states that are kept


@dataclass(frozen=True, eq=False)
class ScanInputs:
    """The operator's arguments."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor

    def spans(self) -> Iterator[slice]:
        """The tokens of each span."""
        length = self.x.shape[1]
        return (slice(start, min(start + SPAN, length)) for start in range(0, length, SPAN))

    @property
    def states_shape(self) -> tuple[int, ...]:
        """The shape of all states that are kept: [spans, batch, groups, N, heads of each, P]."""
        batch, tokens, heads, width = self.x.shape
        groups, inner = self.B.shape[2:]
        return ceil_div(tokens, SPAN), batch, groups, inner, heads // groups, width

    def by_group(self, x: Tensor) -> Tensor:
        """A number of each head as [groups, 1, heads of each], wide."""
        return x.to(wide(self.x.dtype)).view(self.B.shape[2], 1, -1)


@dataclass(frozen=True, eq=False)
class ScanSpan:
    """The values that a span's forward and backward both read; c is the sum of A dt from a chunk's start, z
    its last."""

    x: Tensor  # [..., CHUNK, heads, P]
    dt: Tensor  # [..., CHUNK, heads], as ``risen`` and ``falling``
    B: Tensor  # [..., CHUNK, N], as C
    C: Tensor
    similar: Tensor  # C_i · B_j
    decay: Tensor  # exp(c_i - c_j), i >= j; [..., heads, CHUNK, CHUNK]
    risen: Tensor  # exp(c)
    falling: Tensor  # exp(z - c)

    @property
    def carried(self) -> Tensor:
        """exp(z), by which a chunk decays the state."""
        return self.risen[..., -1:, :, None]

    @property
    def scores(self) -> Tensor:
        """Return what a token reads of those of its chunk."""
        return self.similar.unsqueeze(3) * self.decay


def _chunks_of_groups(x: Tensor, part: slice, groups: int) -> Tensor:
    """The tokens of [batch, tokens, heads, ...] in chunks, the last one filled up with zeros."""
    x = x[:, part].to(wide(x.dtype))
    if x.shape[1] % CHUNK:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % CHUNK))
    batch, tokens, heads, *rest = x.shape
    x = x.reshape(batch, tokens // CHUNK, CHUNK, groups, heads // groups, *rest)
    return x.permute(1, 0, 3, 2, *range(4, x.dim())).contiguous()


def _tokens_of_groups(x: Tensor, length: int) -> Tensor:
    """The opposite of ``_chunks_of_groups``: [batch, length, heads, ...]."""
    x = x.permute(1, 0, 3, 2, *range(4, x.dim()))
    return x.flatten(3, 4).flatten(1, 2)[:, :length]


def _differences(c: Tensor) -> Tensor:
    """Return the differences of the numbers c_i, c_j of two tokens, by heads."""
    column = c.mT.unsqueeze(-1)
    return column - column.mT


def _scan_span(given: ScanInputs, part: slice) -> ScanSpan:
    groups = given.B.shape[2]
    x, dt = (_chunks_of_groups(t, part, groups) for t in (given.x, given.dt))
    B, C = (_chunks_of_groups(t, part, groups).squeeze(4) for t in (given.B, given.C))
    exact = (dt * given.by_group(given.A)).double().cumsum(-2)
    c = exact.to(dt.dtype)
    decay = _differences(c).add_(_differences((exact - c).to(dt.dtype)))
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    decay = decay.masked_fill_(above, float("-inf")).exp_()
    falling = (exact[..., -1:, :] - exact).to(dt.dtype).exp()
    return ScanSpan(x, dt, B, C, C @ B.mT, decay, c.exp(), falling)


def _by_head(x: Tensor) -> Tensor:
    """Tokens and heads change places: for products of a head's tokens."""
    return x.transpose(3, 4)


def _through(products: Tensor, carried: Tensor, state: Tensor, *, back: bool = False) -> Tensor:
    """Replace what each chunk adds to a state by the state before it adds; returns the last one."""
    order = range(len(products))
    for n in reversed(order) if back else order:
        following = torch.addcmul(products[n], state, carried[n])
        products[n] = state
        state = following
    return state


def _span_states(span: ScanSpan, written: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Before each chunk [chunks, batch, groups, N, heads, P], and behind the last."""
    states = (span.B.mT @ written.flatten(-2)).view(*span.B.shape[:3], -1, *written.shape[-2:])
    return states, _through(states, span.carried, state)


def forward_reference(given: ScanInputs) -> tuple[Tensor, Tensor]:
    """(out, states before each span)."""
    out = given.x.new_empty(given.x.shape, dtype=wide(given.x.dtype))
    kept = out.new_empty(given.states_shape)
    state = out.new_zeros(given.states_shape[1:])
    skip = given.by_group(given.D).unsqueeze(-1)
    for index, part in enumerate(given.spans()):
        kept[index] = state
        span = _scan_span(given, part)
        u = span.x * span.dt[..., None]
        states, state = _span_states(span, u * span.falling[..., None], state)
        found = (span.C @ states.flatten(-2)).view(u.shape) * span.risen[..., None]
        found += _by_head(span.scores @ _by_head(u))
        found += span.x * skip
        out[:, part] = _tokens_of_groups(found, part.stop - part.start)
    return out, kept


def backward_reference(grad: Tensor, given: ScanInputs, kept: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x, dt, A, B, C, D."""
    of_tokens = [torch.empty_like(t).contiguous() for t in (given.x, given.dt, given.B, given.C)]
    rates, skip = given.by_group(given.A), given.by_group(given.D)
    d_rates, d_skip = torch.zeros_like(rates), torch.zeros_like(skip)
    d_state = kept.new_zeros(given.states_shape[1:])
    for index, part in reversed(list(enumerate(given.spans()))):
        span = _scan_span(given, part)
        d_out = _chunks_of_groups(grad, part, given.B.shape[2])
        found = _gradients(span, d_out, kept[index], d_state)
        d_state = found.state
        d_rates += (found.decays * span.dt).sum((0, 1, 3)).unsqueeze(1)
        d_skip += _dot(d_out, span.x).sum((0, 1, 3)).unsqueeze(1)
        gradients = (
            found.u * span.dt[..., None] + d_out * skip[..., None],
            found.decays * rates + _dot(found.u, span.x),
            found.B.unsqueeze(4),
            found.C.unsqueeze(4),
        )
        for to, gradient in zip(of_tokens, gradients, strict=True):
            to[:, part] = _tokens_of_groups(gradient, part.stop - part.start)
    d_x, d_dt, d_B, d_C = of_tokens
    d_A, d_D = (d.flatten().to(t.dtype) for d, t in ((d_rates, given.A), (d_skip, given.D)))
    return d_x, d_dt, d_A, d_B, d_C, d_D


@dataclass(frozen=True, eq=False)
class Gradients:
    """Those of a span's B, C, u = dt x and A dt (``decays``), and of the state before it."""

    B: Tensor
    C: Tensor
    u: Tensor
    decays: Tensor
    state: Tensor


def _gradients(span: ScanSpan, d_out: Tensor, state: Tensor, d_state: Tensor) -> Gradients:
    u = span.x * span.dt[..., None]
    d_u, d_similar, decays = _by_scores(span, u, d_out)
    written = u * span.falling[..., None]
    states, _ = _span_states(span, written, state)
    d_read = d_out * span.risen[..., None]
    risen = _dot(d_read, (span.C @ states.flatten(-2)).view(u.shape))
    d_C = d_similar @ span.B + d_read.flatten(-2) @ states.flatten(-2).mT
    d_states = (span.C.mT @ d_read.flatten(-2)).view(states.shape)
    before = _through(d_states, span.carried, d_state, back=True)
    d_B = d_similar.mT @ span.C + written.flatten(-2) @ d_states.flatten(-2).mT
    d_written = (span.B @ d_states.flatten(-2)).view(u.shape)
    fallen = _dot(d_written, written)
    # c_i holds the decays of all tokens up to i, z - c_i those behind i, z all
    decays += risen.flip(-2).cumsum(-2).flip(-2) + (fallen.cumsum(-2) - fallen)
    decays += (d_states * states).sum((3, 5)).unsqueeze(3) * span.carried.squeeze(-1)
    return Gradients(d_B, d_C, d_u + d_written * span.falling[..., None], decays, before)


def _by_scores(span: ScanSpan, u: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the tokens of a chunk give each other: gradients of u, of C B^T, and of A dt."""
    d_u = _by_head(span.scores.mT @ _by_head(d_out))
    d_scores = (_by_head(d_out) @ _by_head(u).mT).mul_(span.decay)
    d_similar = d_scores.sum(3)
    return d_u, d_similar, _pairs_across(d_scores.mul_(span.similar.unsqueeze(3)))


def _pairs_across(pairs: Tensor) -> Tensor:
    """To each token's decay the sum of the pairs i, j that it lies between, i >= t > j.

    Sums of rows less sums of columns would lose digits where most of a pair's gradient is its token's own.
    """
    before = pairs.cumsum(-1).tril_(-1).sum(-2)
    return F.pad(before[..., :-1], (1, 0)).mT


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Over the last dimension."""
    return (a * b).sum(-1)


def eager(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Mamba-2's scan; shapes and formulas are those of ``kernels/mamba2.py``."""
    tokens, heads = x.shape[1:3]
    skip = D[:, None] * x.to(wide(x.dtype))
    x, B, C = (in_chunks(y, SPAN, heads) for y in (x, B, C))
    dt = in_chunks(dt, SPAN, heads)
    c = (dt * A[:, None, None]).cumsum(-1)
    z, x = c[..., -1:], x * dt[..., None]
    added = (B * (z - c).exp()[..., None]).mT @ x
    state = torch.zeros_like(added[:, :, 0])
    states = []
    for carried, more in zip(z.exp()[..., None].unbind(2), added.unbind(2), strict=True):
        states.append(state)
        state = state * carried + more
    out = (C @ B.mT * decays(c)) @ x + c.exp()[..., None] * (C @ torch.stack(states, 2))
    return out_of_chunks(out, tokens) + skip


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
    """Return a pointer to a head's state of a span."""
    first = (batch.to(tl.int64) * heads + head // group * group) * DIM + head % group
    return ptr + span.to(tl.int64) * states_span + first * V_DIM


@triton.jit
def factors_of(ptr, line, chunk, tokens, CHUNK: tl.constexpr):
    """Return pointers to a head's ``factors`` of a chunk's tokens."""
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
    """Load the sums of a chunk's tokens over blocks of columns."""
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


MAX_WIDTH = 256  # of B and C
_PASSED = 1024  # elements of a state that a program takes through the spans
PART = 16  # heads whose pairs a program adds up
_WARPS = {86: 8, 89: 8, 120: 8}  # of the first kernel, which spills there with four
_SMALL_ARCHS = 80, 86, 89, 120  # where pairs, dB and dC of wide x spill unless loads run ahead
MAX_GRID = 65535  # CUDA's, beyond the first dimension


def _all_dense(given: ScanInputs) -> ScanInputs:
    x, B, C = (dense_tokens(t, CHUNK) for t in (given.x, given.B, given.C))
    return ScanInputs(x, given.dt, given.A.contiguous(), B, C, given.D.contiguous())


def _columns(width: int, most: int = 64) -> int:
    """Return the number of columns that a program takes at a time."""
    return min(most, max(16, next_power_of_2(width)))


def _span_sizes(given: ScanInputs) -> dict[str, Any]:
    """Constants that kernels share which go through chunks of a span."""
    return {"ACC": accumulator(given.x.dtype), "SPAN": SPAN // CHUNK, "CHUNK": CHUNK}


def _column_sizes(given: ScanInputs, most: int = MAX_WIDTH, stages: int = 2) -> dict[str, Any]:
    """The same, with columns of B and C."""
    inner = given.B.shape[3]
    return {"DIM": inner, "BLOCK_D": _columns(inner, most), "num_stages": stages, **_span_sizes(given)}


def _launch_states(
    x: Tensor, B: Tensor, given: ScanInputs, kept: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Before each span, of what is written by x along B. With ``kept``, those of the forward: the gradients
    of the states behind each span, of what is read by x along B; ``factors``, and ``carried``."""
    batch, tokens, heads, width = x.shape
    back = kept is not None
    states = x.new_empty(given.states_shape, dtype=wide(x.dtype))
    decays = states.new_empty(batch, heads, len(states))
    sizes = _column_sizes(given)
    blocks = ceil_div(sizes["DIM"] * width, _PASSED)
    factors = states.new_empty(batch, heads, ceil_div(tokens, CHUNK), 3, CHUNK) if back else decays
    carried = states.new_empty(batch, heads, len(states), blocks) if back else decays
    columns = _columns(width, 32 if sizes["BLOCK_D"] > 128 else 64)  # held in registers
    of_heads = states.stride(0), heads, heads // B.shape[2]
    launch(
        mamba2_states_kernel,
        (len(states) * ceil_div(width, columns), heads, batch),
        *(x, given.dt, given.A, B, states, decays, factors),
        *(*token_strides(x, given.dt, B), *of_heads, tokens),
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


def _scores(given: ScanInputs) -> Tensor:
    """C B^T of the pairs of each span."""
    batch, tokens, groups, _ = given.B.shape
    chunks, span = ceil_div(tokens, CHUNK), SPAN // CHUNK
    similar = given.B.new_empty(batch, groups, chunks, span, CHUNK, CHUNK, dtype=wide(given.B.dtype))
    launch(
        mamba2_scores_kernel,
        (chunks * span, groups, batch),
        *(given.B, given.C, similar, *token_strides(given.B, given.C), groups, tokens),
        **_column_sizes(given),
    )
    return similar


def forward_triton(given: ScanInputs) -> tuple[Tensor, Tensor]:
    """(out, states before each span)."""
    given = _all_dense(given)
    x, C = given.x, given.C
    batch, tokens, heads, width = x.shape
    states, *_ = _launch_states(x, given.B, given)
    out, similar, columns = states.new_empty(x.shape), _scores(given), _columns(width)
    launch(
        mamba2_scan_kernel,
        (ceil_div(tokens, CHUNK) * ceil_div(width, columns), heads, batch),
        *(x, given.dt, given.A, C, given.D, similar, states, out),
        *(*token_strides(x, given.dt, C, out), states.stride(0), heads, heads // C.shape[2], tokens),
        V_DIM=width,
        BLOCK_V=columns,
        **_column_sizes(given),
    )
    return out, states


def backward_triton(grad: Tensor, given: ScanInputs, states: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x, dt, A, B, C, D; that of the results is rounded to x's type, which products take."""
    given, grad, states = _all_dense(given), dense_tokens(grad.to(given.x.dtype), CHUNK), states.contiguous()
    behind, factors, carried = _launch_states(grad, given.C, given, states)
    similar = _scores(given)
    d_x, sums = _launch_x(grad, given, similar, factors, behind)
    d_similar, pairs = _launch_pairs(grad, given, similar, factors)
    d_C, risen = _launch_groups(grad, given, d_similar, factors, states, back=False)
    d_B, _ = _launch_groups(given.x, given, d_similar, factors, behind, back=True)
    d_dt, totals = _launch_decays(given, factors, pairs, sums, risen, carried)
    d_A, d_D = (t.sum((1, 2)).to(x.dtype) for t, x in zip(totals, (given.A, given.D), strict=True))
    return d_x, d_dt, d_A, d_B, d_C, d_D


def _launch_x(
    grad: Tensor, given: ScanInputs, similar: Tensor, factors: Tensor, behind: Tensor
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
        *(*token_strides(given.x, given.B, grad), behind.stride(0), heads, heads // given.B.shape[2], tokens),
        V_DIM=width,
        BLOCK_V=columns,
        **_column_sizes(given, 32, stages=1),
    )
    return d_x, sums


def _launch_pairs(grad: Tensor, given: ScanInputs, similar: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """d(C B^T) of parts of a group's heads, and what decays of each head get by pairs."""
    batch, tokens, heads, width = given.x.shape
    groups, chunks, span = similar.shape[1:4]
    parts = ceil_div(heads // groups, PART)
    d_similar = similar.new_empty(batch, groups * parts, *similar.shape[2:])
    pairs = similar.new_empty(batch, heads, chunks, span, CHUNK)
    launch(
        mamba2_backward_pairs_kernel,
        (chunks * span, groups * parts, batch),
        *(given.x, grad, similar, factors, d_similar, pairs, *token_strides(given.x, grad)),
        *(groups * parts, heads, heads // groups, tokens),
        PART=PART,
        V_DIM=width,
        BLOCK_V=_columns(width),
        num_stages=2 if arch_of(similar) in _SMALL_ARCHS else 1,
        **_span_sizes(given),
    )
    return d_similar, pairs


def _launch_groups(
    x: Tensor, given: ScanInputs, d_similar: Tensor, factors: Tensor, states: Tensor, *, back: bool
) -> tuple[Tensor, Tensor]:
    """dC and what is read of the states, or ``back`` dB."""
    batch, tokens, groups, inner = given.B.shape
    heads, width = x.shape[2:]
    columns, ahead = _columns(inner), width > 64 and arch_of(x) in _SMALL_ARCHS
    blocks, chunks = ceil_div(inner, columns), factors.shape[2]
    found = given.B.new_empty(given.B.shape)
    risen = factors if back else factors.new_empty(batch, heads, chunks, blocks, CHUNK)
    launch(
        mamba2_backward_groups_kernel,
        (chunks * blocks, groups, batch),
        *(x, given.B, given.C, d_similar, factors, states, found, risen),
        *(*token_strides(x, given.B, given.C), states.stride(0)),
        *(groups, heads // groups, d_similar.shape[1] // groups, tokens),
        BACK=back,
        V_DIM=width,
        BLOCK_V=_columns(width, 32 if ahead else 64),
        **_column_sizes(given, columns, stages=2 if ahead else 1),
    )
    return found, risen


def _launch_decays(
    given: ScanInputs, factors: Tensor, pairs: Tensor, sums: Tensor, risen: Tensor, carried: Tensor
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
        **_span_sizes(given),
    )
    return d_dt, totals


def runs_kernels(x: Tensor, B: Tensor, C: Tensor) -> bool:
    """Return whether forward and backward launch kernels: B and C up to 256 wide, a grid and states that fit;
    on a GPU, bfloat16.

    float16 lacks the range for long memories; exact float32 products pass by the tensor cores.
    """
    same = x.dtype == B.dtype == C.dtype and x.dtype != torch.float16
    batch, _, heads, width = x.shape
    fits = max(batch, heads) <= MAX_GRID and batch * heads < 1 << 31 and heads * width * MAX_WIDTH < 1 << 31
    fits &= B.shape[3] <= MAX_WIDTH and x.numel() > 0
    return runs_triton(x) and same and fits and (x.dtype == torch.bfloat16 or not on_gpu(x))


@torch.library.custom_op("megacompile::mamba2_chunk_scan", mutates_args=())
def mamba2_chunk_scan_op(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, states that the backward starts from); see the module's docstring."""
    run = forward_triton if runs_kernels(x, B, C) else forward_reference
    return run(ScanInputs(x, dt, A, B, C, D))


@torch.library.custom_op("megacompile::mamba2_chunk_scan_backward", mutates_args=())
def mamba2_chunk_scan_backward_op(
    grad: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, dt, A, B, C, D."""
    run = backward_triton if runs_kernels(x, B, C) else backward_reference
    d_x, d_dt, d_A, d_B, d_C, d_D = run(grad, ScanInputs(x, dt, A, B, C, D), states)
    return d_x, d_dt, d_A, d_B, d_C, d_D


@mamba2_chunk_scan_op.register_fake
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape, dtype=wide(x.dtype))
    return out, out.new_empty(ScanInputs(x, *rest).states_shape)


@mamba2_chunk_scan_backward_op.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:6])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = mamba2_chunk_scan_backward_op(grad, *ctx.saved_tensors)
    return found


mamba2_chunk_scan_op.register_autograd(_backward, setup_context=_setup)


def mamba2_chunk_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """out, differentiable in all inputs."""
    out: Tensor = mamba2_chunk_scan_op(x, dt, A, B, C, D)[0]
    return out


def mamba2_chunk_scan_flops(
    x: Any, dt: Any, A: Any, B: Any, *_: Any, out_val: Any = None, products: Any = (1, 1, 2), **__: Any
) -> int:
    """Those of the products: so many, for each token, of its chunk's tokens with N of each group, with P of
    each head, and of N with P of each head."""
    batch, tokens, heads, width = x
    groups, inner = B[2:]
    of_groups, of_heads, of_states = products
    each = of_groups * CHUNK * inner * groups
    each += heads * width * (of_heads * CHUNK + of_states * inner)
    return int(2 * batch * ceil_div(tokens, CHUNK) * CHUNK * each)


def mamba2_chunk_scan_backward_flops(
    grad: Any, x: Any, dt: Any, A: Any, B: Any, *_: Any, out_val: Any = None, **__: Any
) -> int:
    """The same, of the forward's scores and states once more and of the gradients."""
    return mamba2_chunk_scan_flops(x, dt, A, B, products=(3, 2, 6))


def _runs_kernels(given: Arguments) -> bool:
    return runs_kernels(given["x"], given["B"], given["C"])


def _launches(backward: bool, kernels: int, by_span: int, by_chunk: int) -> Callable[[Arguments], int]:
    """Count our kernels, the gradient's copy and sums of tokens among them, with copies of what they do not
    take as it lies; or in plain torch launches for each span of tokens, and for each chunk."""

    def count(given: Arguments) -> int:
        if _runs_kernels(given):
            copies: int = sum(given[name].stride(-1) != 1 for name in "xBC")
            rounded: int = sum(given[name].dtype != torch.float32 for name in "AD")
            return kernels + copies + backward * rounded
        tokens = given["x"].shape[1]
        return by_span * ceil_div(tokens, SPAN) + by_chunk * ceil_div(tokens, CHUNK)

    return count


def _moved(scores: int, heads: int, states: int, groups: int) -> Callable[[Arguments], int]:
    """Count the bytes of plain torch: how often numbers of these sizes are moved for each token."""

    def count(given: Arguments) -> int:
        if _runs_kernels(given):
            return 0
        batch, tokens, of_heads, width = given["x"].shape
        of_groups, inner = given["B"].shape[2:]
        each = of_heads * (scores * CHUNK + heads * width) + states * (of_heads * width * inner // CHUNK)
        each += groups * of_groups * inner
        return int(batch * ceil_div(tokens, CHUNK) * CHUNK * each * wide(given["x"].dtype).itemsize)

    return count


def _inputs(shape: Shape, g: torch.Generator) -> list[Tensor]:
    batch, groups, heads, tokens, width, inner = shape
    B, C = (normal(g, batch, tokens, groups, inner) for _ in range(2))
    dt, A = F.softplus(normal(g, batch, tokens, heads)), -normal(g, heads).exp()
    return [normal(g, batch, tokens, heads, width), dt, A, B, C, normal(g, heads)]


def _shape_of(shapes: Sequence[Shape], constants: Sequence[str]) -> Shape:
    (batch, tokens, heads, width), _, _, (*_, groups, inner) = shapes[:4]
    return batch, groups, heads, tokens, width, inner


declare(
    OpSpec(
        "mamba2_chunk_scan",
        OpPass(
            mamba2_chunk_scan_flops,
            _launches(False, 4, 41, 2),
            _moved(13, 25, 6, 10),
            teraflops=47,  # 1 × 4,096 tokens, 128 heads 64 wide, 8 groups of B and C 128 wide: 0.466 ms
        ),
        OpPass(
            mamba2_chunk_scan_backward_flops,
            _launches(True, 11, 94, 4),
            _moved(24, 48, 15, 25),
            teraflops=53,  # 1.163 ms
        ),
        runs_kernels=_runs_kernels,
        eager=(
            EagerForm(
                "mamba2_chunk_scan",
                ("batch", "groups", "heads", "tokens", "width", "inner"),
                (1, 8, 128, 4096, 64, 128),
                _inputs,
                6,
                eager,
                mamba2_chunk_scan,
                _shape_of,
            ),
        ),
    )
)
