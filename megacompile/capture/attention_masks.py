"""Attention masks that are made for transformers' models, and the plain patterns that they turn out to be.

A mask has the form that the model's own attention takes, boolean for "sdpa" and additive for "eager": what
a row without keys sees depends on it. A mask that is a plain band is still made, but attention that gets it
untouched computes the band itself, and the mask is dead code.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import _disable_current_modes

from megacompile.capture.call_tensors import storage_id

Band = tuple[bool, int]
"""(causal, window): the keys that each query sees; a window of 0 is unlimited."""


class Mask(NamedTuple):
    """A mask that was made for a model: as the model got it, as attention adds it to scores (-inf for a
    hidden key), and as a plain band, if it is one. Within packed documents their bounds are int32 [2, B, S].
    """

    given: Tensor
    version: int
    additive: Tensor
    band: Band | None
    bounds: Tensor | None


class Masks:
    """Creates the masks of one forward, and recognises them in calls of attention.

    ``padding`` is the batch's mask of padding, where causal masks are to leave it out, and all where it is
    ``of_ones``, as transformers itself does; what a model makes of it is not left out.
    """

    def __init__(self, padding: Tensor | None = None, of_ones: bool = False) -> None:
        self._made: list[Mask] = []
        self._padding, self._of_ones = padding, of_ones
        self._unchanged = None if padding is None else padding._version
        self._prepared: list[Tensor] = []
        self._packed: list[tuple[Callable[..., Any], Callable[..., Any], Tensor]] = []

    def prepare(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """transformers' preparation of a mask of padding, whose result is known again in :meth:`make`."""
        found = theirs(*args, **kwargs)
        given = inspect.signature(theirs).bind(*args, **kwargs).arguments["attention_mask"]
        known = self._padding is not None and _is_alias(given, self._padding)
        if known and given._version == self._unchanged:
            self._prepared.append(found[1])
        return found

    def known(self, mask: Tensor | None) -> Mask | None:
        """Return what is known of a mask that was made here, or of an alias of it, as long as nothing changed
        it."""
        for made in self._made:
            if mask is not None and _is_alias(mask, made.given) and mask._version == made.version:
                return made
        return None

    def pack(
        self,
        theirs: Callable[..., Callable[..., Any]],
        mask_function: Callable[..., Any],
        position_ids: Tensor,
        packed_sequence_mask: Tensor,
    ) -> Callable[..., Any]:
        """transformers' mask function within documents, which is known again in :meth:`make`.

        Positions rise by one within a document, so a band of positions is one of indices.
        """
        made = theirs(mask_function, position_ids, packed_sequence_mask)
        self._packed.append((made, mask_function, packed_sequence_mask))
        return made

    def make(
        self,
        theirs: Callable[..., Tensor],
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
        **kwargs: Any,
    ) -> Tensor:
        """transformers' mask interface: always a dense mask, boolean or additive as ``theirs`` makes it.

        Where the model changes it, it is no longer known, and the dense mask, which is right in every case,
        is used.
        """
        from transformers.masking_utils import causal_mask_function

        function = mask_function or causal_mask_function
        mask = theirs(
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
        band, bounds = self._plain(function, attention_mask, q_length, kv_length, local_size, skippable)
        if band is not None and not q_offset == kv_offset == 0:
            band, bounds = None, None
        additive = as_additive(mask, dtype) if mask.dtype == torch.bool else mask
        self._made.append(Mask(mask, mask._version, additive, band, bounds))
        return mask

    def _plain(
        self, function: Callable[..., Any], padding: Tensor | None, q_length: int, kv_length: int,
        local_size: int | None, skippable: bool,
    ) -> tuple[Band | None, Tensor | None]:  # fmt: skip
        """(band, bounds of documents) that a mask of this function and mask of padding is, as far as any."""
        left_out = any(padding is mask for mask in self._prepared)
        within = [(base, ids) for made, base, ids in self._packed if made is function]
        if not (padding is None or left_out) or not (skippable or within):
            return None, None
        band = _recognise(within[0][0] if within else function, q_length, kv_length, local_size)
        sees_padding = left_out and not self._of_ones
        if band is None or (sees_padding and not band[0]):  # all tokens would see the padding
            return None, None
        return band, _bounds(within[0][1]) if within else None


def _bounds(documents: Tensor) -> Tensor:
    """int32 [2, B, S] of the numbers of documents [B, S], which rise: where each token's begins, and ends."""
    documents = documents.contiguous()
    first = torch.searchsorted(documents, documents, out_int32=True)
    return torch.stack((first, torch.searchsorted(documents, documents, out_int32=True, right=True)))


def bounds_between(places: Tensor, length: int) -> Tensor:
    """int32 [2, 1, S] of the places at which sequences begin, and the last ends, in a row of them."""
    places = places.to(torch.int32)
    ends = torch.searchsorted(places, torch.arange(length, dtype=torch.int32), right=True)
    return torch.stack((places[ends - 1], places[ends]))[:, None]


def _is_alias(x: Tensor | None, of: Tensor) -> bool:
    """Return whether a tensor has all the elements of another in its own memory, in their order."""
    if x is None or (x.shape, x.stride()) != (of.shape, of.stride()):
        return False
    return storage_id(x) == storage_id(of)


def as_additive(mask: Tensor, dtype: torch.dtype, hidden: float = -math.inf) -> Tensor:
    """A boolean mask as what is added to scores, ``hidden`` where it is False."""
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), hidden)


def _recognise(
    function: Callable[..., Any], q_length: int, kv_length: int, local_size: int | None
) -> Band | None:
    """The band that equals the mask function on sampled rows, or None.

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
