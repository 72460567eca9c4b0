"""``transformers.Trainer`` over a program: one import changed in a user's script."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import ProgressCallback, Seq2SeqTrainingArguments, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import find_batch_size

from megacompile.api.compile import compile
from megacompile.api.program import Program
from megacompile.capture.module_wrappers import unwrapped
from megacompile.errors import BudgetError, MegacompileError, ProgramError
from megacompile.integrations.evaluation import (
    Evaluation,
    MicroBatch,
    OutsideModel,
    cancel,
    given_loss,
    longest_row,
    longest_rows,
    smoothed_loss,
)
from megacompile.integrations.progress import Bar, TrainingProgress
from megacompile.integrations.saving import Saving, Writing
from megacompile.integrations.trainer_checkpoints import Interruption
from megacompile.integrations.training_arguments import (
    OWN_CLASSES,
    MegacompileConfig,
    compile_options,
    settle,
)
from megacompile.report.schedule import Schedule
from megacompile.runtime.step_results import StepOutput
from megacompile.state.masters import Weights
from megacompile.state.model_values import Lending, is_owned
from megacompile.state.moment_formats import StateFormat
from megacompile.state.torch_optimizer import Several

# ------------------------------------------------------------------------------------------------------------
# The optimizer that a trainer sees: settings and schedule as it knows them, updates by the program.


class ProgramOptimizer(torch.optim.Optimizer):
    """Stands where a trainer expects its optimizer; ``inner`` is the one that a program has adopted.

    Both share their param groups, so schedulers and callbacks change what the next update takes. ``step``
    calls ``update``. There is no state on this side: moments are the program's.
    """

    _is_accelerate_prepared = True  # accelerate takes it as it is
    step_was_skipped = False

    def __init__(self, inner: torch.optim.Optimizer, update: Callable[[], None]) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self._update = inner, update
        for name in ("eval", "train"):  # of those whose classes change parameters by them
            if callable(getattr(inner, name, None)):
                setattr(self, name, lambda name=name: getattr(inner, name)())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Train the program on all micro-batches that wait."""
        if closure is not None:
            raise ProgramError("A program takes no closure: call optimizer.step() without one.")
        self._update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: a program holds no gradients between updates."""

    def state_dict(self) -> NoReturn:
        """Refused: the moments are in the program."""
        raise ProgramError("The optimizer's state is the program's: save it by trainer.program.save(folder).")


# ------------------------------------------------------------------------------------------------------------
# Updates of a trainer: micro-batches that wait for one, their weights, and the losses that are logged of it.
#
# In: what upstream's loop gives ``training_step``, one micro-batch at a time. Out: one ``train_step`` of the
# program for all of them.


_Upstream: Any = transformers.Trainer if TYPE_CHECKING else object  # every mixin's next class
_Step = TypeVar("_Step", bound=Callable[..., Tensor])
_KEPT = 100  # updates whose losses are summed only when they are logged


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
        if len(self._outputs) >= _KEPT:
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


# ------------------------------------------------------------------------------------------------------------
# ``transformers.Trainer`` over a megacompile program: the same loop, arguments, callbacks and logs.
#
# Upstream's loop is not copied. :class:`Mixin` stands before upstream's class and answers the hooks in which
# it touches the model, the gradients or the optimizer's state; read beside transformers 5.23.


__all__ = [
    "MegacompileConfig",
    "Mixin",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
]


class _TooManyRowsError(Exception):
    """A batch has no room in the budget, and ``auto_find_batch_size`` asks for a smaller one."""

    def __init__(self, least_bytes: int | None, budget_bytes: int) -> None:
        self.least_bytes, self.budget_bytes = least_bytes, budget_bytes


class _PlannedTraining(Exception):
    """All programs of a training are planned, and it is not to begin."""

    def __init__(self, programs: list[tuple[str, Schedule]]) -> None:
        self.programs = programs


class Mixin(Saving, Updates, Evaluation):
    """The mixin that makes a trainer of transformers train through a program; comes before upstream's class.

    ``hbm_budget``, ``host_budget``, ``offload_dir``, ``optimizer_state`` and ``weights`` are those of
    :func:`megacompile.compile`; ``config`` gives the first four and more. ``program`` is the program once
    training or evaluation has begun; ``release()`` ends it, and gives the model its values back.
    """

    model: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any

    def __init__(
        self,
        *args: Any,
        hbm_budget: float | str = "auto",
        host_budget: float | str | None = None,
        offload_dir: str | None = None,
        optimizer_state: StateFormat | None = None,
        config: MegacompileConfig | None = None,
        weights: Weights | None = None,
        **kwargs: Any,
    ) -> None:
        self._config = config or MegacompileConfig(hbm_budget, host_budget, offload_dir, optimizer_state)
        self._weights = weights
        self.program: Program | None = None
        self._lending = Lending()
        self._no_updates()
        self._planned = False  # all programs of this training
        self.planned_updates = 0
        self._stops_planned = False  # before the first update
        self._progress = TrainingProgress(self)
        super().__init__(*args, **kwargs)
        if isinstance(self.optimizer, (list, tuple)):
            self.optimizer = Several(self.optimizer)  # schedulers take one
        self._interruption = Interruption()
        self.add_callback(self._interruption)
        known = self.callback_handler.callbacks
        known[:] = [Bar() if type(callback) is ProgressCallback else callback for callback in known]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = next((base for base in cls.__mro__ if "compute_loss" in vars(base)), None)
        if cls._outside is None and own is not None and not own.__module__.startswith("transformers."):
            cls._outside = OutsideModel

    # ---- before training ---------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        self._config = settle(self.args, self._config)
        super().create_accelerator_and_postprocess()

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        from accelerate.utils import TorchDynamoPlugin

        plain = {"mixed_precision": "no", "device_placement": False}  # autocast, and a model on the device
        upstream: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return upstream | plain | {"dynamo_plugin": TorchDynamoPlugin("no")}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: weights come to the device as the schedule says."""

    def _prepare_input(self, data: Any) -> Any:
        """Nothing: batches go to the device as the schedule says."""
        return data

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As upstream; and counts the rows of a stream's last batch, as accelerate would on a device."""
        state = self.accelerator.gradient_state
        if state.end_of_dataloader and state.remainder == -1 and self.args.world_size == 1:
            state.active_dataloader.remainder = find_batch_size(inputs) or -1
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        return prepared

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: nn.Module | None = None) -> tuple[Any, Any]:
        """AdamW, whichever format of its moments ``optim`` asks for, or a class that upstream has for it."""
        if str(args.optim.value) in OWN_CLASSES:
            upstream: tuple[Any, Any] = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
            return upstream
        betas = args.adam_beta1, args.adam_beta2
        return torch.optim.AdamW, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As upstream, which calls it when the optimizer is there, and has accelerate wrap that next."""
        if self.optimizer is not None:
            self._adopted()
        return super()._wrap_model(model, *args, **kwargs)

    def _adopted(self) -> ProgramOptimizer:
        """The optimizer that ``create_optimizer``, a subclass's too, has made, as a program's."""
        if isinstance(self.optimizer, (list, tuple)):
            self.optimizer = Several(self.optimizer)
        if not isinstance(self.optimizer, ProgramOptimizer):
            self.optimizer = ProgramOptimizer(self.optimizer, self._update)
        adopted: ProgramOptimizer = self.optimizer
        return adopted

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self.model._is_accelerate_prepared = True  # else several ranks would wrap it, to sum gradients
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._drop_update()
        self._no_updates()
        self._planned = False
        program = self._programmed()
        if self._checkpoint is not None and is_owned(self.model):
            self._laid_out([])
        elif self._checkpoint is not None:  # the first step may begin with a rollout
            program.resume(self._checkpoint)
        return prepared

    def _programmed(self) -> Program:
        """The program of the model and the optimizer as they are now; ``model_init`` gives another model to
        each training, and a subclass's ``create_optimizer`` maybe another optimizer."""
        if self.optimizer is None:
            self.create_optimizer()
        optimizer = self._adopted()
        if self.program is not None and self.program.model is not unwrapped(self.model):
            self.program.close()
            self.program = None
        elif self.program is not None and self.program.optimizer is not optimizer.inner:
            self.program.release()
            self.program = None
        if self.program is None:
            # accelerate sets it too, and an attribute that is set later makes other programs of all batches
            self.model._is_accelerate_prepared = True
            options = compile_options(self.args, self.model, self._config)
            loss_fn = self._loss_fn()
            self.program = compile(
                self.model, optimizer=optimizer.inner, loss_fn=loss_fn, weights=self._weights, **options
            )
            self.program.lend(self._lending)
            counts = hasattr(self.model, "num_parameters")  # once, as it takes milliseconds
            self.flops_per_token = 6 * self.model.num_parameters(exclude_embeddings=True) if counts else 0
        return self.program

    def _loss_fn(self) -> Any:
        if self._outside is not None:
            return None
        if self.compute_loss_func is not None:
            return functools.partial(given_loss, self.compute_loss_func)
        if self.label_smoother is None:
            return None
        model = self.accelerator.unwrap_model(self.model)
        name = type(model.base_model.model if hasattr(model, "peft_config") else model).__name__
        shifts = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return functools.partial(smoothed_loss, self.label_smoother, shifts)

    def _laid_out(self, micro: list[dict[str, Any]]) -> Program:
        """The program, with its state laid out for these micro-batches, and a checkpoint loaded into it."""
        program = self._programmed()
        if program.plans_only:
            return program
        plans = bool(micro) and self.is_in_train and not self._planned
        if plans or not is_owned(self.model):
            with _in_train_mode(self.model):  # what comes first may be an evaluation
                if plans:
                    self._plan_training(program, micro)
                if not is_owned(self.model):
                    program.prepare(micro, **self._preparation())
        if self._checkpoint is not None:
            program.load(self._checkpoint)
            self._checkpoint = None
        return program

    def _preparation(self) -> dict[str, Any]:
        return {"outputs": self._outputs_of_forward(), "checkpoint": self._checkpoint}

    def _plan_training(self, program: Program, micro: list[dict[str, Any]]) -> None:
        """Plan all programs that are known of this training, which begins with these micro-batches, and
        refuse, before the first step, a budget in which one of them does not fit."""
        self.planned_updates = self._epochs()[1]
        first = {"training": functools.partial(program.prepare, micro, **self._preparation())}
        with same_draws():
            later = self._later_programs(program, micro)
            if self.args.auto_find_batch_size and self._train_batch_size > 1:
                try:
                    program.plan_all(first)
                    program.plan_all(first | later)
                except BudgetError as error:
                    raise _TooManyRowsError(error.least_bytes, program.budget_bytes) from error
            programs = program.plan_all(first | later | self._evaluations())
        if self._stops_planned:
            raise _PlannedTraining(programs)
        self._planned = True

    def plan(self) -> list[tuple[str, Schedule]]:
        """Return the programs of a training, each with what it is for, as :meth:`train` plans them before its
        first step; that is not made, and nothing is allocated. Raises what ``train`` would until then."""
        self._stops_planned = True
        try:
            self.train()
        except _PlannedTraining as planned:
            return planned.programs
        finally:
            self._stops_planned = False
        return []

    def _later_programs(
        self, program: Program, micro: list[dict[str, Any]]
    ) -> dict[str, Callable[[], object]]:
        """Return, by name, what prepares for later updates, of a training that begins with ``micro``."""
        return {
            name: functools.partial(self._prepare_update, program, samples)
            for name, samples in self._later_updates()
        }

    def _later_updates(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Yield, with a name, the micro-batches of updates that may be unlike the first one, as far as they
        are known: with the longest row, and the last one of an epoch."""
        loader, updates = self._epochs()
        data, sampler = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
        rows, steps = getattr(sampler, "batch_size", None), self.args.gradient_accumulation_steps
        if not rows or not hasattr(data, "__getitem__") or not isinstance(data, Sized) or not len(data):
            return
        drawn = getattr(sampler, "sampler", None)
        count = len(drawn) if isinstance(drawn, Sized) else len(data)
        alone, drops = self.args.world_size == 1, getattr(sampler, "drop_last", False)
        short = count % rows if alone and not drops else 0  # of several ranks batches are filled up
        full = loader.collate_fn(list(longest_rows(data, rows)))
        if longest_row(data) is not None:
            yield "training on the longest rows", [full] * steps
        if (largest := getattr(self.data_collator, "largest", None)) is not None:
            yield "training on the largest images", [largest(data)] * steps
        last = len(loader) % steps or steps
        if (short or last < steps) and updates >= -(-len(loader) // steps):
            end = [loader.collate_fn(list(longest_rows(data, short)))] if short else [full]
            yield "the last update of an epoch", [full] * (last - 1) + end

    def _epochs(self) -> tuple[Any, int]:
        """Return the data loader of this training, and the number of its updates."""
        return self.callback_handler.train_dataloader, self.state.max_steps

    def _prepare_update(self, program: Program, samples: list[dict[str, Any]]) -> None:
        """Prepare for an update on what upstream's loop would give these to."""
        samples, count = self.get_batch_samples(iter(samples), len(samples), self.args.device)
        waiting: list[MicroBatch] = []
        try:
            for sample in samples:  # losses of others may change what they are given
                waiting.append(self._micro_batch(self._prepare_inputs(dict(sample)), count))
            batches = self._alike([micro.batch for micro in waiting])
            program.prepare(batches, **self._preparation())
        finally:
            cancel(waiting)

    def _outputs_of_forward(self) -> Any:
        """Return what the program gives a loss that is computed outside; None: it computes the loss."""
        return self._outside.outputs(self) if self._outside is not None else None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)
        self._progress.show(logs)

    def _inner_training_loop(self, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        """As upstream; for ``auto_find_batch_size`` again, with the rows that a budget's error leaves room
        for, where upstream would compile at nine tenths of them, and so on."""
        needs: list[tuple[int, int]] = []
        while True:
            try:
                return super()._inner_training_loop(batch_size, *args, **kwargs)
            except _TooManyRowsError as error:
                needs.append((batch_size, error.least_bytes or 0))
                batch_size = fewer_rows(needs, error.budget_bytes)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As upstream, which makes one step more where a training that has ended is resumed."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._add_losses()
        if self._checkpoint is not None:  # there was no step left to make
            Evaluation.prediction_step(self, self.model, next(iter(self.get_train_dataloader())), True)
        self._finish_saving()
        # else upstream removes the checkpoint to go on from, if it is not the best
        with self._all_kept() if self._interruption.stopped else contextlib.nullcontext():
            return super()._finalize_training(*args, **kwargs)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        ids = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 0 if ids is None else int(ids.numel()) * self.flops_per_token

    def release(self) -> nn.Module:
        """End the program: the model holds its values again, as an ordinary one."""
        self._finish_saving()
        if self.program is not None:
            self.program.release()
            self.program = self.optimizer = None
        model: nn.Module = self.model
        return model


@contextlib.contextmanager
def _in_train_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into train mode, as upstream's step does, and its modules back into theirs after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Draw again, after it, what is drawn on the host inside."""
    numbers, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 - of collators
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(numbers)
            np.random.set_state(arrays)  # noqa: NPY002


def fewer_rows(needs: Sequence[tuple[int, int]], budget_bytes: int) -> int:
    """The rows of a batch to try next, of the (rows, least bytes) that were too many so far.

    Bytes are nearly linear in rows: two batches tell what none at all would need. After one, that counts as
    nothing, so that no number that fits is passed over.
    """
    rows, least = needs[-1]
    of_row, fixed = least / rows, 0.0
    if len(needs) > 1:
        slope = (needs[-2][1] - least) / (needs[-2][0] - rows)
        if 0 < slope < of_row:
            of_row, fixed = slope, least - slope * rows
    fits = int((budget_bytes - fixed) / of_row) if least else rows // 2
    return max(1, min(fits, rows - 1))


class Trainer(Mixin, transformers.Trainer):
    """``transformers.Trainer`` for a model whose training state is larger than the device's memory.

    Takes what upstream's takes, and what :class:`Mixin` does.
    """


class Generator:
    """Stands where a trainer's own code calls ``generate`` of its model, once: a rollout makes the texts.

    Several ranks, and a budget without room for a rollout, have them made on the host, in FP32, from values
    that the program lends the model.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._model = trainer, trainer.model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **inputs: Any) -> Any:
        """As the model's own."""
        self._trainer.model = self._model
        if self._trainer.args.world_size == 1:
            try:
                with self._trainer._programmed().rollout() as model:
                    return model.generate(**inputs)
            except BudgetError as error:
                warnings.warn(f"Texts are made on the host, which is slow. {error}", stacklevel=2)
        return self._model.generate(**inputs)


class Seq2SeqTrainer(Mixin, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` in the same way.

    With ``predict_with_generate`` the texts of each batch are made in a rollout.
    """

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *rest: Any, **options: Any
    ) -> tuple[Tensor | None, Any, Any]:
        if prediction_loss_only or not self.args.predict_with_generate:
            return Evaluation.prediction_step(self, self.model, inputs, prediction_loss_only, *rest)
        model.eval()
        upstream, own = transformers.Seq2SeqTrainer.prediction_step, self.model
        self.model = Generator(self)
        try:
            step: tuple[Tensor | None, Any, Any] = upstream(
                self, self._stand_in(), inputs, prediction_loss_only, *rest, **options
            )
        finally:
            self.model = own
        return step
