"""Evaluate and predict in a trainer: loss, logits, labels of each batch, by programs of the forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sized
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import transformers
from torch import Tensor, nn

from megacompile.integrations.compute_loss import OutsideModel
from megacompile.integrations.lengths import as_long_as_others, longest_rows, with_rows
from megacompile.state.model_ownership import is_owned


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


_Upstream: Any = transformers.Trainer if TYPE_CHECKING else object  # every mixin's next class


@runtime_checkable
class Forwards(Protocol):
    """A callback that runs forwards at evaluations; ``forward`` runs the one of most memory. The class's name
    says what for."""

    def forward(self) -> object: ...


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
            return self._predict_outside(self._stand_in(), inputs, prediction_loss_only, ignore_keys)
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

    def _evaluations(self) -> dict[str, Callable[[], object]]:
        """Return, by name, what runs the forwards of most memory of an evaluation of this training: of full
        batches as long as the longest row of each data set, and of callbacks."""
        if self.args.eval_strategy == "no" or self.eval_dataset is None:
            return {}
        several = isinstance(self.eval_dataset, dict)
        data = self.eval_dataset if several else {"": self.eval_dataset}
        calls: dict[str, Callable[[], object]] = {
            f"evaluation{name and f' of {name}'}": functools.partial(self._predict_longest, rows)
            for name, rows in data.items()
        }
        callbacks = [c for c in self.callback_handler.callbacks if isinstance(c, Forwards)]
        return calls | {type(callback).__name__.lower(): callback.forward for callback in callbacks}

    def _predict_longest(self, data: Any) -> None:
        """Predict a batch as long as the longest row, where the number of rows is known."""
        if isinstance(data, Sized) and len(data):
            rows = longest_rows(data, self.args.eval_batch_size * self.args.world_size)
            loss_only = self.args.prediction_loss_only or self.compute_metrics is None
            # to its end, as accelerate takes a loader that was left for the one that is trained on; not
            # get_eval_dataloader, which may keep what it returns
            try:
                for batch in list(self.get_test_dataloader(rows)):
                    Evaluation.prediction_step(self, self.model, batch, loss_only)  # no code of a subclass
            finally:
                self.model.train()  # as the step does that comes next

    def _shares(self, batch: dict[str, Any]) -> int:
        """Return what a rank's loss is multiplied with, as upstream takes the mean over ranks: how many of
        them divide by the count of all ranks' tokens."""
        return self.args.world_size if "num_items_in_batch" in batch else 1

    def _predict_outside(self, outside: OutsideModel, *args: Any) -> tuple[Tensor | None, Any, Any]:
        """Upstream's own step, whose ``compute_loss`` calls the model."""
        loss, predictions, labels = super().prediction_step(outside, *args)
        if self._preprocess is not None and predictions is not None:
            predictions = self._preprocess(predictions, labels)
        return loss, predictions, labels

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream, with ``preprocess_logits_for_metrics`` inside of the program: logits stay there.

        A subclass's own ``prediction_step`` is given what runs the program where it calls the model.
        """
        own = self.prediction_step
        if getattr(own, "__func__", None) is not Evaluation.prediction_step:
            self.__dict__["prediction_step"] = lambda _, *rest, **named: own(self._stand_in(), *rest, **named)
            try:
                return super().evaluation_loop(*args, **kwargs)
            finally:
                del self.__dict__["prediction_step"]
        self._preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.preprocess_logits_for_metrics, self._preprocess = self._preprocess, None

    def _stand_in(self) -> Any:
        """Return what stands where a trainer's own code calls the model in eval mode."""
        return (self._outside or OutsideModel)(self, None)

    def _rows_of_training(self) -> int:
        """Return the rows of a micro-batch in training."""
        rows: int = self._train_batch_size
        return rows

    def _like_training(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """Micro-batches of the sizes in training, made of the rows of one for evaluation."""
        return [with_rows(batch, self._rows_of_training())] * self.args.gradient_accumulation_steps
