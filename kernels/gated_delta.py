# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), as Qwen3-Next's linear attention computes it.

Each value head has a state S [Dk, Dv], zero at first, and for each token t

    S = exp(g_t) S        S = S + beta_t k_t (v_t - S^T k_t)^T        out_t = S^T q_t / sqrt(Dk)

with q and k divided by sqrt(sum of squares + 1e-6) before, where ``normalised``. q, k: [B, T, G, Dk]. v:
[B, T, H, Dv], G dividing H; g, beta: [B, T, H]. out: [B, T, H, Dv] of q's type. Computed in float32
(float64 for float64 q); products of the kernels take q's type and accumulate in float32. Saves the inputs
and the states before every 256th token.

Tokens are taken in chunks of 64. With c the sum of g from a chunk's start, z its last, D_ij = exp(c_i -
c_j), W what the chunk writes, and S the state before it:

    W = (1 + tril(beta K K^T * D, -1))^-1 (beta (V - exp(c) K S))
    out = exp(c) Q S + tril(Q K^T * D) W        S' = exp(z) S + (exp(z - c) K)^T W

so that all but S is a product of matrices. The forward is two kernels on bfloat16: one makes the inverse
and the scores of every chunk, one goes through the chunks for some columns of S. Traffic, in elements per
token and value head: 2 Dk and 128 by the first; 2 Dk and 128 for each block of columns, and 2 Dv, by the
second. The 128 are there for all tokens between the two.

The backward is four kernels for each 4,096 tokens of all rows, from right to left, by the formulas of the
backward's kernels; between them lie, for so many tokens, 128 + Dv + Dk Dv / 32 elements per token and value
head. The states' way there and back is rounded to q's type where a product takes it.

**In plain torch** the operator takes a few chunks of tokens at a time, from left to right and back. Within a
span of chunks everything but the state is computed for all chunks at once; the state goes from one to the
next. A forward keeps the state before each span, from which the backward computes the rest again. Tensors of
a span are [chunks, batch, key heads, value heads of each, CHUNK, width], wide; gates have width 1.

**The Triton kernels of the forward:** the first makes what a chunk needs beside the state, for all chunks at
once; the second carries the state of some value columns through the chunks; the third does so once more, for
a backward, through each span from the state that was kept before it. Products take q and k as they are given:
their norms, decays and strengths are factors of rows and columns, applied to what comes out of a product or
goes into it.

Each value head and chunk has, in the type of q: ``solves``, (1 + tril(K K^T * D, -1) diag(beta))^-1, and
``scores``, tril(Q K^T * D) diag(beta), [CHUNK, CHUNK] each; and in ACC, for each token, four ``factors``: of
k and of q for reading the state, of k for writing it, the chunk's decay. So both are applied to W / beta,
which is ``solved``: exact where beta is zero, and what the gradient of beta needs. Tokens that a last chunk
lacks are zeros that decay nothing.

**The Triton kernels of the backward** keep the forward's conventions.

Behind the forward's first kernel comes its third, which leaves ``solved`` and the state before every chunk.
Here, one carries the state's gradient back through all chunks, and leaves that of v and the state's gradient
behind every chunk. From these one makes the terms of pairs of tokens, for each chunk and value head. Two make
the gradients of q, and of k, g and beta, for each chunk and key head; they go through the value heads of
their key head, so no sum depends on an order that changes.

With L what the chunk lacks of v, U = ``solved``, S the state before the chunk, and dX the gradient of X:

    U = solves L      dU = scores^T dout + falling K dS'      dv = dL = solves^T dU
    dS = exp(z) dS' + (exp(c) Q)^T dout - (exp(c) K)^T dv

``solves`` and ``scores`` have the gradients -dv U^T and dout U^T of what they are made of, lower triangles
of which count. Where c or beta is a factor of something, its gradient is that of the thing times the thing
(beta: without the factor): each term is as small as its decay.
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
from megacompile.kernels.registry import Arguments, OpPass, OpSpec, declare
from megacompile.kernels.token_chunks import decays, dense_tokens, in_chunks, out_of_chunks, token_strides

