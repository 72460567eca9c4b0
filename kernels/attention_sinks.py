"""Attention sinks by any flash attention, through the log-sum-exp that it returns.

A sink is one more logit z per head, in the denominator of the softmax alone (Xiao et al. 2023,
arXiv:2309.17453). With l the log-sum-exp of a query's scores, every probability exp(s - l) becomes exp(s -
l') with l' = log(exp(l) + exp(z)), so the output shrinks by exp(l - l') = sigmoid(l - z).

The backward needs nothing else. Flash attention forms probabilities as exp(s - l) and, as the gradient of
scores, p * (dp - delta) with delta the sum of out * grad. Given the output and the log-sum-exp with sinks,
these are the probabilities and the sums with sinks, whose own value is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out [B, H, S, D], log-sum-exp [B, H, S]) with sinks [H], of those without."""
    logits = sinks.to(lse.dtype).view(1, -1, 1)
    share = torch.sigmoid(lse - logits).unsqueeze(-1)
    return out * share.to(out.dtype), torch.logaddexp(lse, logits)


def gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient [H] of sinks, from output and log-sum-exp with them."""
    return sink_gradient(lse, (grad * out).sum(-1, dtype=lse.dtype), sinks)


def sink_gradient(lse: Tensor, delta: Tensor, sinks: Tensor | None) -> Tensor:
    """-sum over queries of the sink's probability times delta; empty without sinks."""
    if sinks is None:
        return lse.new_empty(0)
    share = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    gradient: Tensor = (share * delta).sum((0, 2)).neg()
    return gradient.to(sinks.dtype)
