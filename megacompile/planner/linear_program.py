"""Decide how many blocks of a kind should be treated how, by a linear program over counts.

Equal blocks are interchangeable but for their place, so the plan's large decisions are counts: of each kind
of block, how many keep what and where that waits; of each kind of weight group, how many stay on the
device. The program's rows are the streams' work in two phases (forward, then backward; transfers hide
behind the compute of their own phase), the memory at the turn between them, and host memory. Its solution
is a start for the search in the simulator, which knows what counts cannot tell: where and when.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megacompile.planner.simplex import Array, minimise
from megacompile.planner.treatments import Kind, Takes, Treatments
from megacompile.schedule.plan import norm_bytes

_TIE = 1e-3  # weight of each stream's own work: of two mixtures as fast, the one that works less


@dataclass(frozen=True)
class Mixture:
    """Per kind and treatment a count, not yet whole; ``deferred`` is the share of updates that the backward
    has no time for, ``seconds`` what the program expects of a step.
    """

    blocks: tuple[tuple[Kind, tuple[float, ...]], ...]
    groups: tuple[tuple[Kind, tuple[float, ...]], ...]
    deferred: float
    seconds: float


class Mixer:
    """The program of one workload, mode, machine and order, solved for any room on the device.

    ``drive_after`` are the host bytes of a step from which on it pushes state to a drive, if there is one.
    """

    def __init__(self, found: Treatments, drive_after: int | None) -> None:
        self.work, self.mode, self.machine = found.work, found.mode, found.machine
        self.blocks, self.groups = found.blocks, found.groups
        self.drive_after = drive_after

    def solve(self, device_bytes: float, host_bytes: float | None) -> Mixture | None:
        """The fastest mixture whose offloaded activations and held groups take at most these bytes."""
        kinds = self.blocks + self.groups
        columns = [(k, t) for k, kind in enumerate(kinds) for t in range(len(kind.treatments))]
        takes = Takes(*np.array([kinds[k].takes[t] for k, t in columns]).T)
        work = sum(takes.forward + takes.backward)
        count = len(columns)
        rows, limits = [], []
        for kind in range(len(kinds)):  # counts of a kind add up; >= suffices, as nothing is free
            rows.append([-float(k == kind) for k, _ in columns] + [0.0] * 3)
            limits.append(-float(len(kinds[kind].members)))
            if any(name == "resident" for _, name in kinds[kind].treatments):
                rows.append([float(k == kind) for k, _ in columns] + [0.0] * 3)
                limits.append(float(len(kinds[kind].members)))
        counted = len(rows)
        for row, limit in self._time_rows(takes):
            rows.append(row)
            limits.append(limit)
        scale = max(1.0, *takes.device_bytes, *takes.host_bytes)
        rows.append([*(takes.device_bytes / scale), 0.0, 0.0, 0.0])
        limits.append(max(0.0, device_bytes) / scale)
        if host_bytes is not None:
            rows.append([*(takes.host_bytes / scale), 0.0, 0.0, 0.0])
            limits.append(max(0.0, host_bytes) / scale)
        cost = np.array([*(_TIE * work), 0.0, 0.0, 1.0])
        unit = max(1e-30, *np.concatenate(takes.forward + takes.backward))  # seconds of about one
        a = np.array(rows)
        time_rows = slice(counted, len(a) - 1 - (host_bytes is not None))
        b = np.array(limits)
        a[time_rows, :count] /= unit
        b[time_rows] /= unit
        cost[:count] /= unit
        x = minimise(cost, a, b)
        return None if x is None else self._mixture(x, unit)

    def _time_rows(self, takes: Takes[Array]) -> list[tuple[list[float], float]]:
        """(row, limit) of what keeps the two phases and the whole, the last variables, from being shorter."""
        first, second, whole = (np.eye(3)[i] for i in range(3))
        found: list[tuple[list[float], float]] = []

        def no_longer(work: np.ndarray, phase: np.ndarray, fixed: float = 0.0) -> None:
            found.append(([*work, *-phase], -fixed))

        keeps = self.mode.keeps_gradients
        if self.drive_after is not None:
            # a byte of offloaded activations is a byte of state that is read and written for its update
            rate = min(self.machine.nvme_read_bandwidth, self.machine.nvme_write_bandwidth)
            beyond = (self._kept - self.drive_after) / rate
            no_longer(takes.host_bytes / rate, first if keeps else whole, beyond)
        if self.machine.shared_cores:
            copy, update = 1 / self.machine.cores, max(1, self.machine.cores // 2) / self.machine.cores
            shares = (1.0, copy, copy, update)
            no_longer(np.dot(shares * 2, np.array([*takes.forward, *takes.backward])), whole)
            return found
        link = self._link_share
        for phase, (compute, h2d, d2h, host) in ((first, takes.forward), (second, takes.backward)):
            no_longer(compute, phase)
            no_longer(h2d, phase)
            # the host's norms slow the gradients that leave meanwhile
            no_longer(d2h + link * host if keeps and phase is second else d2h, phase)
            if keeps:
                no_longer(host + link * (h2d + d2h), phase)
        no_longer(0 * takes.device_bytes, whole - first - second)
        if not keeps:
            copied = sum(takes.forward[1:3]) + sum(takes.backward[1:3])
            no_longer(takes.host_forward + takes.host_backward + link * copied, whole)
        return found

    def _mixture(self, x: np.ndarray, unit: float) -> Mixture:
        counts: list[tuple[Kind, tuple[float, ...]]] = []
        place = 0
        for kind in self.blocks + self.groups:
            size = len(kind.treatments)
            counts.append((kind, tuple(float(v) for v in x[place : place + size])))
            place += size
        blocks = len(self.blocks)
        adam = sum(
            n * takes.host_backward
            for kind, given in counts
            for n, takes in zip(given, kind.takes, strict=True)
        )
        deferred = 1 - float(x[-2]) * unit / adam if adam > 1e-12 and not self.machine.shared_cores else 0.0
        return Mixture(
            tuple(counts[:blocks]), tuple(counts[blocks:]), min(1.0, max(0.0, deferred)), float(x[-1]) * unit
        )

    @property
    def _link_share(self) -> float:
        """Return by how many of its seconds a copy over the link delays an update beside it: by the share of
        host memory bandwidth that it draws beyond what an update leaves, or as they were measured."""
        machine = self.machine
        if not machine.shared_memory:
            return 0.0
        left = machine.host_bandwidth - machine.update_bandwidth
        drawn = (machine.h2d_bandwidth + machine.d2h_bandwidth) / 2 - left
        measured = (machine.adam_beside_h2d + machine.adam_beside_d2h) / 2 - 1
        return max(drawn / machine.host_bandwidth, measured)

    @property
    def _kept(self) -> int:
        """Host bytes of gradients that wait."""
        return sum(norm_bytes(self.work, self.mode, g) for g in self.work.contributions)
