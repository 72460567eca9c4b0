"""Simulate when each operation of a step runs on a machine, and how long the step takes.

Event-driven over the streams of the light step, each in order as issued, with the step's waits, and with the
bandwidth that streams share by the machine's description. It is the planner's objective and reads the very
step that is emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megacompile.hardware.contention import shared_times
from megacompile.hardware.kernel_prices import kernel_delay
from megacompile.hardware.machine import Machine
from megacompile.schedule.op_table import SPECS, STREAMS, Cost, Kind, Stream
from megacompile.schedule.step import Event, Op, Step
from megacompile.schedule.workload import Call


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


def simulate(step: Step, machine: Machine, seconds: list[float] | None = None) -> Timeline:
    """Run the step twice in a row and report the second run; ``seconds`` are those of its operations alone,
    where they are known."""
    if seconds is None:
        seconds = [duration(op, machine) for op in step.ops]
    shared = machine.shared_cores or machine.shared_memory
    both = shared_times(step.ops, seconds, machine, 2) if shared else _alone(step.ops, seconds)
    count = len(step.ops)
    starts, ends = both[0][count:], both[1][count:]
    computed = [i for i, op in enumerate(step.ops) if op.stream == "compute"]
    period = ends[computed[-1]] - both[1][computed[-1]] if computed else 0.0
    busy = dict.fromkeys(STREAMS, 0.0)
    for op, start, end, alone in zip(step.ops, starts, ends, seconds, strict=True):
        busy[op.stream] += end - start if shared else alone
    if machine.shared_memory:
        period = max(period, host_memory_bytes(step.ops) / machine.host_bandwidth)
    return Timeline(tuple(starts), tuple(ends), max(period, *busy.values()), busy)


def host_memory_bytes(ops: Iterable[Op]) -> int:
    """Bytes that operations move through host memory."""
    return sum(op.nbytes // op.ranks + op.moved_bytes for op in ops if op.stream not in ("compute", "comm"))


def _alone(ops: tuple[Op, ...], seconds: list[float]) -> tuple[list[float], list[float]]:
    """Starts and ends of two steps in a row whose streams share nothing."""
    clock = dict.fromkeys(STREAMS, 0.0)
    latest: dict[Event, float] = {}
    events = [op.event for op in ops]
    starts: list[float] = []
    ends: list[float] = []
    for _ in range(2):
        begin = clock["compute"]
        for op, event, length in zip(ops, events, seconds, strict=True):
            start = clock[op.stream]
            for wait in op.waits:
                start = max(start, latest.get(wait, 0.0))
            if op.stream != "compute":
                start = max(start, clock["compute"] if op.kind == "reload" else begin)
            clock[op.stream] = latest[event] = start + length
            starts.append(start)
            ends.append(start + length)
    return starts, ends


def call_seconds(call: Call | Op | None, machine: Machine) -> float:
    """Seconds of a block function alone: as measured, else by the machine's rates; of None, nothing.

    The host asks a GPU for kernels ahead of time, so the slower of the two counts: asking or work. The
    cores of a CPU do both.
    """
    if call is None:
        return 0.0
    if call.seconds:
        return call.seconds
    work = call.flops / machine.flops + traffic_seconds(call, machine) + attention_delay(call, machine)
    asking = asking_seconds(call, machine)
    return asking + work if machine.shared_cores else max(asking, work)


def asking_seconds(call: Call | Op, machine: Machine) -> float:
    """Seconds to ask for a block function: for each of its kernels on a GPU, for all at once on a CPU."""
    return machine.launch_seconds * (1 if machine.shared_cores else call.launches)


def attention_delay(call: Call | Op, machine: Machine) -> float:
    """Seconds that a block function takes longer as attention and our kernels are slower than products."""
    rates = machine.attention_forward, machine.attention_backward
    found = zip(call.attention_flops, rates, strict=True)
    delay = sum(flops / rate - flops / machine.flops for flops, rate in found if rate is not None)
    return delay + kernel_delay(call, machine)


def traffic_seconds(call: Call | Op, machine: Machine) -> float:
    """Seconds of a block function's memory traffic, and those that its grouped products wait for memory: each
    expert's weights are read for few rows."""
    work, nbytes = call.grouped
    waits = max(0.0, nbytes / machine.memory_bandwidth - work / machine.flops)
    return call.moved_bytes / machine.memory_bandwidth + waits


def _state_seconds(op: Op, machine: Machine) -> float:
    """Return the seconds to go over a group's state, or its gradient: as fast as the memory that they are
    in, or the host's update, and as the host multiplies."""
    on_gpu = op.stream == "compute" and not machine.shared_cores  # a CPU runs the same kernel there
    passes = op.nbytes / (machine.memory_bandwidth if on_gpu else machine.update_bandwidth)
    return passes + op.flops / machine.host_flops if op.flops else passes


def _fabric_seconds(op: Op, machine: Machine) -> float:
    """The slower of what a device and what its machine get from the others.

    Gathered weights enter a machine once and go round its devices. Each of its devices gets its own part of
    the gradients that all ranks exchange, from every device elsewhere.
    """
    assert machine.fabric_bandwidth is not None
    entering = op.nbytes * (machine.nodes - 1) / machine.nodes
    if op.kind == "reduce":
        entering *= op.ranks // machine.nodes
    between = entering / machine.network_bandwidth
    within = op.nbytes * (op.ranks - 1) / op.ranks / machine.fabric_bandwidth
    return machine.fabric_seconds + max(within, between)


def _network_seconds(op: Op, machine: Machine) -> float:
    """Two exchanges, for which all devices of a machine share its network; replicas that are on one machine
    exchange over its fabric."""
    assert machine.fabric_bandwidth is not None
    near = (machine.beside - 1) / max(1, machine.replicas - 1)
    devices = op.ranks // machine.nodes * machine.beside
    between = op.nbytes * (1 - near) * devices / machine.network_bandwidth
    return 2 * machine.fabric_seconds + max(op.nbytes * near / machine.fabric_bandwidth, between)


def _upload_seconds(op: Op, machine: Machine) -> float:
    """Over the link, once rows of tables are gathered; what is on the device already is read and written
    there."""
    if op.stream == "comm":
        return 2 * op.nbytes / op.ranks / machine.memory_bandwidth
    gathering = op.moved_bytes / machine.update_bandwidth
    return machine.copy_seconds + op.nbytes / op.ranks / machine.h2d_bandwidth + gathering


def _download_seconds(op: Op, machine: Machine) -> float:
    """Over the link; then gradients of rows are added up on the host."""
    adding = op.moved_bytes / machine.update_bandwidth
    return machine.copy_seconds + op.nbytes / op.ranks / machine.d2h_bandwidth + adding


_SECONDS: dict[Cost, Callable[[Op, Machine], float]] = {
    "nothing": lambda op, machine: 0.0,
    "call": call_seconds,
    "products": call_seconds,
    "upload": _upload_seconds,
    "download": _download_seconds,
    "device": lambda op, machine: op.nbytes / machine.memory_bandwidth,
    "state": _state_seconds,
    "nvme_read": lambda op, machine: op.nbytes / machine.nvme_read_bandwidth,
    "nvme_write": lambda op, machine: op.nbytes / machine.nvme_write_bandwidth,
    "fabric": _fabric_seconds,
    "network": _network_seconds,
}
_OF_KIND: dict[Kind, Callable[[Op, Machine], float]] = {k: _SECONDS[spec.cost] for k, spec in SPECS.items()}


def duration(op: Op, machine: Machine) -> float:
    """Seconds that an operation takes alone on its stream."""
    return _OF_KIND[op.kind](op, machine)
