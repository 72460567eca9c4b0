"""List the operations of all operators, their inputs and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megacompile.kernels.operator_benchmark import Operation, Shape, normal
from megacompile.kernels.registry import SPECS

OPERATIONS = {operation.name: operation for _, spec in sorted(SPECS.items()) for operation in spec.benchmarks}


def inputs_of(operation: Operation, shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Fresh leaves of a shape, with the same values at each call."""
    made = operation.make(shape, torch.Generator(device).manual_seed(0))
    moved = [x.to(device, dtype if x.is_floating_point() else x.dtype) for x in made]
    return [x.detach().requires_grad_(i < operation.trained) for i, x in enumerate(moved)]


def gradients_like(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A random gradient of each output, with the same values at each call."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    return [normal(generator, *o.shape).to(o.dtype) for o in outputs]
