"""Padding: sequences made longer, to one of few lengths, where the model hides that behind a mask."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, fx, nn

from megacompile.capture.batch import Batch, is_transformers
from megacompile.capture.captured import Captured

_PADDING = {"labels": -100, "attention_mask": 0}
_MIXING = (
    "_fft_",
    "conv",
    "im2col",
    "avg_pool",
    "max_pool",
    "flip",
    "roll",
)  # positions, whatever a mask says


def bucketed(item: Any, batch: Batch, model: nn.Module, *, longest: int | None) -> Any:
    """``item`` padded to one of few lengths, or None where that is not known to be right, or not needed."""
    ids, labels = batch.kwargs.get("input_ids"), batch.kwargs.get("labels")
    if not (isinstance(ids, Tensor) and isinstance(labels, Tensor) and is_transformers(model)):
        return None
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return None  # one that lands in ``**kwargs`` may be dropped
    if labels.shape != ids.shape or ids.dim() != 2:
        return None
    length = bucket_length(ids.shape[1], longest=longest)
    return pad_batch(item, length) if length > ids.shape[1] else None


def bucket_length(length: int, *, longest: int | None = None) -> int:
    """The padded length: at most an eighth longer, so that few programs serve all lengths."""
    step = max(8, 1 << max(0, length.bit_length() - 3))
    padded = -(-length // step) * step
    return padded if longest is None else min(padded, longest)


def pad_batch(batch: Any, length: int, pad_token: int = 0) -> Any:
    """Pad the sequences of a token batch on the right to ``length``, hidden by the attention mask."""
    ids = batch["input_ids"]
    short = length - ids.shape[1]
    if short <= 0:
        return batch
    padded = dict(batch.items())
    padded.setdefault("attention_mask", torch.ones_like(ids))
    for name, value in padded.items():
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape == ids.shape:
            fill = _PADDING.get(name, pad_token)
            padded[name] = nn.functional.pad(value, (0, short), value=fill)
    return padded


def hides_padding(model: nn.Module, captured: Captured, batch: Batch) -> bool:
    """Whether the loss of a padded batch, whose graph this is, is known to be that of the batch itself.

    The graph must read the mask, and nothing but attention may mix positions: no recurrent layer, no
    convolution or Fourier transform over a dimension as long as the sequence.
    """
    mask, length = batch.kwargs["attention_mask"], batch.kwargs["input_ids"].shape[1]
    read = any(batch.leaves[index] is mask for index in captured.inputs.values())
    mixed = any(isinstance(module, nn.RNNBase) for module in model.modules())
    return read and not mixed and not any(_mixes(node, length) for node in captured.graph.nodes)


def _mixes(node: fx.Node, length: int) -> bool:
    """Whether a node mixes positions of a sequence of this length by other means than attention."""
    if not any(part in str(node.target) for part in _MIXING):
        return False
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes[:1])]
    return any(
        isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) and length in v.shape
        for v in values
    )
