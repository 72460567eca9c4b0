"""Scaled dot-product attention as one operator, in the place of a model's own.

In: what a call of attention is given. Out: its result, and the log-sum-exp that its backward reads. One
graph serves every device, a recomputed forward repeats the first one bit for bit, and the planner sees one
node with known cost. Which kernel runs a call is decided in :mod:`megacompile.kernels.attention_choice`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megacompile.errors import CaptureError
from megacompile.kernels._triton import wide
from megacompile.kernels.attention import Rule, flash_attention_backward, flash_attention_forward
from megacompile.kernels.attention_choice import Features, Path, choose
from megacompile.kernels.attention_sinks import gradient_of_sinks, with_sinks
from megacompile.kernels.eager_form import EagerForm, Function, Shape, normal
from megacompile.kernels.plain_attention import Drops, plain_backward, plain_forward, summed_to
from megacompile.kernels.query_chunks import Chunk, chunks_of
from megacompile.kernels.registry import Arguments, OpPass, OpSpec, declare
from megacompile.kernels.torch_sdpa import (
    backward,
    efficient_backward,
    efficient_forward,
    forward,
    heads_inside,
)

_LOWERED = -1e8  # a logarithm of a number of keys vanishes beside it in float32
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""For q, k, v, bias and sinks; empty for a bias or sinks that are absent or constant."""


@dataclass(frozen=True)
class TorchAttention:
    """A call that torch runs, by its kernels or its operators, whole or some queries at a time: which
    implementation runs it, and its arguments beside q, k and v.

    What a query does not see is -inf in what is added to its scores, unless the kernel knows causal order by
    itself.
    """

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
        dtype = wide(q.dtype)
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
            return plain_forward(q, k, v, added, self.rule, self.drops)
        mask = _kernel_mask(q, k, added)
        run = forward if self.path == "library" else efficient_forward
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
            return plain_backward(grad, q, k, v, added, lse, rule, self.drops, trained)
        mask = _kernel_mask(q, k, added)
        none = q.new_empty(0)
        d_sinks = none.clone() if rule.sinks is None else gradient_of_sinks(grad, out, lse, rule.sinks)
        if self.has.bias and mask is not None:
            grad = _of_lowered_rows(grad, mask)
        if self.path == "library":
            return *backward(grad, q, k, v, out, lse, mask, rule.causal, rule.scale), none, d_sinks
        dq, dk, dv, dmask = efficient_backward(
            grad, q, k, v, out, lse, mask, rule.causal, rule.scale, trained is not None
        )
        d_bias = none if trained is None or dmask is None else summed_to(trained, dmask)
        return dq, dk, dv, d_bias, d_sinks


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Room for (out, log-sum-exp), out stored as [B, S, H, Dv]."""
    batch, heads, length = q.shape[:3]
    out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(batch, heads, length, dtype=wide(q.dtype))


def _kernel_mask(q: Tensor, k: Tensor, added: Tensor | None) -> Tensor | None:
    """Return what is added to scores as kernels take it: in q's dtype, [B, H, S, T]."""
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


_BIAS_GRAD = 9  # its place among the arguments of a backward behind ``sinks``


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
    _refuse_other(q, k, v, bias)
    has = Features.of(bias, sinks, causal, window, softcap, dropout_p, bias_grad, bounds)
    path = choose(q, k, v, has)
    rule = Rule(scale, causal, window, softcap, sinks, bounds)
    if path == "triton":
        return flash_attention_forward(q, k, v, rule)
    call = TorchAttention(path, has, rule, bias, Drops(rng, site, dropout_p))
    out, lse = call.forward(q, k, v)
    return heads_inside(out), lse.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    _refuse_other(q, k, v, bias)
    return empty_results(q, v)


