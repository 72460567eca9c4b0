"""The eager form of an operator: what a model writes in plain torch in its place, and inputs to try both on.

A shape is a tuple of sizes, named by ``EagerForm.sizes``. In float64 the eager form is the reference of the
operator, and of whatever else computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]
Function = Callable[..., Tensor | tuple[Tensor, ...]]
EPS = 1e-6


@dataclass(frozen=True)
class EagerForm:
    """One use of an operator, on tensors of a usual ``shape``.

    ``make`` gives the inputs of a shape in float64, the differentiable ones first (``trained`` many);
    ``ours`` takes the arguments of ``eager``. ``shape_of`` gives the shape of a call of the operator, by the
    tensors that a forward takes and by its constants; None where the call is no such use.
    """

    name: str
    sizes: tuple[str, ...]
    shape: Shape
    make: Callable[[Shape, torch.Generator], list[Tensor]]
    trained: int
    eager: Function
    ours: Function
    shape_of: Callable[[Sequence[Shape], Sequence[str]], Shape | None]

    def check_shape(self, shape: Shape, device: torch.device) -> Shape:
        """The shape in which correctness is checked: fewer tokens or rows, on a CPU fewer classes too."""
        most = {"tokens": 512, "inner": 512, "vocabulary": 8448 if device.type == "cpu" else shape[-1]}
        return tuple(min(s, most.get(name, s)) for name, s in zip(self.sizes, shape, strict=True))


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Draw numbers of a normal distribution, in float64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device) * scale


def rows_of(shapes: Sequence[Shape], constants: Sequence[str]) -> Shape:
    """Return the first tensor's shape as [rows, columns]."""
    *lead, width = shapes[0]
    return torch.Size(lead).numel(), width


def heads_of(shapes: Sequence[Shape], constants: Sequence[str]) -> Shape | None:
    """Return the first tensor's shape, where it has heads."""
    return shapes[0] if len(shapes[0]) == 4 else None
