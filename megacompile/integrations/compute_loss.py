"""Run a trainer's own ``compute_loss`` outside of the program, on what the model returns.

For each micro-batch the trainer's code runs in a thread of its own, which waits where it calls the model.
So the batch is known before the program runs, and one pass serves all code: the program's forward gives the
outputs, the code goes on to the loss, and the program's backward starts from the loss's gradient by them.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacompile.api.program import Program
from megacompile.capture.module_wrappers import unwrapped
from megacompile.errors import MegacompileError
from megacompile.graph.forward_outputs import all_outputs
from megacompile.state.model_ownership import is_owned


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of the next update: what the program is given, the loss's weight, who computes it."""

    batch: dict[str, Any]
    weight: float
    outside: OutsideModel | None = None


class OutsideModel:
    """Stands where a trainer's own loss calls the model.

    ``compute`` is that code, a function of this object; None: only calls in eval mode come. ``batch`` is what
    the program is given, once :meth:`begin` has returned.
    """

    def __init__(self, trainer: Any, compute: Callable[[Any], Tensor] | None = None) -> None:
        self._trainer, self._compute = trainer, compute
        self._batch: Future[dict[str, Any]] = Future()
        self._outputs: Future[Any] = Future()
        self._loss: Future[Tensor] = Future()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer.model, name)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        batch = {name: value for name, value in inputs.items() if name != "use_cache"}  # a program keeps none
        if args:
            model: Any = unwrapped(self._trainer.model)
            source = model.get_base_model() if hasattr(model, "get_base_model") else model
            batch = inspect.signature(source.forward).bind_partial(*args).arguments | batch
        if not self._is_trained():
            return self._laid_out(batch).predict(batch)
        return self._awaited(batch)

    @staticmethod
    def outputs(trainer: Any) -> Any:
        """Return what the program computes of the forward."""
        return all_outputs

    def begin(self) -> dict[str, Any]:
        """Run the code until it calls the model; returns the batch of that call."""
        threading.Thread(target=self._run, name="megacompile loss", daemon=True).start()
        either: tuple[Future[Any], ...] = (self._batch, self._loss)
        wait(either, return_when=FIRST_COMPLETED)
        if not self._batch.done():
            self._loss.result()
            raise MegacompileError(
                "compute_loss returned a loss without calling the model: compute it from model(**inputs)."
            )
        return self._batch.result()

    def loss(self, outputs: Any) -> Tensor:
        """The loss that the code makes of the model's outputs."""
        self._outputs.set_result(outputs)
        return self._loss.result()

    def cancel(self) -> None:
        """End the code, if it still waits for outputs."""
        self._outputs.cancel()

    def _run(self) -> None:
        assert self._compute is not None
        try:
            self._loss.set_result(self._compute(self))
        except BaseException as error:
            self._loss.set_exception(error)

    def _awaited(self, batch: dict[str, Any]) -> Any:
        """The outputs for the call that is trained on."""
        self._batch.set_result(batch)
        return self._outputs.result()

    def _is_trained(self) -> bool:
        """Return whether the loss of this call is trained on."""
        if self._compute is None:
            return False
        if self._batch.done():
            raise MegacompileError(
                "compute_loss calls the model again after the call that is trained on: make one such call, "
                "and others before it, under torch.no_grad()."
            )
        return torch.is_grad_enabled()

    def _laid_out(self, batch: dict[str, Any]) -> Program:
        owned = is_owned(self._trainer.model)
        steps = self._trainer._steps
        program: Program = steps.laid_out([] if owned else steps.like_training(batch))
        return program


def cancel(waiting: list[MicroBatch]) -> None:
    """End what still waits for outputs that never come."""
    for micro in waiting:
        if micro.outside is not None:
            micro.outside.cancel()
