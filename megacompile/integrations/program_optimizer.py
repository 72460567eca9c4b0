"""The optimizer that a trainer sees: settings and schedule as it knows them, updates by the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from megacompile.errors import ProgramError


class ProgramOptimizer(torch.optim.Optimizer):
    """Stands where a trainer expects its optimizer; ``inner`` is the one that a program has adopted.

    Both share their param groups, so schedulers and callbacks change what the next update takes. ``step``
    calls ``update``. There is no state on this side: moments are the program's.
    """

    _is_accelerate_prepared = True  # accelerate takes it as it is
    step_was_skipped = False

    def __init__(self, inner: torch.optim.Optimizer, update: Callable[[], None]) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self._update = inner, update
        for name in ("eval", "train"):  # of those whose classes change parameters by them
            if callable(getattr(inner, name, None)):
                setattr(self, name, lambda name=name: getattr(inner, name)())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Train the program on all micro-batches that wait."""
        if closure is not None:
            raise ProgramError("A program takes no closure: call optimizer.step() without one.")
        self._update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: a program holds no gradients between updates."""

    def state_dict(self) -> NoReturn:
        """Refused: the moments are in the program."""
        raise ProgramError("The optimizer's state is the program's: save it by trainer.program.save(folder).")
