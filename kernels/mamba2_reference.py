"""``mamba2_chunk_scan.py`` in plain torch: a few chunks of tokens at a time, from left to right and back.

Within a span of chunks everything but the state is computed for all chunks at once; the state goes from one
to the next. A forward keeps the state before each span, from which the backward computes the rest again.
Tensors of a span are [chunks, batch, groups, CHUNK, ...], wide. The heads of a group and P come last, so that
a product with B or C takes all of them at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile.kernels._rows import decays, in_chunks, out_of_chunks
from megacompile.kernels._triton import ceil_div, wide

CHUNK = 64  # tokens that see each other by scores, and earlier ones through the state
SPAN = 4 * CHUNK  # tokens between two states that are kept


@dataclass(frozen=True, eq=False)
class Inputs:
    """The operator's arguments; see ``mamba2_chunk_scan.py``."""

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
        """That of all states that are kept: [spans, batch, groups, N, heads of each, P]."""
        batch, tokens, heads, width = self.x.shape
        groups, inner = self.B.shape[2:]
        return ceil_div(tokens, SPAN), batch, groups, inner, heads // groups, width

    def by_group(self, x: Tensor) -> Tensor:
        """A number of each head as [groups, 1, heads of each], wide."""
        return x.to(wide(self.x.dtype)).view(self.B.shape[2], 1, -1)


@dataclass(frozen=True, eq=False)
class Span:
    """What a span's forward and backward both read; c is the sum of A dt from a chunk's start, z its last."""

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
        """What a token reads of those of its chunk."""
        return self.similar.unsqueeze(3) * self.decay


def _chunks(x: Tensor, part: slice, groups: int) -> Tensor:
    """The tokens of [batch, tokens, heads, ...] in chunks, the last one filled up with zeros."""
    x = x[:, part].to(wide(x.dtype))
    if x.shape[1] % CHUNK:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % CHUNK))
    batch, tokens, heads, *rest = x.shape
    x = x.reshape(batch, tokens // CHUNK, CHUNK, groups, heads // groups, *rest)
    return x.permute(1, 0, 3, 2, *range(4, x.dim())).contiguous()


def _tokens(x: Tensor, length: int) -> Tensor:
    """The opposite of ``_chunks``: [batch, length, heads, ...]."""
    x = x.permute(1, 0, 3, 2, *range(4, x.dim()))
    return x.flatten(3, 4).flatten(1, 2)[:, :length]


def _differences(c: Tensor) -> Tensor:
    """Of the numbers c_i, c_j of two tokens, by heads."""
    column = c.mT.unsqueeze(-1)
    return column - column.mT


def _span(given: Inputs, part: slice) -> Span:
    groups = given.B.shape[2]
    x, dt = (_chunks(t, part, groups) for t in (given.x, given.dt))
    B, C = (_chunks(t, part, groups).squeeze(4) for t in (given.B, given.C))
    exact = (dt * given.by_group(given.A)).double().cumsum(-2)
    c = exact.to(dt.dtype)
    decay = _differences(c).add_(_differences((exact - c).to(dt.dtype)))
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    decay = decay.masked_fill_(above, float("-inf")).exp_()
    falling = (exact[..., -1:, :] - exact).to(dt.dtype).exp()
    return Span(x, dt, B, C, C @ B.mT, decay, c.exp(), falling)


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


def _states(span: Span, written: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Before each chunk [chunks, batch, groups, N, heads, P], and behind the last."""
    states = (span.B.mT @ written.flatten(-2)).view(*span.B.shape[:3], -1, *written.shape[-2:])
    return states, _through(states, span.carried, state)


def forward_reference(given: Inputs) -> tuple[Tensor, Tensor]:
    """(out, states before each span)."""
    out = given.x.new_empty(given.x.shape, dtype=wide(given.x.dtype))
    kept = out.new_empty(given.states_shape)
    state = out.new_zeros(given.states_shape[1:])
    skip = given.by_group(given.D).unsqueeze(-1)
    for index, part in enumerate(given.spans()):
        kept[index] = state
        span = _span(given, part)
        u = span.x * span.dt[..., None]
        states, state = _states(span, u * span.falling[..., None], state)
        found = (span.C @ states.flatten(-2)).view(u.shape) * span.risen[..., None]
        found += _by_head(span.scores @ _by_head(u))
        found += span.x * skip
        out[:, part] = _tokens(found, part.stop - part.start)
    return out, kept


def backward_reference(grad: Tensor, given: Inputs, kept: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x, dt, A, B, C, D."""
    of_tokens = [torch.empty_like(t).contiguous() for t in (given.x, given.dt, given.B, given.C)]
    rates, skip = given.by_group(given.A), given.by_group(given.D)
    d_rates, d_skip = torch.zeros_like(rates), torch.zeros_like(skip)
    d_state = kept.new_zeros(given.states_shape[1:])
    for index, part in reversed(list(enumerate(given.spans()))):
        span = _span(given, part)
        d_out = _chunks(grad, part, given.B.shape[2])
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
            to[:, part] = _tokens(gradient, part.stop - part.start)
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


def _gradients(span: Span, d_out: Tensor, state: Tensor, d_state: Tensor) -> Gradients:
    u = span.x * span.dt[..., None]
    d_u, d_similar, decays = _by_scores(span, u, d_out)
    written = u * span.falling[..., None]
    states, _ = _states(span, written, state)
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


def _by_scores(span: Span, u: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the tokens of a chunk give each other: gradients of u, of C B^T, and of A dt."""
    d_u = _by_head(span.scores.mT @ _by_head(d_out))
    d_scores = (_by_head(d_out) @ _by_head(u).mT).mul_(span.decay)
    d_similar = d_scores.sum(3)
    return d_u, d_similar, _between(d_scores.mul_(span.similar.unsqueeze(3)))


def _between(pairs: Tensor) -> Tensor:
    """To each token's decay the sum of the pairs i, j that it lies between, i >= t > j.

    Sums of rows less sums of columns would lose digits where most of a pair's gradient is its token's own.
    """
    before = pairs.cumsum(-1).tril_(-1).sum(-2)
    return F.pad(before[..., :-1], (1, 0)).mT


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Over the last dimension."""
    return (a * b).sum(-1)


def eager(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Mamba-2's scan; shapes and formulas are those of ``kernels/mamba2_chunk_scan.py``."""
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
