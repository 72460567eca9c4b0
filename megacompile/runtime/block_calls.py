"""Keep values on the device by token, and call block functions.

In: a bound step; then its operations, one at a time, from the :class:`~megacompile.runtime.executor.Runtime`.
A function's arguments are looked up by what its block reads; results are kept under the tokens that the
step's later operations name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from megacompile.blocks.joint_graph import Ref
from megacompile.blocks.weight_groups import GroupLayout
from megacompile.errors import BudgetExceededError, ProgramError
from megacompile.runtime.bound_step import BoundCall, BoundStep
from megacompile.runtime.device import Device
from megacompile.runtime.device_state import ResidentState
from megacompile.runtime.step_results import StepInputs
from megacompile.schedule.op_table import Saved, Token, Value, ValueGrad, WeightGrad
from megacompile.state.master_layout import slot_view


class Blocks:
    """The values that one step holds on the device, and its block functions."""

    def __init__(self, device: Device, resident: ResidentState) -> None:
        self.values: dict[Token, Any] = {}
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
            self.values.pop(token, None)

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
        assert self._bound is not None
        here: dict[int, list[Tensor]] = {}
        for token, tensor in self.values.items():
            if isinstance(token, Value) and tensor.is_floating_point() and tensor.numel():
                here.setdefault(token.value, []).append(tensor)
        for block in self._bound.part.blocks:
            for value in block.outputs:
                norms = (torch.linalg.vector_norm(x, math.inf) for x in here.get(value, ()))  # without copies
                if not all(map(math.isfinite, norms)):
                    return (
                        " Of what blocks handed on and is still on the device, the output of "
                        f"{block.name} is the first that is not finite."
                    )
        return ""

    def call(
        self, part: Literal["forward", "recompute", "backward"], block: int, micro: int, checkpoint: str
    ) -> None:
        """Run one function of a block and keep its results."""
        assert self._bound is not None
        call = self._bound.call(block, checkpoint, part)
        results = self._run(call, micro)
        if part == "backward":
            self._keep_gradients(call, micro, results)
        else:
            self._keep_results(call, micro, results)

    def start_backward(self, loss: int, micro: int) -> None:
        """The gradient of the loss is its weight in the step."""
        value = self.values[Value(loss, micro)]
        with self._device.counted():
            self.values[ValueGrad(loss, micro)] = torch.full_like(value, self._inputs.loss_weights[micro])

    def _run(self, call: BoundCall, micro: int) -> list[Any]:
        arguments = [self._argument(call, ref, micro) for ref in call.function.inputs]
        if any(kind == "saved" for kind, _ in call.function.inputs):
            self.values.pop(Saved(call.block.index, micro))
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

    def _argument(self, call: BoundCall, ref: Ref, micro: int) -> Any:
        assert self._bound is not None
        kind, i = ref
        if kind == "saved":
            return self.values[Saved(call.block.index, micro)][i]
        if kind == "out":
            return self.values[Value(call.block.outputs[i], micro)]
        if kind == "grad":
            return self._tangent(call.block.outputs[i], micro)
        item = call.block.inputs[i]
        if item.kind == "value":
            return self.values[Value(item.value, micro)]
        if item.kind == "weight":
            group, slot = self._bound.assembly.places[item.name]
            return (self._weights.get(group) or self._resident.weights[group])[slot]
        if item.kind == "buffer":
            return self._constants[item.name]
        return self._device.send(torch.tensor([self._inputs.seeds[micro], item.site]))

    def _tangent(self, value: int, micro: int) -> Tensor:
        assert self._bound is not None
        grad: Tensor | None = self.values.pop(ValueGrad(value, micro), None)
        info = self._bound.part.values[value]
        if grad is not None and grad.dtype == info.dtype:
            return grad
        with self._device.counted():
            if grad is None:
                return torch.zeros(info.shape, dtype=info.dtype, device=self._device.torch_device)
            return grad.to(info.dtype)

    def _keep_results(self, call: BoundCall, micro: int, results: list[Any]) -> None:
        saved = []
        for (kind, i), result in zip(call.function.outputs, results, strict=True):
            if kind == "saved":
                saved.append(result)
            else:
                self.values[Value(call.block.outputs[i], micro)] = result
        if saved:
            self.values[Saved(call.block.index, micro)] = saved

    def _keep_gradients(self, call: BoundCall, micro: int, results: list[Any]) -> None:
        """Add gradients to those of earlier blocks; each is let go here before the next is added."""
        assert self._bound is not None
        results.reverse()
        for _, i in call.function.outputs:
            grad = results.pop()
            item = call.block.inputs[i]
            rows = self._bound.part.rows.get(item.value)
            if item.kind == "weight" or rows is not None:
                group, slot = self._bound.assembly.places[rows.pieces[0] if rows else item.name]
                key = WeightGrad(group, call.block.index, micro)
                self.values.setdefault(key, []).append((slot, grad))
                continue
            token = ValueGrad(item.value, micro)
            earlier = self.values.pop(token, None)
            if self._bound.assembly.work.values[item.value].sum_bytes:
                with self._device.counted():
                    grad = grad.float() if earlier is None else earlier.add_(grad)
            elif earlier is not None:
                with self._device.counted():
                    grad = earlier + grad
            self.values[token] = grad
            del earlier, grad


def _as_list(value: Any) -> list[Tensor]:
    return value if isinstance(value, list) else [value]