CHUNK = 64  # tokens whose updates of the state are solved for together
SPAN_CHUNKS = 4
SPAN = SPAN_CHUNKS * CHUNK  # tokens between two states that are kept
_EPS = 1e-6  # of the norm, as in transformers and fla


@dataclass(frozen=True, eq=False)
class RuleInputs:
    """The operator's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    normalised: bool

    def of(self, part: slice) -> "RuleInputs":
        """Return the inputs of some tokens."""
        q, k, v, g, beta = (x[:, part] for x in (self.q, self.k, self.v, self.g, self.beta))
        return RuleInputs(q, k, v, g, beta, self.normalised)

    def spans(self) -> Iterator[slice]:
        """The tokens of each span."""
        length = self.q.shape[1]
        return (slice(start, min(start + SPAN, length)) for start in range(0, length, SPAN))

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one state: [batch, key heads, value heads of each, Dk, Dv]."""
        batch, _, heads, width = self.q.shape
        return batch, heads, self.v.shape[2] // heads, width, self.v.shape[3]


def spans_of(tokens: int) -> int:
    """Return the number of states that a forward keeps."""
    return ceil_div(tokens, SPAN)


@dataclass(frozen=True, eq=False)
class RuleSpan:
    """The values that a span's forward and backward both read; c is the sum of g from a chunk's start, z its
    last.

    q and k are normalised, q scaled; ``k_norm`` and ``q_norm`` are what they were multiplied by.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    q_norm: Tensor
    k_norm: Tensor
    decay: Tensor  # exp(c_i - c_j), i >= j
    products: Tensor  # k_i · k_j times decay, i > j
    inverse: Tensor  # (1 + beta products)^-1
    scores: Tensor  # q_i · k_j times decay
    risen: Tensor  # exp(c)
    falling: Tensor  # exp(z - c)
    reads: Tensor  # what reads the state: exp(c) k above exp(c) q
    writes: Tensor  # what writes it: exp(z - c) k

    @property
    def carried(self) -> Tensor:
        """exp(z), by which a chunk decays the state."""
        return self.risen[..., -1:, :]


def _chunks_of_heads(x: Tensor, part: slice, heads: int) -> Tensor:
    """The tokens of [batch, tokens, heads, width] in chunks, the last one filled up with zeros."""
    x = x[:, part].to(wide(x.dtype))
    if x.shape[1] % CHUNK:
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    batch, tokens, of_all, width = x.shape
    x = x.reshape(batch, tokens // CHUNK, CHUNK, heads, of_all // heads, width)
    return x.permute(1, 0, 3, 4, 2, 5).contiguous()


def _tokens_of_heads(x: Tensor, length: int) -> Tensor:
    """The opposite of ``_chunks_of_heads``: [batch, length, heads, width]."""
    return x.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :length]


def _inverse_norm(x: Tensor, normalised: bool) -> Tensor:
    return ((x * x).sum(-1, keepdim=True) + _EPS).rsqrt() if normalised else torch.ones_like(x[..., :1])


def _rule_span(given: RuleInputs, part: slice) -> RuleSpan:
    heads = given.q.shape[2]
    q, k, v = (_chunks_of_heads(x, part, heads) for x in (given.q, given.k, given.v))
    g, beta = (_chunks_of_heads(x[..., None], part, heads) for x in (given.g, given.beta))
    q_norm, k_norm = _inverse_norm(q, given.normalised), _inverse_norm(k, given.normalised)
    q_norm = q_norm * q.shape[-1] ** -0.5
    q, k = q * q_norm, k * k_norm
    c = g.cumsum(-2)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decay = (c - c.mT).masked_fill_(above, float("-inf")).exp_()
    products = (k @ k.mT * decay).tril_(-1)
    unit = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    inverse = torch.linalg.solve_triangular(beta * products, unit, upper=False, unitriangular=True)
    risen, falling = c.exp(), (c[..., -1:, :] - c).exp()
    return RuleSpan(
        q, k, v, beta, q_norm, k_norm, decay, products, inverse,
        scores=q @ k.mT * decay,
        risen=risen,
        falling=falling,
        reads=torch.cat((k * risen, q * risen), -2),
        writes=k * falling,
    )  # fmt: skip


def _advance(span: RuleSpan, state: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Chunk n: what the state lacks of v, what is written to it, the next state."""
    lacking = span.v[n] - span.reads[n, ..., :CHUNK, :] @ state
    written = span.inverse[n] @ (span.beta[n] * lacking)
    return lacking, written, state * span.carried[n] + span.writes[n].mT @ written


