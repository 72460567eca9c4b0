"""What goes into one run of a step and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megacompile.state.adam import AdamHyper
from megacompile.state.param_group import GroupSettings


@dataclass
class StepInputs:
    """The inputs of one run of a step: tensor leaves, seeds and loss weights per micro-batch.

    ``check_loss``: updates do not wait for the gradient's norm, so a loss that is not finite keeps them from
    being made. ``losses_count``: where they wait, such a loss does so too, as a norm that is not finite does.
    ``outside`` makes of a micro-batch's number and its results, by value, the loss and the gradient by each.
    """

    leaves: list[list[Tensor]]
    seeds: list[int]
    loss_weights: list[float]
    hypers: Sequence[AdamHyper] | Sequence[GroupSettings] = ()  # by param group
    max_grad_norm: float | None = None
    check_loss: bool = False
    losses_count: bool = False
    outside: Callable[[int, Mapping[int, Tensor]], tuple[Tensor, dict[int, Tensor]]] | None = None


@dataclass
class StepResults:
    """The results of a run: losses per micro-batch, and the norm once clip_scale has run, if it will; of a
    forward alone ``outputs``, its results by (value, micro-batch). With several ranks the losses are those of
    all once ``agree`` has run. ``stopped_by`` is a loss that was not finite, for which nothing is updated;
    the gradients are looked at instead, and ``finite`` is True if all of them were finite. ``origin`` is a
    sentence on where what is not finite began, as far as that was still to be seen."""

    losses: list[Tensor] = field(default_factory=list)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    takes_norm: bool = False
    grad_norm: Tensor | None = None
    skipped: bool = False
    stopped_by: float | None = None
    finite: bool = True
    origin: str = ""

    def take_losses(self, losses: Sequence[Tensor]) -> None:
        """Replace the losses, by those of all ranks or of several runs."""
        self.losses = list(losses)

    def take_norm(self, norm: Tensor, origin: str) -> None:
        """Note the gradient's norm, and where what is not finite in it began, unless that is known."""
        self.skipped = not bool(torch.isfinite(norm))
        self.origin = self.origin or origin
        self.grad_norm = norm  # last: whoever sees it may read the rest

    def take_gradient(self, *, finite: bool) -> None:
        """Note whether a gradient that was not applied was finite."""
        self.finite = self.finite and finite

    def take_origin(self, origin: str) -> None:
        """Note where what is not finite began."""
        self.origin = origin

    def judge(self, losses: Iterable[Tensor]) -> None:
        """Stop the step's updates for the first of the losses that is not finite."""
        bad = (float(loss) for loss in losses if not math.isfinite(loss))
        self.stopped_by = next(bad, self.stopped_by)


class NonFiniteError(FloatingPointError):
    """The loss or the gradient is not finite; the message says what state is left."""


def raise_skipped(known: Sequence[StepResults]) -> None:
    """Raise for the first of these steps whose update was not applied."""
    for results in known:
        if results.skipped or results.stopped_by is not None:
            what = f"The gradient's norm was {float(results.grad_norm or 0.0)}"
            if not results.skipped:
                what = f"The loss was {results.stopped_by}"
            raise NonFiniteError(
                f"{what}: that step's update was not applied; steps begun before this was known went on from "
                f"the parameters before it.{results.origin}"
            )


def step_seed(seed: int, step: int, micro: int) -> int:
    """The 63-bit seed of all random calls in one micro-batch of one step."""
    mixed = seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + micro * 0x94D049BB133111EB
    mixed &= (1 << 64) - 1
    mixed ^= mixed >> 31
    return (mixed * 0xD6E8FEB86659FD93) & ((1 << 63) - 1)
