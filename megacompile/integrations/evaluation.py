"""Evaluate and predict in a trainer through the program, losses that others compute, and lengths."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sized
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput
from transformers.trainer_pt_utils import LabelSmoother

from megacompile.api.program import Program
from megacompile.capture.module_wrappers import unwrapped
from megacompile.capture.padding import pad_batch
from megacompile.errors import MegacompileError
from megacompile.graph.captured import all_outputs
from megacompile.state.model_values import is_owned

# ------------------------------------------------------------------------------------------------------------
# Lengths: of batches on several ranks, to run one program where the program does not pad; of rows.


_ROWS = (
    ("input_ids",),
    ("prompt_ids", "chosen_ids"),
    ("prompt_ids", "rejected_ids"),
)  # whose tokens a row has
_READ = 10_000  # rows at a time


def longest_of(program: Program, length: int) -> int:
    """The longest that any rank has, where all ask; of a process alone its own."""
    with program.world.together():
        lengths: list[int] = [rank["length"] for rank in program.world.hear(lambda: {"length": length})]
    return max(lengths)


def as_long_as_others(program: Program, batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of tokens, padded on the right to the longest of several ranks'."""
    ids = batch.get("input_ids")
    if program.world.size == 1 or not isinstance(ids, Tensor) or ids.dim() != 2:
        return batch
    longest = longest_of(program, ids.shape[1])
    return batch if longest == ids.shape[1] and "attention_mask" in batch else pad_batch(batch, longest)


def with_rows(batch: dict[str, Any], count: int) -> dict[str, Any]:
    """Return a batch of ``count`` rows: those of another one, repeated or cut."""
    rows = len(next(value for value in batch.values() if isinstance(value, Tensor) and value.dim()))
    chosen = torch.arange(count) % rows
    return {
        name: value[chosen] if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value
        for name, value in batch.items()
    }


def longest_rows(data: Any, count: int) -> Any:
    """Return the row of most tokens ``count`` times, where lengths are at hand; else the first rows.

    Not the longest rows: a collator that pads nothing takes rows of one length alone.
    """
    lengths, count = row_lengths(data), min(count, len(data))
    numbers = [lengths.index(max(lengths))] * count if lengths else range(count)
    return data.select(numbers) if hasattr(data, "select") else [data[i] for i in numbers]


def longest_row(data: Any) -> int | None:
    """The most tokens of a row, where lengths are at hand; None of a stream, and of other data."""
    return max(row_lengths(data), default=None)


def row_lengths(data: Any) -> list[int]:
    """The tokens of each row: of a list of rows, or of a table of datasets, with tokens; else none."""
    if isinstance(data, list) and all(isinstance(row, Mapping) and "input_ids" in row for row in data):
        return [len(row["input_ids"]) for row in data]
    columns = set(getattr(data, "column_names", None) or ()) if hasattr(data, "select_columns") else set()
    kinds = [names for names in _ROWS if columns.issuperset(names)]
    if not kinds or not isinstance(data, Sized):
        return []
    lengths, wanted = [], sorted({name for names in kinds for name in names})
    for table in data.select_columns(wanted).with_format("arrow").iter(_READ):  # type: ignore[attr-defined]
        count = {name: table[name].combine_chunks().value_lengths().to_numpy(False) for name in wanted}
        of_kinds = [sum(count[name] for name in names) for names in kinds]
        lengths += np.maximum.reduce(of_kinds).tolist()
    return lengths


# ------------------------------------------------------------------------------------------------------------
# What transformers' trainer makes of a model's outputs, as functions of these and the batch: its own losses,
# and what evaluation takes of them. A program captures them with the model.


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


# ------------------------------------------------------------------------------------------------------------
# Losses that a trainer computes itself, outside of the program, from what the model returns.
#
# For each micro-batch the trainer's code runs in a thread of its own, which waits where it calls the model.
# So the batch is known before the program runs, and one pass serves all code: the program's forward gives the
# outputs, the code goes on to the loss, and the program's backward starts from the loss's gradient by them.


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of the next update: what the program is given, the loss's weight, who computes it."""

    batch: dict[str, Any]
    weight: float
    outside: OutsideModel | None = None


class OutsideModel:
    """Stands where a trainer's own loss calls the model.

    ``compute`` is that code, a function of this object; None: only calls in eval mode come. ``batch`` is what
    the program is given, once :meth:`begin` has returned.
    """

    def __init__(self, trainer: Any, compute: Callable[[Any], Tensor] | None = None) -> None:
        self._trainer, self._compute = trainer, compute
        self._batch: Future[dict[str, Any]] = Future()
        self._outputs: Future[Any] = Future()
        self._loss: Future[Tensor] = Future()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer.model, name)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        batch = {name: value for name, value in inputs.items() if name != "use_cache"}  # a program keeps none
        if args:
            model: Any = unwrapped(self._trainer.model)
            source = model.get_base_model() if hasattr(model, "get_base_model") else model
            batch = inspect.signature(source.forward).bind_partial(*args).arguments | batch
        if not self._is_trained():
            return self._laid_out(batch).predict(batch)
        return self._awaited(batch)

    @staticmethod
    def outputs(trainer: Any) -> Any:
        """Return what the program computes of the forward."""
        return all_outputs

    def begin(self) -> dict[str, Any]:
        """Run the code until it calls the model; returns the batch of that call."""
        threading.Thread(target=self._run, name="megacompile loss", daemon=True).start()
        either: tuple[Future[Any], ...] = (self._batch, self._loss)
        wait(either, return_when=FIRST_COMPLETED)
        if not self._batch.done():
            self._loss.result()
            raise MegacompileError(
                "compute_loss returned a loss without calling the model: compute it from model(**inputs)."
            )
        return self._batch.result()

    def loss(self, outputs: Any) -> Tensor:
        """The loss that the code makes of the model's outputs."""
        self._outputs.set_result(outputs)
        return self._loss.result()

    def cancel(self) -> None:
        """End the code, if it still waits for outputs."""
        self._outputs.cancel()

    def _run(self) -> None:
        assert self._compute is not None
        try:
            self._loss.set_result(self._compute(self))
        except BaseException as error:
            self._loss.set_exception(error)

    def _awaited(self, batch: dict[str, Any]) -> Any:
        """The outputs for the call that is trained on."""
        self._batch.set_result(batch)
        return self._outputs.result()

    def _is_trained(self) -> bool:
        """Return whether the loss of this call is trained on."""
        if self._compute is None:
            return False
        if self._batch.done():
            raise MegacompileError(
                "compute_loss calls the model again after the call that is trained on: make one such call, "
                "and others before it, under torch.no_grad()."
            )
        return torch.is_grad_enabled()

    def _laid_out(self, batch: dict[str, Any]) -> Program:
        owned = is_owned(self._trainer.model)
        program: Program = self._trainer._laid_out([] if owned else self._trainer._like_training(batch))
        return program


def cancel(waiting: list[MicroBatch]) -> None:
    """End what still waits for outputs that never come."""
    for micro in waiting:
        if micro.outside is not None:
            micro.outside.cancel()


# ------------------------------------------------------------------------------------------------------------
# Evaluation and prediction of a trainer: loss, logits, labels of each batch, by programs of the forward.


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