def _refuse_other(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    """Refuse shapes that do not fit together: kernels would read past the smaller ones."""
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1:3]
    fit = k.shape[0] == batch and k.shape[3] == width and v.shape[:3] == k.shape[:3]
    fit &= heads == groups or (groups > 0 and heads % groups == 0)
    if bias is not None:
        whole = keys, queries, heads, batch
        fit &= bias.dim() <= 4 and all(n in (1, m) for n, m in zip(reversed(bias.shape), whole, strict=False))
    if not fit:
        given = ", ".join(str(list(x.shape)) for x in (q, k, v, bias) if x is not None)
        raise CaptureError(
            f"The forward calls attention on shapes that do not fit together, {given}: give keys and values "
            "one length, keys the width of queries and heads that divide theirs, and a mask, dimension by "
            "dimension, the size of the scores or 1."
        )


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
    has = Features.of(bias, sinks, causal, window, softcap, dropout_p, bias_grad, bounds)
    path = choose(q, k, v, has)
    rule = Rule(scale, causal, window, softcap, sinks, bounds)
    if path == "triton":
        dq, dk, dv, d_sinks = flash_attention_backward(grad, q, k, v, out, lse, rule)
        return dq, dk, dv, q.new_empty(0), d_sinks
    call = TorchAttention(path, has, rule, bias, Drops(rng, site, dropout_p))
    return call.backward(grad, q, k, v, out, lse)


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


def attention_backward_flops(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, sinks: Any, rng: Any, out: Any, lse: Any,
    *args: Any, out_val: Any = None, **kwargs: Any,
) -> int:  # fmt: skip
    """Five products where the forward has two."""
    return attention_flops(q, k, v, bias, sinks, rng, *args) * 5 // 2


def _runs_kernels(given: Arguments) -> bool:
    """Return whether our kernel runs a call: on a GPU, while what is for one is ``recording``."""
    names = "bias", "sinks", "causal", "window", "softcap", "dropout_p", "bias_grad", "bounds"
    has = Features.of(*(given[name] for name in names))
    return choose(given["q"], given["k"], given["v"], has) == "triton"


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention with grouped heads."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _capped_eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gemma's: a causal window and capped scores."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).to(wide(q.dtype))
    scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
    at = torch.arange(q.shape[2], device=q.device)
    distance = at[:, None] - at
    scores = scores.masked_fill((distance < 0) | (distance >= WINDOW), float("-inf"))
    return scores.softmax(-1).to(q.dtype) @ v


def _qkv(shape: Shape, g: torch.Generator) -> list[Tensor]:
    batch, heads, groups, tokens, width = shape
    return [normal(g, batch, tokens, n, width).transpose(1, 2) for n in (heads, groups, groups)]


def _ours(softcap: float, window: int) -> Function:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        out: Tensor = attention(q, k, v, None, None, None, scale, True, window, softcap, 0.0, 0, False)[0]
        return out

    return run


def _shape_of(shapes: Sequence[Shape], constants: Sequence[str]) -> Shape | None:
    """Return the shape of plain causal attention, forward or backward."""
    (batch, heads, tokens, width), (_, groups, *_) = shapes[:2]
    _, causal, window, softcap, dropout_p, *_ = (text for text in constants if text != "None")
    of_all = int(window) <= 0 or int(window) >= shapes[1][2]
    plain = causal == "True" and of_all and softcap == dropout_p == "0.0" and len(shapes) in (3, 5)
    return (batch, heads, groups, tokens, width) if plain else None


SOFTCAP, WINDOW = 50.0, 1024
_SIZES = "batch", "heads", "groups", "tokens", "width"


def _teraflops(plain: float, capped: float) -> Callable[[Arguments], float]:
    return lambda given: capped if given["softcap"] else plain


# torch's backward also sums rows and heads, fills zeros and converts. Rates are of heads 128 wide: causal at
# 4,096 and 32,768 tokens 426 and 484 TFLOP/s, the backward 248 (275 by today's tiles) and 319; with a window
# of 1,024 and a softcap at 4,096 tokens 227 and 176. Other widths were not timed.
declare(
    OpSpec(
        "attention",
        OpPass(attention_flops, teraflops=_teraflops(455, 227)),
        OpPass(
            attention_backward_flops,
            lambda given: 3 if _runs_kernels(given) else 9,
            teraflops=_teraflops(260, 176),
        ),
        runs_kernels=_runs_kernels,
        draws=(5, 11),
        eager=(
            EagerForm(
                "attention",
                _SIZES,
                (2, 32, 8, 4096, 128),
                _qkv,
                3,
                _eager,
                _ours(0.0, 0),
                _shape_of,
            ),
            EagerForm(
                "capped_attention",
                _SIZES,
                (2, 16, 8, 4096, 128),
                _qkv,
                3,
                _capped_eager,
                _ours(SOFTCAP, WINDOW),
                lambda *_: None,
            ),
        ),
    )
)
