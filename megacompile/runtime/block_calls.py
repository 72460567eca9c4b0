"""Keep values on the device by token, and call block functions.

In: a bound step; then its operations, one at a time, from the :class:`~megacompile.runtime.executor.Runtime`.
Arguments and results of functions are those of :class:`~megacompile.blocks.block_values.BlockValues`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megacompile.blocks.block_values import BlockValues, Part
from megacompile.blocks.partition import BlockValue, Input
from megacompile.blocks.weight_groups import GroupLayout
from megacompile.errors import BudgetExceededError, ProgramError
from megacompile.runtime.bound_step import BoundCall, BoundStep
from megacompile.runtime.device import Device
from megacompile.runtime.device_state import ResidentState
from megacompile.runtime.step_results import StepInputs
from megacompile.schedule.op_table import Saved, Token, Value, ValueGrad
from megacompile.state.master_layout import slot_view


class Blocks(BlockValues[Any]):
    """The values that one step holds on the device, and its block functions."""

    def __init__(self, device: Device, resident: ResidentState) -> None:
        super().__init__()
        self._device = device
        self._resident = resident
        self._weights: dict[int, list[Tensor]] = {}  # of the groups that are in a slot now
        self._slots: dict[int, Tensor] = {}  # their bytes, flat
        self._views: dict[tuple[int, int], tuple[Tensor, list[Tensor]]] = {}  # of slots, by their place
        self._bound: BoundStep | None = None

    def begin(self, bound: BoundStep, inputs: StepInputs, constants: Mapping[str, Tensor]) -> None:
        """Get ready for one run of a step."""
        if bound is not self._bound:
            self._views.clear()  # of a slab that may be gone
        self._bound, self._inputs, self._constants = bound, inputs, constants
        self.part, self.assembly = bound.part, bound.assembly

    def clear(self) -> None:
        """Forget all values and all weights in slots."""
        self.values.clear()
        self._weights.clear()
        self._slots.clear()

    def arrive(self, layout: GroupLayout, offset: int) -> Tensor:
        """A group's bytes of the slab, flat; from now on its weights are read there."""
        found = self._views.get((layout.index, offset))
        if found is None:
            place = self._device.slot(offset, layout.nbytes).view(layout.dtype)
            found = self._views[layout.index, offset] = (place, [slot_view(place, s) for s in layout.slots])
        place, self._weights[layout.index] = found
        self._slots[layout.index] = place
        return place

    def slot_of(self, group: int) -> Tensor:
        """The bytes of the slab where a group is now, flat."""
        return self._slots[group]

    def leave(self, group: int) -> None:
        """A group's slot is given up."""
        del self._weights[group], self._slots[group]

    def free(self, tokens: Sequence[Token]) -> None:
        """Forget values that no later operation reads."""
        for token in tokens:
            self.forget(token)

    def tensors(self, tokens: Sequence[Token]) -> list[Tensor]:
        """The tensors under some tokens, in order."""
        return [t for token in tokens for t in _as_list(self.values[token])]

    def put_back(self, tokens: Sequence[Token], tensors: Sequence[Tensor]) -> None:
        """The inverse of :meth:`tensors`; the tokens of one block name its saved tensors last."""
        rest = list(tensors)
        for token in tokens:
            if isinstance(token, Saved):
                self.values[token], rest = rest, []
            else:
                self.values[token] = rest.pop(0)

    def origin(self) -> str:
        """A sentence on the first block whose output is here and not finite; empty where all are."""
        here: dict[int, list[Tensor]] = {}
        for token, tensor in self.values.items():
            if isinstance(token, Value) and tensor.is_floating_point() and tensor.numel():
                here.setdefault(token.value, []).append(tensor)
        for block in self.part.blocks:
            for value in block.outputs:
                norms = (torch.linalg.vector_norm(x, math.inf) for x in here.get(value, ()))  # without copies
                if not all(map(math.isfinite, norms)):
                    return (
                        " Of what blocks handed on and is still on the device, the output of "
                        f"{block.name} is the first that is not finite."
                    )
        return ""

    def call(self, part: Part, block: int, micro: int, checkpoint: str) -> None:
        """Run one function of a block and keep its results."""
        assert self._bound is not None
        call = self._bound.call(block, checkpoint, part)
        self.call_function(call.block, call.function, part, micro, partial(self._run, call))

    def start_backward(self, loss: int, micro: int) -> None:
        """The gradient of the loss is its weight in the step."""
        value = self.values[Value(loss, micro)]
        with self._device.counted():
            self.values[ValueGrad(loss, micro)] = torch.full_like(value, self._inputs.loss_weights[micro])

    def forget(self, token: Token) -> None:
        """Forget a value."""
        self.values.pop(token, None)

    def weight(self, name: str) -> Tensor:
        """A weight, in the slot where its group is now, or where it stays."""
        group, slot = self.assembly.places[name]
        return (self._weights.get(group) or self._resident.weights[group])[slot]

    def constant(self, name: str) -> Tensor:
        """A buffer or a constant of the model."""
        return self._constants[name]

    def seed(self, item: Input, micro: int) -> Tensor:
        """The seed and site of random numbers, int64 [2]."""
        return self._device.send(torch.tensor([self._inputs.seeds[micro], item.site]))

    def zeros(self, value: BlockValue) -> Tensor:
        """The gradient of a value that has none."""
        with self._device.counted():
            return torch.zeros(value.shape, dtype=value.dtype, device=self._device.torch_device)

    def narrowed(self, gradient: Tensor, value: BlockValue, sum_bytes: int) -> Tensor:
        """A gradient in the type of its value."""
        if gradient.dtype == value.dtype:
            return gradient
        with self._device.counted():
            return gradient.to(value.dtype)

    def summed(self, earlier: Tensor | None, gradient: Tensor, sum_bytes: int) -> Tensor:
        """The sum of an earlier block's gradient, if any, and another, in FP32 where that takes bytes."""
        if earlier is None and not sum_bytes:
            return gradient
        with self._device.counted():
            if earlier is None:
                return gradient.float()
            return earlier.add_(gradient) if sum_bytes else earlier + gradient

    def _run(self, call: BoundCall, arguments: list[Any]) -> list[Any]:
        try:
            with self._products(call), self._device.counted(), torch.no_grad():
                return call.run(arguments)
        except BudgetExceededError:
            raise
        except torch.OutOfMemoryError as error:
            raise BudgetExceededError(
                f"{call.function.name} of {call.block.name} asked for more than the budget leaves: please "
                f"report this schedule. ({str(error).split('. ')[0]})"
            ) from error
        except (RuntimeError, IndexError) as error:  # what an operator says of its arguments
            raise ProgramError(
                f"{call.function.name} of {call.block.name} failed on this batch: {error}"
            ) from error

    def _products(self, call: BoundCall) -> AbstractContextManager[object]:
        return self._device.products() if call.function.narrow else nullcontext()


def _as_list(value: Any) -> list[Tensor]:
    return value if isinstance(value, list) else [value]
