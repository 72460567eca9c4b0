"""Figures of a planned step: what compute does, who waits for whom.

In: a planned step, a machine. Out: plain numbers in seconds, each by the definition in its docstring, so
that a report can be checked by hand.
"""

from __future__ import annotations

from collections import defaultdict

from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import attention_delay, duration, traffic_seconds
from megacompile.planner.plan_evaluator import Planned
from megacompile.schedule.op_table import COMPUTES, STREAMS, Stream
from megacompile.schedule.step import Step


def compute_parts(step: Step, machine: Machine, model_flops: float) -> dict[str, float]:
    """Busy seconds of the compute stream: model FLOPs, those beyond (recompute), what attention and
    recurrences take longer than products, memory traffic, what launches of kernels add to these, and what of
    gradients and updates is done there."""
    kinds = ("accumulate", "norm", "adam", "orthogonalize")
    updates = [op for op in step.on("compute") if op.kind in kinds]
    ops = [op for op in step.ops if op.kind in COMPUTES]
    flops = sum(op.flops for op in ops)
    attention = sum(attention_delay(op, machine) for op in ops)
    traffic = sum(traffic_seconds(op, machine) for op in ops)
    worked = flops / machine.flops + attention + traffic
    return {
        "model FLOPs": model_flops / machine.flops,
        "FLOPs beyond, mostly recompute": max(0.0, flops - model_flops) / machine.flops,
        "slower attention, recurrences": attention,
        "memory traffic": traffic,
        "launches": max(0.0, sum(duration(op, machine) for op in ops) - worked),
        "updates on the device": sum(duration(op, machine) for op in updates),
    }


CAUSES: dict[Stream, str] = {
    "compute": "compute", "h2d": "copies to the device", "d2h": "copies to the host",
    "host": "host Adam and norms", "nvme_read": "reads from NVMe", "nvme_write": "writes to NVMe",
    "comm": "exchanges between devices",
}  # fmt: skip
IDLE = "nothing to do"


def waits(planned: Planned) -> dict[Stream, dict[str, float]]:
    """Idle seconds of each stream in one step, by cause; with its busy time they add up to the step.

    A gap of the compute stream is charged to the stream that is behind in the chain of waits; one of another
    stream to what the operation after it waits for and ends last. What is left of the step is time in which
    compute keeps pace with the busiest stream, and another stream has nothing to do.
    """
    step, timeline = planned.step, planned.timeline
    period, chain = timeline.step_seconds, _Chain(planned)
    ready = {op.stream: timeline.ends[i] - period for i, op in enumerate(step.ops)}
    found: dict[Stream, dict[str, float]] = {stream: defaultdict(float) for stream in ready}
    for index, op in enumerate(step.ops):
        start, end, free = timeline.starts[index], timeline.ends[index], ready[op.stream]
        busy = end > start or op.stream == "compute"  # which also waits before what takes no time
        if busy and start - free > 1e-9:
            if op.stream == "compute":
                found[op.stream][CAUSES[chain.behind(index)]] += start - free
            elif foreign := chain.foreign(index):
                when, cause = max(foreign)
                found[op.stream][CAUSES[step.ops[cause].stream]] += min(start, max(free, when)) - free
        if busy:
            ready[op.stream] = end
    busiest = max((s for s in STREAMS if s != "compute"), key=lambda s: timeline.busy[s])
    for stream, causes in found.items():
        rest = max(0.0, period - timeline.busy[stream] - sum(causes.values()))
        causes[CAUSES[busiest] if stream == "compute" else IDLE] += rest
    return {
        stream: {name: t for name, t in sorted(causes.items(), key=lambda c: -c[1]) if t > 1e-3 * period}
        for stream, causes in found.items()
    }


class _Chain:
    """The causes that each operation waits for, in this step or the one before: their ends with their
    indices."""

    def __init__(self, planned: Planned) -> None:
        self.ops, ends = planned.step.ops, planned.timeline.ends
        period = planned.timeline.step_seconds
        # what an operation waits for and this step has not recorded yet is of the step before
        latest = {op.event: (ends[i] - period, i) for i, op in enumerate(self.ops)}
        streams: dict[Stream, tuple[float, int]] = {}
        self._before: list[list[tuple[float, int]]] = []
        for index, op in enumerate(self.ops):
            own = [streams[op.stream]] if op.stream in streams else []
            self._before.append([*(latest[e] for e in op.waits if e in latest), *own])
            latest[op.event] = streams[op.stream] = (ends[index], index)

    def foreign(self, index: int) -> list[tuple[float, int]]:
        """Return what an operation waits for on other streams."""
        return [c for c in self._before[index] if self.ops[c[1]].stream != self.ops[index].stream]

    def behind(self, index: int) -> Stream:
        """The stream whose own backlog delayed the compute operation ``index``."""
        foreign = self.foreign(index)
        if not foreign:
            return "host"
        _, index = max(foreign)
        for _ in range(len(self.ops)):
            cause = max(self._before[index], default=None)
            if cause is None or self.ops[cause[1]].stream in ("compute", self.ops[index].stream):
                break
            index = cause[1]
        return self.ops[index].stream