def forward_reference(given: RuleInputs) -> tuple[Tensor, Tensor]:
    """(out, states before each span [spans, *state_shape])."""
    out = given.q.new_empty(given.v.shape)
    state = given.q.new_zeros(given.state_shape, dtype=wide(given.q.dtype))
    states = state.new_empty(spans_of(given.q.shape[1]), *state.shape)
    for index, part in enumerate(given.spans()):
        states[index] = state
        span = _rule_span(given, part)
        found = torch.empty_like(span.v)
        for n in range(len(found)):
            read = span.reads[n, ..., CHUNK:, :] @ state
            _, written, state = _advance(span, state, n)
            found[n] = read + span.scores[n] @ written
        out[:, part] = _tokens_of_heads(found, part.stop - part.start)
    return out, states


def backward_reference(grad: Tensor, given: RuleInputs, states: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta."""
    found = tuple(torch.empty_like(x).contiguous() for x in (given.q, given.k, given.v, given.g, given.beta))
    d_state = states.new_zeros(given.state_shape)
    for index, part in reversed(list(enumerate(given.spans()))):
        span = _rule_span(given, part)
        d_out = _chunks_of_heads(grad, part, given.q.shape[2])
        trail = _trail(span, states[index], d_out, d_state)
        d_state = trail.d_before
        for to, gradient in zip(found, _gradients(span, trail, d_out, given.normalised), strict=True):
            back = _tokens_of_heads(gradient, part.stop - part.start)
            to[:, part] = back if to.dim() == 4 else back[..., 0]
    return found


@dataclass(frozen=True, eq=False)
class Trail:
    """The values that a span's chunks leave on the way there, and on the way back."""

    states: Tensor  # before each chunk
    lacking: Tensor
    written: Tensor
    d_states: Tensor  # of the state behind each chunk
    d_lacking: Tensor  # beta times that of what ``inverse`` is multiplied by, which is ``d_solved``
    d_solved: Tensor
    d_before: Tensor  # of the state before the span


def _trail(span: RuleSpan, state: Tensor, d_out: Tensor, d_state: Tensor) -> Trail:
    states, lacking, written = [], [], []
    for n in range(len(d_out)):
        states.append(state)
        left, right, state = _advance(span, state, n)
        lacking.append(left)
        written.append(right)
    d_written = span.scores.mT @ d_out
    d_states, d_solved = [torch.empty(0)] * len(d_out), torch.empty_like(d_written)
    for n in reversed(range(len(d_out))):
        d_states[n] = d_state
        d_solved[n] = span.inverse[n].mT @ (d_written[n] + span.writes[n] @ d_state)
        both = torch.cat((-span.beta[n] * d_solved[n], d_out[n]), -2)
        d_state = d_state * span.carried[n] + span.reads[n].mT @ both
    return Trail(
        torch.stack(states), torch.stack(lacking), torch.stack(written), torch.stack(d_states),
        span.beta * d_solved, d_solved, d_state,
    )  # fmt: skip


def _gradients(span: RuleSpan, trail: Trail, d_out: Tensor, normalised: bool) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g, beta, in chunks."""
    d_products = -(trail.d_solved @ trail.written.mT).tril_(-1)
    d_scores = d_out @ trail.written.mT
    d_reads = torch.cat((-trail.d_lacking, d_out), -2) @ trail.states.mT
    d_writes = trail.written @ trail.d_states.mT
    d_beta = (d_products * span.products).sum(-1, keepdim=True) + _row_dot(trail.d_solved, trail.lacking)
    # with respect to c, by the decays of pairs, of what reads the state, of what writes it, of the state
    pairs = d_products * span.beta * span.products + d_scores * span.scores
    over, under = _row_dot(d_reads, span.reads).chunk(2, -2)
    fallen = _row_dot(d_writes, span.writes)
    d_c = pairs.sum(-1, keepdim=True) - pairs.sum(-2, keepdim=True).mT + over + under - fallen
    carried = (trail.d_states * trail.states).sum((-2, -1), keepdim=True) * span.carried
    d_c[..., -1:, :] += fallen.sum(-2, keepdim=True) + carried
    d_g = d_c.flip(-2).cumsum(-2).flip(-2)
    # with respect to q and k, which all value heads of a group share
    similar = (d_products * span.beta * span.decay).sum(3, keepdim=True)
    scored = (d_scores * span.decay).sum(3, keepdim=True)
    d_k, d_q = (d_reads * torch.cat((span.risen, span.risen), -2)).sum(3, keepdim=True).chunk(2, -2)
    d_q = d_q + scored @ span.k
    d_k = d_k + scored.mT @ span.q + (similar + similar.mT) @ span.k
    d_k = d_k + (d_writes * span.falling).sum(3, keepdim=True)
    if normalised:
        d_k = d_k - span.k * _row_dot(span.k, d_k)
        scale = span.q.shape[-1]  # q is scaled by its root after it is normalised
        d_q = d_q - span.q * _row_dot(span.q, d_q) * scale
    return d_q * span.q_norm, d_k * span.k_norm, trail.d_lacking, d_g, d_beta


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Over the last dimension, which stays with size one."""
    return (a * b).sum(-1, keepdim=True)


def eager(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Qwen3-Next's linear attention; shapes and formulas are those of ``kernels/gated_delta.py``."""
    tokens, heads, dtype = v.shape[1], v.shape[2], q.dtype
    q, k, v, beta = (in_chunks(x, CHUNK, heads) for x in (q, k, v, beta[..., None]))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    c = in_chunks(g[..., None], CHUNK, heads)[..., 0].cumsum(-1)
    decay, risen, z = decays(c), c.exp()[..., None], c[..., -1:, None]
    system = (beta * (k @ k.mT) * decay).tril(-1) + torch.eye(CHUNK, dtype=c.dtype, device=c.device)
    solved = torch.linalg.solve_triangular(system, beta * torch.cat((v, risen * k), -1), upper=False)
    values, reads = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores, writes = q @ k.mT * decay, k * (z - c[..., None]).exp()
    state = torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0])
    outs = []
    of_chunks = (x.unbind(2) for x in (values, reads, risen * q, scores, writes.mT, z.exp()))
    for value, read, query, score, write, carried in zip(*of_chunks, strict=True):
        written = value - read @ state
        outs.append(query @ state + score @ written)
        state = state * carried + write @ written
    return out_of_chunks(torch.stack(outs, 2), tokens).to(dtype)


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
    """Return the factors that give rows of these sums of squares length one, or ones."""
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


