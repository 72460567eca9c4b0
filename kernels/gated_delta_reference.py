"""``gated_delta_rule.py`` in plain torch: a few chunks of tokens at a time, from left to right and back.

Within a span of chunks everything but the state is computed for all chunks at once; the state goes from one
to the next. A forward keeps the state before each span, from which the backward computes the rest again.
Tensors of a span are [chunks, batch, key heads, value heads of each, CHUNK, width], wide; gates have width 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile.kernels._rows import decays, in_chunks, out_of_chunks
from megacompile.kernels._triton import ceil_div, wide

CHUNK = 64  # tokens whose updates of the state are solved for together
SPAN_CHUNKS = 4
SPAN = SPAN_CHUNKS * CHUNK  # tokens between two states that are kept
_EPS = 1e-6  # of the norm, as in transformers and fla


@dataclass(frozen=True, eq=False)
class Inputs:
    """The operator's arguments; see ``gated_delta_rule.py``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    normalised: bool

    def of(self, part: slice) -> "Inputs":
        """Of some tokens."""
        q, k, v, g, beta = (x[:, part] for x in (self.q, self.k, self.v, self.g, self.beta))
        return Inputs(q, k, v, g, beta, self.normalised)

    def spans(self) -> Iterator[slice]:
        """The tokens of each span."""
        length = self.q.shape[1]
        return (slice(start, min(start + SPAN, length)) for start in range(0, length, SPAN))

    @property
    def state_shape(self) -> tuple[int, ...]:
        """That of one state: [batch, key heads, value heads of each, Dk, Dv]."""
        batch, _, heads, width = self.q.shape
        return batch, heads, self.v.shape[2] // heads, width, self.v.shape[3]


def spans_of(tokens: int) -> int:
    """How many states a forward keeps."""
    return ceil_div(tokens, SPAN)


@dataclass(frozen=True, eq=False)
class Span:
    """What a span's forward and backward both read; c is the sum of g from a chunk's start, z its last.

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


def _chunks(x: Tensor, part: slice, heads: int) -> Tensor:
    """The tokens of [batch, tokens, heads, width] in chunks, the last one filled up with zeros."""
    x = x[:, part].to(wide(x.dtype))
    if x.shape[1] % CHUNK:
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    batch, tokens, of_all, width = x.shape
    x = x.reshape(batch, tokens // CHUNK, CHUNK, heads, of_all // heads, width)
    return x.permute(1, 0, 3, 4, 2, 5).contiguous()


def _tokens(x: Tensor, length: int) -> Tensor:
    """The opposite of ``_chunks``: [batch, length, heads, width]."""
    return x.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :length]


def _inverse_norm(x: Tensor, normalised: bool) -> Tensor:
    return ((x * x).sum(-1, keepdim=True) + _EPS).rsqrt() if normalised else torch.ones_like(x[..., :1])


def _span(given: Inputs, part: slice) -> Span:
    heads = given.q.shape[2]
    q, k, v = (_chunks(x, part, heads) for x in (given.q, given.k, given.v))
    g, beta = (_chunks(x[..., None], part, heads) for x in (given.g, given.beta))
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
    return Span(
        q, k, v, beta, q_norm, k_norm, decay, products, inverse,
        scores=q @ k.mT * decay,
        risen=risen,
        falling=falling,
        reads=torch.cat((k * risen, q * risen), -2),
        writes=k * falling,
    )  # fmt: skip


def _advance(span: Span, state: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Chunk n: what the state lacks of v, what is written to it, the next state."""
    lacking = span.v[n] - span.reads[n, ..., :CHUNK, :] @ state
    written = span.inverse[n] @ (span.beta[n] * lacking)
    return lacking, written, state * span.carried[n] + span.writes[n].mT @ written


def forward_reference(given: Inputs) -> tuple[Tensor, Tensor]:
    """(out, states before each span [spans, *state_shape])."""
    out = given.q.new_empty(given.v.shape)
    state = given.q.new_zeros(given.state_shape, dtype=wide(given.q.dtype))
    states = state.new_empty(spans_of(given.q.shape[1]), *state.shape)
    for index, part in enumerate(given.spans()):
        states[index] = state
        span = _span(given, part)
        found = torch.empty_like(span.v)
        for n in range(len(found)):
            read = span.reads[n, ..., CHUNK:, :] @ state
            _, written, state = _advance(span, state, n)
            found[n] = read + span.scores[n] @ written
        out[:, part] = _tokens(found, part.stop - part.start)
    return out, states


def backward_reference(grad: Tensor, given: Inputs, states: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g, beta."""
    found = tuple(torch.empty_like(x).contiguous() for x in (given.q, given.k, given.v, given.g, given.beta))
    d_state = states.new_zeros(given.state_shape)
    for index, part in reversed(list(enumerate(given.spans()))):
        span = _span(given, part)
        d_out = _chunks(grad, part, given.q.shape[2])
        trail = _trail(span, states[index], d_out, d_state)
        d_state = trail.d_before
        for to, gradient in zip(found, _gradients(span, trail, d_out, given.normalised), strict=True):
            back = _tokens(gradient, part.stop - part.start)
            to[:, part] = back if to.dim() == 4 else back[..., 0]
    return found


@dataclass(frozen=True, eq=False)
class Trail:
    """What a span's chunks leave on the way there, and on the way back."""

    states: Tensor  # before each chunk
    lacking: Tensor
    written: Tensor
    d_states: Tensor  # of the state behind each chunk
    d_lacking: Tensor  # beta times that of what ``inverse`` is multiplied by, which is ``d_solved``
    d_solved: Tensor
    d_before: Tensor  # of the state before the span


def _trail(span: Span, state: Tensor, d_out: Tensor, d_state: Tensor) -> Trail:
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


def _gradients(span: Span, trail: Trail, d_out: Tensor, normalised: bool) -> tuple[Tensor, ...]:
    """Of q, k, v, g, beta, in chunks."""
    d_products = -(trail.d_solved @ trail.written.mT).tril_(-1)
    d_scores = d_out @ trail.written.mT
    d_reads = torch.cat((-trail.d_lacking, d_out), -2) @ trail.states.mT
    d_writes = trail.written @ trail.d_states.mT
    d_beta = (d_products * span.products).sum(-1, keepdim=True) + _dot(trail.d_solved, trail.lacking)
    # with respect to c, by the decays of pairs, of what reads the state, of what writes it, of the state
    pairs = d_products * span.beta * span.products + d_scores * span.scores
    over, under = _dot(d_reads, span.reads).chunk(2, -2)
    fallen = _dot(d_writes, span.writes)
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
        d_k = d_k - span.k * _dot(span.k, d_k)
        scale = span.q.shape[-1]  # q is scaled by its root after it is normalised
        d_q = d_q - span.q * _dot(span.q, d_q) * scale
    return d_q * span.q_norm, d_k * span.k_norm, trail.d_lacking, d_g, d_beta


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Over the last dimension, which stays with size one."""
    return (a * b).sum(-1, keepdim=True)


def eager(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Qwen3-Next's linear attention; shapes and formulas are those of ``kernels/gated_delta_rule.py``."""
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
