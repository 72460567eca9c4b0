"""Hold several optimizers as one, as they are given to a program in a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megacompile.errors import MegacompileError


class Several(torch.optim.Optimizer):
    """Optimizers that a program is given as a list: their param groups, one after another."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if not optimizers or not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
            kinds = ", ".join(type(o).__name__ for o in optimizers) or "nothing"
            raise MegacompileError(
                f"optimizer= is a list of {kinds}: give torch.optim.Optimizer objects in it."
            )
        self.optimizers = tuple(member for o in optimizers for member in members_of(o))
        groups = [group for member in self.optimizers for group in member.param_groups]
        parameters = [id(p) for group in groups for p in group["params"]]
        if len(set(parameters)) < len(parameters):
            raise MegacompileError("Two of the optimizers hold one parameter: give it to one of them.")
        super().__init__([{"params": []}], {})
        self.param_groups[:] = groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for member in self.optimizers:
            member.step(closure)

    def eval(self) -> None:
        """Switch those that average weights to the average."""
        for member in self.optimizers:
            getattr(member, "eval", lambda: None)()

    def train(self) -> None:
        """Switch those that average weights back to what they train."""
        for member in self.optimizers:
            getattr(member, "train", lambda: None)()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of each of them."""
        for member in self.optimizers:
            member.zero_grad(set_to_none)


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that make up this one: itself, unless it is of several."""
    return optimizer.optimizers if isinstance(optimizer, Several) else (optimizer,)
