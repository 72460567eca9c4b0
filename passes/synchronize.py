"""Make streams wait for each other exactly where data, slots or host buffers demand it.

The step is walked twice in a row, as it will run; the waits of the second walk are kept, so that they
cover what the step before left running. A wait that others imply is left out: taking any single one
away makes the step unsafe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from megacompile.plan import Mode, Plan
from megacompile.step import DEVICE_TOKENS, STREAMS, Event, Op, Step, Token
from megacompile.workload import Workload

_STREAM = {stream: position for position, stream in enumerate(STREAMS)}


def synchronize(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Add to ``waits`` the events of earlier operations that conflict with an operation."""
    walker = _Walker()
    for op in step.ops:
        walker.visit(op)
    waits = [walker.visit(op) for op in step.ops]
    ops = (op.with_(waits=w) if w else op for op, w in zip(step.ops, waits, strict=True))
    return step.with_(ops=tuple(ops))


@dataclass(frozen=True, slots=True)
class _Visit:
    """An operation in one walk: the ``tick`` of its stream, and all that is over when it is over."""

    op: Op
    stream: int
    tick: int
    clock: tuple[int, ...]


class _Walker:
    """Follows all streams in program order with one clock entry per stream."""

    def __init__(self) -> None:
        self.clocks: list[tuple[int, ...]] = [(0,) * len(STREAMS) for _ in STREAMS]
        self.writer: dict[Token, _Visit] = {}
        self.readers: dict[Token, list[_Visit]] = defaultdict(list)
        self.stays: dict[int, _Visit] = {}  # the last evict of each group; it implies those before
        self.compute: _Visit | None = None

    def visit(self, op: Op) -> tuple[Event, ...]:
        """Move past an operation; returns the events that it has to wait for."""
        stream = _STREAM[op.stream]
        clock = self.clocks[stream]
        changed = tuple(dict.fromkeys(op.writes + op.donates + op.frees))
        latest: dict[int, _Visit] = {}  # per stream the last conflict, which implies those before
        for other in self._conflicts(op, changed):
            there = other.stream
            if (
                there != stream
                and clock[there] < other.tick
                and (there not in latest or latest[there].tick < other.tick)
            ):
                latest[there] = other
        waits: list[Event] = []
        for other in sorted(latest.values(), key=lambda v: (-sum(v.clock), v.stream)):
            if clock[other.stream] < other.tick:
                waits.append(other.op.event)
                clock = tuple(map(max, clock, other.clock))
        tick = clock[stream] + 1
        clock = (*clock[:stream], tick, *clock[stream + 1 :])
        self.clocks[stream] = clock
        self._record(_Visit(op, stream, tick, clock), changed)
        return tuple(waits)

    def _conflicts(self, op: Op, changed: tuple[Token, ...]) -> Iterator[_Visit]:
        """Earlier operations that must be over before ``op`` starts."""
        for token in op.reads + changed:
            if token in self.writer:
                yield self.writer[token]
        for token in changed:
            yield from self.readers[token]
        if op.kind == "prefetch":
            end = op.offset + op.nbytes
            for visit in self.stays.values():
                if visit.op.offset < end and op.offset < visit.op.offset + visit.op.nbytes:
                    yield visit
        elif (
            op.stream != "compute"
            and self.compute is not None
            and any(token[0] in DEVICE_TOKENS for token in op.writes)
        ):
            yield self.compute  # the memory it takes may have been given back just before

    def _record(self, visit: _Visit, changed: tuple[Token, ...]) -> None:
        for token in changed:
            self.writer[token] = visit
            self.readers[token] = []
        for token in visit.op.reads:
            self.readers[token].append(visit)
        if visit.op.stream == "compute":
            self.compute = visit
            if visit.op.kind == "evict" and visit.op.group >= 0:
                self.stays[visit.op.group] = visit
