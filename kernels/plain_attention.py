"""Attention written out in torch's operators, for what no library's kernel takes: dropout, a bias that is
trained, on the CPU softcaps and sinks. It holds the whole matrix of scores.

In: the arguments of :func:`megacompile.kernels.sdpa.attention`; what a query does not see is -inf in the
bias. Out: its results, and their gradients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megacompile.kernels._triton import wide
from megacompile.kernels.attention import Rule
from megacompile.kernels.attention_sinks import sink_gradient
from megacompile.kernels.dropout import dropout_op
from megacompile.kernels.grouped_heads import repeat_heads, sum_heads


class Drops(NamedTuple):
    """The probabilities that a call drops: as :func:`~megacompile.kernels.dropout.dropout_op` says."""

    rng: Tensor | None
    site: int
    p: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.p == 0.0:
            return x
        assert self.rng is not None
        dropped: Tensor = dropout_op(x, self.rng, self.site, self.p)
        return dropped


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rule: Rule, drops: Drops
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp)."""
    probabilities, lse, _ = _softmax(q, k, bias, rule)
    dropped = drops(probabilities.to(v.dtype))
    return torch.matmul(dropped, repeat_heads(v, q.shape[1])), lse


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lse: Tensor, rule: Rule, drops: Drops,
    trained: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients for (q, k, v, trained, sinks), ``trained`` a part of ``bias``; empty for what is absent."""
    groups = k.shape[1]
    k_all, v_all = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    p, _, capped = _softmax(q, k, bias, rule)
    dropped = drops(p.to(v.dtype))
    dv = sum_heads(torch.matmul(dropped.transpose(-1, -2), grad), groups)
    dp = drops(torch.matmul(grad, v_all.transpose(-1, -2))).to(p.dtype)
    inner = (p * dp).sum(-1, keepdim=True)
    ds = p * (dp - inner)
    d_bias = q.new_empty(0) if trained is None else summed_to(trained, ds)
    if capped is not None:
        ds = ds * (1.0 - (capped / rule.softcap) ** 2)
    ds = (ds * rule.scale).to(q.dtype)
    dq = torch.matmul(ds, k_all).contiguous()
    dk = sum_heads(torch.matmul(ds.transpose(-1, -2), q), groups)
    d_sinks = q.new_empty(0)
    if rule.sinks is not None:
        d_sinks = sink_gradient(lse, inner.squeeze(-1), rule.sinks)
    return dq, dk, dv, d_bias, d_sinks


def summed_to(bias: Tensor, d_scores: Tensor) -> Tensor:
    """A bias's gradient, of that of the scores to which it was broadcast."""
    return d_scores.sum_to_size(bias.shape).to(bias.dtype).contiguous()


def _softmax(q: Tensor, k: Tensor, bias: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor, Tensor | None]:
    """Probabilities [B, H, S, T], log-sum-exp [B, H, S], and the capped scores where capped."""
    dtype = wide(q.dtype)
    keys = repeat_heads(k, q.shape[1])
    scores = torch.matmul(q, keys.transpose(-1, -2)).to(dtype) * rule.scale
    capped = None
    if rule.softcap > 0.0:
        scores = capped = rule.softcap * torch.tanh(scores / rule.softcap)
    if bias is not None:
        scores = scores + bias
    top = scores.amax(-1, keepdim=True) if k.shape[2] else scores.new_full((*scores.shape[:3], 1), -math.inf)
    sinks = None if rule.sinks is None else rule.sinks.to(dtype).view(1, -1, 1, 1)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    lse = (top + torch.log(total)).masked_fill(total == 0.0, math.inf)
    return weights / total.masked_fill(total == 0.0, 1.0), lse.squeeze(-1), capped
