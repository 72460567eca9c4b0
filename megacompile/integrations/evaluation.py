"""Evaluation and prediction of a trainer: loss, logits, labels of each batch, by programs of the forward."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from megacompile.integrations.lengths import as_long_as_others
from megacompile.integrations.losses import collected
from megacompile.integrations.outside import OutsideModel
from megacompile.runtime.ownership import is_owned

_Upstream: Any = transformers.Trainer if TYPE_CHECKING else object  # every mixin's next class


class Evaluation(_Upstream):
    """The part of the mixin that trains nothing."""

    _outside: type[OutsideModel] | None = None  # where the loss is the trainer's own code
    _preprocess: Any = None  # of the logits, while an evaluation runs
    preprocess_logits_for_metrics: Any

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        model.eval()
        if self._outside is not None:
            return self._predict_outside(self._outside(self, None), inputs, prediction_loss_only, ignore_keys)
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        inputs = self._prepare_inputs(inputs)
        count = self._get_num_items_in_batch([inputs], torch.device("cpu")) if has_labels else None
        batch = self._batch(inputs, count)
        program = self._laid_out([] if is_owned(self.model) else self._like_training(batch))
        if prediction_loss_only:
            return program.evaluate(batch) * self._shares(batch), None, None
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        inputs = as_long_as_others(program, inputs)  # as upstream pads what it gathers of the ranks
        batch = self._batch(inputs, count)
        names = tuple(self.label_names) if has_labels else ()
        collect = functools.partial(collected, self._loss_fn(), self._preprocess, tuple(ignore_keys), names)
        loss, predictions = program.predict(batch, outputs=collect)
        labels = tuple(inputs[name] for name in names)
        loss = loss if loss is None else loss * self._shares(batch)
        return loss, predictions, (labels[0] if len(labels) == 1 else labels or None)

    def _shares(self, batch: dict[str, Any]) -> int:
        """What a rank's loss is multiplied with, as upstream takes the mean over ranks: how many of them
        divide by the count of all ranks' tokens."""
        return self.args.world_size if "num_items_in_batch" in batch else 1

    def _predict_outside(self, outside: OutsideModel, *args: Any) -> tuple[Tensor | None, Any, Any]:
        """Upstream's own step, whose ``compute_loss`` calls the model."""
        loss, predictions, labels = super().prediction_step(outside, *args)
        if self._preprocess is not None and predictions is not None:
            predictions = self._preprocess(predictions, labels)
        return loss, predictions, labels

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream, with ``preprocess_logits_for_metrics`` inside of the program: logits stay there."""
        self._preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.preprocess_logits_for_metrics, self._preprocess = self._preprocess, None

    def _like_training(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """Micro-batches of the sizes in training, made of the rows of one for evaluation."""
        rows = len(next(value for value in batch.values() if isinstance(value, Tensor) and value.dim()))
        chosen = torch.arange(self._train_batch_size) % rows
        resized = {
            name: value[chosen] if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value
            for name, value in batch.items()
        }
        return [resized] * self.args.gradient_accumulation_steps
