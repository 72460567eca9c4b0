"""TRL's trainers over a megacompile program: ``SFTTrainer`` and ``DPOTrainer``, a change of one import.

TRL's losses are computed by TRL's own code, outside of the program (:mod:`megacompile.integrations.outside`).
They read what TRL's fused head gives: for each token its log-probability, the entropy, whether it was the
most likely one. A program of the forward gives these numbers, so no logits leave the device. Read beside
TRL 1.16.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
import trl
from torch import Tensor, nn
from trl import DPOConfig, SFTConfig
from trl.trainer.utils import FusedCausalLMOutput

from megacompile.capture.padding import bucket_length, pad_batch
from megacompile.errors import MegacompileError
from megacompile.integrations.adapters import learns_prompts, virtual_tokens
from megacompile.integrations.arguments import MegacompileConfig
from megacompile.integrations.lengths import as_long_as_others, longest_of, longest_row
from megacompile.integrations.masks import AssistantMasks
from megacompile.integrations.outside import OutsideModel
from megacompile.integrations.transformers import Mixin
from megacompile.program import Program

__all__ = ["DPOConfig", "DPOTrainer", "MegacompileConfig", "SFTConfig", "SFTTrainer"]

_QUARTERS = 4  # the lengths that batches are padded to, of the longest row
_MULTIPLE = 8  # of tokens, which matrix products like
_PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}  # position_ids say it


@dataclass(frozen=True)
class TokenOutputs:
    """What TRL's fused head computes of the logits of a causal language model, zero where labels are ignored.

    ``metrics`` are fields of its output beside the log-probabilities, which alone carry a gradient. Called as
    ``outputs`` of a program: for metrics a sixteenth of the logits is on the device at a time.
    """

    metrics: tuple[str, ...]
    inputs: tuple[str, ...] = ("labels",)
    parts: int = 16  # in which logits are made for metrics

    @property
    def whole(self) -> TokenOutputs:
        """The same in one part."""
        return replace(self, parts=1)

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        logits = outputs.logits.detach()
        virtual = logits.shape[1] - batch["labels"].shape[1]  # tokens that PEFT puts first, without labels
        labels = nn.functional.pad(batch["labels"], (virtual, 0), value=-100)[:, 1:]
        mask, length = labels != -100, labels.shape[1]
        size = max(2, -(-length // self.parts))
        starts = range(
            0, max(1, length - 1), size
        )  # no part of one position, which hides where positions are
        ranges = [slice(start, end) for start, end in zip(starts, [*starts[1:], length], strict=True)]
        parts = [self._of(logits[:, part], labels[:, part]) for part in ranges]
        found = {name: torch.cat([part[name] for part in parts], dim=1) for name in self.metrics}
        found["log_probs"] = _log_probs(outputs.logits[:, :-1].float(), labels)
        found = {name: value.masked_fill(~mask, 0) for name, value in found.items()} | {"label_mask": mask}
        aux_loss = getattr(outputs, "aux_loss", None)
        return found if aux_loss is None else found | {"aux_loss": aux_loss}

    def _of(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = logits.float()
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

    def __call__(self, *, fused_lm_head: bool = False, **inputs: Any) -> Any:
        trained, batch = self._is_trained(), {n: v for n, v in inputs.items() if n not in _PACKED}
        if not fused_lm_head and trained:
            raise MegacompileError(
                "This loss needs all logits, which stay on the device: leave out label_smoothing_factor and "
                "compute_loss_func, or use megacompile.integrations.transformers.Trainer."
            )
        if not fused_lm_head:
            batch = as_long_as_others(self._trainer._programmed(), batch)
            return self._laid_out(batch).predict(batch)
        length, batch = batch["input_ids"].shape[1], self._padded(batch)
        if trained:
            outputs = self._awaited(batch)
        else:
            batch = _lengthened(batch, longest_of(self._trainer._programmed(), batch["input_ids"].shape[1]))
            outputs = self._laid_out(batch).predict(batch, outputs=self.outputs(self._trainer))
        kept = virtual_tokens(self._trainer.model) + length - 1
        return FusedCausalLMOutput(**{n: v[:, :kept] if v.dim() == 2 else v for n, v in outputs.items()})

    def _padded(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One of few lengths."""
        length, trainer = batch["input_ids"].shape[1], self._trainer
        rows = trainer._train_batch_size if _is_packed(batch) else 1
        for longest in (trainer._longest, getattr(trainer.args, "max_length", None)):
            if longest and length <= longest * rows:
                quarter = -(-longest * rows // (_QUARTERS * _MULTIPLE)) * _MULTIPLE
                return _lengthened(batch, min(-(-length // quarter) * quarter, longest * rows))
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

    def _programmed(self) -> Program:
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        vars(model).pop("forward", None)  # TRL's fused head, which the program computes itself
        return super()._programmed()

    def _alike(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Micro-batches of one length, which are one program; also of several ranks."""
        longest = longest_of(self._programmed(), max(batch["input_ids"].shape[1] for batch in batches))
        return [_lengthened(batch, longest) for batch in batches]


class SFTTrainer(TokenMixin, trl.SFTTrainer):
    """``trl.SFTTrainer`` for a model whose training state is larger than the device's memory.

    Takes what TRL's takes, and ``hbm_budget``, ``host_budget``, ``offload_dir``, ``optimizer_state``, or a
    ``config``.
    """

    _token_outputs = TokenOutputs(("entropy", "is_top1"))

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
    warnings.warn(f"{text}: they are left out.", stacklevel=2)


class DPOTrainer(TokenMixin, trl.DPOTrainer):
    """``trl.DPOTrainer`` for a model whose training state is larger than the device's memory.

    The policy as it is given is the reference: its log-probabilities are computed before training, under the
    same budget, and no second model is held.
    """

    _token_outputs = TokenOutputs(("entropy", "is_top1", "mean_logits", "log_sum_sq_probs"))
    ref_model: Any

    def __init__(
        self, model: Any, ref_model: Any = None, args: Any = None, *rest: Any, **kwargs: Any
    ) -> None:
        if ref_model is not None:
            raise MegacompileError(
                "DPOTrainer(ref_model=...) is not supported: leave it out, and the model as it is given is "
                "the reference."
            )
        args = args or trl.DPOConfig()
        args.precompute_ref_log_probs = True
        super().__init__(model, None, args, *rest, **kwargs)

    def _rows_of_training(self) -> int:
        rows = super()._rows_of_training()
        return rows if self.args.padding_free else 2 * rows  # the chosen ones, then the rejected

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """TRL's, of the policy: nothing has trained it yet, so its adapters need not be switched off."""
        if learns_prompts(self.model) and "ref" not in self.model.peft_config:
            raise MegacompileError(
                "DPOTrainer(peft_config=...) cannot switch new virtual tokens off, as its reference needs: "
                "give it peft.get_peft_model(model, peft_config) as model, and they belong to the reference."
            )
        self.ref_model = outside = TokenModel(self, None)
        try:
            return super().compute_ref_log_probs(outside, inputs)
        finally:
            self.ref_model = None
