"""Make streams wait for each other exactly where data, slots or host buffers demand it.

The step is walked twice in a row, as it will run; the waits of the second walk are kept, so that they
cover what the step before left running. A wait that others imply is left out.
"""

from __future__ import annotations

from collections import defaultdict

from megacompile.plan import Mode, Plan
from megacompile.step import STREAMS, Event, Op, Step, Token
from megacompile.workload import Workload

Clock = tuple[int, ...]


def synchronize(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Add to ``waits`` the events of earlier operations that conflict with an operation."""
    walker = _Walker(step)
    for op in step.ops:
        walker.visit(op)
    return step.with_(ops=tuple(op.with_(waits=walker.visit(op)) for op in step.ops))


class _Walker:
    """Follows all streams in program order with one clock entry per stream."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.count = dict.fromkeys(STREAMS, 0)
        self.clocks: dict[str, Clock] = dict.fromkeys(STREAMS, (0,) * len(STREAMS))
        self.writer: dict[Token, tuple[Op, Clock]] = {}
        self.readers: dict[Token, list[tuple[Op, Clock]]] = defaultdict(list)
        self.stays: dict[int, tuple[int, int, Op, Clock]] = {}
        self.compute: tuple[Op, Clock] | None = None

    def visit(self, op: Op) -> tuple[Event, ...]:
        position = STREAMS.index(op.stream)
        clock = self.clocks[op.stream]
        waits: list[Event] = []
        for other, other_clock in sorted(
            self._conflicts(op), key=lambda pair: -self._time(pair[0], pair[1])
        ):
            there = STREAMS.index(other.stream)
            if clock[there] < other_clock[there]:
                waits.append(other.event)
                clock = tuple(map(max, clock, other_clock))
        self.count[op.stream] += 1
        clock = (*clock[:position], self.count[op.stream], *clock[position + 1 :])
        self.clocks[op.stream] = clock
        self._record(op, clock)
        return tuple(waits)

    def _time(self, op: Op, clock: Clock) -> int:
        return sum(clock)

    def _conflicts(self, op: Op) -> list[tuple[Op, Clock]]:
        """Earlier operations on other streams that must be over before ``op`` starts."""
        found: list[tuple[Op, Clock]] = []
        changed = {*op.writes, *op.donates, *op.frees}
        for token in {*op.reads, *changed}:
            if token in self.writer:
                found.append(self.writer[token])
            if token in changed:
                found += self.readers[token]
        if op.kind == "prefetch":
            end = op.offset + op.nbytes
            found += [
                (evict, clock)
                for start, stop, evict, clock in self.stays.values()
                if start < end and op.offset < stop
            ]
        if op.kind == "reload" and self.compute is not None:
            found.append(self.compute)  # its memory may have been freed just before
        return [(other, clock) for other, clock in found if other.stream != op.stream]

    def _record(self, op: Op, clock: Clock) -> None:
        for token in {*op.writes, *op.donates, *op.frees}:
            self.writer[token] = (op, clock)
            self.readers[token] = []
        for token in op.reads:
            self.readers[token].append((op, clock))
        if op.kind == "evict" and op.group >= 0:
            self.stays[op.group] = (op.offset, op.offset + op.nbytes, op, clock)
        if op.stream == "compute":
            self.compute = (op, clock)
