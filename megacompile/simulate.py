"""Simulate: when each operation of a step runs on a machine, and how long the step takes.

Event-driven over the streams of the light step, each in order as issued, with the waits that the step
contains. It is the planner's objective and reads the very step that is emitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from megacompile.machine import Machine
from megacompile.step import STREAMS, Event, Op, Step, Stream


@dataclass(frozen=True)
class Timeline:
    """Start and end in seconds of each operation of the last of the simulated steps.

    ``step_seconds`` is the time from one step to the next when steps follow each other; ``busy`` the
    seconds that each stream works in a step.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    step_seconds: float
    busy: dict[Stream, float]


def simulate(step: Step, machine: Machine) -> Timeline:
    """Run the step twice in a row and report the second run."""
    seconds = [duration(op, machine) for op in step.ops]
    clock = dict.fromkeys(STREAMS, 0.0)
    latest: dict[Event, float] = {}
    begins: list[float] = []
    starts: list[float] = []
    ends: list[float] = []
    for _ in range(2):
        starts, ends = [], []
        begins.append(clock["compute"])
        for op, length in zip(step.ops, seconds, strict=True):
            start = max([clock[op.stream], *(latest.get(e, 0.0) for e in op.waits)])
            if op.stream != "compute":
                start = max(start, clock["compute"] if op.kind == "reload" else begins[-1])
            clock[op.stream] = latest[op.event] = start + length
            starts.append(start)
            ends.append(start + length)
    busy = {s: sum(t for op, t in zip(step.ops, seconds, strict=True) if op.stream == s) for s in STREAMS}
    period = clock["compute"] - begins[1]
    if machine.shared_cores:
        drives = ("nvme_read", "nvme_write")  # which need next to no core
        period += sum(t for s, t in busy.items() if s != "compute" and s not in drives)
    period = max(period, *busy.values())
    return Timeline(tuple(starts), tuple(ends), period, busy)


def duration(op: Op, machine: Machine) -> float:
    """Seconds that an operation takes alone on its stream."""
    if op.kind in ("forward", "recompute", "backward"):
        work = op.flops / machine.flops + op.moved_bytes / machine.memory_bandwidth
        return machine.launch_seconds + work
    if op.kind in ("prefetch", "reload"):
        return machine.copy_seconds + op.nbytes / machine.h2d_bandwidth
    if op.kind in ("push_grad", "offload"):
        return machine.copy_seconds + op.nbytes / machine.d2h_bandwidth
    if op.kind in ("adam", "norm"):
        return op.nbytes / machine.host_bandwidth
    if op.kind == "read":
        return op.nbytes / machine.nvme_read_bandwidth
    if op.kind == "write":
        return op.nbytes / machine.nvme_write_bandwidth
    return 0.0
