"""Put our attention and dropout operators in place of a model's own, for the length of a context.

Used twice: by ``capture``, so that the graph holds them, and by eager reference runs, so that eager
PyTorch computes the same function with the same dropout masks. A transformers model is switched to a
registered attention function; any other module is covered by torch's functional entry points.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import _disable_current_modes

from megacompile.capture import operators as ops
from megacompile.capture import recurrent
from megacompile.capture.patching import in_this_thread
from megacompile.errors import CaptureError

_EAGER, _SDPA = "eager", "sdpa"
_WITHOUT_EFFECT = {"position_ids", "cache_position", "labels"}  # handed through, never read by attention
_current: list[_CallSites] = []
_patching = threading.RLock()  # the functions that are replaced are the whole process's


class _Mask(NamedTuple):
    """A mask that was made for a model: as the model got it, as attention adds it to scores (-inf where a
    boolean one hides a key), and the plain band (causal, window) that it is, if any.
    """

    given: Tensor
    version: int
    additive: Tensor
    pattern: tuple[bool, int] | None


class _CallSites:
    """Numbers the random calls of one forward, in call order, under one seed tensor."""

    def __init__(self, rng: Tensor) -> None:
        self.rng = rng
        self._count = itertools.count()
        self._masks: list[_Mask] = []

    def next(self) -> int:
        return next(self._count)

    def mark(self, mask: Tensor, dtype: torch.dtype, pattern: tuple[bool, int] | None) -> None:
        """Remember a mask that a model is given, and the band that it is, as long as nothing changes it."""
        additive = _additive(mask, dtype, -math.inf) if mask.dtype == torch.bool else mask
        self._masks.append(_Mask(mask, mask._version, additive, pattern))

    def known(self, mask: Tensor | None) -> _Mask | None:
        """What is known of a marked mask, or of an unchanged alias of it."""
        for known in self._masks:
            if (
                mask is not None
                and mask.untyped_storage()._cdata == known.given.untyped_storage()._cdata
                and mask.shape == known.given.shape
                and mask.stride() == known.given.stride()
                and mask._version == known.version
            ):
                return known
        return None


@contextlib.contextmanager
def our_operators(model: nn.Module, rng: Tensor, *, positions_given: bool = False) -> Iterator[None]:
    """Within the context ``model`` runs attention and dropout through :mod:`megacompile.capture.operators`.

    ``rng`` is int64 [2], (seed, 0). One forward per context: call sites are numbered from 0.
    ``positions_given`` says that the batch brings its own ``position_ids``, so that transformers must
    look for packed sequences in them; positions that a model makes itself are never packed.
    """
    with _patching:  # other threads wait here, and their other calls run torch's own functions
        if _current:
            raise RuntimeError("our_operators is already active: contexts cannot be nested.")
        _current.append(_CallSites(rng))
        try:
            with contextlib.ExitStack() as stack:
                for owner, name, replacement in (
                    (F, "dropout", _dropout),
                    (torch, "dropout", _dropout),
                    (F, "scaled_dot_product_attention", _scaled_dot_product_attention),
                    (torch._VF, "lstm", recurrent.lstm),
                    (torch._VF, "gru", recurrent.gru),
                    (torch._VF, "rnn_tanh", recurrent.rnn(torch.tanh)),
                    (torch._VF, "rnn_relu", recurrent.rnn(torch.relu)),
                ):
                    ours = in_this_thread(replacement, getattr(owner, name))
                    stack.enter_context(mock.patch.object(owner, name, ours))
                stack.enter_context(_attention_implementation(model, positions_given))
                yield
        finally:
            _current.pop()


@contextlib.contextmanager
def _attention_implementation(model: nn.Module, positions_given: bool) -> Iterator[None]:
    """Our attention in place of transformers' "sdpa" and "eager" ones; models set to others become eager.

    Each model keeps its name: it asks for it before it does what a boolean mask needs, or an additive one.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None:
        yield
        return
    configs: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, transformers.PreTrainedConfig):
                configs[id(value)] = (value, value._attn_implementation_internal)
    for config, own in configs.values():
        config._attn_implementation_internal = _SDPA if own == _SDPA else _EAGER
    attention, masks = (
        interface._global_mapping
        for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface)
    )
    not_packed = mock.patch("transformers.masking_utils.find_packed_sequence_indices", _not_packed)
    try:
        with (
            mock.patch.dict(attention, {_EAGER: _transformers_attention, _SDPA: _transformers_attention}),
            mock.patch.dict(masks, {_EAGER: _transformers_mask, _SDPA: _boolean_mask}),
            contextlib.nullcontext() if positions_given else not_packed,
        ):
            yield
    finally:
        for config, before in configs.values():
            config._attn_implementation_internal = before


def _not_packed(position_ids: Tensor) -> None:
    return None


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0:
        return input
    sites = _current[-1]
    out = ops.dropout(input, sites.rng, sites.next(), float(p))
    return input.copy_(out) if inplace else out


