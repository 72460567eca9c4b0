"""``attention.py`` in plain torch, with the whole matrix of scores; and the rule that both follow.

q: [B, H, S, D]. k: [B, G, T, D]. v: [B, G, T, Dv].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megacompile.kernels._triton import wide


@dataclass(frozen=True, eq=False)
class Rule:
    """What a query sees, and how scores are formed; sinks: [H], bounds: int32 [2, B, S]."""

    scale: float
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    bounds: Tensor | None = None


def sink_gradient(lse: Tensor, delta: Tensor, sinks: Tensor | None) -> Tensor:
    """-sum over queries of the sink's probability times delta; empty without sinks."""
    if sinks is None:
        return lse.new_empty(0)
    share = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    gradient: Tensor = (share * delta).sum((0, 2)).neg()
    return gradient.to(sinks.dtype)


def visible(q: Tensor, k: Tensor, rule: Rule) -> Tensor:
    """bool, broadcastable to [B, H, S, T]."""
    key = torch.arange(k.shape[2], device=q.device)
    distance = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2] - key
    seen = distance >= 0 if rule.causal else torch.ones_like(distance, dtype=torch.bool)
    if rule.window:
        seen = seen & (distance < rule.window)
        seen = seen if rule.causal else seen & (-distance < rule.window)
    if rule.bounds is None:
        return seen
    first, last = rule.bounds[:, :, None, :, None]
    inside: Tensor = (key >= first) & (key < last)
    return seen & inside


def scores(q: Tensor, k: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """(capped scores, probabilities, lse) in plain torch."""
    dtype = wide(q.dtype)
    keys = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    s = q.to(dtype) @ keys.mT * rule.scale
    s = rule.softcap * torch.tanh(s / rule.softcap) if rule.softcap else s
    hidden = s.masked_fill(~visible(q, k, rule), float("-inf"))
    lse = hidden.logsumexp(-1)
    if rule.sinks is not None:
        lse = torch.logaddexp(lse, rule.sinks.to(dtype).view(1, -1, 1))
    base = torch.where(lse == float("-inf"), 0.0, lse)
    return s, torch.exp(hidden - base.unsqueeze(-1)), lse


def forward_reference(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """(out, lse) in plain torch, with the whole score matrix."""
    _, p, lse = scores(q, k, rule)
    out: Tensor = p @ v.to(p.dtype).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse


def backward_reference(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks) in plain torch."""
    s, p, _ = scores(q, k, rule)
    group = q.shape[1] // k.shape[1]
    keys, values = (x.to(p.dtype).repeat_interleave(group, dim=1) for x in (k, v))
    grad = grad.to(p.dtype)
    delta = (out.to(p.dtype) * grad).sum(-1)
    ds = p * (grad @ values.mT - delta.unsqueeze(-1)) * rule.scale
    ds = ds * (1.0 - (s / rule.softcap).square()) if rule.softcap else ds
    dk, dv = ds.mT @ q.to(p.dtype), p.mT @ grad
    dk, dv = (x.view(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))
    dq = (ds @ keys).to(q.dtype).contiguous()
    return dq, dk.to(k.dtype), dv.to(v.dtype), sink_gradient(lse, delta, rule.sinks)
