"""Insert the waits of streams for each other, exactly where data, slots or host buffers demand them.

The step is walked twice in a row, as it will run; the waits of the second walk are kept, so that they
cover what the step before left running. A wait that others imply is left out: taking any single one
away makes the step unsafe.
"""

from __future__ import annotations

from collections.abc import Iterator

from megacompile.schedule.op_table import STREAMS, Token
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Event, Op, Step
from megacompile.schedule.workload import Workload

_SlotRange = tuple[int, int]  # first byte and end of a slot
_COMPUTE = STREAMS.index("compute")
_STREAM = {stream: position for position, stream in enumerate(STREAMS)}


def synchronize(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Add to ``waits`` the events of earlier operations that conflict with an operation."""
    numbers: dict[Token, int] = {}
    items = [_Item(op, numbers) for op in step.ops]
    walker = _Walker(len(numbers))
    for item in items:
        walker.visit(item)
    waits = [walker.visit(item) for item in items]
    ops = (op.with_(waits=w) if w else op for op, w in zip(step.ops, waits, strict=True))
    return step.with_(ops=tuple(ops))


class _Item:
    """An operation with what both walks need of it; tokens are numbered, as hashing them takes long."""

    __slots__ = ("changed", "fills", "leaves", "op", "reads", "stream", "takes", "touched")

    def __init__(self, op: Op, numbers: dict[Token, int]) -> None:
        self.op = op
        self.stream = _STREAM[op.stream]
        self.reads = [numbers.setdefault(t, len(numbers)) for t in op.reads]
        changed = op.writes
        if op.donates or op.frees:
            changed = tuple(dict.fromkeys(op.writes + op.donates + op.frees))
        self.changed = [numbers.setdefault(t, len(numbers)) for t in changed]
        self.touched = self.reads + self.changed
        self.takes = self.stream != _COMPUTE and any(t.on_device for t in op.writes)
        place = (op.offset, op.offset + op.nbytes) if op.group >= 0 else None
        self.fills = place if op.kind == "prefetch" else None
        self.leaves = place if op.kind == "evict" else None


class _Visit:
    """An operation in one walk: the ``tick`` of its stream, and per stream the last tick that is over when
    this one is."""

    __slots__ = ("clock", "op", "stream", "tick")

    def __init__(self, op: Op, stream: int, clock: list[int]) -> None:
        self.op, self.stream, self.tick, self.clock = op, stream, clock[stream], clock


class _Walker:
    """Follows all streams in program order with one clock per stream."""

    def __init__(self, tokens: int) -> None:
        self.clocks = [[0] * len(STREAMS) for _ in STREAMS]
        self.writer: list[_Visit | None] = [None] * tokens
        self.readers: list[dict[int, _Visit]] = [{} for _ in range(tokens)]  # the last of each stream
        self.stays: dict[_SlotRange, _Visit] = {}  # the last evict from each place in the slab
        self.overlaps: dict[_SlotRange, list[_SlotRange]] = {}
        self.compute: _Visit | None = None

    def visit(self, item: _Item) -> tuple[Event, ...]:
        """Move past an operation; returns the events that it has to wait for."""
        stream = item.stream
        clock = self.clocks[stream].copy()
        waits: tuple[Event, ...] = ()
        latest = self._conflicts(item, clock)
        if latest:
            others = latest.values()
            for other in sorted(others, key=_most_implied_first) if len(latest) > 1 else others:
                if clock[other.stream] < other.tick:
                    waits += (other.op.event,)
                    clock = [a if a > b else b for a, b in zip(clock, other.clock, strict=True)]
        clock[stream] += 1
        self.clocks[stream] = clock
        self._record(item, _Visit(item.op, stream, clock))
        return waits

    def _conflicts(self, item: _Item, clock: list[int]) -> dict[int, _Visit]:
        """Per other stream the last operation that must be over before this; it implies those before."""
        writer, readers = self.writer, self.readers
        latest: dict[int, _Visit] = {}
        for token in item.touched:
            other = writer[token]
            if other is not None and clock[other.stream] < other.tick:
                _keep_last(latest, other)
        for token in item.changed:
            for other in readers[token].values():
                if clock[other.stream] < other.tick:
                    _keep_last(latest, other)
        if item.fills is not None:
            for other in self._earlier_stays(item.fills):
                if clock[other.stream] < other.tick:
                    _keep_last(latest, other)
        elif item.takes and self.compute is not None and clock[_COMPUTE] < self.compute.tick:
            _keep_last(latest, self.compute)  # what it takes may have been given back just before
        return latest

    def _earlier_stays(self, place: _SlotRange) -> Iterator[_Visit]:
        """The last evict from each place in the slab that overlaps this one."""
        if place not in self.overlaps:
            self.overlaps[place] = [p for p in self.stays if p[0] < place[1] and place[0] < p[1]]
        return (self.stays[p] for p in self.overlaps[place])

    def _record(self, item: _Item, visit: _Visit) -> None:
        for token in item.changed:
            self.writer[token] = visit
            if self.readers[token]:
                self.readers[token] = {}
        for token in item.reads:
            self.readers[token][visit.stream] = visit
        if visit.stream == _COMPUTE:
            self.compute = visit
            if item.leaves is not None:
                self._end_stay(item.leaves, visit)

    def _end_stay(self, place: _SlotRange, visit: _Visit) -> None:
        if place not in self.stays:
            for other, known in self.overlaps.items():
                if other[0] < place[1] and place[0] < other[1]:
                    known.append(place)
        self.stays[place] = visit


def _keep_last(latest: dict[int, _Visit], visit: _Visit) -> None:
    if visit.stream not in latest or latest[visit.stream].tick < visit.tick:
        latest[visit.stream] = visit


def _most_implied_first(visit: _Visit) -> tuple[int, int]:
    return -sum(visit.clock), visit.stream
