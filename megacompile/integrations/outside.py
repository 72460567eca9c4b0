"""Losses that a trainer computes itself, outside of the program, from what the model returns.

A program of the forward gives the model's outputs, in the modes of training and with its random numbers. The
trainer's code computes the loss from them, and autograd its gradient by each output. With these the program
trains: its loss is the sum of outputs times gradients. So a micro-batch takes one more forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megacompile.errors import MegacompileError
from megacompile.program import Program
from megacompile.runtime.ownership import is_owned

_MOST = 64  # tensors in an output


class GivenGradients:
    """The ``loss_fn`` whose gradient by output number i is the batch's entry ``by_i``; without any of them, a
    loss that trains what they would."""

    inputs = tuple(f"by_{i}" for i in range(_MOST))

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> Tensor:
        numbered = enumerate(pytree.tree_leaves(outputs))
        leaves = {f"by_{i}": x for i, x in numbered if isinstance(x, Tensor) and x.is_floating_point()}
        terms = [(leaf * batch[name]).sum() for name, leaf in leaves.items() if name in batch]
        return torch.stack(terms or [leaf.mean() for leaf in leaves.values()]).sum()


class OutsideModel:
    """Stands where a trainer's own loss calls the model, and keeps the gradient that comes back.

    ``micro_batch`` is the number of the micro-batch in the next update; None: in eval mode, without gradient.
    """

    loss_fn: Any = GivenGradients()

    def __init__(self, trainer: Any, micro_batch: int | None) -> None:
        self._trainer, self._micro_batch = trainer, micro_batch
        self._batch: dict[str, Any] = {}
        self._leaves: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer.model, name)

    def __call__(self, **inputs: Any) -> Any:
        micro_batch = self._followed()
        outputs = self._laid_out(inputs).predict(inputs, micro_batch=micro_batch)
        leaves, spec = pytree.tree_flatten(outputs)
        if micro_batch is not None:
            floats = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()}
            self._batch, self._leaves = inputs, {f"by_{i}": x.requires_grad_() for i, x in floats.items()}
            for i, leaf in floats.items():
                leaves[i] = leaf.clone()  # which may be changed in place, as a model's output may
        return pytree.tree_unflatten(leaves, spec)

    def trained_batch(self) -> dict[str, Any]:
        """The batch that the model was called with, and the gradients that came back."""
        gradients = {name: leaf.grad for name, leaf in self._leaves.items() if leaf.grad is not None}
        if not gradients:
            raise MegacompileError(
                "compute_loss returned a loss without a gradient by the model's outputs: compute it from "
                "what model(**inputs) returns."
            )
        return self._batch | gradients

    def _followed(self) -> int | None:
        """The number of the micro-batch, if the loss of this call is trained on."""
        if self._micro_batch is None or not torch.is_grad_enabled():
            return None
        if self._leaves:
            raise MegacompileError(
                "compute_loss calls the model twice, and one call can be trained on: make the other one "
                "under torch.no_grad()."
            )
        return self._micro_batch

    def _laid_out(self, batch: dict[str, Any]) -> Program:
        owned = is_owned(self._trainer.model)
        program: Program = self._trainer._laid_out([] if owned else self._trainer._like_training(batch))
        return program
