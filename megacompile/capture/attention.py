"""Attention as an operator, in the place of a model's own.

In: what a call of attention is given. Out: its result, and the log-sum-exp that its backward reads. One graph
serves every device, a recomputed forward repeats the first one bit for bit, and the planner sees one node
with known cost. Which kernel runs a call is decided in :mod:`megacompile.capture.sdpa`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megacompile.capture import plain_attention, sdpa
from megacompile.capture.plain_attention import Drops
from megacompile.capture.sinks import gradient_of_sinks, with_sinks
from megacompile.kernels.attention import flash_attention_backward, flash_attention_forward
from megacompile.kernels.attention_reference import Rule

_BIAS_GRAD = 9  # its place among the arguments of a backward behind ``sinks``
_LOWERED = -1e8  # a logarithm of a number of keys vanishes beside it in float32


@torch.library.custom_op("megacompile::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    rng: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    dropout_p: float,
    site: int,
    bias_grad: bool,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention; returns (out, log-sum-exp of the scores).

    q [B, H, S, D], k [B, G, T, D], v [B, G, T, Dv] with G dividing H; ``bias`` is additive and
    broadcasts to [B, H, S, T]; ``sinks`` [H] adds one logit per head to the softmax's denominator;
    ``window`` > 0 keeps keys with 0 <= i - j < window (|i - j| < window where not causal);
    ``softcap`` c > 0 maps scores s to c·tanh(s / c); ``bounds`` int32 [2, B, S], in the place of ``bias``,
    hold the first key of each query's document and the one behind its last. out is [B, H, S, Dv], stored as
    [B, S, H, Dv]; log-sum-exp is [B, H, S] in at least fp32. A query whose keys are all hidden, by -inf in
    ``bias``, gives zeros, and no gradient, as in torch's own attention; its log-sum-exp is inf.
    """
    has = sdpa.Features.of(bias, sinks, causal, window, softcap, dropout_p, bias_grad, bounds)
    path = sdpa.choose(q, k, v, has)
    if bounds is not None and path != "triton":
        bias, causal, window = _document_bias(q, k, bounds, causal, window), False, 0
    if path in ("library", "efficient"):
        mask = _flash_mask(q, k, bias, causal, window)
        run = sdpa.forward if path == "library" else sdpa.efficient_forward
        out, lse = run(q, k, v, mask, causal, scale)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        if bias is not None and mask is not None:
            hidden = _tops(mask) == -math.inf
            out = out.masked_fill(hidden, 0.0)
            lse = lse.masked_fill(hidden.squeeze(-1), math.inf)
        return _heads_inside(out), lse.contiguous()
    if path == "triton":
        return flash_attention_forward(q, k, v, Rule(scale, causal, window, softcap, sinks, bounds))
    rule = Rule(scale, causal, window, softcap, sinks)
    out, lse = plain_attention.forward(q, k, v, bias, rule, Drops(rng, site, dropout_p))
    return _heads_inside(out), lse


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length = q.shape[:3]
    out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, length, dtype=sdpa.accumulate_dtype(q))


