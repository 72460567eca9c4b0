"""The inputs of one run of a step, and what a program gives back of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from megacompile.errors import ProgramError
from megacompile.state.adam import AdamHyper
from megacompile.state.torch_optimizer import GroupSettings
from megacompile.units import format_bytes

if TYPE_CHECKING:
    from megacompile.api.session import Session


# ------------------------------------------------------------------------------------------------------------
# What goes into one run of a step and what comes out of it.


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
    forward alone ``outputs``, its results by (value, micro-batch). Of several ranks the losses are those of
    all once ``agree`` has run. ``stopped_by`` is a loss that was not finite, for which nothing is updated;
    then ``finite`` says of the gradients that were looked at instead whether all were finite. ``origin`` is a
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


# ------------------------------------------------------------------------------------------------------------
# What a program gives back: the result of a step, and the bytes that it measured.


@dataclass(frozen=True)
class Memory:
    """Bytes on the device, measured beside predicted, and on the host by kind.

    Of the host's bytes that a GPU copies, ``page_locked_bytes`` are page-locked where they lie;
    ``staged_bytes``, which the system refused to page-lock, pass through buffers.

    ``resident_peak_bytes`` is of the whole process, Python and torch included.
    """

    budget_bytes: int
    device_peak_bytes: int
    predicted_peak_bytes: int
    host_bytes: dict[str, int]
    host_budget_bytes: int
    resident_peak_bytes: int
    storage_bytes: int = 0
    traffic: str = ""
    page_locked_bytes: int = 0
    staged_bytes: int = 0

    def __str__(self) -> str:
        host = ", ".join(f"{k} {format_bytes(v)}" for k, v in self.host_bytes.items() if v)
        host += (
            f"; budget {format_bytes(self.host_budget_bytes)}; the whole process held "
            f"{format_bytes(self.resident_peak_bytes)} at most"
        )
        if self.page_locked_bytes or self.staged_bytes:
            host += (
                f"; {format_bytes(self.page_locked_bytes)} are page-locked, copies of "
                f"{format_bytes(self.staged_bytes)} pass through buffers"
            )
        if self.storage_bytes:
            host += f"\nstorage: {format_bytes(self.storage_bytes)} in scratch files\n{self.traffic}"
        return (
            f"device: peak {format_bytes(self.device_peak_bytes)} measured, "
            f"{format_bytes(self.predicted_peak_bytes)} predicted, budget "
            f"{format_bytes(self.budget_bytes)}\nhost: {host}"
        )


class StepLoss(Tensor):
    """A step's loss, an ordinary tensor in all else, whose ``backward`` says what the step has done."""

    # what is computed from it is plain
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, *given: object, **options: object) -> NoReturn:
        raise ProgramError(
            "This loss has no gradient to compute: train_step has made its backward and the update, and "
            "forward_backward its backward, so leave out loss.backward() and optimizer.step()."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __format__(self, specification: str) -> str:
        return format(self.as_subclass(Tensor), specification)


class StepOutput:
    """Result of a step. ``loss`` and ``grad_norm`` are 0-d tensors, looked up when read."""

    def __init__(self, session: Session, results: StepResults, weights: Sequence[float]) -> None:
        self._session = session
        self._results = results
        self._weights = tuple(weights)

    @property
    def losses(self) -> tuple[Tensor, ...]:
        """The loss of each micro-batch before it is weighted, as 0-d tensors."""
        self._session.await_losses()
        return tuple(loss.as_subclass(StepLoss) for loss in self._results.losses)

    @property
    def loss(self) -> Tensor:
        """The loss; of several micro-batches their weighted sum. ``optimizer_step`` computes none."""
        losses = self.losses
        if not losses:
            raise ProgramError("optimizer_step computes no loss: read it where forward_backward returns.")
        if len(losses) == 1 and self._weights == (1.0,):
            return losses[0]
        weighted = [w * x for w, x in zip(self._weights, losses, strict=True)]
        return torch.stack(weighted).sum().as_subclass(StepLoss)

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradient's 2-norm before clipping; None where updates do not wait for it."""
        if self._results.grad_norm is None and self._results.takes_norm:
            self._session.await_norm()
        return self._results.grad_norm

    def __repr__(self) -> str:
        return f"StepOutput(loss={float(self.loss):.4f})" if self._results.losses else "StepOutput()"
