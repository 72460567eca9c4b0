"""Attention by torch: its kernels, or its operators; whole, or some queries at a time.

In: the arguments of :func:`megacompile.capture.attention.attention`, on any path but our own kernel's. Out:
its results, and their gradients. What a query does not see is -inf in what is added to its scores, unless
the kernel knows causal order by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megacompile.capture import plain_attention, sdpa
from megacompile.capture.plain_attention import Drops, summed_to
from megacompile.capture.query_chunks import Chunk, chunks_of
from megacompile.capture.sdpa import Features, Path
from megacompile.capture.sinks import gradient_of_sinks, with_sinks
from megacompile.kernels.attention_reference import Rule

_LOWERED = -1e8  # a logarithm of a number of keys vanishes beside it in float32
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""For q, k, v, bias and sinks; empty for a bias or sinks that are absent or constant."""


@dataclass(frozen=True)
class TorchAttention:
    """A call: which implementation runs it, and its arguments beside q, k and v."""

    path: Path
    has: Features
    rule: Rule
    bias: Tensor | None
    drops: Drops

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out [B, H, S, Dv], log-sum-exp [B, H, S])."""
        chunks = self._chunks(q, k)
        if len(chunks) == 1:
            return self._forward(q, k, v, self._added(chunks[0], q, k))
        out, lse = empty_results(q, v)
        for chunk in chunks:
            some, keys = chunk
            found = self._forward(q[:, :, some], k[:, :, keys], v[:, :, keys], self._added(chunk, q, k))
            out[:, :, some], lse[:, :, some] = found
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Gradients of :meth:`forward`; over chunks, those of keys and values are summed in float32."""
        chunks = self._chunks(q, k)
        if len(chunks) == 1:
            return self._backward(grad, q, k, v, out, lse, self._added(chunks[0], q, k))
        dtype = sdpa.accumulate_dtype(q)
        dq, d_bias, d_sinks = q.new_empty(q.shape), q.new_empty(0), []
        dk, dv = k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)
        for chunk in chunks:
            some, keys = chunk
            found = self._backward(
                grad[:, :, some], q[:, :, some], k[:, :, keys], v[:, :, keys], out[:, :, some],
                lse[:, :, some], self._added(chunk, q, k),
            )  # fmt: skip
            dq[:, :, some] = found[0]
            dk[:, :, keys] += found[1]
            dv[:, :, keys] += found[2]
            d_sinks.append(found[4])
        return dq, dk.to(k.dtype), dv.to(v.dtype), d_bias, torch.stack(d_sinks).sum(0)

    def _chunks(self, q: Tensor, k: Tensor) -> list[Chunk]:
        whole = Chunk(slice(0, q.shape[2]), slice(0, k.shape[2]))
        return chunks_of(q, k, self.has, self.path) if self._holds_scores(k) else [whole]

    def _holds_scores(self, k: Tensor) -> bool:
        return self.path == "plain" or self.has.masked(k)

    def _added(self, chunk: Chunk, q: Tensor, k: Tensor) -> Tensor | None:
        return chunk.bias(q, k, self.bias, self.rule) if self._holds_scores(k) else None

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.path == "plain":
            return plain_attention.forward(q, k, v, added, self.rule, self.drops)
        mask = _kernel_mask(q, k, added)
        run = sdpa.forward if self.path == "library" else sdpa.efficient_forward
        out, lse = run(q, k, v, mask, self.rule.causal, self.rule.scale)
        if self.rule.sinks is not None:
            out, lse = with_sinks(out, lse, self.rule.sinks)
        if mask is not None and (self.has.bias or self.has.packed):
            hidden = _tops(mask) == -math.inf
            out = out.masked_fill(hidden, 0.0)
            lse = lse.masked_fill(hidden.squeeze(-1), math.inf)
        return out, lse

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, added: Tensor | None
    ) -> Gradients:
        rule, trained = self.rule, self.bias if self.has.bias_grad else None
        if self.path == "plain":
            return plain_attention.backward(grad, q, k, v, added, lse, rule, self.drops, trained)
        mask = _kernel_mask(q, k, added)
        none = q.new_empty(0)
        d_sinks = none.clone() if rule.sinks is None else gradient_of_sinks(grad, out, lse, rule.sinks)
        if self.has.bias and mask is not None:
            grad = _of_lowered_rows(grad, mask)
        if self.path == "library":
            return *sdpa.backward(grad, q, k, v, out, lse, mask, rule.causal, rule.scale), none, d_sinks
        dq, dk, dv, dmask = sdpa.efficient_backward(
            grad, q, k, v, out, lse, mask, rule.causal, rule.scale, trained is not None
        )
        d_bias = none if trained is None or dmask is None else summed_to(trained, dmask)
        return dq, dk, dv, d_bias, d_sinks


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Room for (out, log-sum-exp), out stored as [B, S, H, Dv]."""
    batch, heads, length = q.shape[:3]
    out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, length, dtype=sdpa.accumulate_dtype(q))


def _kernel_mask(q: Tensor, k: Tensor, added: Tensor | None) -> Tensor | None:
    """What is added to scores as kernels take it: in q's dtype, [B, H, S, T]."""
    if added is None:
        return None
    if added.dtype != q.dtype:  # what is finite stays so: it lowers keys and does not hide them
        lowest = torch.finfo(q.dtype).min
        added = added.masked_fill((added < lowest) & (added > -math.inf), lowest).to(q.dtype)
    return added.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _tops(mask: Tensor) -> Tensor:
    """The largest entry of each query's row, [B, H, S, 1], or 1 where rows are shared; -inf: it sees no key.

    A finite mask hides nothing wholly: as in torch, a query all of whose keys it lowers alike looks at all.
    """
    own = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())
    return mask[own].amax(-1, keepdim=True)


def _of_lowered_rows(grad: Tensor, mask: Tensor) -> Tensor:
    """The output's gradient, for kernels that read probabilities from the log-sum-exp. Where a finite mask
    lowers all T keys of a query alike, that has lost log T, and each 1 / T comes out as 1.
    """
    tops = _tops(mask)
    lowered = (tops > -math.inf) & (tops <= _LOWERED)
    return grad * torch.where(lowered, 1.0 / mask.shape[-1], 1.0).to(grad.dtype)
