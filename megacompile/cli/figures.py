"""Figures of a planned step: what is alive, who waits for whom.

In: a workload, a planned step, a machine. Out: plain numbers in seconds and bytes, each by the
definition in its docstring, so that a report can be checked by hand.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megacompile.machine.rates import Machine
from megacompile.machine.simulate import duration
from megacompile.plan.workload import Workload
from megacompile.search.candidates import Planned
from megacompile.search.least import alive_before
from megacompile.step.operations import STREAMS, Step, Stream, memory_curve


def alive_at_peak(step: Step, work: Workload) -> dict[str, int]:
    """Device bytes at the step's highest point, by kind; they add up to the peak."""
    curve = memory_curve(step)
    index, peak = max(curve, key=lambda point: point[1], default=(0, 0))
    parts = {
        "weight slots": step.slab_bytes,
        "weights and state that stay": step.constant_bytes - work.constant_bytes,
        "buffers and constants": work.constant_bytes,
    }
    kinds = {"x": "activations between blocks", "saved": "tensors kept for the backward",
             "g": "activation gradients", "wg": "weight gradients on their way"}  # fmt: skip
    parts |= dict.fromkeys(kinds.values(), 0)
    for token in alive_before(step, index):
        parts[kinds[token[0]]] += step.token_bytes[token]
    parts["the running block's own"] = peak - sum(parts.values())
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def compute_parts(step: Step, machine: Machine, model_flops: float) -> dict[str, float]:
    """Busy seconds of the compute stream: model FLOPs, those beyond (recompute), memory traffic, launches,
    and what of gradients and updates is done there."""
    updates = [op for op in step.on("compute") if op.kind in ("accumulate", "norm", "adam")]
    ops = [op for op in step.ops if op.kind in ("forward", "recompute", "backward")]
    flops = sum(op.flops for op in ops)
    return {
        "model FLOPs": model_flops / machine.flops,
        "FLOPs beyond, mostly recompute": max(0.0, flops - model_flops) / machine.flops,
        "memory traffic": sum(op.moved_bytes for op in ops) / machine.memory_bandwidth,
        "launches": machine.launch_seconds * len(ops),
        "updates on the device": sum(duration(op, machine) for op in updates),
    }


@dataclass(frozen=True)
class Stall:
    """Seconds of a step that compute waits because of one stream."""

    cause: str
    seconds: float


_CAUSES = {"compute": "compute", "h2d": "copies to the device", "d2h": "copies to the host",
           "host": "host Adam and norms", "nvme_read": "reads from NVMe",
           "nvme_write": "writes to NVMe"}  # fmt: skip


def stalls(planned: Planned) -> tuple[Stall, ...]:
    """Gaps of the compute stream, each charged to the stream that is behind in the chain of waits."""
    step, timeline = planned.step, planned.timeline
    chain = _Chain(planned)
    seconds: dict[str, float] = defaultdict(float)
    ready = chain.begin
    for index, op in enumerate(step.ops):
        if op.stream == "compute":
            gap = timeline.starts[index] - ready
            if gap > 1e-9:
                seconds[chain.behind(index)] += gap
            ready = timeline.ends[index]
    rest = timeline.step_seconds - timeline.busy["compute"] - sum(seconds.values())
    if rest > 1e-3 * timeline.step_seconds:  # a stream that is busy for longer than compute sets the pace
        others = [s for s in STREAMS if s != "compute"]
        seconds[max(others, key=lambda s: timeline.busy[s])] += rest
    found = [Stall(_CAUSES[s], t) for s, t in seconds.items() if t > 1e-4 * timeline.step_seconds]
    return tuple(sorted(found, key=lambda s: -s.seconds))


def idle_causes(planned: Planned) -> dict[Stream, dict[str, float]]:
    """Idle seconds of each other stream in one step, by the stream that it waits for.

    A gap before an operation is charged to what that operation waits for and ends last; a gap without
    one, and what is left of the step, is time in which there is nothing to do.
    """
    step, timeline = planned.step, planned.timeline
    period = timeline.step_seconds
    latest = {op.event: (timeline.ends[i] - period, op.stream) for i, op in enumerate(step.ops)}
    ready = {op.stream: timeline.ends[i] - period for i, op in enumerate(step.ops)}
    found: dict[Stream, dict[str, float]] = {s: defaultdict(float) for s in ready}
    for index, op in enumerate(step.ops):
        start, end = timeline.starts[index], timeline.ends[index]
        when, cause = max((latest[e] for e in op.waits if e in latest), default=(ready[op.stream], op.stream))
        gap = start - ready[op.stream]
        if gap > 1e-9 and end > start:
            waited = min(gap, max(0.0, when - ready[op.stream])) if cause != op.stream else 0.0
            found[op.stream][_CAUSES.get(cause, cause)] += waited
        if end > start:
            ready[op.stream] = end
        latest[op.event] = (end, op.stream)
    for stream, causes in found.items():
        rest = period - timeline.busy[stream] - sum(causes.values())
        causes["nothing to do"] = max(0.0, rest)
    return {
        stream: {name: t for name, t in causes.items() if t > 1e-3 * period}
        for stream, causes in found.items()
        if stream != "compute"
    }


class _Chain:
    """Walks back from a compute operation through what it waited for, to the stream that is late."""

    def __init__(self, planned: Planned) -> None:
        self.ops, self.ends = planned.step.ops, planned.timeline.ends
        period = planned.timeline.step_seconds
        last = max((i for i, op in enumerate(self.ops) if op.stream == "compute"), default=-1)
        self.begin = self.ends[last] - period if last >= 0 else 0.0
        self.before: list[list[tuple[float, int]]] = []  # (end of a cause, its index)
        # what an operation waits for and this step has not recorded yet is of the step before
        latest = {op.event: (self.ends[i] - period, i) for i, op in enumerate(self.ops)}
        streams: dict[str, tuple[float, int]] = {}
        for index, op in enumerate(self.ops):
            own = [streams[op.stream]] if op.stream in streams else []
            self.before.append([*(latest[e] for e in op.waits if e in latest), *own])
            latest[op.event] = streams[op.stream] = (self.ends[index], index)

    def behind(self, index: int) -> str:
        """The stream whose own backlog delayed the compute operation ``index``."""
        foreign = [c for c in self.before[index] if self.ops[c[1]].stream != "compute"]
        if not foreign:
            return "host"
        _, index = max(foreign)
        for _ in range(len(self.ops)):
            cause = max(self.before[index], default=None)
            if cause is None or self.ops[cause[1]].stream in ("compute", self.ops[index].stream):
                break
            index = cause[1]
        return self.ops[index].stream
