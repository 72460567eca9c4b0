"""The benchmark of an operator: inputs, the eager form beside ours, bytes and floating-point operations.

A shape is a tuple of sizes, named by ``Operation.sizes``. Bytes are the least that a kernel must move: each
input read once, each result written once. The eager form is what a model writes in plain torch; in float64
it is the reference of every provider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
Function = Callable[..., Tensor | tuple[Tensor, ...]]
EPS = 1e-6


@dataclass(frozen=True)
class Cost:
    """The least work of one pass: bytes to and from device memory, floating-point operations."""

    nbytes: int
    flops: int = 0

    def __add__(self, more: Cost) -> Cost:
        return Cost(self.nbytes + more.nbytes, self.flops + more.flops)


Costs = Callable[[Shape, int], tuple[Cost, Cost]]


@dataclass(frozen=True)
class Operation:
    """One row group of the benchmark.

    ``make`` gives the inputs of a shape in float64, the differentiable ones first (``trained`` many);
    ``costs`` gives forward and backward cost for a shape and an item size; ``ours`` takes the arguments of
    ``eager``, as does ``liger`` behind Liger-Kernel's functional interface, of version 0.6. ``shape_of``
    gives the shape that a call is benchmarked as, by the tensors that a forward takes and by its constants.
    """

    name: str
    sizes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    make: Callable[[Shape, torch.Generator], list[Tensor]]
    trained: int
    eager: Function
    costs: Costs
    ours: Function
    shape_of: Callable[[Sequence[Shape], Sequence[str]], Shape | None]
    liger: Callable[..., Any] | None = None

    def check_shape(self, shape: Shape, device: torch.device) -> Shape:
        """The shape in which correctness is checked: fewer tokens or rows, on a CPU fewer classes too."""
        most = {"tokens": 512, "inner": 512, "vocabulary": 8448 if device.type == "cpu" else shape[-1]}
        return tuple(min(s, most.get(name, s)) for name, s in zip(self.sizes, shape, strict=True))


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Draw numbers of a normal distribution, in float64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device) * scale


def elementwise(inputs: int, outputs: int, backward: int) -> Costs:
    """Return the costs of an operator on [rows, columns]: how many such tensors a pass reads and writes."""

    def costs(shape: Shape, itemsize: int) -> tuple[Cost, Cost]:
        nbytes = torch.Size(shape).numel() * itemsize
        return Cost((inputs + outputs) * nbytes), Cost(backward * nbytes)

    return costs


def rows_of(shapes: Sequence[Shape], constants: Sequence[str]) -> Shape:
    """Return the first tensor's shape as [rows, columns]."""
    *lead, width = shapes[0]
    return torch.Size(lead).numel(), width


def heads_of(shapes: Sequence[Shape], constants: Sequence[str]) -> Shape | None:
    """Return the first tensor's shape, where it has heads."""
    return shapes[0] if len(shapes[0]) == 4 else None
