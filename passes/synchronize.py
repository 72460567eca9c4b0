"""Make streams wait for each other exactly where data, slots or host buffers demand it.

The step is walked twice in a row, as it will run; the waits of the second walk are kept, so that they
cover what the step before left running. A wait that others imply is left out: taking any single one
away makes the step unsafe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from megacompile.plan.plan import Mode, Plan
from megacompile.plan.workload import Workload
from megacompile.step.operations import DEVICE_TOKENS, STREAMS, Event, Op, Step, Token

_Place = tuple[int, int]  # first byte and end of a slot
_STREAM = {stream: position for position, stream in enumerate(STREAMS)}


def synchronize(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Add to ``waits`` the events of earlier operations that conflict with an operation."""
    walker = _Walker()
    items = [_Item(op) for op in step.ops]
    for item in items:
        walker.visit(item)
    waits = [walker.visit(item) for item in items]
    ops = (op.with_(waits=w) if w else op for op, w in zip(step.ops, waits, strict=True))
    return step.with_(ops=tuple(ops))


class _Item:
    """An operation with what both walks need of it."""

    __slots__ = ("changed", "event", "op", "stream", "takes", "touched")

    def __init__(self, op: Op) -> None:
        self.op = op
        self.event = op.event
        self.stream = _STREAM[op.stream]
        self.changed: tuple[Token, ...] = op.writes
        if op.donates or op.frees:
            self.changed = tuple(dict.fromkeys(op.writes + op.donates + op.frees))
        self.touched = op.reads + self.changed
        self.takes = op.stream != "compute" and any(t[0] in DEVICE_TOKENS for t in op.writes)


@dataclass(slots=True)
class _Visit:
    """An item in one walk: the ``tick`` of its stream, and all that is over when it is over."""

    item: _Item
    stream: int
    tick: int
    clock: tuple[int, ...]


class _Walker:
    """Follows all streams in program order with one clock entry per stream."""

    def __init__(self) -> None:
        self.clocks: list[tuple[int, ...]] = [(0,) * len(STREAMS) for _ in STREAMS]
        self.writer: dict[Token, _Visit] = {}
        self.readers: dict[Token, list[_Visit]] = defaultdict(list)
        self.stays: dict[_Place, _Visit] = {}  # the last evict from each place in the slab
        self.overlaps: dict[_Place, list[_Place]] = {}
        self.compute: _Visit | None = None

    def visit(self, item: _Item) -> tuple[Event, ...]:
        """Move past an operation; returns the events that it has to wait for."""
        stream = item.stream
        clock = self.clocks[stream]
        waits: list[Event] = []
        latest = self._conflicts(item, clock)
        if latest:
            for other in sorted(latest.values(), key=_most_implied_first):
                if clock[other.stream] < other.tick:
                    waits.append(other.item.event)
                    clock = tuple(map(max, clock, other.clock))
        tick = clock[stream] + 1
        clock = (*clock[:stream], tick, *clock[stream + 1 :])
        self.clocks[stream] = clock
        self._record(_Visit(item, stream, tick, clock))
        return tuple(waits)

    def _conflicts(self, item: _Item, clock: tuple[int, ...]) -> dict[int, _Visit]:
        """Per other stream the last operation that must be over before this; it implies those before."""
        writer, readers = self.writer, self.readers
        found = [writer[token] for token in item.touched if token in writer]
        for token in item.changed:
            found += readers[token]
        if item.op.kind == "prefetch":
            found += self._earlier_stays(item.op)
        elif item.takes and self.compute is not None:
            found.append(self.compute)  # the memory it takes may have been given back just before
        latest: dict[int, _Visit] = {}
        for other in found:
            there, tick = other.stream, other.tick
            known = latest[there].tick if there in latest else clock[there]
            if there != item.stream and known < tick:
                latest[there] = other
        return latest

    def _earlier_stays(self, op: Op) -> Iterator[_Visit]:
        """The last evict from each place in the slab that overlaps the one that ``op`` fills."""
        place = (op.offset, op.offset + op.nbytes)
        if place not in self.overlaps:
            self.overlaps[place] = [p for p in self.stays if p[0] < place[1] and place[0] < p[1]]
        return (self.stays[p] for p in self.overlaps[place])

    def _record(self, visit: _Visit) -> None:
        op = visit.item.op
        for token in visit.item.changed:
            self.writer[token] = visit
            self.readers[token] = []
        for token in op.reads:
            self.readers[token].append(visit)
        if op.stream == "compute":
            self.compute = visit
            if op.kind == "evict" and op.group >= 0:
                self._end_stay((op.offset, op.offset + op.nbytes), visit)

    def _end_stay(self, place: _Place, visit: _Visit) -> None:
        if place not in self.stays:
            for other, known in self.overlaps.items():
                if other[0] < place[1] and place[0] < other[1]:
                    known.append(place)
        self.stays[place] = visit


def _most_implied_first(visit: _Visit) -> tuple[int, int]:
    return -sum(visit.clock), visit.stream
