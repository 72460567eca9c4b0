"""Take loss and predictions of a batch out of a model's outputs, as transformers evaluates it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def collected(
    loss_fn: Any,
    preprocess: Any,
    ignored: tuple[str, ...],
    names: tuple[str, ...],
    outputs: Any,
    batch: Mapping[str, Any],
) -> tuple[Tensor | None, Any]:
    """(loss, predictions) as upstream's ``prediction_step`` takes them out of a model's outputs.

    ``names`` are those of the labels; without labels there is no loss.
    """
    loss, labels = None, tuple(batch[name] for name in names)
    if names:
        given = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        loss = given if loss_fn is None else loss_fn(outputs, batch)
    if isinstance(outputs, dict):
        ignored = (*ignored, "loss") if names else ignored
        predictions = tuple(value for name, value in outputs.items() if name not in ignored)
    else:
        predictions = outputs[1:] if names else outputs
    if len(predictions) == 1:
        predictions = predictions[0]
    if preprocess is not None:
        predictions = preprocess(predictions, labels[0] if len(labels) == 1 else labels or None)
    return loss, predictions
