"""The steps of a trainer by a program: updates on the micro-batches that wait, and forwards of evaluations.

In: what upstream's loop gives ``training_step`` and ``prediction_step``, one batch at a time. Out: one
``train_step`` of the program for all micro-batches of an update, the losses to log, and predictions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megacompile.api.compile import compile
from megacompile.api.program import Program
from megacompile.capture.module_wrappers import unwrapped
from megacompile.errors import MegacompileError
from megacompile.integrations.compute_loss import MicroBatch, cancel
from megacompile.integrations.evaluation import collected
from megacompile.integrations.lengths import as_long_as_others, with_rows
from megacompile.integrations.loss_functions import given_loss, smoothed_loss
from megacompile.integrations.plan_training import in_train_mode, plan_training
from megacompile.integrations.program_optimizer import ProgramOptimizer
from megacompile.integrations.progress import TrainingProgress
from megacompile.integrations.training_arguments import MegacompileConfig, compile_options
from megacompile.runtime.step_output import StepOutput
from megacompile.state.masters import Weights
from megacompile.state.model_ownership import is_owned
from megacompile.state.model_values import Lending
from megacompile.state.several_optimizers import Several

_Step = TypeVar("_Step", bound=Callable[..., Tensor])
_LOSSES_KEPT = 100  # updates whose losses are summed only when they are logged


def waits_for_update(training_step: _Step) -> _Step:
    """Mark a ``training_step`` of ours, whose loss may wait for the update; a subclass's own sees it."""
    training_step.waits_for_update = True  # type: ignore[attr-defined]
    return training_step


