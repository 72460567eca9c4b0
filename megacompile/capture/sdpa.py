"""Scaled dot-product attention as one operator: which implementation runs a call, and each of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from megacompile.capture.counter_rng import dropout
from megacompile.errors import CaptureError
from megacompile.kernels._triton import arch_of, ceil_div, on_gpu, processors, runs_triton, wide
from megacompile.kernels.attention import (
    Rule,
    flash_attention_backward,
    flash_attention_forward,
    sink_gradient,
    supports,
)
from megacompile.kernels.registry import (
    Arguments,
    Cost,
    Costs,
    Function,
    Kernel,
    Operation,
    OpPass,
    OpSpec,
    Shape,
    declare,
    normal,
)

# ------------------------------------------------------------------------------------------------------------
# Which implementation of attention runs a call, torch's own behind one interface, the plain softmax.
#
# ``library`` is torch's flash attention (its own kernel on CPU, FlashAttention 2 on CUDA), ``triton`` our
# kernel for windows, softcap, sinks, packed documents, where it is faster, and for sequences so long that
# torch's would hold gigabytes of sums, in 16-bit types, ``efficient`` torch's memory-efficient attention on
# CUDA (float32, additive bias and its gradient), ``plain`` what :mod:`megacompile.capture.sdpa` writes out.
# The choice depends on shapes, dtypes, device and constants alone, so that a recomputed forward and the
# backward make the same one.
#
# On CUDA torch's cuDNN attention is not used: its backward sums in an order that changes from run to run, and
# equal seeds must give equal bits. The other two are asked to be deterministic.


aten = torch.ops.aten
Path = Literal["library", "triton", "efficient", "plain"]
LIBRARY_DIM = 256
ALIGNED = 16  # bytes that kernels load at once, and heads of the memory-efficient attention are a multiple of
_BIAS_COLUMNS = 16  # and elements that rows of its bias are
_MOST_SUMS = 1 << 30  # bytes of sums above which torch's attention leaves a call to ours
_DENSE = torch.contiguous_format
_LSE_ROWS = 32  # and rows that its log-sum-exps are


@dataclass(frozen=True)
class Features:
    """The features of a call of attention beside q, k and v."""

    bias: bool
    bias_grad: bool
    sinks: bool
    dropout: bool
    causal: bool
    window: int
    softcap: float
    packed: bool = False

    @classmethod
    def of(
        cls, bias: Tensor | None, sinks: Tensor | None, causal: bool, window: int, softcap: float,
        dropout_p: float, bias_grad: bool, bounds: Tensor | None,
    ) -> Self:  # fmt: skip
        """Return the features of the arguments of a call."""
        drops, packed = dropout_p > 0.0, bounds is not None
        return cls(bias is not None, bias_grad, sinks is not None, drops, causal, window, softcap, packed)

    def masked(self, k: Tensor) -> bool:
        """Return whether a query does not look at all keys alike, or at those before it."""
        return self.bias or self.packed or 0 < self.window < k.shape[2]


def choose(q: Tensor, k: Tensor, v: Tensor, has: Features) -> Path:
    """The implementation that runs a call; all but "triton" are given packed documents as a bias."""
    if 0 in (*q.shape, *k.shape, *v.shape) or has.dropout or (has.bias_grad and not q.is_cuda):
        return "plain"
    same_lengths = q.shape[2] == k.shape[2]
    plain_scores = has.softcap == 0.0 and (not has.sinks or on_gpu(q))
    torchs = plain_scores and q.shape[-1] == v.shape[-1] and (same_lengths or not (has.causal or has.window))
    masked = has.masked(k)
    sees_all = same_lengths or (not has.window and not has.causal)
    ours = not has.bias and sees_all and runs_triton(q) and supports(q, k, v)
    covers = _library_covers(q, masked=masked) if q.is_cuda else not (masked and ours)
    if torchs and covers and not (ours and (_is_faster(q) or _sums_bytes(q) > _MOST_SUMS)):
        return "library"
    if ours:
        return "triton"
    return "efficient" if torchs and _efficient_covers(q) else "plain"


def _is_faster(q: Tensor) -> bool:
    """Return whether our kernel was measured to be faster than torch's flash attention, whose backward is
    asked for equal bits: on Hopper, heads 128 wide."""
    return q.shape[-1] == 128 and arch_of(q) == 90


def _sums_bytes(q: Tensor) -> int:
    """Return the bytes that torch's deterministic backward takes on a GPU beside its results: dq in FP32 for
    each of as many programs as a head has of the multiprocessors. Ours takes nothing."""
    if not on_gpu(q):
        return 0
    return 4 * q.numel() * ceil_div(processors(q.device), q.shape[0] * q.shape[1])


def _library_covers(q: Tensor, *, masked: bool) -> bool:
    """Return whether torch's flash attention takes these on CUDA, where it knows no mask and 16-bit types
    alone."""
    return not masked and q.element_size() == 2 and q.shape[-1] <= LIBRARY_DIM and q.shape[-1] % 8 == 0


def _efficient_covers(q: Tensor) -> bool:
    """Return whether torch's memory-efficient attention takes these, on CUDA alone."""
    rows = q.shape[-1] * q.element_size()
    return q.is_cuda and q.element_size() <= 4 and rows % ALIGNED == 0


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of scores and sums."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of torch's flash attention; without a mask, causal or not."""
    if q.device.type != "cpu":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            *_rows(q, k, v), 0.0, causal, False, scale=scale
        )
        return out, lse
    heads = q.shape[1]
    return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        *_rows(q, repeat_heads(k, heads), repeat_heads(v, heads)), 0.0, causal and mask is None,
        attn_mask=mask, scale=scale,
    )  # fmt: skip


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of :func:`forward`, contiguous."""
    if q.device.type != "cpu":
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout: never read
        with _deterministic():
            dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                grad, *_rows(q, k, v), out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal,
                seed, seed[:0], scale=scale,
            )  # fmt: skip
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    heads, groups = q.shape[1], k.shape[1]
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *_rows(q, repeat_heads(k, heads), repeat_heads(v, heads), out), lse, 0.0,
        causal and mask is None, attn_mask=mask, scale=scale,
    )  # fmt: skip
    return dq.contiguous(), sum_heads(dk, groups), sum_heads(dv, groups)


def efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of torch's memory-efficient attention; ``causal`` where there is no mask."""
    heads = q.shape[1]
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        *_rows(q, repeat_heads(k, heads), repeat_heads(v, heads)), _aligned(mask), True, 0.0,
        causal and mask is None, scale=scale,
    )  # fmt: skip
    return out, lse[:, :, : q.shape[2]]


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    causal: bool, scale: float, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dmask) of :func:`efficient_forward`; dmask [B, H, S, T] where ``bias_grad``."""
    heads, groups = q.shape[1], k.shape[1]
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout: never read
    with _deterministic():
        dq, dk, dv, dmask = aten._scaled_dot_product_efficient_attention_backward(
            grad, *_rows(q, repeat_heads(k, heads), repeat_heads(v, heads)), _aligned(mask), _by_token(out),
            torch.nn.functional.pad(lse, (0, -q.shape[2] % _LSE_ROWS), value=float("inf")), seed, seed, 0.0,
            [True, True, True, bias_grad], causal and mask is None, scale=scale,
        )  # fmt: skip
    return dq.contiguous(), sum_heads(dk, groups), sum_heads(dv, groups), dmask if bias_grad else None


def is_aligned(mask: Tensor) -> bool:
    """Return whether each row of a mask begins at a multiple of 16 elements, side by side."""
    places = (mask.storage_offset(), *mask.stride()[:-1])
    return mask.stride(-1) == 1 and all(place % _BIAS_COLUMNS == 0 for place in places)


def _aligned(mask: Tensor | None) -> Tensor | None:
    """The mask with rows that begin at multiples of 16 elements; dimensions that are shared stay so."""
    if mask is None or is_aligned(mask):
        return mask
    own = _own(mask, mask.dim() - 1)
    columns = mask.shape[-1]
    rows = mask.new_empty((*own.shape[:-1], -(-columns // _BIAS_COLUMNS) * _BIAS_COLUMNS))
    rows[..., :columns] = own
    return rows[..., :columns].expand_as(mask)


def _own(x: Tensor, dims: int) -> Tensor:
    """One entry of those of the first dimensions that share it."""
    return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()[:dims])]


def _rows(*tensors: Tensor) -> list[Tensor]:
    """Queries, keys or values as kernels read them; in a copy batches and heads still share what they shared.

    torch's flash attention for the CPU takes the last stride to be one, and rows not to overlap; those for
    CUDA load 16 bytes at once. None of them looks.
    """
    return [x if _has_rows(x) else _own(x, 2).clone(memory_format=_DENSE).expand_as(x) for x in tensors]


def _has_rows(x: Tensor) -> bool:
    """Return whether a row's elements lie side by side, apart from others', on a GPU at a multiple of 16
    bytes."""
    length, width = x.shape[2:]
    if (width > 1 and x.stride(3) != 1) or (length > 1 and 0 < x.stride(2) < width):
        return False
    places = [
        x.storage_offset(),
        *(stride for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1),
    ]
    return not on_gpu(x) or all(place * x.element_size() % ALIGNED == 0 for place in places)


def _by_token(out: Tensor) -> Tensor:
    """Outputs as the memory-efficient attention's backward reads them: a token's heads side by side."""
    heads, _, width = out.shape[1:]
    return out if out.stride()[1:] == (width, heads * width, 1) else heads_inside(out)


def heads_inside(out: Tensor) -> Tensor:
    """Store [B, H, S, D] as [B, S, H, D], the order in which the model reads it next."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Ask for deterministic kernels, without torch's filling of fresh memory, for one call."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=warns)
        settings.fill_uninitialized_memory = fills


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Each of x's heads as often as it takes to have ``heads``."""
    batch, groups, length, dim = x.shape
    if groups == heads:
        return x
    each = x[:, :, None].expand(batch, groups, heads // groups, length, dim)
    return each.reshape(batch, heads, length, dim)


def sum_heads(x: Tensor, groups: int) -> Tensor:
    """The gradient of :func:`repeat_heads`."""
    batch, heads, length, dim = x.shape
    if heads == groups:
        return x.contiguous()
    return x.view(batch, groups, heads // groups, length, dim).sum(2)


# ------------------------------------------------------------------------------------------------------------
# Sinks by any flash attention, through the log-sum-exp that it returns.
#
# A sink is one more logit z per head, in the denominator of the softmax alone (Xiao et al. 2023,
# arXiv:2309.17453). With l the log-sum-exp of a query's scores, every probability exp(s - l) becomes exp(s -
# l') with l' = log(exp(l) + exp(z)), so the output shrinks by exp(l - l') = sigmoid(l - z).
#
# The backward needs nothing else. Flash attention forms probabilities as exp(s - l) and, as the gradient of
# scores, p * (dp - delta) with delta the sum of out * grad. Given the output and the log-sum-exp with sinks,
# these are the probabilities and the sums with sinks, whose own value is zero.


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out [B, H, S, D], log-sum-exp [B, H, S]) with sinks [H], of those without."""
    logits = sinks.to(lse.dtype).view(1, -1, 1)
    share = torch.sigmoid(lse - logits).unsqueeze(-1)
    return out * share.to(out.dtype), torch.logaddexp(lse, logits)


def gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient [H] of sinks, from output and log-sum-exp with them."""
    return sink_gradient(lse, (grad * out).sum(-1, dtype=lse.dtype), sinks)


# ------------------------------------------------------------------------------------------------------------
# Chunks of queries, where the scores or the mask of all of them would be large.
#
# In: a call of attention. Out: which queries to take at a time, with the keys that any of them sees, and what
# hides the rest. What a window costs then grows with the tokens, not with their square (Beltagy et al. 2020,
# arXiv:2004.05150).


MOST_BYTES = 64 << 20  # of a chunk's scores
LEAST_QUERIES = 256  # so that products stay large


class Chunk(NamedTuple):
    """Queries of a call, and the keys that they may see."""

    queries: slice
    keys: slice

    def bias(self, q: Tensor, k: Tensor, bias: Tensor | None, rule: Rule) -> Tensor | None:
        """Return what is added to the chunk's scores, broadcastable to [B, H, queries, keys]: its part of
        ``bias``, and -inf where a query does not see a key. ``q`` and ``k`` are the whole call's."""
        if bias is not None:
            bias = _part(_part(bias, -2, self.queries, q.shape[2]), -1, self.keys, k.shape[2])
        key = torch.arange(self.keys.start, self.keys.stop, device=q.device)
        seen = self._band(key, k.shape[2] - q.shape[2], rule)
        if rule.bounds is not None:
            first, last = rule.bounds[:, :, self.queries].unsqueeze(-1)
            inside = (key >= first) & (key < last)
            seen = (inside if seen is None else inside & seen).unsqueeze(1)
        if seen is None:
            return bias
        return torch.where(seen, q.new_zeros(()) if bias is None else bias, -math.inf)

    def _band(self, key: Tensor, shift: int, rule: Rule) -> Tensor | None:
        """True where causal order and the window let a query look at a key; the last query is at the last
        key's place, ``shift`` beyond its own number."""
        if not rule.causal and rule.window <= 0:
            return None
        query = torch.arange(self.queries.start, self.queries.stop, device=key.device) + shift
        distance = query[:, None] - key
        if not rule.causal:
            return distance.abs() < rule.window
        seen = distance >= 0
        return seen & (distance < rule.window) if rule.window > 0 else seen


def chunks_of(q: Tensor, k: Tensor, has: Features, path: Path) -> list[Chunk]:
    """The chunks of a call that holds scores, or a mask of their size, on ``path``.

    One where they are small, and where they cannot be cut: dropout numbers the elements of all scores, and a
    trained bias has a gradient of their size.
    """
    length, rows = q.shape[2], q.shape[2]
    of_pair = q.shape[0] * (q.shape[1] if path == "plain" else 1) * accumulate_dtype(q).itemsize
    while rows > LEAST_QUERIES and of_pair * rows * _most_keys(rows, k, has) > MOST_BYTES:
        rows = max(LEAST_QUERIES, -(-rows // 2))
    if rows == length or has.dropout or has.bias_grad:
        return [Chunk(slice(0, length), slice(0, k.shape[2]))]
    queries = [slice(start, min(start + rows, length)) for start in range(0, length, rows)]
    return [Chunk(some, _keys(some, k.shape[2] - length, k.shape[2], has)) for some in queries]


def _most_keys(rows: int, k: Tensor, has: Features) -> int:
    """Return the most keys that so many neighbouring queries see together."""
    if has.bias or not has.window:
        return k.shape[2]
    return min(k.shape[2], rows + has.window * (1 if has.causal else 2))


def _keys(queries: slice, shift: int, length: int, has: Features) -> slice:
    """The keys that these queries see together; with a bias, which may lower them all alike, every key."""
    if has.bias:
        return slice(0, length)
    first = queries.start + shift - has.window + 1 if has.window else 0
    behind = queries.stop + shift
    last = behind if has.causal else behind + has.window - 1 if has.window else length
    last = min(max(last, 1), length)
    return slice(min(max(first, 0), last - 1), last)


def _part(bias: Tensor, dim: int, part: slice, whole: int) -> Tensor:
    """A part of a dimension, unless all share one entry."""
    return bias.narrow(dim, part.start, part.stop - part.start) if bias.shape[dim] == whole else bias


# ------------------------------------------------------------------------------------------------------------
# Attention written out in torch's operators, for what no library's kernel takes: dropout, a bias that is
# trained, on the CPU softcaps and sinks. It holds the whole matrix of scores.
#
# In: the arguments of :func:`megacompile.capture.sdpa.attention`; what a query does not see is -inf in the
# bias. Out: its results, and their gradients.


class Drops(NamedTuple):
    """The probabilities that a call drops: as :func:`~megacompile.capture.counter_rng.dropout` says."""

    rng: Tensor | None
    site: int
    p: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.p == 0.0:
            return x
        assert self.rng is not None
        dropped: Tensor = dropout(x, self.rng, self.site, self.p)
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
    dtype = accumulate_dtype(q)
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


# ------------------------------------------------------------------------------------------------------------
# Attention by torch: its kernels, or its operators; whole, or some queries at a time.
#
# In: the arguments of :func:`megacompile.capture.sdpa.attention`, on any path but our own kernel's. Out: its
# results, and their gradients. What a query does not see is -inf in what is added to its scores, unless the
# kernel knows causal order by itself.


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
        dtype = accumulate_dtype(q)
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
    return out, q.new_empty(batch, heads, length, dtype=accumulate_dtype(q))


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


# ------------------------------------------------------------------------------------------------------------
# Attention as an operator, in the place of a model's own.
#
# In: what a call of attention is given. Out: its result, and the log-sum-exp that its backward reads. One
# graph serves every device, a recomputed forward repeats the first one bit for bit, and the planner sees one
# node with known cost. Which kernel runs a call is decided in :mod:`megacompile.capture.sdpa`.


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


def _variant(given: Arguments) -> str:
    """``128 window softcap``, ``192/128``, ``64 two-sided``."""
    keys, values, window = given["k"].shape, given["v"].shape[-1], given["window"]
    windowed = 0 < window < keys[2]
    has = {
        "window": windowed and given["causal"],
        "two-sided": windowed and not given["causal"],
        "softcap": given["softcap"] > 0.0,
        "sinks": given["sinks"] is not None,
        "packed": given["bounds"] is not None,
    }
    width = str(values) if values == keys[-1] else f"{keys[-1]}/{values}"
    return " ".join([width, *(name for name, there in has.items() if there)])


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


def _costs(window: int) -> Costs:
    def costs(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
        batch, heads, groups, tokens, width = shape
        reach = min(window or tokens, tokens)
        pairs = reach * tokens - reach * (reach - 1) // 2
        flops = 4 * batch * heads * pairs * width
        q, kv = (batch * n * tokens * width * itemsize for n in (heads, 2 * groups))
        return Cost(2 * q + kv, flops), Cost(4 * q + 2 * kv, flops * 5 // 2)

    return costs


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


# torch's backward also sums rows and heads, fills zeros and converts.
declare(
    OpSpec(
        "attention",
        OpPass(attention_flops, kernels=(Kernel("attention_forward_kernel", (1.0,)),)),
        OpPass(
            attention_backward_flops,
            lambda given: 3 if _runs_kernels(given) else 9,
            kernels=(
                Kernel("attention_backward_q_kernel", (0.6,)),  # scores, their gradient, dq
                Kernel("attention_backward_kv_kernel", (0.8,)),  # scores, gradient, dk, dv
                Kernel("attention_backward_kv_kernel", (0.6, 0.2)),  # dk and dv apart
            ),
        ),
        variant=_variant,
        runs_kernels=_runs_kernels,
        draws=(5, 11),
        benchmarks=(
            Operation(
                "attention",
                _SIZES,
                ((2, 32, 8, 4096, 128),),
                _qkv,
                3,
                _eager,
                _costs(0),
                _ours(0.0, 0),
                _shape_of,
            ),
            Operation(
                "capped_attention",
                _SIZES,
                ((2, 16, 8, 4096, 128),),
                _qkv,
                3,
                _capped_eager,
                _costs(WINDOW),
                _ours(SOFTCAP, WINDOW),
                lambda *_: None,
            ),
        ),
    )
)