@torch.library.custom_op("megacompile::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    rng: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    dropout_p: float,
    site: int,
    bias_grad: bool,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`attention` for (q, k, v, bias, sinks), from its inputs and outputs.

    The gradients of ``bias`` and ``sinks`` are empty tensors where these are absent or constant.
    """
    none = q.new_empty(0)
    has = sdpa.Features.of(bias, sinks, causal, window, softcap, dropout_p, bias_grad, bounds)
    path = sdpa.choose(q, k, v, has)
    if bounds is not None and path != "triton":
        bias, causal, window = _document_bias(q, k, bounds, causal, window), False, 0
    if path in ("library", "efficient"):
        mask = _flash_mask(q, k, bias, causal, window)
        d_sinks = none.clone() if sinks is None else gradient_of_sinks(grad, out, lse, sinks)
        grad = _of_lowered_rows(grad, bias, mask)
        if path == "library":
            return *sdpa.backward(grad, q, k, v, out, lse, mask, causal, scale), none, d_sinks
        dq, dk, dv, dmask = sdpa.efficient_backward(grad, q, k, v, out, lse, mask, causal, scale, bias_grad)
        d_bias = none if bias is None or dmask is None else plain_attention.summed_to(bias, dmask)
        return dq, dk, dv, d_bias, d_sinks
    if path == "triton":
        rule = Rule(scale, causal, window, softcap, sinks, bounds)
        dq, dk, dv, d_sinks = flash_attention_backward(grad, q, k, v, out, lse, rule)
        return dq, dk, dv, none, d_sinks
    rule, drops = Rule(scale, causal, window, softcap, sinks), Drops(rng, site, dropout_p)
    return plain_attention.backward(grad, q, k, v, bias, lse, rule, drops, bias_grad=bias_grad)


@attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    bias_grad = rest[_BIAS_GRAD]
    d_bias = torch.empty_like(bias).contiguous() if bias_grad and bias is not None else q.new_empty(0)
    d_sinks = torch.empty_like(sinks) if sinks is not None else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_bias, d_sinks


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, sinks, rng, *ctx.constants, bounds = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, bias, sinks, rng, bounds, *output)


def _attention_grad(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, bias, sinks, rng, bounds, out, lse = ctx.saved_tensors
    dq, dk, dv, d_bias, d_sinks = torch.ops.megacompile.attention_backward(
        grad, q, k, v, bias, sinks, rng, out, lse, *ctx.constants, bounds
    )
    bias_grad = ctx.constants[-1] and bias is not None
    return (dq, dk, dv, d_bias if bias_grad else None, d_sinks if sinks is not None else None) + (None,) * (
        2 + len(ctx.constants)
    )


attention.register_autograd(_attention_grad, setup_context=_attention_setup)


def _heads_inside(out: Tensor) -> Tensor:
    """Store [B, H, S, D] as [B, S, H, D], the order in which the model reads it next."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _document_bias(q: Tensor, k: Tensor, bounds: Tensor, causal: bool, window: int) -> Tensor:
    """What packed documents add to scores, [B, 1, S, T]: -inf where a query does not see a key."""
    key = torch.arange(k.shape[2], device=q.device)
    first, last = bounds.unsqueeze(-1)
    seen, band = (key >= first) & (key < last), sdpa.band_mask(q, k, causal, window)
    seen = seen if band is None else seen & band
    return torch.where(seen, torch.zeros((), dtype=q.dtype, device=q.device), -math.inf).unsqueeze(1)


def _flash_mask(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, window: int) -> Tensor | None:
    covers_all = window <= 0 or window >= k.shape[2]
    if bias is None and covers_all:
        return None
    band = sdpa.band_mask(q, k, causal, window)
    mask = bias if bias is not None else q.new_zeros(())
    if band is not None:
        mask = torch.where(band, mask, -math.inf)
    if mask.dtype != q.dtype:  # what is finite stays so: it lowers keys and does not hide them
        lowest = torch.finfo(q.dtype).min
        mask = mask.masked_fill((mask < lowest) & (mask > -math.inf), lowest).to(q.dtype)
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _tops(mask: Tensor) -> Tensor:
    """The largest entry of each query's row, [B, H, S, 1], or 1 where rows are shared; -inf: it sees no key.

    A finite mask hides nothing wholly: as in torch, a query all of whose keys it lowers alike looks at all.
    """
    own = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())
    return mask[own].amax(-1, keepdim=True)


def _of_lowered_rows(grad: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """The output's gradient, for kernels that read probabilities from the log-sum-exp. Where a finite mask
    lowers all T keys of a query alike, that has lost log T, and each 1 / T comes out as 1.
    """
    if bias is None or mask is None:
        return grad
    tops = _tops(mask)
    lowered = (tops > -math.inf) & (tops <= _LOWERED)
    return grad * torch.where(lowered, 1.0 / mask.shape[-1], 1.0).to(grad.dtype)


@register_flop_formula(torch.ops.megacompile.attention)
def attention_flops(q: Any, k: Any, v: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Floating-point operations of the two products, the causal half or the window counted once."""
    batch, heads, length, dim = q
    keys = k[2]
    causal, window = args[4], args[5]
    pairs = length * keys
    if causal:
        reach = min(window, keys) if window > 0 else keys
        pairs = reach * length - math.comb(reach, 2) if length == keys else pairs
    elif window > 0:
        pairs = min(pairs, length * (2 * window - 1))
    return int(2 * batch * heads * pairs * (dim + v[-1]))


@register_flop_formula(torch.ops.megacompile.attention_backward)
def attention_backward_flops(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, sinks: Any, rng: Any, out: Any, lse: Any,
    *args: Any, out_val: Any = None, **kwargs: Any,
) -> int:  # fmt: skip
    """Five products where the forward has two."""
    return attention_flops(q, k, v, bias, sinks, rng, *args) * 5 // 2
