"""Trainers of ``trl.experimental`` over a program, a change of one import.

Their losses are TRL's own code, which reads all logits: the program's forward gives these to the host, and
its backward starts from the gradient by them. Read beside TRL 1.16.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from trl.experimental import cpo, gkd, orpo, tpo

from megacompile.errors import MegacompileError
from megacompile.graph.forward_outputs import all_outputs
from megacompile.integrations.peft_adapters import learns_prompts
from megacompile.integrations.trainer_steps import waits_for_update
from megacompile.integrations.training_arguments import plans_recompute
from megacompile.integrations.transformers import Mixin
from megacompile.integrations.trl import ReferenceModel, without_fused_head, without_memory_of

__all__ = [
    "CPOConfig",
    "CPOTrainer",
    "GKDConfig",
    "GKDTrainer",
    "ORPOConfig",
    "ORPOTrainer",
    "TPOConfig",
    "TPOTrainer",
]


@plans_recompute
class ORPOConfig(orpo.ORPOConfig):
    """TRL's, that leaves what is recomputed to the plan, where TRL's asks for all activations."""


@plans_recompute
class CPOConfig(cpo.CPOConfig):
    """TRL's, in the same way."""


@plans_recompute
class TPOConfig(tpo.TPOConfig):
    """TRL's, in the same way."""


@plans_recompute
class GKDConfig(gkd.GKDConfig):
    """TRL's, in the same way."""


class ORPOTrainer(Mixin, orpo.ORPOTrainer):
    """TRL's ``ORPOTrainer`` for a model whose training state is larger than the device's memory."""


class CPOTrainer(Mixin, cpo.CPOTrainer):
    """TRL's ``CPOTrainer`` for a model whose training state is larger than the device's memory."""


class TPOTrainer(Mixin, tpo.TPOTrainer):
    """TRL's ``TPOTrainer`` for a model whose training state is larger than the device's memory."""


class TeacherModel(ReferenceModel):
    """Gives a teacher's outputs, by a program of its own."""

    def eval(self) -> TeacherModel:
        return self

    def rollout(self) -> Any:
        """Return the context in which the teacher generates."""
        return self.program.rollout()

    @staticmethod
    def outputs(trainer: Any) -> Any:
        return all_outputs


class GKDTrainer(Mixin, gkd.GKDTrainer):
    """TRL's ``GKDTrainer`` for a student whose training state is larger than the device's memory.

    The teacher has a program of its own: the two take turns on the device, each within the whole budget. Both
    generate in rollouts.
    """

    teacher_model: Any

    def __init__(
        self, model: Any = None, teacher_model: Any = None, args: Any = None, *rest: Any, **kwargs: Any
    ) -> None:
        super().__init__(model, teacher_model, args or GKDConfig(), *rest, **kwargs)
        if self.args.world_size > 1 or learns_prompts(self.model):
            raise MegacompileError(
                "GKDTrainer is for one process, and learns no prompts: train so, and other adapters."
            )
        self._steps.config = without_memory_of(self.teacher_model, self._steps.config)
        self._teacher = self.teacher_model
        self.teacher_model = None

    def _before_program(self) -> None:
        without_fused_head(self.model)
        if self.teacher_model is None:
            self.teacher_model = TeacherModel(self, self._teacher)

    @waits_for_update
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As upstream, with completions that are made in a rollout."""
        policy: Any = self._steps.programmed() if random.random() <= self.lmbda else None
        if policy is None and self.seq_kd:
            policy = self.teacher_model
        if policy is not None:
            with policy.rollout() as generates:
                names = "input_ids", "attention_mask", "labels"
                made = self.generate_on_policy_outputs(generates, inputs, self.generation_config)
                inputs |= dict(zip(names, made, strict=True))
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        """As upstream, which asks the teacher second."""
        with torch.no_grad():
            self.teacher_model.foresee({name: inputs[name] for name in ("input_ids", "attention_mask")})
        return super().compute_loss(model, inputs, *rest, **named)

    def release(self) -> nn.Module:
        if self.teacher_model is not None:
            self.teacher_model.release()
            self.teacher_model = None
        return super().release()