class TrainerSteps:
    """Trains and evaluates the model of a trainer by a program, made of model and optimizer as they are.

    ``trainer`` has :class:`~megacompile.integrations.transformers.Mixin` before its class. ``program`` is
    there once training or an evaluation has begun; ``checkpoint`` is loaded into it when its state is laid
    out. ``last`` is what the last update returned.
    """

    def __init__(self, trainer: Any, config: MegacompileConfig, weights: Weights | None) -> None:
        self._trainer, self.config, self._weights = trainer, config, weights
        self.program: Program | None = None
        self.lending = Lending()
        self.progress = TrainingProgress(trainer)
        self.checkpoint: Path | None = None
        self.last: StepOutput | None = None
        self.flops_per_token = 0
        self.planned_updates = 0
        self.stops_planned = False  # before the first update
        self._planned = False  # all programs of this training
        self._waiting: list[MicroBatch] = []  # of the next update
        self._outputs: list[tuple[StepOutput, list[float], int]] = []  # of updates not logged, by step
        self._gathers = False  # gradients wait in the program

    def begin(self) -> None:
        """Begin a training, with nothing left of the one before; the optimizer is there."""
        self.drop_update()
        self._outputs.clear()
        self.last, self._planned = None, False
        program = self.programmed()
        if self.checkpoint is not None and is_owned(self._trainer.model):
            self.laid_out([])
        elif self.checkpoint is not None:  # the first step may begin with a rollout
            program.resume(self.checkpoint)

    def drop_update(self) -> None:
        """Forget what waits for an update that never comes."""
        cancel(self._waiting)
        if self._gathers and self.program is not None:
            self.program.drop_gradients()
        self._waiting, self._gathers = [], False

    def train_on(self, inputs: dict[str, Any], count: Tensor | int | None, *, waits: bool) -> Tensor:
        """Keep a micro-batch that ``waits`` for its update, or gather its gradients at once; returns zero, or
        its loss."""
        trainer = self._trainer
        micro = self.micro_batch(inputs, count)
        if trainer.is_in_train:
            self.progress.count(inputs)
            if waits:
                self._waiting.append(micro)
                return torch.zeros((), device=trainer.args.device)
        try:
            program, outside = self.laid_out([micro.batch]), self._loss_outside([micro])
            loss: Tensor = program.forward_backward(micro.batch, weight=micro.weight, **outside).loss
        finally:
            cancel([micro])
        self._gathers = trainer.is_in_train
        return loss

    def micro_batch(self, inputs: dict[str, Any], count: Tensor | int | None) -> MicroBatch:
        """Return a micro-batch with its weight; a loss of the trainer's own begins to run."""
        trainer = self._trainer
        steps = getattr(trainer, "current_gradient_accumulation_steps", 1)
        ranks: int = trainer.args.world_size
        if trainer._outside is None:  # a count is that of all ranks
            weight = 1.0 if self._is_scaled(count) else 1.0 / (steps * ranks)
            return MicroBatch(self._batch(inputs, count), weight)
        # the gradients of ranks are averaged there
        weight = 1.0 / ranks if self._is_scaled(count) else 1.0 / (steps * ranks)
        compute = functools.partial(trainer.compute_loss, inputs=inputs, num_items_in_batch=count)
        outside = trainer._outside(trainer, compute)
        return MicroBatch(outside.begin(), weight, outside)

    def _loss_outside(self, waiting: list[MicroBatch]) -> dict[str, Any]:
        """Return how a program is told that the trainer computes the loss, where it does."""
        if self._trainer._outside is None:
            return {}

        def loss(number: int, outputs: Any) -> Tensor:
            outside = waiting[number].outside
            assert outside is not None
            return outside.loss(outputs)

        return {"loss": loss, "outputs": self._outputs_of_forward()}

    def _outputs_of_forward(self) -> Any:
        """Return what the program gives a loss that is computed outside; None: it computes the loss."""
        outside = self._trainer._outside
        return outside.outputs(self._trainer) if outside is not None else None

    def _batch(self, inputs: Mapping[str, Any], count: Tensor | int | None) -> dict[str, Any]:
        """Return what the program is given."""
        trainer = self._trainer
        takes_count = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        return dict(inputs) | ({"num_items_in_batch": count} if takes_count and count is not None else {})

    def _is_scaled(self, count: Tensor | int | None) -> bool:
        """Return whether upstream takes a micro-batch's loss as its part in that of the whole update."""
        trainer = self._trainer
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)  # not in every version
        if scaled is not None:
            return bool(scaled)
        counted = trainer.model_accepts_loss_kwargs and count is not None
        return counted or trainer.compute_loss_func is not None

    def update(self) -> None:
        """Take one optimizer step on the micro-batches that wait, or by gradients that were gathered."""
        trainer = self._trainer
        if not self._waiting and not self._gathers:
            raise MegacompileError(
                f"{type(trainer).__name__}.training_step does not call super().training_step, so no program "
                "has trained on the batch: call it, and put a loss of your own into compute_loss."
            )
        trainer._saving.tell()
        if self._gathers:
            assert self.program is not None
            with self.progress.update():
                self.last = self.program.optimizer_step()
            self._gathers = False
            return
        waiting, self._waiting = self._waiting, []
        batches, weights = trainer._alike([micro.batch for micro in waiting]), [m.weight for m in waiting]
        try:
            with self.progress.update():
                program, loss = self.laid_out(batches), self._loss_outside(waiting)
                self.last = output = program.train_step(batches, weights=weights, **loss)
        finally:
            cancel(waiting)
        if len(self._outputs) >= _LOSSES_KEPT:
            self.add_losses()
        everyone = [weight for weight in weights for _ in range(program.world.size)]  # all ranks' are alike
        self._outputs.append((output, everyone, trainer.state.global_step))

    def add_losses(self) -> None:
        """Add the losses of all updates so far to what is logged, as upstream does one by one: for one that
        is not finite the average of those before it, unless ``logging_nan_inf_filter`` is off."""
        trainer = self._trainer
        for output, weights, step in self._outputs:
            for weight, loss in zip(weights, output.losses, strict=True):
                if trainer.args.logging_nan_inf_filter and not loss.isfinite():
                    average = trainer._tr_loss / (1 + step - trainer._globalstep_last_logged)
                    trainer._tr_loss += average / trainer.args.world_size  # of the ranks together
                else:
                    trainer._tr_loss += (weight * loss).to(trainer._tr_loss.device)
        self._outputs.clear()

    def adopted(self) -> ProgramOptimizer:
        """Return the optimizer that ``create_optimizer``, a subclass's too, has made, as a program's."""
        trainer = self._trainer
        if isinstance(trainer.optimizer, (list, tuple)):
            trainer.optimizer = Several(trainer.optimizer)
        if not isinstance(trainer.optimizer, ProgramOptimizer):
            trainer.optimizer = ProgramOptimizer(trainer.optimizer, self.update)
        adopted: ProgramOptimizer = trainer.optimizer
        return adopted

    def programmed(self) -> Program:
        """Return the program of the model and the optimizer as they are now; ``model_init`` gives another
        model to each training, and a subclass's ``create_optimizer`` maybe another optimizer."""
        trainer = self._trainer
        trainer._before_program()
        if trainer.optimizer is None:
            trainer.create_optimizer()
        optimizer = self.adopted()
        if self.program is not None and self.program.model is not unwrapped(trainer.model):
            self.program.close()
            self.program = None
        elif self.program is not None and self.program.optimizer is not optimizer.inner:
            self.program.release()
            self.program = None
        if self.program is None:
            # accelerate sets it too, and an attribute that is set later makes other programs of all batches
            trainer.model._is_accelerate_prepared = True
            options = compile_options(trainer.args, trainer.model, self.config)
            options |= {"loss_fn": self._loss_fn(), "weights": self._weights}
            self.program = compile(trainer.model, optimizer=optimizer.inner, **options)
            self.program.lend(self.lending)
            counts = hasattr(trainer.model, "num_parameters")  # once, as it takes milliseconds
            self.flops_per_token = 6 * trainer.model.num_parameters(exclude_embeddings=True) if counts else 0
        return self.program

    def _loss_fn(self) -> Any:
        trainer = self._trainer
        if trainer._outside is not None:
            return None
        if trainer.compute_loss_func is not None:
            return functools.partial(given_loss, trainer.compute_loss_func)
        if trainer.label_smoother is None:
            return None
        model = trainer.accelerator.unwrap_model(trainer.model)
        name = type(model.base_model.model if hasattr(model, "peft_config") else model).__name__
        shifts = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return functools.partial(smoothed_loss, trainer.label_smoother, shifts)

    def laid_out(self, micro: list[dict[str, Any]]) -> Program:
        """Return the program, with its state laid out for these micro-batches, and a checkpoint loaded into
        it."""
        trainer, program = self._trainer, self.programmed()
        if program.plans_only:
            return program
        plans = bool(micro) and trainer.is_in_train and not self._planned
        if plans or not is_owned(trainer.model):
            with in_train_mode(trainer.model):  # what comes first may be an evaluation
                if plans:
                    self.planned_updates = trainer._epochs()[1]
                    plan_training(trainer, self, program, micro)
                    self._planned = True
                if not is_owned(trainer.model):
                    program.prepare(micro, **self.preparation())
        if self.checkpoint is not None:
            program.load(self.checkpoint)
            self.checkpoint = None
        return program

    def preparation(self) -> dict[str, Any]:
        """Return the options of ``program.prepare`` for this training."""
        return {"outputs": self._outputs_of_forward(), "checkpoint": self.checkpoint}

    def like_training(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """Return micro-batches of the sizes in training, made of the rows of one for evaluation."""
        rows, steps = self._trainer._rows_of_training(), self._trainer.args.gradient_accumulation_steps
        return [with_rows(batch, rows)] * steps

    def predict(
        self, inputs: dict[str, Any], loss_only: bool, ignored: list[str] | None, preprocess: Any
    ) -> tuple[Tensor | None, Any, Any]:
        """Return loss, predictions and labels of a batch as upstream's ``prediction_step`` does; the program
        applies ``preprocess`` to the predictions."""
        trainer = self._trainer
        label_names: list[str] = trainer.label_names
        has_labels = bool(label_names) and all(inputs.get(name) is not None for name in label_names)
        inputs = trainer._prepare_inputs(inputs)
        count = trainer._get_num_items_in_batch([inputs], torch.device("cpu")) if has_labels else None
        batch = self._batch(inputs, count)
        program = self.laid_out([] if is_owned(trainer.model) else self.like_training(batch))
        # upstream takes the mean over ranks, each of which may divide by the count of all ranks' tokens
        share = trainer.args.world_size if "num_items_in_batch" in batch else 1
        if loss_only:
            return program.evaluate(batch) * share, None, None
        if ignored is None:
            config = getattr(trainer.model, "config", None)
            ignored = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        inputs = as_long_as_others(program, inputs)  # as upstream pads what it gathers of the ranks
        names = tuple(label_names) if has_labels else ()
        collect = functools.partial(collected, self._loss_fn(), preprocess, tuple(ignored), names)
        loss, predictions = program.predict(self._batch(inputs, count), outputs=collect)
        labels = tuple(inputs[name] for name in names)
        loss = loss if loss is None else loss * share
        return loss, predictions, (labels[0] if len(labels) == 1 else labels or None)
