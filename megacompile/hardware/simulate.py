"""Simulate a step on a machine: seconds of every operation, links that share memory, measured steps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megacompile.hardware.kernel_ceilings import kernel_delay
from megacompile.hardware.machine import Machine
from megacompile.schedule.op_table import SPECS, STREAMS, Cost, Kind, Stream
from megacompile.schedule.step import Event, Op, Step
from megacompile.schedule.workload import Call
from megacompile.units import format_seconds

# ------------------------------------------------------------------------------------------------------------
# Contention: the event-driven clock for streams that share host memory, or the cores of a CPU.
#
# At each moment every running operation has the same share of its full speed, the largest at which what all
# of them draw stays within the capacity. Operations start in the order of their stream, when what they wait
# for is over; what runs changes only when one ends, so a step takes as many moments as it has operations.


def shared_times(
    ops: Sequence[Op], seconds: Sequence[float], machine: Machine, runs: int
) -> tuple[list[float], list[float]]:
    """(starts, ends) of all operations of ``runs`` steps in a row; ``seconds`` are those alone."""
    causes = _causes(ops, runs)
    draws = [_draws(op, t, machine) for op, t in zip(ops, seconds, strict=True)] * runs
    lengths = list(seconds) * runs
    computes = [op.stream == "compute" for op in ops] * runs
    count = len(lengths)
    waiting = [len(c) for c in causes]
    effects = _effects(causes)
    starts, ends = [0.0] * count, [0.0] * count
    running: dict[int, float] = {}  # operation -> seconds of its own that are left
    ready = [i for i in range(count) if not waiting[i]]
    now = 0.0
    while ready or running:
        while ready:
            index = ready.pop()
            starts[index] = now
            if lengths[index] > 0:
                running[index] = lengths[index]
                continue
            ends[index] = now
            _release(index, effects, waiting, ready)
        if not running:
            break
        pace = _paces(running, draws)
        if machine.shared_cores:
            _slow_each_other(pace, computes, machine)
        passed = min([left * pace[i] for i, left in running.items()])
        now += passed
        for index, left in list(running.items()):
            left -= passed / pace[index]
            if left > 1e-12 * lengths[index]:
                running[index] = left
                continue
            del running[index]
            ends[index] = now
            _release(index, effects, waiting, ready)
    return starts, ends


def _paces(running: Iterable[int], draws: Sequence[tuple[float, float]]) -> dict[int, float]:
    """Return how many times longer each running operation takes than alone."""
    cores = memory = 0.0
    for index in running:
        core, byte = draws[index]
        cores += core
        memory += byte
    slow_cores, slow_memory = max(1.0, cores), max(1.0, memory)
    if slow_cores == slow_memory == 1.0:
        return dict.fromkeys(running, 1.0)
    return {i: max(slow_cores if draws[i][0] else 1.0, slow_memory if draws[i][1] else 1.0) for i in running}


def _slow_each_other(pace: dict[int, float], computes: Sequence[bool], machine: Machine) -> None:
    """Raise the paces of compute and of what runs beside it to those that were measured together."""
    if 0 < sum(computes[i] for i in pace) < len(pace):
        for i in pace:
            pace[i] = max(pace[i], machine.compute_beside if computes[i] else machine.others_beside)


def _release(index: int, effects: list[list[int]], waiting: list[int], ready: list[int]) -> None:
    for effect in effects[index]:
        waiting[effect] -= 1
        if not waiting[effect]:
            ready.append(effect)


def _causes(ops: Sequence[Op], runs: int) -> list[list[int]]:
    """Per operation those that must be over before it starts: of its stream, waited for, or issuing it."""
    latest: dict[Event, int] = {}
    last: dict[str, int] = {}
    causes: list[list[int]] = []
    begin = -1  # the last compute operation of the step before
    given = [(op.stream, op.kind, op.waits, op.event) for op in ops]
    for _ in range(runs):
        for stream, kind, waits, event in given:
            before = {latest[e] for e in waits if e in latest} if waits else set()
            if stream in last:
                before.add(last[stream])
            if stream != "compute":
                issued = last.get("compute", -1) if kind == "reload" else begin
                if issued >= 0:
                    before.add(issued)
            last[stream] = latest[event] = len(causes)
            causes.append(list(before))
        begin = last.get("compute", -1)
    return causes


def _effects(causes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per operation those that it is a cause of."""
    effects: list[list[int]] = [[] for _ in causes]
    for index, before in enumerate(causes):
        for cause in before:
            effects[cause].append(index)
    return effects


