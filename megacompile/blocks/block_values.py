"""Interpret calls of block functions: the values on the device that each takes, and those that it leaves.

The runtime keeps tensors under the tokens of a step, the replay of the allocator numbers that stand for them.
Both take arguments, keep results and add gradients up in the order that is written here; an allocation is
given back when its last user lets go of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

from megacompile.blocks.block_functions import BlockFunction
from megacompile.blocks.joint_graph import Ref
from megacompile.blocks.partition import Block, BlockValue, Input, Partition
from megacompile.blocks.weight_groups import Assembly
from megacompile.schedule.op_table import Saved, Token, Value, ValueGrad, WeightGrad

T = TypeVar("T")
Part = Literal["forward", "recompute", "backward"]


class BlockValues(ABC, Generic[T]):
    """The values that one step holds on the device.

    ``values`` has one value under a token, a list under that of saved tensors, of gradients of weights a
    list of (slot, gradient).
    """

    part: Partition
    assembly: Assembly

    def __init__(self) -> None:
        self.values: dict[Token, Any] = {}

    @abstractmethod
    def forget(self, token: Token) -> None:
        """Forget the value under a token, if there is one."""

    def shared(self, value: T) -> T:
        """A value that stays under its token while a function has it."""
        return value

    @abstractmethod
    def weight(self, name: str) -> T:
        """A weight where it is on the device."""

    @abstractmethod
    def constant(self, name: str) -> T:
        """A buffer or a constant of the model."""

    @abstractmethod
    def seed(self, item: Input, micro: int) -> T:
        """The seed and site of random numbers."""

    @abstractmethod
    def zeros(self, value: BlockValue) -> T:
        """The gradient of a value that has none."""

    @abstractmethod
    def narrowed(self, gradient: T, value: BlockValue, sum_bytes: int) -> T:
        """A gradient, where it is a sum of ``sum_bytes`` in FP32, in the type of its value."""

    @abstractmethod
    def summed(self, earlier: T | None, gradient: T, sum_bytes: int) -> T:
        """The sum of an earlier block's gradient, if any, and another, in FP32 where that takes bytes."""

    def call_function(
        self,
        block: Block,
        function: BlockFunction,
        part: Part,
        micro: int,
        run: Callable[[list[T]], list[T]],
    ) -> None:
        """Run one function of a block by ``run``, which lets its arguments go, and keep its results."""
        arguments = [self._argument(block, ref, micro) for ref in function.inputs]
        if any(kind == "saved" for kind, _ in function.inputs):
            self.forget(Saved(block.index, micro))
        results = run(arguments)
        keep = self._keep_gradients if part == "backward" else self._keep_results
        keep(block, function.outputs, results, micro)

    def _argument(self, block: Block, ref: Ref, micro: int) -> T:
        kind, i = ref
        if kind == "saved":
            return self.shared(self.values[Saved(block.index, micro)][i])
        if kind == "out":
            return self.shared(self.values[Value(block.outputs[i], micro)])
        if kind == "grad":
            return self._tangent(block.outputs[i], micro)
        item = block.inputs[i]
        if item.kind == "value":
            return self.shared(self.values[Value(item.value, micro)])
        if item.kind == "weight":
            return self.weight(item.name)
        return self.constant(item.name) if item.kind == "buffer" else self.seed(item, micro)

    def _tangent(self, value: int, micro: int) -> T:
        gradient: T | None = self.values.pop(ValueGrad(value, micro), None)
        of = self.part.values[value]
        if gradient is None:
            return self.zeros(of)
        return self.narrowed(gradient, of, self.assembly.work.values[value].sum_bytes)

    def _keep_results(self, block: Block, outputs: Sequence[Ref], results: list[T], micro: int) -> None:
        saved = []
        for (kind, i), result in zip(outputs, results, strict=True):
            if kind == "saved":
                saved.append(result)
            else:
                self.values[Value(block.outputs[i], micro)] = result
        if saved:
            self.values[Saved(block.index, micro)] = saved

    def _keep_gradients(self, block: Block, outputs: Sequence[Ref], results: list[T], micro: int) -> None:
        """Add gradients to those of earlier blocks; each is let go here before the next is added."""
        results.reverse()
        for _, i in outputs:
            gradient = results.pop()
            item = block.inputs[i]
            rows = self.part.rows.get(item.value)
            if item.kind == "weight" or rows is not None:
                group, slot = self.assembly.places[rows.pieces[0] if rows else item.name]
                key = WeightGrad(group, block.index, micro)
                self.values.setdefault(key, []).append((slot, gradient))
                continue
            token = ValueGrad(item.value, micro)
            earlier = self.values.pop(token, None)
            sum_bytes = self.assembly.work.values[item.value].sum_bytes
            self.values[token] = self.summed(earlier, gradient, sum_bytes)
            del gradient, earlier