# Of a key; the least one in bfloat16, because an inverse of narrow keys, which are alike, amplifies what
# products round. In Triton's interpreter, 300 tokens of two heads, 128 wide, parts of scale from float64
# (torch's way in brackets): out 0.0069 (0.0026), dq 0.0049 (0.0021), dk 0.0061 (0.0022), dv 0.0061 (0.0026),
# dg 0.0090 (0.0022), dbeta 0.0030 (0.0015). 64 columns keep 0.01, 16 reach 0.022.
MIN_WIDTH, MAX_WIDTH = 64, 128
# Tokens of all rows whose states a backward holds at a time: 1.6 KB for each token and value head of 128
# columns, 205 MB at 32 heads, however long the sequence.
HELD = 4096
LAUNCHES = 2, 6  # of a forward; of each part of a backward, beside the first state's zeros
MAX_GRID = 65535  # CUDA's, beyond the first dimension
# Columns of the state that a program carries, and its warps: 10.0 spills with four, 12.0 with 32 columns.
_CARRIED = {80: (32, 4), 90: (32, 4), 100: (32, 8), 103: (32, 8)}
# Columns at a time of states in a backward, and where dk takes others: more spill.
_READ, _OF_KEYS = {90: 64, 100: 64, 103: 64}, {86: 32, 89: 32}


