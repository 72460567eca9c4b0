"""The result of a step that a program gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from megacompile.errors import ProgramError
from megacompile.runtime.step_results import StepResults


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
    """Result of a step. ``loss`` and ``grad_norm`` are 0-d tensors, looked up when read.

    ``await_losses`` and ``await_norm`` return when the results have them, or raise the error for which they
    never will.
    """

    def __init__(
        self,
        results: StepResults,
        weights: Sequence[float],
        await_losses: Callable[[], None],
        await_norm: Callable[[], None],
    ) -> None:
        self._results = results
        self._weights = tuple(weights)
        self._await_losses, self._await_norm = await_losses, await_norm

    @property
    def losses(self) -> tuple[Tensor, ...]:
        """The loss of each micro-batch before it is weighted, as 0-d tensors."""
        self._await_losses()
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
            self._await_norm()
        return self._results.grad_norm

    def __repr__(self) -> str:
        return f"StepOutput(loss={float(self.loss):.4f})" if self._results.losses else "StepOutput()"
