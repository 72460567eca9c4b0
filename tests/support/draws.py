"""Eager PyTorch that draws the numbers which a program draws, for tests that compare the two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megacompile.capture.random_draws import Draw, Numbering, draw

aten = torch.ops.aten
_OUT_OF_PLACE: dict[Any, Any] = {
    aten.normal_.default: aten.normal_functional.default,
    aten.uniform_.default: aten.uniform.default,
    aten.exponential_.default: aten.exponential.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
}


class OurDraws(TorchDispatchMode):
    """Within it, random calls of one forward give what a program with the seed ``rng`` draws there."""

    def __init__(self, rng: Tensor) -> None:
        super().__init__()
        self.rng, self.numbering = rng, Numbering()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target, kwargs = _OUT_OF_PLACE.get(func, func), kwargs or {}
        self.numbering.see(func, args)
        value = func(*args, **kwargs)
        if not isinstance(value, Tensor):
            return value
        drawn = draw(Draw(target, args, kwargs, value, self._uniform, _run))
        if drawn is None:
            return value
        return drawn if target is func else value.copy_(drawn)

    def _uniform(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        drawn: Tensor = torch.ops.megacompile.uniform(self.rng, shape, dtype, self.numbering.next())
        return drawn


def _run(target: Any, *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)