def _draws(op: Op, seconds: float, machine: Machine) -> tuple[float, float]:
    """Shares of all cores, and of host memory bandwidth, that an operation takes at full speed."""
    cores = memory = 0.0
    if machine.shared_cores and not op.stream.startswith("nvme"):
        copy, update = 1, max(1, machine.cores // 2)
        threads = {"h2d": copy, "d2h": copy, "comm": copy, "host": update}.get(op.stream, machine.cores)
        cores = threads / machine.cores
    elif machine.shared_memory and seconds > 0 and op.stream not in ("compute", "comm"):
        memory = op.nbytes / op.ranks / seconds / machine.host_bandwidth
    return cores, memory


# ------------------------------------------------------------------------------------------------------------
# Simulate: when each operation of a step runs on a machine, and how long the step takes.
#
# Event-driven over the streams of the light step, each in order as issued, with the waits that the step
# contains, and with what streams share where the machine says that they do. It is the planner's objective and
# reads the very step that is emitted.


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
        moved = sum(op.nbytes // op.ranks for op in step.ops if op.stream not in ("compute", "comm"))
        period = max(period, moved / machine.host_bandwidth)
    return Timeline(tuple(starts), tuple(ends), max(period, *busy.values()), busy)


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
    """Seconds that a block function takes longer as attention's rates are not those of products."""
    rates = machine.attention_forward, machine.attention_backward
    found = zip(call.attention_flops, rates, strict=True)
    delay = sum(flops / rate - flops / machine.flops for flops, rate in found if rate is not None)
    return delay + kernel_delay(call, machine, attends=True)


def traffic_seconds(call: Call | Op, machine: Machine) -> float:
    """Seconds of a block function's memory traffic, and those that its grouped products wait for memory: each
    expert's weights are read for few rows."""
    work, nbytes = call.grouped
    waits = max(0.0, nbytes / machine.memory_bandwidth - work / machine.flops)
    return call.moved_bytes / machine.memory_bandwidth + waits + kernel_delay(call, machine, attends=False)


def _state_seconds(op: Op, machine: Machine) -> float:
    """Return the seconds to go over a group's state, or its gradient: as fast as the memory that they are
    in, and as the host multiplies."""
    on_gpu = op.stream == "compute" and not machine.shared_cores  # a CPU runs the same kernel there
    passes = op.nbytes / (machine.memory_bandwidth if on_gpu else machine.host_bandwidth)
    return passes + op.flops / machine.host_flops if op.flops else passes


def _fabric_seconds(op: Op, machine: Machine) -> float:
    """The slower of what a device and what its machine get from the others.

    Gathered weights enter a machine once and go round its devices. Of gradients that all ranks exchange,
    each of its devices gets its own part from every device elsewhere.
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
    """Over the link; what is on the device already is read and written there."""
    if op.stream == "comm":
        return 2 * op.nbytes / op.ranks / machine.memory_bandwidth
    return machine.copy_seconds + op.nbytes / op.ranks / machine.h2d_bandwidth


_SECONDS: dict[Cost, Callable[[Op, Machine], float]] = {
    "nothing": lambda op, machine: 0.0,
    "call": call_seconds,
    "products": call_seconds,
    "upload": _upload_seconds,
    "download": lambda op, machine: machine.copy_seconds + op.nbytes / op.ranks / machine.d2h_bandwidth,
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


# ------------------------------------------------------------------------------------------------------------
# A step as it ran, beside what was predicted of it.
#
# In:  a step and the traces that a runtime keeps of its last runs. Out: :class:`Measured`, one start and end
# per operation, and a table that says by how much the estimates of each kind of operation were off.


RUN: Event = ("run",)  # the entry of a trace that tells when the run began


@dataclass(frozen=True)
class Measured:
    """Start and end of each operation in seconds from the begin of the run; None where it is not timed.

    ``step_seconds`` ends with the last operation on the compute stream; updates may go on after it.
    """

    starts: tuple[float | None, ...]
    ends: tuple[float | None, ...]
    step_seconds: float


def align(step: Step, trace: Iterable[tuple[Event, float, float]]) -> Measured | None:
    """Give each operation its entry of a trace: the n-th of an event is its n-th operation."""
    entries: dict[Event, deque[tuple[float, float]]] = defaultdict(deque)
    for event, start, end in sorted(trace, key=lambda entry: entry[1]):
        entries[event].append((start, end))
    found = [entries[op.event].popleft() if entries[op.event] else None for op in step.ops]
    timed = [span for span in found if span is not None]
    if not timed:
        return None
    begin = entries[RUN][0][0] if entries[RUN] else min(start for start, _ in timed)
    compute = [s[1] for s, op in zip(found, step.ops, strict=True) if s and op.stream == "compute"]
    return Measured(
        tuple(s and s[0] - begin for s in found),
        tuple(s and s[1] - begin for s in found),
        max(compute, default=begin) - begin,
    )


@dataclass(frozen=True)
class Comparison:
    """Seconds of all operations of one kind, predicted and measured; ``worst`` was off the most."""

    kind: Kind
    count: int
    predicted: float
    measured: float
    worst: int

    @property
    def ratio(self) -> float:
        """Measured over predicted; above 1, the estimate was too low."""
        return self.measured / self.predicted if self.predicted else float("inf")


def compare(step: Step, timeline: Timeline, measured: Measured) -> list[Comparison]:
    """Per kind of operation, largest difference first; kinds that were not timed are left out."""
    pairs: dict[Kind, list[tuple[float, float, int]]] = defaultdict(list)
    for index, (op, start, end) in enumerate(zip(step.ops, measured.starts, measured.ends, strict=True)):
        if start is not None and end is not None:
            predicted = timeline.ends[index] - timeline.starts[index]
            pairs[op.kind].append((predicted, end - start, index))
    rows = []
    for kind, found in pairs.items():
        worst = max(found, key=lambda pair: abs(pair[1] - pair[0]))[2]
        rows.append(
            Comparison(kind, len(found), sum(p for p, _, _ in found), sum(m for _, m, _ in found), worst)
        )
    return sorted(rows, key=lambda row: -abs(row.measured - row.predicted))


def comparison_table(rows: Sequence[Comparison]) -> str:
    """The comparison as text."""
    lines = [f"{'operation':<12}{'count':>6}{'predicted':>14}{'measured':>14}{'ratio':>10}"]
    for row in rows:
        ratio = f"{row.ratio:.2f}" if row.predicted else "–"
        times = "".join(f"{format_seconds(seconds):>14}" for seconds in (row.predicted, row.measured))
        lines.append(f"{row.kind:<12}{row.count:>6}{times}{ratio:>10}")
    return "\n".join(lines)
