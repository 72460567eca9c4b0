"""``transformers.Trainer`` over a program, one import changed: the same loop, arguments, callbacks and logs.

Upstream's loop is not copied. :class:`Mixin` stands before upstream's class and answers the hooks in which
it touches the model, the gradients or the optimizer's state; read beside transformers 5.23.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import ProgressCallback, Seq2SeqTrainingArguments, TrainingArguments
from transformers.trainer_pt_utils import find_batch_size

from megacompile.api.program import Program
from megacompile.errors import BudgetError
from megacompile.integrations.compute_loss import OutsideModel
from megacompile.integrations.interruption import Interruption
from megacompile.integrations.lengths import longest_rows
from megacompile.integrations.plan_training import (
    PlannedTraining,
    TooManyRowsError,
    fewer_rows,
    later_programs,
)
from megacompile.integrations.progress import Bar
from megacompile.integrations.saving import TrainerSaving
from megacompile.integrations.trainer_checkpoints import check_checkpoint, last_checkpoint
from megacompile.integrations.trainer_steps import TrainerSteps, waits_for_update
from megacompile.integrations.training_arguments import OWN_CLASSES, MegacompileConfig, settle
from megacompile.report.schedule import Schedule
from megacompile.state.masters import Weights
from megacompile.state.model_ownership import is_owned
from megacompile.state.moment_formats import StateFormat
from megacompile.state.several_optimizers import Several
from megacompile.user_warning import warn_user

__all__ = [
    "MegacompileConfig",
    "Mixin",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
]


_Upstream: Any = transformers.Trainer if TYPE_CHECKING else object  # the mixin's next class


class Mixin(_Upstream):
    """The mixin that makes a trainer of transformers train through a program; comes before upstream's class.

    ``hbm_budget``, ``host_budget``, ``offload_dir``, ``optimizer_state`` and ``weights`` are those of
    :func:`megacompile.compile`; ``config`` gives the first four and more. ``program`` is the program once
    training or evaluation has begun; ``release()`` ends it, and gives the model its values back.

    It answers upstream's hooks, by its steps and what saves; other kinds of trainers answer ours:
    ``_before_program``, ``_alike``, ``_epochs``, ``_later_programs``, ``_predict_longest``,
    ``_rows_of_training``, ``_save_beside``.
    """

    model: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    preprocess_logits_for_metrics: Any
    _outside: type[OutsideModel] | None = None  # where the loss is the trainer's own code
    _preprocess: Any = None  # of the logits, while an evaluation runs

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
        config = config or MegacompileConfig(hbm_budget, host_budget, offload_dir, optimizer_state)
        self._steps = TrainerSteps(self, config, weights)
        self._saving = TrainerSaving(self, self._steps)
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

    @property
    def program(self) -> Program | None:
        """The program, once training or evaluation has begun."""
        return self._steps.program

    @property
    def planned_updates(self) -> int:
        """The updates of the training that is under way, as they were planned before its first step."""
        return self._steps.planned_updates

    def plan(self) -> list[tuple[str, Schedule]]:
        """Return the programs of a training, each with what it is for, as :meth:`train` plans them before its
        first step; that is not made, and nothing is allocated. Raises what ``train`` would until then."""
        self._steps.stops_planned = True
        try:
            self.train()
        except PlannedTraining as planned:
            return planned.programs
        finally:
            self._steps.stops_planned = False
        return []

    def release(self) -> nn.Module:
        """End the program: the model holds its values again, as an ordinary one."""
        self._saving.finish()
        if self.program is not None:
            self.program.release()
            self._steps.program = self.optimizer = None
        model: nn.Module = self.model
        return model

    def _before_program(self) -> None:
        """Bring the models into the state in which the program is compiled, whenever it is asked for."""

    def _alike(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches of an update; a program pads what hides it itself."""
        return batches

    def _epochs(self) -> tuple[Any, int]:
        """Return the data loader of this training, and the number of its updates."""
        return self.callback_handler.train_dataloader, self.state.max_steps

    def _rows_of_training(self) -> int:
        """Return the rows of a micro-batch in training."""
        rows: int = self._train_batch_size
        return rows

    def _later_programs(
        self, program: Program, micro: list[dict[str, Any]]
    ) -> dict[str, Callable[[], object]]:
        """Return, by name, what prepares for later updates, of a training that begins with ``micro``."""
        return later_programs(self, self._steps, program)

    def _predict_longest(self, data: Any) -> None:
        """Predict a batch as long as the longest row, where the number of rows is known."""
        if isinstance(data, Sized) and len(data):
            rows = longest_rows(data, self.args.eval_batch_size * self.args.world_size)
            loss_only = self.args.prediction_loss_only or self.compute_metrics is None
            # to its end, as accelerate takes a loader that was left for the one that is trained on; not
            # get_eval_dataloader, which may keep what it returns
            try:
                for batch in list(self.get_test_dataloader(rows)):
                    Mixin.prediction_step(self, self.model, batch, loss_only)  # no code of a subclass
            finally:
                self.model.train()  # as the step does that comes next

    def _save_beside(self, folder: Path) -> None:
        """Write what a checkpoint has beside upstream's files and the program's state."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As upstream; ``resume_from_checkpoint=True`` takes the newest checkpoint that is whole, if any.

        On SIGINT or SIGTERM it finishes the update, saves a checkpoint and returns. When it has returned, or
        raised, no checkpoint is being written any more.
        """
        steps = self._steps
        steps.checkpoint = None
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None and self.is_world_process_zero():
                text = f"{self.args.output_dir} has no whole checkpoint: training starts from the beginning."
                warn_user(text)
        named = self._naming_failures()
        with self._interruption.handled(self), steps.progress.told(), named, steps.lending.training():
            try:
                return super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                steps.drop_update()  # which never came
                self._saving.finish()

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """The other ranks hear why this one fails, and this one says which of them did."""
        try:
            yield
        except BaseException:
            if self.program is None or self.program.world.ended:
                raise
            with self.program.world.together():
                raise

    def create_accelerator_and_postprocess(self) -> None:
        self._steps.config = settle(self.args, self._steps.config)
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
            self._steps.adopted()
        return super()._wrap_model(model, *args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self.model._is_accelerate_prepared = True  # else several ranks would wrap it, to sum gradients
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._steps.begin()
        return prepared

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
        waits = getattr(self.training_step, "waits_for_update", False)
        return self._steps.train_on(self._prepare_inputs(inputs), num_items_in_batch, waits=waits)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Nothing: the program clips, as compiled."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Nothing: the norm is asked for where it is logged."""

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log and self._steps.last is not None:
            grad_norm = self._steps.last.grad_norm
            self._steps.add_losses()
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)
        self._steps.progress.show(logs)

    def _inner_training_loop(self, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        """As upstream; for ``auto_find_batch_size`` again, with the rows that a budget's error leaves room
        for, where upstream would compile at nine tenths of them, and so on."""
        needs: list[tuple[int, int]] = []
        while True:
            try:
                return super()._inner_training_loop(batch_size, *args, **kwargs)
            except TooManyRowsError as error:
                needs.append((batch_size, error.least_bytes or 0))
                batch_size = fewer_rows(needs, error.budget_bytes)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch as upstream, but without its one step more for a training that is resumed after its
        end."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._steps.add_losses()
        if self._steps.checkpoint is not None:  # there was no step left to make
            Mixin.prediction_step(self, self.model, next(iter(self.get_train_dataloader())), True)
        self._saving.finish()
        # else upstream removes the checkpoint to go on from, if it is not the best
        with self._saving.all_kept() if self._interruption.stopped else contextlib.nullcontext():
            return super()._finalize_training(*args, **kwargs)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        ids = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 0 if ids is None else int(ids.numel()) * self._steps.flops_per_token

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        model.eval()
        if self._outside is None:
            return self._steps.predict(inputs, prediction_loss_only, ignore_keys, self._preprocess)
        # upstream's own step, whose compute_loss calls the model
        step = super().prediction_step(self._stand_in(), inputs, prediction_loss_only, ignore_keys)
        loss, predictions, labels = step
        if self._preprocess is not None and predictions is not None:
            predictions = self._preprocess(predictions, labels)
        return loss, predictions, labels

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream, with ``preprocess_logits_for_metrics`` inside of the program: logits stay there.

        A subclass's own ``prediction_step`` is given what runs the program where it calls the model.
        """
        own = self.prediction_step
        if getattr(own, "__func__", None) is not Mixin.prediction_step:
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

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As upstream, but a thread writes what is large, and then says that the folder is whole."""
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        save = functools.partial(super()._save_checkpoint, model, trial)
        self._saving.save_checkpoint(folder, save, super()._push_from_checkpoint)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing: it is not whole yet."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:
            self._saving.save_scheduler(Path(output_dir))

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the model as ``from_pretrained`` loads it, with its tokenizer."""
        if self.program is None or not is_owned(self.model):
            super()._save(output_dir, state_dict)
            return
        folder = output_dir if output_dir is not None else self.args.output_dir
        self._saving.save_model(self.program, folder)

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        """As upstream, which compares the numbers of updates of a checkpoint with what may be shares here."""
        names = ("logging_steps", "eval_steps", "save_steps")
        given = {name: getattr(self.args, name) for name in names}
        shares = {name: steps for name, steps in given.items() if steps is not None and steps < 1}
        self.args.__dict__.update({name: math.ceil(max_steps * share) for name, share in shares.items()})
        try:
            return super()._init_training_state(max_steps, *args, **kwargs)
        finally:
            self.args.__dict__.update(shares)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Only look whether it is whole: the state is read when it has been laid out, at the first update."""
        self._steps.checkpoint = check_checkpoint(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
            self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        assert self.program is not None
        self.program.load(check_checkpoint(Path(self.state.best_model_checkpoint)))

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        best = super()._determine_best_metric(*args, **kwargs)
        return best or self._interruption.stopped  # save_strategy="best" saves where this is true


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
                with self._trainer._steps.programmed().rollout() as model:
                    return model.generate(**inputs)
            except BudgetError as error:
                warn_user(f"Texts are made on the host, which is slow. {error}")
        return self._model.generate(**inputs)


class Seq2SeqTrainer(Mixin, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` in the same way.

    With ``predict_with_generate`` the texts of each batch are made in a rollout.
    """

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *rest: Any, **options: Any
    ) -> tuple[Tensor | None, Any, Any]:
        if prediction_loss_only or not self.args.predict_with_generate:
            return Mixin.prediction_step(self, self.model, inputs, prediction_loss_only, *rest)
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