def _additive(mask: Tensor, dtype: torch.dtype, hidden: float) -> Tensor:
    """A boolean mask as what is added to scores."""
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), hidden)


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
) -> Tensor:
    sites = _current[-1]
    drops = dropout_p > 0.0
    if bias is not None and bias.dtype == torch.bool:
        bias = _additive(bias, q.dtype, -math.inf)
    out: Tensor
    out, _ = ops.attention(
        q,
        k,
        v,
        bias,
        sinks,
        sites.rng if drops else None,
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        causal,
        window,
        softcap,
        float(dropout_p),
        sites.next() if drops else 0,
        bias is not None and bias.requires_grad,
    )
    return out


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's functional entry point; leading dimensions beyond [B, H, S, D] are flattened or added."""
    lead = query.shape[:-2]
    if is_causal and query.shape[-2] != key.shape[-2]:
        rows = torch.arange(query.shape[-2], device=query.device)[:, None]
        attn_mask = rows >= torch.arange(key.shape[-2], device=query.device)
        is_causal = False

    def to_four(x: Tensor) -> Tensor:
        return x.reshape(-1, 1, *x.shape[-2:]) if x.dim() != 4 else x

    if attn_mask is not None and attn_mask.dim() != 4:
        flat = attn_mask.expand(*lead, *attn_mask.shape[-2:]) if query.dim() != 4 else attn_mask
        attn_mask = to_four(flat) if query.dim() != 4 else flat.view(1, *flat.shape[-3:])
        attn_mask = attn_mask.view(1, 1, *flat.shape) if flat.dim() == 2 else attn_mask
    out = _attend(
        to_four(query), to_four(key), to_four(value), attn_mask,
        scale=scale, causal=is_causal, dropout_p=dropout_p,
    )  # fmt: skip
    return out.reshape(*lead, *out.shape[-2:]) if query.dim() != 4 else out


def _transformers_attention(
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
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if own is None:
            raise CaptureError(
                f"{type(module).__name__} passes {', '.join(unknown)} to its attention function, which ours "
                "does not take: report the model."
            )
        rest |= {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        rest |= {"position_bias": position_bias, "dropout": dropout, "scaling": scaling}
        given = {n: v for n, v in rest.items() if v is not None}
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            attention_mask = _additive(attention_mask, query.dtype, torch.finfo(query.dtype).min)
        found: tuple[Tensor, Any] = own(module, query, key, value, attention_mask, **given)
        return found
    known = _current[-1].known(attention_mask)
    bias = attention_mask
    if known is not None and known.pattern is not None:
        (causal, window), bias = known.pattern, None
    elif attention_mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        causal, window = causal and query.shape[2] > 1, sliding_window or 0
    else:
        causal, window = False, 0
        bias = attention_mask if known is None or position_bias is not None else known.additive
        bias = bias[..., : key.shape[2]]
    if position_bias is not None:
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.where(bias, position_bias, torch.finfo(query.dtype).min)
        else:
            bias = position_bias if bias is None else position_bias + bias
    out = _attend(
        query,
        key,
        value,
        bias,
        scale=scaling,
        causal=causal,
        window=window,
        softcap=softcap or 0.0,
        sinks=s_aux,
        dropout_p=dropout,
    )
    return out.transpose(1, 2), None


def _transformers_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    boolean: bool = False,
    **kwargs: Any,
) -> Tensor:
    """transformers' mask interface: always a dense mask, additive or ``boolean``, marked with its pattern.

    Where the model hands the mask on untouched, attention uses the pattern and the dense mask is dead
    code; where the model changes it, the mark no longer fits and the dense mask, which is right in
    every case, is used.
    """
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    function = mask_function or causal_mask_function
    mask: Tensor = (sdpa_mask if boolean else eager_mask)(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        dtype=dtype,
        **{name: value for name, value in kwargs.items() if name != "allow_torch_fix"},
    )
    skippable = allow_is_causal_skip or allow_is_bidirectional_skip
    plain = attention_mask is None and skippable and q_offset == kv_offset == 0
    _current[-1].mark(mask, dtype, _recognise(function, q_length, kv_length, local_size) if plain else None)
    return mask


_boolean_mask = functools.partial(_transformers_mask, boolean=True)


def _recognise(
    function: Callable[..., Any], q_length: int, kv_length: int, local_size: int | None
) -> tuple[bool, int] | None:
    """(causal, window) whose band equals the mask function on sampled rows, or None.

    Rows are compared on real tensors, outside any tracing. The sampled rows tell a causal band, a
    causal window, a full mask and a chunked mask apart, which is all that transformers builds without
    data-dependent parts.
    """
    window = local_size if local_size is not None and local_size < kv_length else 0
    rows = sorted({0, q_length // 3, min(window + window // 2, q_length - 1), q_length - 1})
    try:
        with _disable_current_modes(), disable_proxy_modes_tracing():
            q = torch.tensor(rows)[:, None]
            k = torch.arange(kv_length)[None, :]
            zero = torch.zeros((), dtype=torch.long)
            mask = torch.as_tensor(function(zero, zero, q, k)).expand(len(rows), kv_length)
            for causal in (True, False):
                if causal and q_length != kv_length:
                    continue
                band = (k <= q) if causal else torch.ones_like(mask)
                if window:
                    band = band & ((q - k < window) if causal else ((q - k).abs() < window))
                if torch.equal(mask, band):
                    return causal, window
    except Exception:  # a mask function over traced tensors cannot be sampled: the dense mask stands
        return None
    return None
