"""Updates of a trainer: micro-batches that wait for one, their weights, and the losses that are logged of it.

In: what upstream's loop gives ``training_step``, one micro-batch at a time. Out: one ``train_step`` of the
program for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import transformers
from torch import Tensor, nn

from megacompile.api.program import Program
from megacompile.errors import MegacompileError
from megacompile.integrations.compute_loss import MicroBatch, OutsideModel, cancel
from megacompile.integrations.progress import TrainingProgress
from megacompile.integrations.saving import Writing
from megacompile.runtime.step_output import StepOutput

_Upstream: Any = transformers.Trainer if TYPE_CHECKING else object  # every mixin's next class
_Step = TypeVar("_Step", bound=Callable[..., Tensor])
_LOSSES_KEPT = 100  # updates whose losses are summed only when they are logged


def waits_for_update(training_step: _Step) -> _Step:
    """Mark a ``training_step`` of ours, whose loss may wait for the update; a subclass's own sees it."""
    training_step.waits_for_update = True  # type: ignore[attr-defined]
    return training_step


class Updates(_Upstream):
    """The part of the mixin that trains."""

    program: Program | None
    _outside: type[OutsideModel] | None
    _progress: TrainingProgress
    _writing: Writing | None

    def _no_updates(self) -> None:
        """Nothing waits, and nothing is to be logged."""
        self._waiting: list[MicroBatch] = []  # of the next update
        self._outputs: list[tuple[StepOutput, list[float], int]] = []  # of updates not logged, by step
        self._last: StepOutput | None = None
        self._gathers = False  # gradients wait in the program

    def _drop_update(self) -> None:
        """Forget what waits for an update that never comes."""
        cancel(self._waiting)
        if self._gathers and self.program is not None:
            self.program.drop_gradients()
        self._waiting, self._gathers = [], False

    @waits_for_update
    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Keep a micro-batch for the update, which trains on all of them; its loss is known when logged.

        Called by a ``training_step`` of a subclass, which sees the loss, or outside of training, it gathers
        the gradients at once, and returns the loss.
        """
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        micro = self._micro_batch(inputs, num_items_in_batch)
        if self.is_in_train:
            self._progress.count(inputs)
            if getattr(self.training_step, "waits_for_update", False):
                self._waiting.append(micro)
                return torch.zeros((), device=self.args.device)
        try:
            program, outside = self._laid_out([micro.batch]), self._loss_outside([micro])
            loss: Tensor = program.forward_backward(micro.batch, weight=micro.weight, **outside).loss
        finally:
            cancel([micro])
        self._gathers = self.is_in_train
        return loss

    def _micro_batch(self, inputs: dict[str, Any], count: Tensor | int | None) -> MicroBatch:
        steps = getattr(self, "current_gradient_accumulation_steps", 1)
        ranks: int = self.args.world_size
        if self._outside is None:  # a count is that of all ranks
            weight = 1.0 if self._is_scaled(count) else 1.0 / (steps * ranks)
            return MicroBatch(self._batch(inputs, count), weight)
        # the gradients of ranks are averaged there
        weight = 1.0 / ranks if self._is_scaled(count) else 1.0 / (steps * ranks)
        compute = functools.partial(self.compute_loss, inputs=inputs, num_items_in_batch=count)
        outside = self._outside(self, compute)
        return MicroBatch(outside.begin(), weight, outside)

    def _loss_outside(self, waiting: list[MicroBatch]) -> dict[str, Any]:
        """Return how a program is told that the trainer computes the loss, where it does."""
        if self._outside is None:
            return {}

        def loss(number: int, outputs: Any) -> Tensor:
            outside = waiting[number].outside
            assert outside is not None
            return outside.loss(outputs)

        return {"loss": loss, "outputs": self._outputs_of_forward()}

    def _batch(self, inputs: Mapping[str, Any], count: Tensor | int | None) -> dict[str, Any]:
        """Return what the program is given."""
        takes_count = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return dict(inputs) | ({"num_items_in_batch": count} if takes_count and count is not None else {})

    def _is_scaled(self, count: Tensor | int | None) -> bool:
        """Return whether upstream takes a micro-batch's loss as its part in that of the whole update."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)  # not in every version
        if scaled is not None:
            return bool(scaled)
        counted = self.model_accepts_loss_kwargs and count is not None
        return counted or self.compute_loss_func is not None

    def _update(self) -> None:
        """One optimizer step on the micro-batches that wait, or by gradients that were gathered of them."""
        if not self._waiting and not self._gathers:
            raise MegacompileError(
                f"{type(self).__name__}.training_step does not call super().training_step, so no program has "
                "trained on the batch: call it, and put a loss of your own into compute_loss."
            )
        if self._writing is not None:
            self._writing.tell()
        if self._gathers:
            assert self.program is not None
            with self._progress.update():
                self._last = self.program.optimizer_step()
            self._gathers = False
            return
        waiting, self._waiting = self._waiting, []
        batches, weights = self._alike([micro.batch for micro in waiting]), [m.weight for m in waiting]
        try:
            with self._progress.update():
                program, loss = self._laid_out(batches), self._loss_outside(waiting)
                self._last = output = program.train_step(batches, weights=weights, **loss)
        finally:
            cancel(waiting)
        if len(self._outputs) >= _LOSSES_KEPT:
            self._add_losses()
        everyone = [weight for weight in weights for _ in range(program.world.size)]  # all ranks' are alike
        self._outputs.append((output, everyone, self.state.global_step))

    def _alike(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches of an update; a program pads what hides it itself."""
        return batches

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Nothing: the program clips, as compiled."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Nothing: the norm is asked for where it is logged."""

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log and self._last is not None:
            grad_norm = self._last.grad_norm
            self._add_losses()
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _add_losses(self) -> None:
        """Add the losses of all updates so far to what is logged, as upstream does one by one: for one that
        is not finite the average of those before it, unless ``logging_nan_inf_filter`` is off."""
        for output, weights, step in self._outputs:
            for weight, loss in zip(weights, output.losses, strict=True):
                if self.args.logging_nan_inf_filter and not loss.isfinite():
                    average = self._tr_loss / (1 + step - self._globalstep_last_logged)
                    self._tr_loss += average / self.args.world_size  # of the ranks together
                else:
                    self._tr_loss += (weight * loss).to(self._tr_loss.device)
        self._outputs.clear()
