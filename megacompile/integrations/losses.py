"""What transformers' trainer makes of a model's outputs, as functions of these and the batch: its own losses,
and what evaluation takes of them. A program captures them with the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import ModelOutput
from transformers.trainer_pt_utils import LabelSmoother


def given_loss(function: Any, outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """``compute_loss_func`` on outputs without the loss that the model computes where it is given labels."""
    count = batch.get("num_items_in_batch")
    loss: Tensor = function(_without_loss(outputs), batch.get("labels"), num_items_in_batch=count)
    return loss


def smoothed_loss(smoother: LabelSmoother, shifts: bool, outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    count = batch.get("num_items_in_batch")
    loss: Tensor = smoother(
        _without_loss(outputs), batch["labels"], shift_labels=shifts, num_items_in_batch=count
    )
    return loss


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


def _without_loss(outputs: Any) -> Any:
    if isinstance(outputs, ModelOutput):
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "loss"})
    return outputs
