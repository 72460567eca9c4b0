"""Put our operators in the place of a model's own, for the length of a context: attention, dropout, scans.

Used twice: by ``capture``, so that the graph holds them, and by eager reference runs, so that eager PyTorch
computes the same function with the same dropout masks. A transformers model is switched to a registered
attention function; any other module is covered by torch's functional entry points.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile.capture.attention_masks import Masks, as_additive, bounds_between
from megacompile.errors import CaptureError
from megacompile.kernels.dropout import dropout_op
from megacompile.kernels.gated_delta import gated_delta_rule as delta_rule
from megacompile.kernels.mamba2 import mamba2_chunk_scan as chunk_scan
from megacompile.kernels.sdpa import attention as attention_operator

_WITHOUT_EFFECT = {  # handed through; the last four say what a mask says, to flash attention alone
    *("position_ids", "cache_position", "labels"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
}
_current: list[CallSites] = []


class CallSites:
    """Numbers the random calls of one forward, in call order, under one seed tensor; keeps its masks.
    ``packs``: an attention runs that is given packed sequences by their bounds."""

    def __init__(self, rng: Tensor, padding: Tensor | None = None, of_ones: bool = False) -> None:
        self.rng, self.packs = rng, False
        self.masks = Masks(padding, of_ones)
        self._count = itertools.count()

    def next(self) -> int:
        return next(self._count)


@contextlib.contextmanager
def numbered(rng: Tensor, padding: Tensor | None = None, of_ones: bool = False) -> Iterator[CallSites]:
    """The sites of one forward's calls; ``rng`` is int64 [2], (seed, 0). Masks leave ``padding`` out."""
    if _current:
        raise RuntimeError("our_operators is already active: contexts cannot be nested.")
    _current.append(CallSites(rng, padding, of_ones))
    try:
        yield _current[-1]
    finally:
        _current.pop()


