"""The caching allocator of a GPU: a model of its pages, and a step's requests of it in order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from megacompile.blocks.block_functions import Asked, BlockFunction
from megacompile.blocks.joint_graph import Ref
from megacompile.blocks.partition import Block, Partition
from megacompile.blocks.policies import DifferentiatedTemplate
from megacompile.blocks.weight_groups import SEED_BYTES, Assembly
from megacompile.schedule.op_table import COMPUTES, Saved, Token, Value, ValueGrad, WeightGrad
from megacompile.schedule.step import Op, Step

# ------------------------------------------------------------------------------------------------------------
# What torch's caching allocator holds for a sequence of requests, by its own rules.
#
# In: sizes in the order in which one stream takes them and gives them back, the most that may be held. Out:
# the bytes held, page by page. The rules are those of ``CUDACachingAllocator.cpp`` with expandable segments:
# requests of up to 1 MiB in a segment of their own; the smallest free block that is large enough, split;
# blocks that are free side by side made one; where none is large enough, whole pages mapped behind a free
# block or in the first gap; and where that would go beyond the limit, first every page that is free as a
# whole unmapped. ``tests/simulated/test_pages.py`` compares it with the allocator itself.


Request = tuple[int, int]
"""A number that stands for an allocation, and its bytes; 0 gives it back."""

PAGE_BYTES = 12 << 20  # by which segments grow, as the runtime sets it; of 20 MiB unless told
_SMALL, _SMALL_PAGE, _LARGE, _ROUND = 1 << 20, 2 << 20, 10 << 20, 2 << 20
_UNIT = 512
_ADDRESSES = 1 << 50  # of a segment: more than any device has


class Pages:
    """Torch's allocator on one stream, that may hold ``limit`` bytes.

    ``held`` are the bytes of mapped pages, ``peak`` the most so far. ``lacking`` is by how much the limit was
    too small for any request so far; such a request is granted all the same.
    """

    def __init__(self, limit: int, page_bytes: int = PAGE_BYTES) -> None:
        self.limit = limit
        self.held = self.peak = self.lacking = 0
        self._page_bytes = page_bytes
        self._segments = _Segment(_SMALL_PAGE), _Segment(page_bytes)
        self._taken: dict[int, tuple[_Segment, _Block]] = {}

    def replay(self, requests: Iterable[Request]) -> None:
        """Take and give back, in order."""
        for number, nbytes in requests:
            if nbytes:
                self.take(number, nbytes)
            else:
                self.give(number)

    def take(self, number: int, nbytes: int) -> None:
        """Allocate."""
        size = -(-nbytes // _UNIT) * _UNIT
        segment = self._segments[size > _SMALL]
        found = segment.fitting(size)
        if found is None:
            if size <= _SMALL:
                asked = _SMALL_PAGE
            else:
                asked = self._page_bytes if size < _LARGE else -(-size // _ROUND) * _ROUND
            if self.held + asked > self.limit:
                self.trim()
                self.lacking = max(self.lacking, self.held + asked - self.limit)
            found, mapped = segment.grown(size)
            self.held += mapped
            self.peak = max(self.peak, self.held)
        segment.take(found, size)
        self._taken[number] = segment, found

    def give(self, number: int) -> None:
        """Give an allocation back."""
        segment, block = self._taken.pop(number)
        segment.give(block)

    def trim(self) -> None:
        """Unmap every page that is free as a whole."""
        self.held -= sum(segment.trim() for segment in self._segments)

    def address(self, number: int) -> int:
        """The offset of an allocation in its segment."""
        return self._taken[number][1].start


class _Block:
    """A part of a segment: mapped or not, taken or free."""

    __slots__ = ("free", "mapped", "next", "previous", "size", "start")

    def __init__(self, start: int, size: int, mapped: bool) -> None:
        self.start, self.size, self.mapped, self.free = start, size, mapped, True
        self.previous: _Block | None = None
        self.next: _Block | None = None

    def cut(self, size: int) -> _Block:
        """Leave ``size`` bytes to this block; the rest."""
        rest = _Block(self.start + size, self.size - size, self.mapped)
        rest.previous, rest.next, self.size = self, self.next, size
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        return rest


class _Segment:
    """Addresses of one pool, of which whole pages are mapped."""

    def __init__(self, page_bytes: int) -> None:
        self._page = page_bytes
        self._free: list[tuple[int, int]] = []  # (size, address) of mapped blocks that are free
        self._gaps = [0]  # addresses of blocks that are not mapped
        self._at = {0: _Block(0, _ADDRESSES, mapped=False)}

    def fitting(self, size: int) -> _Block | None:
        """The free block to take: the smallest, its gap behind it counted in."""
        place = bisect_left(self._free, (size, 0))
        if place == len(self._free):
            return None
        best = self._at[self._free[place][1]]
        for _, address in self._free[place + 1 :]:
            other = self._at[address]
            if _room(other) >= _room(best):
                break
            best = other
        return best

    def take(self, block: _Block, size: int) -> None:
        """Take a free block, and leave what it has too much."""
        self._drop(block)
        if block.size > size:
            self._add(block.cut(size))
        block.free = False

    def give(self, block: _Block) -> None:
        """Make a block free, one with those beside it."""
        block.free = True
        self._add(self._merged(block))

    def grown(self, size: int) -> tuple[_Block, int]:
        """A free block of at least ``size`` bytes, and the bytes that were mapped for it."""
        mapped = 0
        block = self._with_room(size)
        while not block.mapped or block.size < size:
            gap = block if not block.mapped else block.next
            assert gap is not None and not gap.mapped
            missing = size - (block.size if block.mapped else 0)
            pages = min(gap.size, -(-missing // self._page) * self._page)
            self._drop(gap)
            if gap.size > pages:
                self._add(gap.cut(pages))
            gap.mapped = True
            mapped += pages
            block = self._merged(gap)
            self._add(block)
        return block, mapped

    def trim(self) -> int:
        """Unmap the whole pages of free blocks; the bytes."""
        unmapped = 0
        for _, address in list(self._free):
            block = self._at[address]
            first = -(-block.start // self._page) * self._page
            end = (block.start + block.size) // self._page * self._page
            if first >= end:
                continue
            self._drop(block)
            if first > block.start:
                inner = block.cut(first - block.start)
                self._add(block)
                block = inner
            if block.start + block.size > end:
                self._add(block.cut(end - first))
            block.mapped = False
            unmapped += end - first
            self._add(self._merged(block))
        return unmapped

    def _with_room(self, size: int) -> _Block:
        """The first gap, or the free block before it, from which on enough is free or not mapped."""
        for address in self._gaps:
            first: _Block = self._at[address]
            if first.previous is not None and first.previous.free:
                first = first.previous
            room, block = 0, first
            while room < size and block is not None and block.free:
                room, block = room + block.size, block.next  # type: ignore[assignment]
            if room >= size:
                return first
        raise AssertionError("a segment has no end")

    def _merged(self, block: _Block) -> _Block:
        """One block of this one and those beside it that are free, and mapped, as it is."""
        before, after = block.previous, block.next
        if after is not None and after.free and after.mapped == block.mapped:
            self._drop(after)
            block.size, block.next = block.size + after.size, after.next
            if after.next is not None:
                after.next.previous = block
        if before is not None and before.free and before.mapped == block.mapped:
            self._drop(before)
            before.size, before.next = before.size + block.size, block.next
            if block.next is not None:
                block.next.previous = before
            return before
        return block

    def _add(self, block: _Block) -> None:
        self._at[block.start] = block
        if block.mapped:
            insort(self._free, (block.size, block.start))
        else:
            insort(self._gaps, block.start)

    def _drop(self, block: _Block) -> None:
        del self._at[block.start]
        known: list[tuple[int, int]] | list[int] = self._free if block.mapped else self._gaps
        key = (block.size, block.start) if block.mapped else block.start
        del known[bisect_left(known, key)]


def _room(block: _Block) -> int:
    behind = block.next
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)


# ------------------------------------------------------------------------------------------------------------
# What a step asks a GPU's allocator for, in order: each activation, gradient and temporary, to the byte.
#
# In: a step, and the functions that its blocks call, with what each of them asks for. Out: requests as
# :class:`~megacompile.hardware.caching_allocator.Pages` replays them. It follows
# :class:`~megacompile.runtime.block_calls.Blocks`, with numbers in the place of tensors.


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

    # ---- allocations
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

    # ---- functions
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
