"""TRL's trainers over a program, ``SFTTrainer``, ``DPOTrainer`` and others: a change of one import.

TRL's losses are computed by TRL's own code, outside of the program
(:mod:`megacompile.integrations.compute_loss`). They read what TRL's fused head gives: for each token its
log-probability, the entropy, whether it was the most likely one. A program of the forward gives these
numbers, so no logits leave the device. Read beside TRL 1.16.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import trl
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from trl.trainer.utils import FusedCausalLMOutput

from megacompile.api.compile import compile
from megacompile.api.merged_weights import layers_to_merge
from megacompile.api.program import Program
from megacompile.capture.module_wrappers import unwrapped
from megacompile.capture.padded_length import bucket_length, quarter_length
from megacompile.capture.padding import IGNORED, pad_batch
from megacompile.errors import MegacompileError
from megacompile.integrations.assistant_masks import AssistantMasks
from megacompile.integrations.compute_loss import OutsideModel
from megacompile.integrations.cut_images import refuse_cut_images
from megacompile.integrations.lengths import as_long_as_others, longest_of, longest_row, with_rows
from megacompile.integrations.peft_adapters import learns_prompts, start_without_effect, virtual_tokens
from megacompile.integrations.plan_training import same_draws
from megacompile.integrations.trainer_steps import waits_for_update
from megacompile.integrations.training_arguments import MegacompileConfig, compile_options, plans_recompute
from megacompile.integrations.transformers import Mixin
from megacompile.state.checkpoint_manifest import read_manifest
from megacompile.state.model_ownership import is_owned
from megacompile.units import host_available, parse_bytes
from megacompile.user_warning import warn_user

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "MegacompileConfig",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
]

_LONGEST_TEXTS = 64  # texts of most characters, one of which has the most tokens, or nearly
_PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}  # position_ids say it


@plans_recompute
class SFTConfig(trl.SFTConfig):
    """``trl.SFTConfig`` that leaves what is recomputed to the plan, where TRL's asks for all activations."""


@plans_recompute
class DPOConfig(trl.DPOConfig):
    """``trl.DPOConfig`` in the same way."""


@plans_recompute
class KTOConfig(trl.KTOConfig):
    """``trl.KTOConfig`` in the same way."""


@plans_recompute
class RewardConfig(trl.RewardConfig):
    """``trl.RewardConfig`` in the same way."""


@plans_recompute
class GRPOConfig(trl.GRPOConfig):
    """``trl.GRPOConfig`` in the same way."""


@plans_recompute
class RLOOConfig(trl.RLOOConfig):
    """``trl.RLOOConfig`` in the same way."""


_PART_BYTES = 1 << 22  # of FP32 logits: fewer are made at once, as each part lengthens the graph


