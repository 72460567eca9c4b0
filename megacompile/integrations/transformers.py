"""``transformers.Trainer`` over a program, one import changed: the same loop, arguments, callbacks and logs.

Upstream's loop is not copied. :class:`Mixin` stands before upstream's class and answers the hooks in which
it touches the model, the gradients or the optimizer's state; read beside transformers 5.23.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

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
from megacompile.errors import BudgetError
from megacompile.integrations.compute_loss import MicroBatch, OutsideModel, cancel
from megacompile.integrations.evaluation import Evaluation
from megacompile.integrations.interruption import Interruption
from megacompile.integrations.lengths import longest_row, longest_rows
from megacompile.integrations.loss_functions import given_loss, smoothed_loss
from megacompile.integrations.program_optimizer import ProgramOptimizer
from megacompile.integrations.progress import Bar, TrainingProgress
from megacompile.integrations.saving import Saving
from megacompile.integrations.training_arguments import (
    OWN_CLASSES,
    MegacompileConfig,
    compile_options,
    settle,
)
from megacompile.integrations.updates import Updates
from megacompile.report.schedule import Schedule
from megacompile.state.masters import Weights
from megacompile.state.model_ownership import is_owned
from megacompile.state.model_values import Lending
from megacompile.state.moment_formats import StateFormat
from megacompile.state.several_optimizers import Several

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
