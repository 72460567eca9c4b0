"""Mixture: how many blocks of a kind should be treated how, by a linear program over counts.

Equal blocks are interchangeable but for their place, so the plan's large decisions are counts: of each
kind of block, how many keep what and where that waits; of each kind of weight group, how many stay on the
device. The program's rows are the streams' work in two phases (forward, then backward; transfers hide
behind the compute of their own phase), the memory at the turn between them, and host memory. Its solution
is a start for the search in the simulator, which knows what counts cannot tell: where and when.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from megacompile.machine.rates import Machine
from megacompile.machine.simulate import call_seconds, duration
from megacompile.plan.plan import Mode, norm_bytes
from megacompile.plan.workload import Choice, Workload
from megacompile.search.simplex import minimise
from megacompile.step.operations import Op

Order = Literal["depth", "breadth"]
Treatment = tuple[str, str]  # of a block: (choice, stash); of a group: ("", keep) or ("", "resident")
_TIE = 1e-3  # weight of each stream's own work: of two mixtures as fast, the one that works less


@dataclass(frozen=True)
class Kind:
    """Interchangeable blocks, or weight groups, and what each treatment of one of them takes."""

    members: tuple[int, ...]
    treatments: tuple[Treatment, ...]
    takes: tuple[Sequence[float], ...]  # per treatment one entry per row of the program


@dataclass(frozen=True)
class Mixture:
    """Per kind and treatment a count, not yet whole; ``late`` is the share of updates that the backward
    has no time for, ``seconds`` what the program expects of a step.
    """

    blocks: tuple[tuple[Kind, tuple[float, ...]], ...]
    groups: tuple[tuple[Kind, tuple[float, ...]], ...]
    late: float
    seconds: float


# rows: work of each stream in each phase, device bytes at the turn, host bytes of stashes, and what a
# group whose state is on the device takes from all updates, norms and pushes
_ROWS = (
    "compute F", "h2d F", "d2h F", "compute B", "h2d B", "d2h B", "device", "host", "adam", "norm", "push",
)  # fmt: skip


class Mixer:
    """The program of one workload, mode, machine and order, solved for any room on the device."""

    def __init__(
        self,
        work: Workload,
        mode: Mode,
        machine: Machine,
        order: Order,
        *,
        drive_after: int | None = None,
        residents: Collection[int] = (),
        resident: Collection[int] = (),
    ) -> None:
        self.work, self.mode, self.machine, self.order = work, mode, machine, order
        self.drive_after = drive_after  # host bytes of a step, from which on it pushes state to a drive
        self.residents = frozenset(residents)  # groups whose state may be on the device
        self.resident = frozenset(resident)  # groups whose state must be
        self.breadth = order == "breadth"
        m = mode.micro_batches
        self.forwards = (m, 0) if self.breadth else (1, m - 1)  # in the first phase, in the second
        self.blocks = self._kinds([self._block(b) for b in range(len(work.blocks))])
        self.groups = self._kinds([self._group(g) for g in range(len(work.groups))])

    def solve(self, device_bytes: float, host_bytes: float | None) -> Mixture | None:
        """The fastest mixture whose stashes and held groups take at most these bytes."""
        kinds = self.blocks + self.groups
        columns = [(k, t) for k, kind in enumerate(kinds) for t in range(len(kind.treatments))]
        takes = np.array([kinds[k].takes[t] for k, t in columns]).T  # rows x columns
        count = len(columns)
        rows, limits = [], []
        for kind in range(len(kinds)):  # counts of a kind add up; >= suffices, as nothing is free
            rows.append([-float(k == kind) for k, _ in columns] + [0.0] * 3)
            limits.append(-float(len(kinds[kind].members)))
        for row, limit in self._time_rows(takes):
            rows.append(row)
            limits.append(limit)
        scale = max(1.0, float(takes[6:8].max(initial=1.0)))
        rows.append([*(takes[6] / scale), 0.0, 0.0, 0.0])
        limits.append(max(0.0, device_bytes) / scale)
        if host_bytes is not None:
            rows.append([*(takes[7] / scale), 0.0, 0.0, 0.0])
            limits.append(max(0.0, host_bytes) / scale)
        cost = np.array([*(_TIE * takes[:6].sum(axis=0)), 0.0, 0.0, 1.0])
        unit = max(float(takes[:6].max(initial=0.0)), 1e-30)  # seconds of about one
        a = np.array(rows)
        time_rows = slice(len(kinds), len(a) - 1 - (host_bytes is not None))
        b = np.array(limits)
        a[time_rows, :count] /= unit
        b[time_rows] /= unit
        cost[:count] /= unit
        x = minimise(cost, a, b)
        return None if x is None else self._mixture(x, unit)

    def _time_rows(self, takes: np.ndarray) -> list[tuple[list[float], float]]:
        """(row, limit) of what keeps the two phases and the whole, the last variables, from being shorter."""
        first, second, whole = (np.eye(3)[i] for i in range(3))
        adam, norm, pushes = self._fixed
        found: list[tuple[list[float], float]] = []

        def no_longer(work: np.ndarray, fixed: float, phase: np.ndarray) -> None:
            found.append(([*work, *-phase], -fixed))

        if self.drive_after is not None:
            # a byte of stashes is a byte of state that is read and written for its update
            rate = min(self.machine.nvme_read_bandwidth, self.machine.nvme_write_bandwidth)
            updating = first if self.mode.keeps_gradients else whole
            no_longer(takes[7] / rate, (self._kept - self.drive_after) / rate, updating)
        if self.machine.shared_cores:
            cores = self.machine.cores
            copy, update = 1 / cores, max(1, cores // 2) / cores
            weights = np.array([1.0, copy, copy, 1.0, copy, copy, 0.0, 0.0, update, update, copy])
            no_longer(weights @ takes, update * (adam + norm) + copy * pushes, whole)
            return found
        link = self._link_share
        for i, phase in enumerate((first, first, first, second, second, second)):
            # the host's norms slow the gradients that leave meanwhile
            if i == 5:
                no_longer(takes[5] + takes[10] + link * takes[9], pushes + link * norm, phase)
            else:
                no_longer(takes[i], 0.0, phase)
        no_longer(0 * takes[0], 0.0, whole - first - second)
        ahead, back = takes[[1, 2]].sum(axis=0) * link, takes[[4, 5]].sum(axis=0) * link
        if self.mode.keeps_gradients:
            no_longer(ahead + takes[8], adam, first)
            no_longer(back + takes[9] + link * takes[10], norm + pushes * link, second)
        else:
            no_longer(ahead + back + takes[8] + link * takes[10], adam + pushes * link, whole)
        return found

    def _mixture(self, x: np.ndarray, unit: float) -> Mixture:
        counts: list[tuple[Kind, tuple[float, ...]]] = []
        place = 0
        for kind in self.blocks + self.groups:
            size = len(kind.treatments)
            counts.append((kind, tuple(float(v) for v in x[place : place + size])))
            place += size
        blocks = len(self.blocks)
        adam = self._fixed[0] + sum(
            n * takes[8] for kind, given in counts for n, takes in zip(given, kind.takes, strict=True)
        )
        late = 1 - float(x[-2]) * unit / adam if adam > 1e-12 and not self.machine.shared_cores else 0.0
        return Mixture(
            tuple(counts[:blocks]), tuple(counts[blocks:]), min(1.0, max(0.0, late)), float(x[-1]) * unit
        )

    @staticmethod
    def _kinds(items: list[dict[Treatment, tuple[float, ...]]]) -> tuple[Kind, ...]:
        found: dict[tuple[tuple[Treatment, tuple[float, ...]], ...], list[int]] = defaultdict(list)
        for index, takes in enumerate(items):
            found[tuple(takes.items())].append(index)
        return tuple(
            Kind(tuple(members), tuple(t for t, _ in key), tuple(v for _, v in key))
            for key, members in found.items()
        )

    # ---- what one block or group takes --------------------------------------------------------------

    def _block(self, b: int) -> dict[Treatment, tuple[float, ...]]:
        ahead, later = self.forwards
        m = self.mode.micro_batches
        takes: dict[Treatment, tuple[float, ...]] = {}
        for choice in self.work.blocks[b].choices:
            forward = call_seconds(choice.forward, self.machine)
            backward = call_seconds(choice.backward, self.machine)
            back = call_seconds(choice.recompute, self.machine) + backward
            stash = self.stash_bytes(b, choice)
            compute = (ahead * forward, later * forward + m * back)
            alive = stash * (m if self.breadth else 1)
            takes[choice.name, "device"] = (compute[0], 0.0, 0.0, compute[1], 0.0, 0.0, alive, *(0.0,) * 4)
            if stash:
                out = duration(Op("offload", "d2h", nbytes=stash), self.machine)
                back_in = duration(Op("reload", "h2d", nbytes=stash), self.machine)
                # one operation may run beside a stash on its way; compute waits for the rest
                away, home = max(0.0, out - forward), max(0.0, back_in - backward)
                takes[choice.name, "host"] = (
                    compute[0] + ahead * away, 0.0, ahead * out, compute[1] + later * away + m * home,
                    m * back_in, later * out, 0.0, float(stash * m), 0.0, 0.0, 0.0,
                )  # fmt: skip
        return takes

    def _group(self, g: int) -> dict[Treatment, tuple[float, ...]]:
        m, again = self.mode.micro_batches, g in self._wanted_again
        fetch = duration(Op("prefetch", "h2d", nbytes=self.work.groups[g].nbytes), self.machine)
        later = m - 1 if not self.breadth else 0
        nbytes = float(self.work.groups[g].nbytes)

        def takes(second: int, held: float) -> tuple[float, ...]:
            return (0.0, fetch, 0.0, 0.0, second * fetch, 0.0, held, *(0.0,) * 4)

        resident = {("", "resident"): self._resident(g)} if g in self.residents else {}
        if g in self.resident:
            return resident
        if not again and m == 1:
            return {("", "stream"): takes(0, 0.0), **resident}
        found = {("", "stream"): takes(later + (m if not self.breadth else 1) * again, 0.0)}
        if m > 1 and not self.breadth:
            found["", "micro"] = takes(later, nbytes)
        found["", "step"] = takes(0, nbytes)
        return found | resident

    def _resident(self, g: int) -> tuple[float, ...]:
        """State on the device: updated there, nothing of it on any other stream."""
        group, m = self.work.groups[g], self.mode.micro_batches
        waits = self.mode.keeps_gradients or len(self.work.contributions[g]) > 1
        held = group.nbytes + group.state_bytes + waits * group.gradient_bytes
        update = group.update_bytes / self.machine.memory_bandwidth
        pushes = [n for block in self.work.blocks for other, n in block.grad_groups if other == g]
        norm = norm_bytes(self.work, self.mode, g)
        if waits:
            update += (m * sum(pushes) + 2 * norm) / self.machine.memory_bandwidth
        return (
            0.0, 0.0, 0.0, update, 0.0, 0.0, float(held), 0.0,
            -duration(Op("adam", "host", nbytes=group.update_bytes), self.machine),
            -duration(Op("norm", "host", nbytes=norm), self.machine),
            -m * sum(duration(Op("push_grad", "d2h", nbytes=n), self.machine) for n in pushes),
        )  # fmt: skip

    def stash_bytes(self, b: int, choice: Choice) -> int:
        """Bytes that wait from a block's forward for its own backward alone."""
        calls = [c for c in (choice.recompute, choice.backward) if c is not None]
        reads = {v for call in calls for v in call.reads}
        own = [v for v in reads if self._readers[v] == {b} and not self.work.values[v].batch]
        saved = choice.saved_bytes if choice.recompute is None and choice.backward is not None else 0
        return saved + sum(self.work.values[v].nbytes for v in own)

    @cached_property
    def _readers(self) -> dict[int, set[int]]:
        """Per value the blocks that read it again after their forward."""
        readers: dict[int, set[int]] = defaultdict(set)
        for b, block in enumerate(self.work.blocks):
            for choice in block.choices:
                for call in (choice.recompute, choice.backward):
                    for v in call.reads if call is not None else ():
                        readers[v].add(b)
        return readers

    @cached_property
    def _wanted_again(self) -> set[int]:
        """Groups that a backward wants after other blocks have run since their forward."""
        last = len(self.work.blocks) - 1
        return {g for b, block in enumerate(self.work.blocks) if b < last for c in block.choices
                for call in (c.recompute, c.backward) if call is not None for g in call.groups}  # fmt: skip

    @property
    def _link_share(self) -> float:
        """Of host memory bandwidth, what a copy over the link draws, where that is shared."""
        machine = self.machine
        if not machine.shared_memory:
            return 0.0
        return (machine.h2d_bandwidth + machine.d2h_bandwidth) / 2 / machine.host_bandwidth

    @property
    def _kept(self) -> int:
        """Host bytes of gradients that wait."""
        return sum(norm_bytes(self.work, self.mode, g) for g in self.work.contributions)

    @cached_property
    def _fixed(self) -> tuple[float, float, float]:
        """Seconds of all updates, of all norms, of all pushes of gradients."""
        updated = self.work.contributions if self.mode.kind == "train" else ()
        trained = [self.work.groups[g] for g in updated]
        pushed = [n for block in self.work.blocks for _, n in block.grad_groups]
        adam = duration(Op("adam", "host", nbytes=sum(g.update_bytes for g in trained)), self.machine)
        normed = sum(norm_bytes(self.work, self.mode, g) for g in updated)
        norm = duration(Op("norm", "host", nbytes=normed), self.machine)
        pushes = sum(duration(Op("push_grad", "d2h", nbytes=n), self.machine) for n in pushed)
        return adam, norm, pushes * self.mode.micro_batches
