"""``transformers.Trainer`` over a megacompile program: the same loop, arguments, callbacks and logs.

Upstream's loop is not copied. :class:`Mixin` stands before upstream's class and answers the hooks in which it
touches the model, the gradients or the optimizer's state; read beside transformers 5.23.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import ProgressCallback, Seq2SeqTrainingArguments, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import find_batch_size

from megacompile.api import compile
from megacompile.capture.wrappers import unwrapped
from megacompile.errors import BudgetError
from megacompile.host.foreign import Several
from megacompile.host.formats import StateFormat
from megacompile.host.state import Weights
from megacompile.integrations.arguments import OWN_CLASSES, MegacompileConfig, compile_options, settle
from megacompile.integrations.evaluation import Evaluation
from megacompile.integrations.interrupt import Interruption
from megacompile.integrations.losses import given_loss, smoothed_loss
from megacompile.integrations.optimizer import ProgramOptimizer
from megacompile.integrations.outside import OutsideModel
from megacompile.integrations.progress import Bar, Progress
from megacompile.integrations.saving import Saving
from megacompile.integrations.updates import Updates
from megacompile.program import Program
from megacompile.runtime.ownership import is_owned
from megacompile.runtime.values import Lending

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


class Mixin(Saving, Updates, Evaluation):
    """What makes a trainer of transformers train through a program; comes before upstream's class.

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
        self._progress = Progress(self)
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
        self._programmed()
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
        if not is_owned(self.model):
            try:
                program.prepare(micro, outputs=self._outputs_of_forward(), checkpoint=self._checkpoint)
            except BudgetError as error:
                if self.args.auto_find_batch_size and self._train_batch_size > 1:
                    raise _TooManyRowsError(error.least_bytes, program.budget_bytes) from error
                raise
            if self.is_in_train:
                self._plan_evaluation()
        if self._checkpoint is not None:
            program.load(self._checkpoint)
            self._checkpoint = None
        return program

    def _outputs_of_forward(self) -> Any:
        """What the program gives a loss that is computed outside; None: it computes the loss."""
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


class Seq2SeqTrainer(Mixin, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` in the same way.

    With ``predict_with_generate`` the model's own ``generate`` makes the texts on the host, in FP32 and with
    its cache, from values that the program lends it for each batch.
    """

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *rest: Any, **options: Any
    ) -> tuple[Tensor | None, Any, Any]:
        if prediction_loss_only or not self.args.predict_with_generate:
            return Evaluation.prediction_step(self, self.model, inputs, prediction_loss_only, *rest)
        model.eval()
        upstream = transformers.Seq2SeqTrainer.prediction_step
        step: tuple[Tensor | None, Any, Any] = upstream(
            self, self._stand_in(), inputs, prediction_loss_only, *rest, **options
        )
        return step
