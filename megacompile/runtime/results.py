"""What a program gives back: the result of a step, and the bytes that it measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from megacompile.errors import ProgramError
from megacompile.runtime.step_io import StepResults
from megacompile.units import format_bytes

if TYPE_CHECKING:
    from megacompile.session import Session


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
