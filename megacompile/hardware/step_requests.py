"""List what a step asks a GPU's allocator for, in order: each activation, gradient and temporary in bytes.

In: a step, and the functions that its blocks call, with what each of them asks for. Out: requests as
:class:`~megacompile.hardware.caching_allocator.Pages` replays them. Functions are called as the runtime calls
them (:class:`~megacompile.blocks.block_values.BlockValues`), with numbers in the place of tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch

from megacompile.blocks.block_functions import Asked, BlockFunction
from megacompile.blocks.block_values import BlockValues
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.partition import BlockValue, Input, Partition
from megacompile.blocks.weight_groups import SEED_BYTES, Assembly
from megacompile.schedule.op_table import COMPUTES, Saved, Token, ValueGrad, WeightGrad
from megacompile.schedule.step import Op, Step

Held = tuple[int, int]
"""The number of an allocation, and the bytes that a tensor shows of it."""

_NUMBER = 4  # bytes of a loss, a norm, a scale
_STAYS: Held = (0, 0)  # a weight or a constant, which no step takes or gives back


def step_requests(
    step: Step, part: Partition, templates: Sequence[DifferentiatedTemplate], assembly: Assembly
) -> list[Held]:
    """(number of an allocation, its bytes, or 0 where it is given back) of all operations."""
    walk = _Walk(step, part, templates, assembly)
    for op in step.ops:
        walk.run(op)
    assert not walk.values, f"left on the device: {list(walk.values)}"
    return walk.requests


class _Walk(BlockValues[Held]):
    """The same calls with numbers of allocations; one is given back when its last user is gone."""

    def __init__(
        self, step: Step, part: Partition, templates: Sequence[DifferentiatedTemplate], assembly: Assembly
    ) -> None:
        super().__init__()
        self.requests: list[Held] = []
        self.part, self._templates, self.assembly = part, templates, assembly
        kinds = {op.kind for op in step.ops}
        self._loss = part.results[0] if "backward" in kinds and "copy_result" not in kinds else -1
        self._sizes: dict[int, int] = {}
        self._users: Counter[int] = Counter()
        self._offloaded: dict[tuple[int, int], list[int]] = {}

    def run(self, op: Op) -> None:
        """One operation of the step."""
        if op.kind in ("load", "gather", "load_grad"):
            self.values[op.writes[0]] = self._new(self.part.values[op.value].nbytes)
        elif op.kind in COMPUTES:
            self._call(op)
        elif op.kind == "offload":
            found = [self.values[token] for token in op.reads if token in self.values]
            here = [held for each in found for held in (each if isinstance(each, list) else [each])]
            self._offloaded[op.block, op.micro] = [nbytes for _, nbytes in here]
        elif op.kind == "reload":
            self._reload(op)
        elif op.kind == "load_update":
            self.values[op.writes[0]] = [self._new(2 * m * n) for m, n in self._sides(op)]
        elif op.kind == "orthogonalize":
            self._orthogonalize(op)
        elif op.kind in ("norm", "adam") and op.stream == "compute":
            numbers = [self._new(_NUMBER) for _ in self.assembly.groups[op.group].slots]
            numbers.append(self._new(op.peak_bytes))
            for number in numbers:
                self._drop(number)
        for token in op.frees:
            self.forget(token)

    def _new(self, nbytes: int) -> Held:
        number = len(self._sizes) + 1
        self._sizes[number], self._users[number] = nbytes, 1
        if nbytes:
            self.requests.append((number, nbytes))
        return number, nbytes

    def _drop(self, held: Held) -> None:
        number = held[0]
        self._users[number] -= 1
        if not self._users[number] and self._sizes.get(number):
            self.requests.append((number, 0))

    def _reload(self, op: Op) -> None:
        tensors = [self._new(nbytes) for nbytes in self._offloaded.pop((op.block, op.micro))]
        for token in op.writes:
            if isinstance(token, Saved):
                self.values[token], tensors = tensors, []
            else:
                self.values[token] = tensors.pop(0)

    def _sides(self, op: Op) -> tuple[tuple[int, int], ...]:
        matrices = self.assembly.work.groups[op.group].matrices
        assert matrices is not None
        return matrices.sides

    def _orthogonalize(self, op: Op) -> None:
        """As :func:`~megacompile.state.muon.orthogonalize`, the last matrix first."""
        updates = self.values.pop(op.donates[0])
        factors: list[Held] = []
        matrices = self.assembly.work.groups[op.group].matrices
        for rows, columns in reversed(self._sides(op)):
            m, n = min(rows, columns), max(rows, columns)
            matrix = updates.pop()
            for _ in range(2):
                self._drop(self._new(_NUMBER))
            for _ in range(matrices.iterations if matrices else 0):
                gram, polynomial = self._new(2 * m * m), self._new(2 * m * m)
                self._drop(gram)
                product = self._new(2 * m * n)
                self._drop(matrix)
                self._drop(polynomial)
                matrix = product
            if rows > columns:
                turned = self._new(2 * m * n)
                self._drop(matrix)
                matrix = turned
            factors.insert(0, matrix)
        self.values[op.writes[0]] = factors

    def _call(self, op: Op) -> None:
        block = self.part.blocks[op.block]
        policy = self._templates[block.template].policies[op.policy]  # type: ignore[index]
        function: BlockFunction = getattr(policy, op.kind)
        assert function.asked is not None, "the function was measured for no GPU"
        self.call_function(block, function, op.kind, op.micro, partial(self._played, function.asked))  # type: ignore[arg-type]
        if op.kind == "forward" and self._loss in block.outputs:
            self.values[ValueGrad(self._loss, op.micro)] = self._new(_NUMBER)

    def forget(self, token: Token) -> None:
        found = self.values.pop(token, [])
        for held in found if isinstance(found, list) else [found]:
            self._drop(held[1] if isinstance(token, WeightGrad) else held)

    def shared(self, value: Held) -> Held:
        self._users[value[0]] += 1
        return value

    def weight(self, name: str) -> Held:
        return self.shared(_STAYS)

    def constant(self, name: str) -> Held:
        return self.shared(_STAYS)

    def seed(self, item: Input, micro: int) -> Held:
        return self._new(SEED_BYTES)

    def zeros(self, value: BlockValue) -> Held:
        return self._new(value.nbytes)

    def narrowed(self, gradient: Held, value: BlockValue, sum_bytes: int) -> Held:
        wide = sum_bytes and value.dtype != torch.float32
        return self._instead_of(value.nbytes, gradient) if wide else gradient

    def summed(self, earlier: Held | None, gradient: Held, sum_bytes: int) -> Held:
        if earlier is None:
            return self._instead_of(sum_bytes, gradient) if sum_bytes else gradient
        if not sum_bytes:
            return self._instead_of(gradient[1], gradient, earlier)
        self._drop(gradient)
        return earlier

    def _instead_of(self, nbytes: int, *operands: Held) -> Held:
        """The result of an operation, behind which its operands are given back."""
        made = self._new(nbytes)
        for held in operands:
            self._drop(held)
        return made

    def _played(self, asked: Asked, arguments: list[Held]) -> list[Held]:
        """Play all that a function asks for; returns its results by its own numbers."""
        here: dict[int, Held] = dict(enumerate(arguments))
        known = dict(here)
        for number, nbytes in asked.requests:
            if nbytes:
                known[number] = here[number] = self._new(nbytes)
            else:
                self._drop(here.pop(number))
        for number, nbytes in asked.results:
            if not nbytes and number not in known:  # a tensor without elements, which is asked for by nobody
                known[number] = here[number] = self._new(0)
        results = [self.shared((known[number][0], nbytes)) for number, nbytes in asked.results]
        for held in here.values():
            self._drop(held)
        return results