def _key_sizes(q: Tensor) -> dict[str, Any]:
    return {"ACC": accumulator(q.dtype), "DIM": q.shape[3], "CHUNK": CHUNK}


def _launch_chunks(q: Tensor, k: Tensor, given: RuleInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(solves, scores, factors) of every chunk."""
    batch, tokens, groups, width = q.shape
    heads, chunks = given.v.shape[2], ceil_div(tokens, CHUNK)
    solves, scores = q.new_empty(2, batch, heads, chunks, CHUNK, CHUNK)
    factors = q.new_empty(batch, heads, chunks, 4, CHUNK, dtype=wide(q.dtype))
    launch(
        gated_delta_chunk_kernel,
        (chunks, heads, batch),
        *(q, k, given.g, given.beta, solves, scores, factors),
        *token_strides(q, k, given.g, given.beta),
        *(heads, heads // groups, tokens, width**-0.5),
        NORMALISED=given.normalised,
        BLOCK_D=32,
        num_stages=2,
        **_key_sizes(q),
    )
    return solves, scores, factors


def forward_triton(given: RuleInputs) -> tuple[Tensor, Tensor]:
    """(out, states before each span)."""
    q, k, v = (dense_tokens(x, CHUNK) for x in (given.q, given.k, given.v))
    batch, tokens, groups, width = q.shape
    heads, inner = v.shape[2:]
    columns, warps = _CARRIED.get(arch_of(q), (16, 4))
    solves, scores, factors = _launch_chunks(q, k, given)
    out = q.new_empty(v.shape)
    states = factors.new_empty(spans_of(tokens), *given.state_shape)
    launch(
        gated_delta_forward_kernel,
        (ceil_div(inner, columns), heads, batch),
        *(q, k, v, solves, scores, factors, out, states),
        *token_strides(q, k, v, out),
        *(states.stride(0), heads, heads // groups, tokens),
        SPAN=SPAN_CHUNKS,
        V_DIM=inner,
        BLOCK_D=max(16, next_power_of_2(width)),
        BLOCK_V=columns,
        num_warps=warps,
        num_stages=2,
        **_key_sizes(q),
    )
    return out, states


def parts_of(batch: int, tokens: int) -> list[slice]:
    """The tokens that a backward goes through at a time: spans, of about HELD tokens in all rows."""
    step = SPAN * max(1, HELD // (SPAN * batch))
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def backward_triton(grad: Tensor, given: RuleInputs, states: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta."""
    grad, q, k, v = (dense_tokens(x, CHUNK) for x in (grad, given.q, given.k, given.v))
    given, states = RuleInputs(q, k, v, given.g, given.beta, given.normalised), states.contiguous()
    found = tuple(x.new_empty(x.shape) for x in (q, k, v, given.g, given.beta))
    d_state = states.new_zeros(given.state_shape)
    for part in reversed(parts_of(*q.shape[:2])):
        kept, into = states[part.start // SPAN :], tuple(x[:, part] for x in found)
        backward_part(grad[:, part], given.of(part), kept, d_state, into)
    return found


def backward_part(
    grad: Tensor, given: RuleInputs, states: Tensor, d_state: Tensor, found: tuple[Tensor, ...]
) -> None:
    """Gradients of some spans into ``found``; d_state, of the state behind them, becomes that before them."""
    q, k, v, dv = given.q, given.k, given.v, found[2]
    batch, tokens, groups, width = q.shape
    heads, inner = v.shape[2:]
    chunks, group, columns = ceil_div(tokens, CHUNK), heads // groups, _READ.get(arch_of(q), 32)
    solves, scores, factors = _launch_chunks(q, k, given)
    before, behind = q.new_empty(2, batch, heads, chunks, width, inner)
    solved = q.new_empty(batch, heads, tokens, inner)
    sizes = {"BLOCK_D": max(16, next_power_of_2(width)), "V_DIM": inner, "num_stages": 2, **_key_sizes(q)}
    launch(
        gated_delta_states_kernel,
        (spans_of(tokens) * ceil_div(inner, columns), heads, batch),
        *(k, v, solves, factors, states, solved, before, *token_strides(k, v)),
        *(states.stride(0), heads, group, tokens),
        SPAN=SPAN_CHUNKS,
        BLOCK_V=columns,
        **sizes,
    )
    launch(
        gated_delta_backward_state_kernel,
        (ceil_div(inner, 32), heads, batch),
        *(q, k, grad, solves, scores, factors, d_state, dv, behind, *token_strides(q, k, grad, dv)),
        *(heads, group, tokens),
        BLOCK_V=32,
        **sizes,
    )
    # Their gradients take the places of ``scores`` and of what ``solves`` is made of.
    _launch_gradients(grad, given, (solved, before, behind, scores, solves), found, columns, sizes)


def _launch_gradients(
    grad: Tensor,
    given: RuleInputs,
    trail: tuple[Tensor, ...],
    found: tuple[Tensor, ...],
    columns: int,
    sizes: dict[str, Any],
) -> None:
    """Launch the kernels that are left to do for all chunks at once."""
    q, k, g, beta = given.q, given.k, given.g, given.beta
    solved, before, behind, d_scores, d_products = trail
    dq, dk, dv, dg, dbeta = found
    batch, tokens, groups, width = q.shape
    heads, chunks, inner = *before.shape[1:3], dv.shape[3]
    sums = q.new_empty(batch, heads, chunks, 3, CHUNK, dtype=wide(q.dtype))
    numbers = heads // groups, tokens, inner, width**-0.5
    sizes = {**sizes, "NORMALISED": given.normalised}
    launch(
        gated_delta_backward_pairs_kernel,
        (chunks, heads, batch),
        *(q, k, g, beta, grad, dv, solved, d_scores, d_products, sums),
        *(*token_strides(q, k, g, beta, grad, dv), heads, *numbers),
        BLOCK_V=64,
        **{**sizes, "BLOCK_D": 32},
    )
    launch(
        gated_delta_backward_q_kernel,
        (chunks, groups, batch),
        *(q, k, g, grad, before, behind, d_scores, sums, dq),
        *(*token_strides(q, k, g, grad, dq), groups, *numbers),
        BLOCK_V=columns,
        num_warps=8,
        **sizes,
    )
    launch(
        gated_delta_backward_k_kernel,
        (chunks, groups, batch),
        *(q, k, g, beta, dv, solved, before, behind, d_scores, d_products, sums, dk, dg, dbeta),
        *(*token_strides(q, k, g, beta, dv, dk, dg), groups, *numbers),
        BLOCK_V=_OF_KEYS.get(arch_of(q), 64),
        num_warps=8,
        **sizes,
    )


def runs_kernels(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether forward and backward of these launch kernels: keys up to 128 wide, a grid that fits; on
    a GPU, bfloat16, of which keys have at least 64 columns.

    float16 lacks the range for the norms of long keys; exact float32 products pass by the tensor cores.
    Narrow keys are too much alike for what is rounded to bfloat16: gradients by keys of 16 columns were off
    by 0.022 of their scale.
    """
    same = q.dtype == k.dtype == v.dtype and q.dtype != torch.float16
    batch, heads = v.shape[0], v.shape[2]
    fits = max(batch, heads) <= MAX_GRID and batch * heads < 1 << 31
    fits &= q.shape[3] <= MAX_WIDTH and v.numel() > 0
    low = q.dtype == torch.bfloat16
    return runs_triton(q) and same and fits and (q.shape[3] >= MIN_WIDTH if low else not on_gpu(q))


@torch.library.custom_op("megacompile::gated_delta_rule", mutates_args=())
def gated_delta_rule_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalised: bool = True
) -> tuple[Tensor, Tensor]:
    """(out, states that the backward starts from); see the module's docstring."""
    run = forward_triton if runs_kernels(q, k, v) else forward_reference
    return run(RuleInputs(q, k, v, g, beta, normalised))


@torch.library.custom_op("megacompile::gated_delta_rule_backward", mutates_args=())
def gated_delta_rule_backward_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, normalised: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, g, beta."""
    run = backward_triton if runs_kernels(q, k, v) else backward_reference
    dq, dk, dv, dg, dbeta = run(grad, RuleInputs(q, k, v, g, beta, normalised), states)
    return dq, dk, dv, dg, dbeta


@gated_delta_rule_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalised: bool = True
) -> tuple[Tensor, Tensor]:
    shape = RuleInputs(q, k, v, g, beta, normalised).state_shape
    states = q.new_empty((spans_of(q.shape[1]), *shape), dtype=wide(q.dtype))
    return q.new_empty(v.shape), states


@gated_delta_rule_backward_op.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:5])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.normalised = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*gated_delta_rule_backward_op(grad, *ctx.saved_tensors, ctx.normalised), None)


gated_delta_rule_op.register_autograd(_backward, setup_context=_setup)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalised: bool = True
) -> Tensor:
    """out, differentiable in q, k, v, g, beta."""
    out: Tensor = gated_delta_rule_op(q, k, v, g, beta, normalised)[0]
    return out


def gated_delta_rule_flops(
    q: Any, k: Any, v: Any, *_: Any, out_val: Any = None, products: Any = (2, 2, 3), **__: Any
) -> int:
    """Those of the products: so many, for each token, of its chunk's tokens with Dk of each key head, with
    Dv of each value head, and of Dk with Dv; and the inverse."""
    batch, tokens, groups, width = q
    heads, inner = v[2:]
    of_keys, of_values, of_states = products
    each = of_keys * CHUNK * width * groups
    each += heads * (of_values * CHUNK * inner + of_states * width * inner + CHUNK * CHUNK // 2)
    return int(2 * batch * ceil_div(tokens, CHUNK) * CHUNK * each)


def gated_delta_rule_backward_flops(
    grad: Any, q: Any, k: Any, v: Any, *_: Any, out_val: Any = None, **__: Any
) -> int:
    """The same, of the forward's states once more and of the gradients."""
    return gated_delta_rule_flops(q, k, v, products=(5, 5, 8))


def _runs_kernels(given: Arguments) -> bool:
    return runs_kernels(given["q"], given["k"], given["v"])


def _launches(backward: bool, by_span: int, by_chunk: int) -> Callable[[Arguments], int]:
    """Count our kernels, or in plain torch launches for each span of tokens, and for each chunk."""

    def count(given: Arguments) -> int:
        q = given["q"]
        if _runs_kernels(given):
            forward, part = LAUNCHES
            return 1 + part * len(parts_of(*q.shape[:2])) if backward else forward
        return by_span * ceil_div(q.shape[1], SPAN) + by_chunk * ceil_div(q.shape[1], CHUNK)

    return count


def _inputs(shape: Shape, g: torch.Generator) -> list[Tensor]:
    batch, groups, heads, tokens, width, inner = shape
    q, k = (normal(g, batch, tokens, groups, width) for _ in range(2))
    gates = -F.softplus(normal(g, batch, tokens, heads))
    beta = normal(g, batch, tokens, heads).sigmoid()
    return [q, k, normal(g, batch, tokens, heads, inner), gates, beta]


def _shape_of(shapes: Sequence[Shape], constants: Sequence[str]) -> Shape | None:
    (batch, tokens, groups, width), _, (*_, heads, inner) = shapes[:3]
    return (batch, groups, heads, tokens, width, inner) if tuple(constants) == ("True",) else None


declare(
    OpSpec(
        "gated_delta_rule",
        OpPass(
            gated_delta_rule_flops,
            _launches(False, 45, 11),
            teraflops=72,  # 2 × 4,096 tokens, 16 heads of keys and 32 of values, 128 wide: 0.552 ms
        ),
        OpPass(
            gated_delta_rule_backward_flops,
            _launches(True, 125, 17),
            teraflops=64,  # 1.592 ms
        ),
        runs_kernels=_runs_kernels,
        eager=(
            EagerForm(
                "gated_delta_rule",
                ("batch", "groups", "heads", "tokens", "width", "inner"),
                (2, 16, 32, 4096, 128, 128),
                _inputs,
                5,
                eager,
                gated_delta_rule,
                _shape_of,
            ),
        ),
    )
)
