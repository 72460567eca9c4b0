"""Figures of a planned step: host bytes by kind, what is alive, who waits for whom.

In: a workload, a planned step, a machine. Out: plain numbers in seconds and bytes, each by the
definition in its docstring, so that a report can be checked by hand.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from megacompile.host.offload import buffer_bytes, place_group
from megacompile.machine.rates import Machine
from megacompile.machine.simulate import duration
from megacompile.plan.assemble import Assembly
from megacompile.plan.plan import Plan
from megacompile.plan.workload import Workload
from megacompile.search.candidates import Planned
from megacompile.search.least import alive_before
from megacompile.step.operations import Step, kept_gradients, memory_curve, stash_bytes, stashes
from megacompile.step.spec import COMPUTES, STREAMS, Saved, Stream, Value, ValueGrad, WeightGrad


@dataclass(frozen=True)
class Host:
    """Host bytes by kind; ``buffers`` are the ring that gradients pass, ``stash`` offloaded tensors.

    ``window`` are the buffers that state on NVMe passes through; ``nvme`` lies on the drive and is not in
    ``total``.
    """

    masters: int
    moments: int
    gradients: int
    buffers: int
    stash: int
    window: int = 0
    nvme: int = 0

    @property
    def state(self) -> int:
        return self.masters + self.moments

    @property
    def total(self) -> int:
        return self.masters + self.moments + self.gradients + self.buffers + self.stash + self.window


def host_bytes(assembly: Assembly, step: Step, plan: Plan | None = None) -> Host:
    """What a step keeps in host memory; gradients that are summed are kept in fp32.

    A ``plan`` may leave state and stashes on NVMe; without one all state is in RAM. The host has room for
    what is on the device, so that it can go back.
    """
    elements = {g.index: g.elements for g in assembly.groups}
    trained = sum(g.elements for g in assembly.groups if g.trainable)
    gradients = sum(
        assembly.groups[g].nbytes if own else 4 * elements[g] for g, own in kept_gradients(step).items()
    )
    host = Host(4 * sum(elements.values()), 8 * trained, gradients, sum(step.ring), stash_bytes(step))
    return host if plan is None else _with_drive(host, assembly, plan, step)


def _with_drive(host: Host, assembly: Assembly, plan: Plan, step: Step) -> Host:
    states = [g.state for g in plan.groups]
    stashed = sum(stashes(step, "nvme_write").values())
    if not stashed and all(state in ("host", "device") for state in states):
        return host
    places = [place_group(g, "fp32", state) for g, state in zip(assembly.groups, states, strict=True)]
    kept = [g for g, state in zip(assembly.groups, states, strict=True) if state == "host" and g.trainable]
    moments = sum(8 * g.elements for g in kept)
    return replace(
        host,
        masters=sum(p.ram_bytes for p in places) - moments,
        moments=moments,
        window=plan.window * sum(buffer_bytes(places)),
        nvme=sum(p.storage_bytes for p in places) + stashed,
    )


def alive_at_peak(step: Step, work: Workload) -> dict[str, int]:
    """Device bytes at the step's highest point, by kind; they add up to the peak."""
    curve = memory_curve(step)
    index, peak = max(curve, key=lambda point: point[1], default=(0, 0))
    parts = {
        "weight slots": step.slab_bytes,
        "weights and state that stay": step.constant_bytes - work.constant_bytes,
        "buffers and constants": work.constant_bytes,
    }
    kinds = {Value: "activations between blocks", Saved: "tensors kept for the backward",
             ValueGrad: "activation gradients", WeightGrad: "weight gradients on their way"}  # fmt: skip
    parts |= dict.fromkeys(kinds.values(), 0)
    for token in alive_before(step, index):
        parts[kinds[type(token)]] += step.token_bytes[token]
    parts["the running block's own"] = peak - sum(parts.values())
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def compute_parts(step: Step, machine: Machine, model_flops: float) -> dict[str, float]:
    """Busy seconds of the compute stream: model FLOPs, those beyond (recompute), memory traffic, launches,
    and what of gradients and updates is done there."""
    updates = [op for op in step.on("compute") if op.kind in ("accumulate", "norm", "adam")]
    ops = [op for op in step.ops if op.kind in COMPUTES]
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