def said_to_be_causal(
    theirs: Any, mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """torch would compare the mask's values with a causal one's; used as it is, it is right in every case."""
    return is_causal is True


def bincount(theirs: Any, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """``torch.bincount`` of values below ``minlength``; a larger one is an index error, where torch returns
    more counts than that."""
    if weights is not None or not minlength:
        return theirs(input, weights, minlength)  # type: ignore[no-any-return]
    counts = torch.zeros(minlength, dtype=torch.int64, device=input.device)
    return counts.scatter_add(0, input.long(), torch.ones_like(input, dtype=torch.int64))


def dropout(
    theirs: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """``F.dropout`` whose mask comes from a counter."""
    if not training or p == 0.0:
        return input
    sites = _current[-1]
    out = dropout_op(input, sites.rng, sites.next(), float(p))
    return input.copy_(out) if inplace else out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    scale: float | None,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    bounds: Tensor | None = None,
) -> Tensor:
    sites = _current[-1]
    drops = dropout_p > 0.0
    if bias is not None and bias.dtype == torch.bool:
        bias = as_additive(bias, q.dtype)
    out: Tensor
    out, _ = attention_operator(
        q,
        k,
        v,
        bias,
        sinks,
        sites.rng if drops else None,
        max(1, q.shape[-1]) ** -0.5 if scale is None else float(scale),
        causal,
        window,
        softcap,
        float(dropout_p),
        sites.next() if drops else 0,
        bias is not None and bias.requires_grad,
        bounds,
    )
    return out


def attention(
    theirs: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's functional entry point; leading dimensions are broadcast, and flattened or added to have two.

    Keys and values of fewer heads stay as few where that is what our operator takes.
    """
    rank = max(x.dim() for x in (query, key, value))
    query, key, value = (x if x.dim() == rank else x[(None,) * (rank - x.dim())] for x in (query, key, value))
    alone = rank == 4 and key.shape[1] == value.shape[1]
    if enable_gqa and not alone:
        key, value = (x.repeat_interleave(max(1, query.shape[-3] // x.shape[-3]), -3) for x in (key, value))
    grouped = alone and (enable_gqa or key.shape[1] == 1)
    query, key, value = broadcast(query, key, value, kept=3 if grouped else 2)
    lead = query.shape[:-2]
    if is_causal and query.shape[-2] != key.shape[-2]:
        rows = torch.arange(query.shape[-2], device=query.device)[:, None]
        attn_mask = rows >= torch.arange(key.shape[-2], device=query.device)
        is_causal = False

    def to_four(x: Tensor) -> Tensor:
        return x.reshape(math.prod(lead), 1, *x.shape[-2:]) if rank != 4 else x

    if attn_mask is not None and rank != 4:
        attn_mask = to_four(attn_mask.expand(*lead, *attn_mask.shape[-2:]))
    elif attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    out = _attend(
        to_four(query), to_four(key), to_four(value), attn_mask,
        scale=scale, causal=is_causal, dropout_p=dropout_p,
    )  # fmt: skip
    return out.reshape(*lead, *out.shape[-2:]) if rank != 4 else out


def broadcast(*tensors: Tensor, kept: int) -> tuple[Tensor, ...]:
    """Broadcast all dimensions but the last ``kept`` of tensors of one rank; what fits stays as it is."""
    lead = torch.broadcast_shapes(*(x.shape[:-kept] for x in tensors))  # type: ignore[no-untyped-call]
    return tuple(x if x.shape[:-kept] == lead else x.expand(*lead, *x.shape[-kept:]) for x in tensors)


def transformers_attention(
    theirs: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, Any]:
    """transformers' attention interface. A mask known to be a plain pattern is never read.

    Where a model passes tensors that our operator does not know, its own attention function runs.
    """
    unknown = [n for n, v in rest.items() if isinstance(v, Tensor) and n not in _WITHOUT_EFFECT]
    if unknown:
        own = _own_attention(module, unknown)
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            attention_mask = as_additive(attention_mask, query.dtype, torch.finfo(query.dtype).min)
        rest |= {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        rest |= {"position_bias": position_bias, "dropout": dropout, "scaling": scaling}
        given = {n: v for n, v in rest.items() if v is not None}
        return own(module, query, key, value, attention_mask, **given)
    query, key, value = broadcast(query, key, value, kept=3)
    if _current[-1].packs:
        seen = _Seen(None, bounds=bounds_between(rest["cu_seq_lens_q"], query.shape[2]))
    else:
        seen = _seen(module, query, key, attention_mask, is_causal, sliding_window, position_bias)
    out = _attend(
        query, key, value, seen.bias, scale=scaling, causal=seen.causal, window=seen.window,
        softcap=softcap or 0.0, sinks=s_aux, dropout_p=dropout, bounds=seen.bounds,
    )  # fmt: skip
    return out.transpose(1, 2), None


class _Seen(NamedTuple):
    """The keys that each query of a call sees, and what is added to its scores."""

    bias: Tensor | None
    causal: bool = False
    window: int = 0
    bounds: Tensor | None = None


def _seen(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None,
    sliding_window: int | None, position_bias: Tensor | None,
) -> _Seen:  # fmt: skip
    """Return the pattern of a mask that is a plain one, of any other the mask."""
    known = _current[-1].masks.known(mask)
    packed = known is not None and known.bounds is not None
    if known is not None and known.band is not None and not (packed and position_bias is not None):
        return _Seen(position_bias, *known.band, known.bounds)
    if mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        return _Seen(position_bias, causal and query.shape[2] > 1, sliding_window or 0)
    bias = mask if known is None or position_bias is not None else known.additive
    bias = bias[..., : key.shape[2]]
    if position_bias is not None and bias.dtype == torch.bool:
        bias = torch.where(bias, position_bias, torch.finfo(query.dtype).min)
    elif position_bias is not None:
        bias = position_bias + bias
    return _Seen(bias)


def packed_forward(theirs: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of an attention over images in a row, which calls the interface once for all of them, as it
    does for flash attention, not once for each: else their sizes would be those of the graph."""
    sites = _current[-1]
    sites.packs = True
    try:
        return theirs(module, *args, **kwargs)
    finally:
        sites.packs = False


def packs(theirs: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    """Return whether attention is flash attention, as far as :func:`packed_forward` asks."""
    return _current[-1].packs or theirs(*args, **kwargs)


def _own_attention(module: nn.Module, unknown: list[str]) -> Callable[..., tuple[Tensor, Any]]:
    """The eager attention of the file that a model comes from."""
    own: Callable[..., tuple[Tensor, Any]]
    try:
        own = sys.modules[type(module).__module__].eager_attention_forward
    except AttributeError:
        raise CaptureError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention function, which ours "
            "does not take: report the model."
        ) from None
    return own


def gated_delta_rule(
    theirs: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' gated delta rule, from a state of zeros. Its chunks are a matter of rounding.

    States that are given or wanted, for samples, stay its own loops, as does its refusal of packed sequences.
    """
    packed = any(rest.get(name) is not None for name in ("cu_seqlens", "seq_idx"))
    if packed or initial_state is not None or output_final_state:
        rest |= {"initial_state": initial_state, "output_final_state": output_final_state}
        return theirs(
            query, key, value, g, beta, chunk_size=chunk_size,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **rest,
        )  # fmt: skip
    return delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel), None


def mamba2_chunk_scan(
    theirs: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **rest: Any,
) -> Any:
    """transformers' scan of Mamba-2, from a state of zeros. Its chunks are a matter of rounding.

    States that are given or wanted, for samples, stay its own code, as does its refusal of packed sequences.
    """
    given = (rest.get(name) for name in ("initial_states", "z", "seq_idx", "cu_seqlens"))
    if D is None or rest.get("return_final_states") or any(x is not None for x in given):
        return theirs(
            hidden_states, dt, A, B, C, chunk_size=chunk_size, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus,
            dt_limit=dt_limit, **rest,
        )  # fmt: skip
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    return chunk_scan(hidden_states, torch.clamp(dt, *dt_limit), A, B, C, D)


def augmented_copy(
    theirs: Callable[..., Tensor], model: Any, features: Tensor, *args: Any, **rest: Any
) -> Tensor:
    """Whisper's SpecAugment, of a copy: transformers' own writes into the batch, which then stays masked."""
    augments = model.training and getattr(model.config, "apply_spec_augment", True)
    return theirs(model, features.clone() if augments else features, *args, **rest)
