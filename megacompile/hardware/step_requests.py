"""List what a step asks a GPU's allocator for, in order: each activation, gradient and temporary in bytes.

In: a step, and the functions that its blocks call, with what each of them asks for. Out: requests as
:class:`~megacompile.hardware.caching_allocator.Pages` replays them. It follows
:class:`~megacompile.runtime.block_calls.Blocks`, with numbers in the place of tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from megacompile.blocks.block_functions import Asked, BlockFunction
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.joint_graph import Ref
from megacompile.blocks.partition import Block, Partition
from megacompile.blocks.weight_groups import SEED_BYTES, Assembly
from megacompile.schedule.op_table import COMPUTES, Saved, Token, Value, ValueGrad, WeightGrad
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
    assert not walk.held, f"left on the device: {list(walk.held)}"
    return walk.requests


class _Walk:
    """``held`` has what lies under each token; an allocation is given back when its last user is gone."""

    def __init__(
        self, step: Step, part: Partition, templates: Sequence[DifferentiatedTemplate], assembly: Assembly
    ) -> None:
        self.requests: list[Held] = []
        self.held: dict[Token, list[Held]] = {}
        self._part, self._templates, self._assembly = part, templates, assembly
        kinds = {op.kind for op in step.ops}
        self._loss = part.results[0] if "backward" in kinds and "copy_result" not in kinds else -1
        self._sizes: dict[int, int] = {}
        self._users: Counter[int] = Counter()
        self._offloaded: dict[tuple[int, int], list[int]] = {}

    def run(self, op: Op) -> None:
        """One operation of the step."""
        if op.kind in ("load", "gather", "load_grad"):
            self.held[op.writes[0]] = [self._new(self._part.values[op.value].nbytes)]
        elif op.kind in COMPUTES:
            self._call(op)
        elif op.kind == "offload":
            here = [held for token in op.reads for held in self.held.get(token, ())]
            self._offloaded[op.block, op.micro] = [nbytes for _, nbytes in here]
        elif op.kind == "reload":
            self._reload(op)
        elif op.kind == "load_update":
            self.held[op.writes[0]] = [self._new(2 * m * n) for m, n in self._sides(op)]
        elif op.kind == "orthogonalize":
            self._orthogonalize(op)
        elif op.kind in ("norm", "adam") and op.stream == "compute":
            numbers = [self._new(_NUMBER) for _ in self._assembly.groups[op.group].slots]
            numbers.append(self._new(op.peak_bytes))
            for number in numbers:
                self._drop(number)
        for token in op.frees:
            self._forget(token)

    def _new(self, nbytes: int) -> Held:
        number = len(self._sizes) + 1
        self._sizes[number], self._users[number] = nbytes, 1
        if nbytes:
            self.requests.append((number, nbytes))
        return number, nbytes

    def _keep(self, held: Held) -> Held:
        self._users[held[0]] += 1
        return held

    def _drop(self, held: Held) -> None:
        number = held[0]
        self._users[number] -= 1
        if not self._users[number] and self._sizes.get(number):
            self.requests.append((number, 0))

    def _forget(self, token: Token) -> None:
        for held in self.held.pop(token, ()):
            self._drop(held)

    def _reload(self, op: Op) -> None:
        tensors = [self._new(nbytes) for nbytes in self._offloaded.pop((op.block, op.micro))]
        for token in op.writes:
            taken = len(tensors) if isinstance(token, Saved) else 1
            self.held[token], tensors = tensors[:taken], tensors[taken:]

    def _sides(self, op: Op) -> tuple[tuple[int, int], ...]:
        matrices = self._assembly.work.groups[op.group].matrices
        assert matrices is not None
        return matrices.sides

    def _orthogonalize(self, op: Op) -> None:
        """As :func:`~megacompile.state.muon.orthogonalize`, the last matrix first."""
        updates = self.held.pop(op.donates[0])
        factors: list[Held] = []
        matrices = self._assembly.work.groups[op.group].matrices
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
        self.held[op.writes[0]] = factors

    def _call(self, op: Op) -> None:
        block = self._part.blocks[op.block]
        policy = self._templates[block.template].policies[op.policy]  # type: ignore[index]
        function: BlockFunction = getattr(policy, op.kind)
        assert function.asked is not None, "the function was measured for no GPU"
        arguments = [self._argument(block, ref, op.micro) for ref in function.inputs]
        if any(kind == "saved" for kind, _ in function.inputs):
            self._forget(Saved(op.block, op.micro))
        results = self._played(function.asked, arguments)
        keep = self._keep_gradients if op.kind == "backward" else self._keep_results
        keep(block, function.outputs, results, op.micro)
        if op.kind == "forward" and self._loss in block.outputs:
            self.held[ValueGrad(self._loss, op.micro)] = [self._new(_NUMBER)]

    def _argument(self, block: Block, ref: Ref, micro: int) -> Held:
        kind, i = ref
        if kind == "saved":
            return self._keep(self.held[Saved(block.index, micro)][i])
        if kind == "out":
            return self._keep(self.held[Value(block.outputs[i], micro)][0])
        if kind == "grad":
            return self._tangent(block.outputs[i], micro)
        item = block.inputs[i]
        if item.kind == "value":
            return self._keep(self.held[Value(item.value, micro)][0])
        return self._keep(_STAYS) if item.kind in ("weight", "buffer") else self._new(SEED_BYTES)

    def _tangent(self, value: int, micro: int) -> Held:
        """The gradient of a value in its own type: as it is, of a sum in FP32, or zeros."""
        info, token = self._part.values[value], ValueGrad(value, micro)
        if token in self.held and not (self._sums(value) and info.dtype != torch.float32):
            (known,) = self.held.pop(token)
            return known
        made = self._new(info.nbytes)
        self._forget(token)
        return made

    def _sums(self, value: int) -> int:
        return self._assembly.work.values[value].sum_bytes

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
        results = [self._keep((known[number][0], nbytes)) for number, nbytes in asked.results]
        for held in here.values():
            self._drop(held)
        return results

    def _keep_results(self, block: Block, outputs: Sequence[Ref], results: list[Held], micro: int) -> None:
        saved = []
        for (kind, i), result in zip(outputs, results, strict=True):
            if kind == "saved":
                saved.append(result)
            else:
                self.held[Value(block.outputs[i], micro)] = [result]
        if saved:
            self.held[Saved(block.index, micro)] = saved

    def _keep_gradients(self, block: Block, outputs: Sequence[Ref], results: list[Held], micro: int) -> None:
        for (_, i), gradient in zip(outputs, results, strict=True):
            item = block.inputs[i]
            rows = self._part.rows.get(item.value)
            if item.kind == "weight" or rows is not None:
                group, _ = self._assembly.places[rows.pieces[0] if rows else item.name]
                self.held.setdefault(WeightGrad(group, block.index, micro), []).append(gradient)
                continue
            token = ValueGrad(item.value, micro)
            earlier = self.held.pop(token, [])
            wide = self._sums(item.value)
            if earlier and wide:
                self.held[token] = earlier
                self._drop(gradient)
            elif earlier or wide:
                self.held[token] = [self._new(wide or gradient[1])]
                self._drop(gradient)
                for held in earlier:
                    self._drop(held)
            else:
                self.held[token] = [gradient]
