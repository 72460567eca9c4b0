"""Time streams that share host memory, or the cores of a CPU, by an event-driven clock.

At each moment every running operation has the same share of its full speed, the largest at which what all
of them draw stays within the capacity. Operations start in the order of their stream, when what they wait
for is over; what runs changes only when one ends, so a step takes as many moments as it has operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megacompile.hardware.machine import Machine
from megacompile.schedule.op_table import Stream
from megacompile.schedule.step import Event, Op


def shared_times(
    ops: Sequence[Op], seconds: Sequence[float], machine: Machine, runs: int
) -> tuple[list[float], list[float]]:
    """(starts, ends) of all operations of ``runs`` steps in a row; ``seconds`` are those alone."""
    causes = _causes(ops, runs)
    draws = [_draws(op, t, machine) for op, t in zip(ops, seconds, strict=True)] * runs
    lengths = list(seconds) * runs
    streams = [op.stream for op in ops] * runs
    slow = _slow_by_cores if machine.shared_cores else _slow_updates
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
        slow(pace, streams, machine)
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


def _slow_by_cores(pace: dict[int, float], streams: Sequence[Stream], machine: Machine) -> None:
    """Raise the paces of compute and of what runs beside it to those that were measured together."""
    if 0 < sum(streams[i] == "compute" for i in pace) < len(pace):
        for i in pace:
            slower = machine.compute_beside if streams[i] == "compute" else machine.others_beside
            pace[i] = max(pace[i], slower)


def _slow_updates(pace: dict[int, float], streams: Sequence[Stream], machine: Machine) -> None:
    """Raise the paces of what the host does to state and of copies beside it to those measured together."""
    if machine.adam_beside_h2d == machine.adam_beside_d2h == 1.0:
        return
    running = {streams[i]: i for i in pace}
    beside: tuple[tuple[Stream, float], ...]
    beside = ("h2d", machine.adam_beside_h2d), ("d2h", machine.adam_beside_d2h)
    for stream, slower in beside if "host" in running else ():
        if stream in running:
            for i in (running["host"], running[stream]):
                pace[i] = max(pace[i], slower)


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
        memory = (op.nbytes / op.ranks + op.moved_bytes) / seconds / machine.host_bandwidth
    return cores, memory