@dataclass(frozen=True)
class TokenOutputs:
    """The outputs of TRL's fused head, made of the logits of a causal language model, zero where labels are
    ignored.

    ``metrics`` are fields of its output beside the log-probabilities, which alone carry a gradient, and the
    entropy where ``trains_entropy``. All are of logits divided by ``temperature``. Called as ``outputs`` of a
    program: for metrics without a gradient a sixteenth of the logits, or 4 MiB, is on the device at a time.
    """

    metrics: tuple[str, ...]
    inputs: tuple[str, ...] = ("labels",)
    temperature: float = 1.0
    trains_entropy: bool = False
    parts: int = 16  # in which logits are made for metrics, at most

    @property
    def whole(self) -> TokenOutputs:
        """The same in one part."""
        return replace(self, parts=1)

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        logits = outputs.logits.detach()
        virtual = logits.shape[1] - batch["labels"].shape[1]  # tokens that PEFT puts first, without labels
        labels = nn.functional.pad(batch["labels"], (virtual, 0), value=-100)[:, 1:]
        mask, length = labels != -100, labels.shape[1]
        parts = min(self.parts, -(-logits.numel() * torch.float32.itemsize // _PART_BYTES))
        size = max(2, -(-length // max(1, parts)))
        starts = range(
            0, max(1, length - 1), size
        )  # no part of one position, which hides where positions are
        ranges = [slice(start, end) for start, end in zip(starts, [*starts[1:], length], strict=True)]
        made = [self._of(logits[:, part], labels[:, part]) for part in ranges]
        found = {name: torch.cat([part[name] for part in made], dim=1) for name in self.metrics}
        trained = self._scaled(outputs.logits[:, :-1])
        found["log_probs"] = _log_probs(trained, labels)
        if self.trains_entropy:
            found["entropy"] = _entropy(trained, labels)
        found = {name: value.masked_fill(~mask, 0) for name, value in found.items()} | {"label_mask": mask}
        aux_loss = getattr(outputs, "aux_loss", None)
        return found if aux_loss is None else found | {"aux_loss": aux_loss}

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits.float() if self.temperature == 1 else logits.float() / self.temperature

    def _of(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self._scaled(logits)
        return {name: _METRICS[name](logits, labels) for name in self.metrics}


def _log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return -losses.view(labels.shape)


def _entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


_METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "entropy": _entropy,
    "log_sum_sq_probs": lambda logits, labels: (2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1),
    "mean_logits": lambda logits, labels: logits.mean(-1),
    "is_top1": lambda logits, labels: logits.argmax(-1) == labels,
}


class TokenModel(OutsideModel):
    """Gives what TRL's fused head would."""

    @staticmethod
    def outputs(trainer: Any) -> Any:
        return trainer._token_outputs

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self._trainer.model
        return model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _programmed(self) -> Program:
        program: Program = self._trainer._steps.programmed()
        return program

    def __call__(self, *, fused_lm_head: bool = False, **inputs: Any) -> Any:
        trained, batch = self._is_trained(), {n: v for n, v in inputs.items() if n not in _PACKED}
        if not fused_lm_head and trained:
            raise MegacompileError(
                "This loss needs all logits, which stay on the device: leave out label_smoothing_factor and "
                "compute_loss_func, or use megacompile.integrations.transformers.Trainer."
            )
        if not fused_lm_head:
            batch = as_long_as_others(self._programmed(), batch)
            return self._laid_out(batch).predict(batch)
        length = batch["input_ids"].shape[1]
        few = hasattr(self._trainer.data_collator, "buckets")  # whose batches are of few lengths already
        if not few:
            batch = self._padded(batch)
        if trained:
            outputs = self._awaited(batch)
        else:
            if not few:
                batch = _lengthened(batch, longest_of(self._programmed(), batch["input_ids"].shape[1]))
            outputs = self._laid_out(batch).predict(batch, outputs=self.outputs(self._trainer))
        kept = virtual_tokens(self._model) + length - 1
        return FusedCausalLMOutput(**{n: v[:, :kept] if v.dim() == 2 else v for n, v in outputs.items()})

    def _padded(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One of few lengths."""
        length, trainer = batch["input_ids"].shape[1], self._trainer
        rows = trainer._train_batch_size if _is_packed(batch) else 1
        for longest in (trainer._longest, getattr(trainer.args, "max_length", None)):
            if longest and length <= longest * rows:
                return _lengthened(batch, quarter_length(length, longest * rows))
        return _lengthened(batch, bucket_length(length))


def _is_packed(batch: dict[str, Any]) -> bool:
    return batch.get("attention_mask") is None


def _lengthened(batch: dict[str, Any], length: int) -> dict[str, Any]:
    """Longer on the right, where causal attention and ignored labels hide it."""
    before = batch["input_ids"].shape[1]
    padded: dict[str, Any] = pad_batch(batch, length)
    if _is_packed(batch):  # a mask would hide where sequences begin; what is added is a sequence of its own
        padded.pop("attention_mask", None)
        if "position_ids" in batch:
            padded["position_ids"][:, before:] = torch.arange(length - before)
    return padded


class TokenMixin(Mixin):
    """A trainer of TRL whose loss is computed from what its fused head gives; before TRL's class."""

    _outside = TokenModel
    _token_outputs: TokenOutputs
    train_dataset: Any
    eval_dataset: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not getattr(self, "_is_vision_dataset", False):
            return
        data = {"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset}
        if isinstance(held_out := data["eval_dataset"], dict):
            data |= {"eval_dataset": None, **{f"eval_dataset[{n!r}]": rows for n, rows in held_out.items()}}
        config, workers = unwrapped(self.model).config, self.args.dataloader_num_workers
        with same_draws():
            shows = not self.args.disable_tqdm and self.args.process_index == 0
            refuse_cut_images(self.data_collator, data, config, workers=workers, shows=shows)

    @functools.cached_property
    def _longest(self) -> int | None:
        """The most tokens of a row, where all rows are known."""
        held_out = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        found = [longest_row(data) for data in (self.train_dataset, *held_out.values()) if data is not None]
        known = [length for length in found if length is not None]
        if len(known) < len(found) or not known:
            return None
        most = getattr(self.args, "max_length", None)
        return max(known) if most is None else min(max(known), most)

    def _before_program(self) -> None:
        without_fused_head(self.model)

    def _alike(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Micro-batches of one length, which are one program; also of several ranks."""
        longest = longest_of(self._steps.programmed(), max(batch["input_ids"].shape[1] for batch in batches))
        return [_lengthened(batch, longest) for batch in batches]


class SFTTrainer(TokenMixin, trl.SFTTrainer):
    """``trl.SFTTrainer`` for a model whose training state is larger than the device's memory.

    Takes what TRL's takes, and ``hbm_budget``, ``host_budget``, ``offload_dir``, ``optimizer_state``, or a
    ``config``.
    """

    _token_outputs = TokenOutputs(("entropy", "is_top1"))

    def __init__(self, model: Any, args: Any = None, *rest: Any, **given: Any) -> None:
        if args is not None and args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = False  # else TRL asks DDP for it, of any model with a processor
        super().__init__(model, args, *rest, **given)

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, *rest: Any
    ) -> Any:
        """TRL's, with exact masks of the assistant's turns, and word of the rows that TRL drops."""
        if args.assistant_only_loss and getattr(processing_class, "is_fast", False):
            processing_class = AssistantMasks(processing_class)
        prepared = super()._prepare_dataset(dataset, processing_class, args, packing, *rest)
        if isinstance(dataset, Sized) and not packing:
            _tell_of_dropped(len(dataset) - len(prepared), len(dataset), args.max_length)
        return prepared


def _tell_of_dropped(dropped: int, rows: int, length: int | None) -> None:
    if not dropped:
        return
    text = f"{dropped} of {rows} rows have nothing to learn from in their first {length} tokens (max_length)"
    if dropped == rows:
        raise MegacompileError(f"{text}: give more, or shorten the prompts.")
    warn_user(f"{text}: they are left out.")


class ReferenceModel(TokenModel):
    """Gives what TRL's fused head would of a reference that is not the policy, by a program of its own, which
    has the device's memory while it runs, and the policy's program else.

    A program trains something: here that is the last of the smallest parameters, which no step is made for;
    so frozen weights are kept as those of a policy are, and no moments beside them. ``mixes`` says that the
    policy's are to be mixed into them. ``checkpoint`` is loaded when they are laid out.
    """

    def __init__(self, trainer: Any, model: nn.Module, *, mixes: bool = False) -> None:
        self._reference = unwrapped(model)
        super().__init__(trainer)
        self.checkpoint: Path | None = None
        self._foreseen: Any = WeakTensorKeyDictionary()
        without_fused_head(self._reference)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        last = min(reversed(list(model.parameters())), key=Tensor.numel)
        model.requires_grad_(False)
        optimizer = torch.optim.AdamW([last.requires_grad_()])
        options = compile_options(trainer.args, model, trainer._steps.config)
        self.program = compile(model, optimizer=optimizer, **options | {"dump": None})
        if mixes:
            self.program.expect_mixing()

    def foresee(self, inputs: dict[str, Any]) -> None:
        """Compute the outputs of a call that a loss makes while the policy's program has the device."""
        self._foreseen[inputs["input_ids"]] = self._computed(inputs)

    def __call__(self, **inputs: Any) -> Any:
        outputs = self._foreseen.pop(inputs["input_ids"], None)
        return self._computed(inputs) if outputs is None else outputs

    def _computed(self, inputs: dict[str, Any]) -> Any:
        if self._trainer.program is not None:
            self._trainer.program.vacate()
        try:
            return super().__call__(**inputs)
        finally:
            self.program.vacate()

    @staticmethod
    def outputs(trainer: Any) -> Any:
        return replace(trainer._token_outputs, metrics=(), trains_entropy=False)

    @property
    def _model(self) -> nn.Module:
        return self._reference

    def _programmed(self) -> Program:
        return self.program

    def _laid_out(self, batch: dict[str, Any]) -> Program:
        if not is_owned(self._reference):
            self.program.prepare(batch, outputs=self.outputs(self._trainer))
        if self.checkpoint is not None:
            self.program.load(self.checkpoint)
            self.checkpoint = None
        return self.program

    def release(self) -> nn.Module:
        """Give the model its values back, and end the program."""
        self.program.release()
        self._reference.requires_grad_(False)
        for parameter in self._trained:
            parameter.requires_grad_()
        return self._reference


def without_fused_head(model: Any) -> None:
    """Take away what TRL puts in the place of a model's forward, and a program computes itself."""
    vars(model.get_base_model() if hasattr(model, "get_base_model") else model).pop("forward", None)


def without_memory_of(model: nn.Module, config: MegacompileConfig) -> MegacompileConfig:
    """Return the settings of a program beside a frozen model, whose weights are taken off the host budget."""
    if config.host_budget is None:
        return config
    whole = parse_bytes(config.host_budget, what="host_budget", available=host_available(), grows=True)
    left = whole - sum(p.nbytes for p in model.parameters())
    return replace(config, host_budget=f"{max(left, 1)}B")


class BesideReference(TokenMixin):
    """A trainer of TRL beside a reference that stays, as ``ref_model``, and may follow the policy
    (``sync_ref_model``): then checkpoints have it too."""

    ref_model: Any

    @property
    def _keeps_reference(self) -> bool:
        """Return whether the reference is asked while the policy is trained."""
        return self.ref_model is not None

    def _make_room(self) -> None:
        """Take a reference that stays off the host budget, and refuse one that cannot follow."""
        if not self._keeps_reference:
            return
        self._steps.config = without_memory_of(self.ref_model, self._steps.config)
        shapes = [[p.shape for p in model.parameters()] for model in (self.model, self.ref_model)]
        if self.args.sync_ref_model and (shapes[0] != shapes[1] or self.args.world_size > 1):
            raise MegacompileError(
                f"{type(self).__name__}(sync_ref_model=True) mixes each weight of the policy into its "
                "reference's, in one process: give a ref_model that has the same weights, not coded, and one "
                "rank."
            )

    def add_callback(self, callback: Any) -> None:
        """As upstream, with TRL's mixture of weights by programs."""
        if isinstance(callback, trl.SyncRefModelCallback):
            callback.sync_target_model = self._follow
        super().add_callback(callback)

    def _follow(self, policy: nn.Module, reference: nn.Module, share: float) -> None:
        assert self.program is not None
        self.ref_model.program.mix(self.program, share)

    def _before_program(self) -> None:
        if self._keeps_reference and isinstance(self.ref_model, nn.Module):
            self.ref_model = ReferenceModel(self, self.ref_model, mixes=self.args.sync_ref_model)
        super()._before_program()

    def _prepare_for_training(self, steps: int, loader: Any, resumed: str | None = None) -> Any:
        checkpoint = Path(resumed) / "reference" if resumed and self.args.sync_ref_model else None
        if checkpoint is not None:
            read_manifest(checkpoint)
        prepared = super()._prepare_for_training(steps, loader, resumed)
        if checkpoint is not None:
            self.ref_model.checkpoint = checkpoint
        return prepared

    def _save_beside(self, folder: Path) -> None:
        if self.args.sync_ref_model and not self.args.save_only_model:
            self.ref_model.program.save(folder / "reference")

    def release(self) -> nn.Module:
        if isinstance(self.ref_model, ReferenceModel):
            self.ref_model = self.ref_model.release()
        return super().release()


class ComparedModel(TokenModel):
    """Gives what TRL's fused head would to a loss that asks the reference for the same next: that is computed
    first, while no step has the device."""

    def __call__(self, *, fused_lm_head: bool = False, **inputs: Any) -> Any:
        program, reference = self._programmed(), self._trainer.ref_model
        if fused_lm_head and isinstance(reference, ReferenceModel) and not program.plans_only:
            asked = {name: value for name, value in inputs.items() if name != "output_router_logits"}
            reference.foresee(asked | {"fused_lm_head": True})
        return super().__call__(fused_lm_head=fused_lm_head, **inputs)


class ReferenceMixin(BesideReference):
    """A trainer of TRL whose loss compares the policy with a reference; before TRL's class.

    The reference's log-probabilities are computed when training begins, or the first evaluation, under the
    same budget. It is the policy as it is given, or ``ref_model``, whose program has ended when the policy's
    begins. Where it follows the policy, or data are a stream, it stays, and is asked beside the policy.
    """

    _outside = ComparedModel
    _defaults: Callable[[], Any]
    _compares = False  # the reference's log-probabilities are there, or under way
    _begins = False  # they are under way

    def __init__(
        self, model: Any, ref_model: Any = None, args: Any = None, *rest: Any, **kwargs: Any
    ) -> None:
        args = args or self._defaults()
        data = [*rest[1:3], kwargs.get("train_dataset"), kwargs.get("eval_dataset")]
        parts = [part for of in data for part in (of.values() if isinstance(of, dict) else [of])]
        streams = any(part is not None and not isinstance(part, Sized) for part in parts)
        if not args.sync_ref_model:
            args.precompute_ref_log_probs = not streams
        super().__init__(model, ref_model, args, *rest, **kwargs)
        if streams and self.ref_model is None:
            raise MegacompileError(
                f"{type(self).__name__} cannot switch adapters off beside each step, as a reference of data "
                "that are a stream needs: give Datasets that have rows, or a copy of the model as ref_model=."
            )
        self._make_room()

    @property
    def _keeps_reference(self) -> bool:
        return not self.args.precompute_ref_log_probs

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """TRL's, of the reference that was given by a program of its own."""
        if not isinstance(dataset, Sized):
            raise MegacompileError(
                f"The {name} data are a stream, of which no reference can be computed at once: give a "
                "Dataset that has rows."
            )
        given = self.ref_model
        if not self._compares and given is None:
            self._refuse_other_reference()
        if not self._compares:
            return dataset
        if given is None:
            return super()._precompute_ref_logps(dataset, name, batch_size)
        self.ref_model = reference = ReferenceModel(self, given)
        try:
            return super()._precompute_ref_logps(dataset, name, batch_size)
        finally:
            self.ref_model = given
            reference.release()

    def _epochs(self) -> tuple[Any, int]:
        if not self._begins:
            return super()._epochs()
        loader = super().get_train_dataloader()
        return loader, self.set_initial_training_values(self.args, loader)[-1]

    def get_train_dataloader(self) -> Any:
        self._compute_references()
        return super().get_train_dataloader()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._compute_references()
        return super().evaluate(*args, **kwargs)

    def _compute_references(self) -> None:
        """Add the reference's log-probabilities to all data, once: as TRL does when a trainer is made, where
        nothing could be planned yet."""
        if self._compares or self._keeps_reference:
            return
        args, held_out = self.args, self.eval_dataset
        rows = [
            args.precompute_ref_batch_size or of_step
            for of_step in (args.per_device_train_batch_size, args.per_device_eval_batch_size)
        ]
        self._compares = self._begins = True
        try:
            train = self._precompute_ref_logps(self.train_dataset, "train", rows[0])
            if isinstance(held_out, dict):
                held_out = {
                    name: self._precompute_ref_logps(data, name, rows[1]) for name, data in held_out.items()
                }
            elif held_out is not None:
                held_out = self._precompute_ref_logps(held_out, "eval", rows[1])
        except BaseException:
            self._compares = False
            state = self.accelerator.gradient_state
            while state.active_dataloader is not None:  # that was left
                state._remove_dataloader(state.active_dataloader)
            raise
        finally:
            self._begins = False
        self.train_dataset, self.eval_dataset = train, held_out

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """TRL's, of the reference that was given, or of the policy: where nothing has trained it yet, and
        adapters change nothing yet, they need not be switched off."""
        if self.ref_model is not None:
            return super().compute_ref_log_probs(model, inputs)
        self._refuse_other_reference()
        adapters = getattr(self.model, "peft_config", {})
        if self.state.global_step or not (
            "ref" in adapters or not adapters or start_without_effect(self.model)
        ):
            self._steps.programmed()  # of the adapters that are trained
            return super().compute_ref_log_probs(SwitchedModel(self, None), inputs)
        self.ref_model = outside = TokenModel(self, None)
        try:
            return super().compute_ref_log_probs(outside, inputs)
        finally:
            self.ref_model = None

    def _refuse_other_reference(self) -> None:
        """Refuse a policy that is trained, and prompts, which cannot be switched off."""
        name, adapters = type(self).__name__, getattr(self.model, "peft_config", {})
        prompts = learns_prompts(self.model)
        if self.state.global_step and (prompts or not adapters):
            raise MegacompileError(
                "evaluate() was given data after training, and the policy is the reference no more: give "
                f"{name} these data as eval_dataset=, or a copy of the model as ref_model=."
            )
        if prompts and "ref" not in adapters:
            raise MegacompileError(
                f"{name}(peft_config=...) cannot switch off learned prompts, as its reference needs: give a "
                "copy of the model as ref_model=; or peft.get_peft_model(model, peft_config) as model, and "
                "they belong to the reference."
            )


class DPOTrainer(ReferenceMixin, trl.DPOTrainer):
    """``trl.DPOTrainer`` for a model whose training state is larger than the device's memory."""

    _token_outputs = TokenOutputs(("entropy", "is_top1", "mean_logits", "log_sum_sq_probs"))
    _defaults = DPOConfig

    def _rows_of_training(self) -> int:
        rows = super()._rows_of_training()
        return rows if self.args.padding_free else 2 * rows  # the chosen ones, then the rejected


class KTOTrainer(ReferenceMixin, trl.KTOTrainer):
    """``trl.KTOTrainer`` for a model whose training state is larger than the device's memory."""

    _token_outputs = TokenOutputs(("entropy", "mean_logits"))
    _defaults = KTOConfig


class RewardTrainer(Mixin, trl.RewardTrainer):
    """``trl.RewardTrainer`` for a model whose training state is larger than the device's memory."""


class PolicyModel(TokenModel):
    """Gives what TRL's fused head would to a loss of reinforcement learning.

    Losses run at the update, when gradients are due for all micro-batches; TRL asks whether they were when
    the micro-batch came.
    """

    def __init__(self, trainer: Any, compute: Callable[[Any], Tensor] | None = None) -> None:
        super().__init__(trainer, compute)
        self._syncs = trainer.accelerator.sync_gradients

    def _awaited(self, batch: dict[str, Any]) -> Any:
        outputs = super()._awaited(batch)
        self._trainer.accelerator.gradient_state._set_sync_gradients(self._syncs)
        return outputs


class SwitchedModel(TokenModel):
    """Gives what TRL's fused head would of the policy with its adapters off, or switched to others.

    The state is laid out for the adapters that are trained.
    """

    def _laid_out(self, batch: dict[str, Any]) -> Program:
        with contextlib.nullcontext() if is_owned(self._model) else _as_trained(self._model):
            return super()._laid_out(batch)


@contextlib.contextmanager
def _as_trained(model: Any) -> Iterator[None]:
    """Within, the adapters are on that TRL trains."""
    if not hasattr(model, "peft_config"):
        yield
        return
    disabled, active = model._adapters_disabled, model.active_adapter
    if disabled:
        model.base_model.enable_adapter_layers()
    else:
        model.set_adapter("default")
    try:
        yield
    finally:
        if disabled:
            model.base_model.disable_adapter_layers()
        else:
            model.set_adapter(active)


class PolicyMixin(BesideReference):
    """A trainer of TRL that learns from completions of its own, made in a rollout; before TRL's class."""

    _outside = PolicyModel
    _defaults: Callable[[], Any]
    _entropy_bonus_enabled = False
    model_wrapped: Any
    vllm_generation: Any
    _current_train_step_time: float
    temperature: float

    def __init__(self, model: Any, reward_funcs: Any, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        args = args or self._defaults()
        refused = {
            "vllm_mode": (args.vllm_mode if args.use_vllm else "server", "server"),
            "use_transformers_continuous_batching": (args.use_transformers_continuous_batching, False),
            "cast_lm_head_to_fp32": (getattr(args, "cast_lm_head_to_fp32", False), False),
            "world_size": (args.world_size, 1),
        }
        for name, (value, supported) in refused.items():
            if value != supported:
                raise MegacompileError(
                    f"{type(self).__name__} does not support {name}={value} yet: set it to {supported}."
                )
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        if args.use_vllm:
            if hasattr(self.model, "peft_config"):
                layers_to_merge(self.model)  # or refuse them now
            self.vllm_generation._iter_named_params = self._weights_for_server
        if args.beta and learns_prompts(self.model):
            raise MegacompileError(
                f"{type(self).__name__} cannot switch off prompts that are learned, as the reference of "
                f"beta={args.beta} needs: set beta to 0.0, or learn other adapters."
            )
        self._make_room()

    @property
    def _token_outputs(self) -> TokenOutputs:  # type: ignore[override]
        return TokenOutputs(
            ("entropy",), temperature=self.temperature, trains_entropy=self._entropy_bonus_enabled
        )

    @waits_for_update
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As upstream, which counts steps by it: after so many of them it makes new completions."""
        start = time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step += 1
        self._current_train_step_time += time.perf_counter() - start
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return loss

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream, by the model of a rollout, or by a server that has the weights."""
        if self.use_vllm:
            return super()._generate_single_turn(*args, **kwargs)
        policy = self.model_wrapped
        with self._steps.programmed().rollout() as self.model_wrapped:
            try:
                return super()._generate_single_turn(*args, **kwargs)
            finally:
                self.model_wrapped = policy

    def _weights_for_server(self) -> Iterator[tuple[str, Tensor]]:
        """In the place of upstream's: one at a time, as the program computes with them."""
        for name, value in self._steps.programmed().named_weights():
            yield self.vllm_generation._fix_param_name_to_vllm(name), value
            del value

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # upstream gives the prompts, of which completions are not made yet

    def _later_programs(
        self, program: Program, micro: list[dict[str, Any]]
    ) -> dict[str, Callable[[], object]]:
        """Return, by name, what plans an update on completions as long as they may get, and what plans their
        log-probabilities, where upstream asks for these before updates."""
        outside, args = PolicyModel(self), self.args
        length = self._longest_prompt(micro) + args.max_completion_length
        longest = f"completions of {args.max_completion_length} tokens"
        self._longest_batches = [
            outside._padded(_lengthened(batch, max(length, batch["input_ids"].shape[1]))) for batch in micro
        ]
        calls: dict[str, Callable[[], object]] = {
            f"training on {longest}": functools.partial(
                program.prepare, self._longest_batches, **self._steps.preparation()
            )
        }
        misaligned = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations)
        if misaligned or args.beta or args.use_vllm or isinstance(self, trl.RLOOTrainer):
            predict = functools.partial(self._predict_completions, args.per_device_train_batch_size)
            calls[f"log-probabilities of {longest}"] = predict
        return calls

    def _longest_prompt(self, micro: list[dict[str, Any]]) -> int:
        """Return the tokens of the longest prompt: of texts the longest ones tell, else micro-batches."""
        data, prompts = self.train_dataset, []
        if isinstance(data, Sized) and not getattr(self, "environment_factories", None) and not self._is_vlm:
            prompts = heapq.nlargest(
                _LONGEST_TEXTS, self.train_dataset["prompt"], key=lambda prompt: len(str(prompt))
            )
        known = [len(ids) for ids in self._tokenize_prompts(prompts)[0]] if prompts else []
        return max(known + [int((batch["labels"] == IGNORED).all(0).cumprod(0).sum()) for batch in micro])

    def _predict_longest(self, data: Any) -> None:
        self._predict_completions(self.args.eval_batch_size)

    def _predict_completions(self, rows: int) -> None:
        """Predict so many of the longest completions; of other than in training only what has no images."""
        batch = self._longest_batches[0]
        known, resized = len(batch["input_ids"]), with_rows(batch, rows)
        if rows == known or all(x.shape[:1] == (known,) for x in batch.values() if isinstance(x, Tensor)):
            self._steps.programmed().predict(resized, outputs=self._token_outputs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As upstream; of the policy as it is now, and of a reference, by a program."""
        outside = model if isinstance(model, TokenModel) else SwitchedModel(self, None)
        return super()._get_per_token_logps_and_entropies(outside, *args, **kwargs)


class GRPOTrainer(PolicyMixin, trl.GRPOTrainer):
    """``trl.GRPOTrainer`` for a model whose training state is larger than the device's memory."""

    _defaults = GRPOConfig


class RLOOTrainer(PolicyMixin, trl.RLOOTrainer):
    """``trl.RLOOTrainer`` for a model whose training state is larger than the device's memory."""

    _defaults = RLOOConfig
