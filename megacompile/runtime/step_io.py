"""What goes into one run of a step and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from megacompile.host.adam import AdamHyper


@dataclass
class StepInputs:
    """What one run of a step is given: tensor leaves, seeds and loss weights per micro-batch."""

    leaves: list[list[Tensor]]
    seeds: list[int]
    loss_weights: list[float]
    hypers: list[AdamHyper] = field(default_factory=list)  # by param group
    max_grad_norm: float | None = None
    check_loss: bool = False


@dataclass
class StepResults:
    """What a run gives: losses per micro-batch, and the norm once clip_scale has run, if it will."""

    losses: list[Tensor]
    takes_norm: bool = False
    grad_norm: Tensor | None = None
    skipped: bool = False


class NonFiniteError(FloatingPointError):
    """The loss or the gradient is not finite; the message says what state is left."""
