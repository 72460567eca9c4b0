"""Compute a loss outside of the program: by torch, from what the forward returned, with the gradient by it.

In: a function of the user's and the results of one micro-batch's forward, on the host. Out: its loss, and
the gradient by each result, from which the program's backward starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megacompile.api.frontend import Compiled
from megacompile.capture.batch import Batch
from megacompile.errors import MegacompileError

LossOfOutputs = Callable[[int, Any], Tensor]
"""(number of the micro-batch, its outputs, which require gradients) -> a scalar loss."""


class OutsideLoss:
    """Calls ``function`` for a micro-batch of a program, on outputs without padding; ``weights`` are those of
    the losses.
    """

    def __init__(
        self, function: LossOfOutputs, compiled: Compiled, micro: Sequence[Batch], weights: Sequence[float]
    ) -> None:
        self._function, self._weights = function, weights
        self._micro = micro
        self._structure, self._order = compiled.captured.structure, compiled.part.results
        self._again: dict[int, tuple[Tensor, dict[int, Tensor]]] = {}  # of a loss that is not finite
        self.running = False  # the function, inside of a step

    def __call__(self, micro: int, results: Mapping[int, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
        """The loss, and its weighted gradient by each result, by value. The function is called once, also
        where a step is run again."""
        if micro in self._again:
            return self._again.pop(micro)
        leaves = {value: x.requires_grad_(x.is_floating_point()) for value, x in results.items()}
        copies = {value: leaf.clone() for value, leaf in leaves.items()}  # may be changed in place
        copies = {value: self._micro[micro].own(x) for value, x in copies.items()}
        loss = self._computed(micro, self._structure.around([copies[value] for value in self._order]))
        (loss * self._weights[micro]).sum().backward()  # type: ignore[no-untyped-call]
        zeros = {v: torch.zeros_like(x) for v, x in leaves.items() if x.requires_grad and x.grad is None}
        found = {value: leaf.grad for value, leaf in leaves.items() if leaf.grad is not None}
        loss, found = loss.detach().reshape(()), zeros | found
        if not loss.isfinite():
            self._again[micro] = loss, dict(found)
        return loss, found

    def _computed(self, micro: int, outputs: Any) -> Tensor:
        self.running = True
        try:
            loss = self._function(micro, outputs)
        finally:
            self.running = False
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise MegacompileError("loss= must return one number, as a tensor.")
        if not loss.requires_grad:
            raise MegacompileError(
                "loss= returned a number without a gradient by the outputs: compute it from what it is given."
            )
        return loss
