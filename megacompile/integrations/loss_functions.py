"""transformers' own losses, ``compute_loss_func`` and label smoothing, as functions of outputs and batch.

A program captures them with the model.
"""

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


def _without_loss(outputs: Any) -> Any:
    if isinstance(outputs, ModelOutput):
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "loss"})
    return outputs
