"""A lower bound for any plan: the linear relaxation of the whole-step problem.

Blocks may split between their choices and stashes, weight groups between being held and being fetched
again; transfers and updates overlap with compute as well as the step's order allows at all. What stays:
each stream's work, device bytes at every forward and backward (weight slots are a slab of fixed size, as
in every step), what must follow what (all compute of a step between the fetch of the first weights and
the push of the last gradient; all updates of a step before its next forward ends, and the first of the
next step after its gradient has come).

With updates deferred, a step is two phases: from the end of the last backward to the end of the first
micro-batch's last forward, in which all updates and one fetch of every trained group must happen, and the
rest, in which all gradients leave.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import Literal

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from megacompile.machine.rates import Machine
from megacompile.machine.simulate import duration
from megacompile.plan.plan import Mode
from megacompile.plan.workload import Call, Choice, Workload
from megacompile.step.operations import Op

Row = dict[int, float]
GB = 1e-9  # memory rows count in GB, times in seconds: all coefficients are of about one size
_PHASES = ("whole", "first", "second")


def relaxed_seconds(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> float:
    """Seconds below which no plan of this mode's step gets; inf where the relaxation is infeasible."""
    orders: tuple[Literal["depth", "breadth"], ...] = ("depth", "breadth")
    return min(
        _Relaxation(work, mode, machine, budget_bytes, order).solve()
        for order in orders[: 1 + (mode.micro_batches > 1)]
    )


class _Relaxation:
    """Variables are numbered as they are made; rows are sums that stay at or below a limit."""

    def __init__(
        self, work: Workload, mode: Mode, machine: Machine, budget: int, order: Literal["depth", "breadth"]
    ) -> None:
        self.work, self.mode, self.machine, self.budget, self.order = work, mode, machine, budget, order
        self.upper: list[float | None] = []
        self.rows: list[tuple[Row, float]] = []
        self.equal: list[tuple[Row, float]] = []
        self.time = {name: self._variable(None) for name in _PHASES}
        self.slab = self._variable(None)
        self.streams: dict[tuple[str, str], Row] = defaultdict(lambda: defaultdict(float))
        self.fixed: dict[tuple[str, str], float] = defaultdict(float)

    def solve(self) -> float:
        choices = [self._choose(b) for b in range(len(self.work.blocks))]
        held = [self._variable(1.0) for _ in self.work.groups]
        self._compute(choices)
        self._transfers(choices, held)
        self._updates()
        self._memory(choices, held)
        self._time()
        return self._run()

    # ---- rows -------------------------------------------------------------------------------------

    def _variable(self, upper: float | None) -> int:
        self.upper.append(upper)
        return len(self.upper) - 1

    def _choose(self, b: int) -> list[tuple[int, Choice, bool, int]]:
        """(variable, choice, whether its stash is on the host, bytes of the stash) of one block."""
        found = []
        for choice in {c.name: c for c in self.work.blocks[b].choices}.values():
            for on_host in (False, True):
                found.append((self._variable(1.0), choice, on_host, self._stash(b, choice)))
        self.equal.append(({v: 1.0 for v, *_ in found}, 1.0))
        return found

    def _stash(self, b: int, choice: Choice) -> int:
        """Bytes that wait for the block's own backward alone, from its forward on."""
        again = [c for c in (choice.recompute, choice.backward) if c is not None]
        reads = {v for call in again for v in call.reads}
        own = (v for v in reads if self._own(v, b) and not self.work.values[v].batch)
        kept = choice.saved_bytes if choice.recompute is None else 0
        return kept + sum(self.work.values[v].nbytes for v in own)

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

    def _own(self, value: int, b: int) -> bool:
        """Whether no other block's backward reads a value."""
        return self._readers[value] == {b}

    def _add(self, phase: str, stream: str, variable: int | None, seconds: float) -> None:
        if variable is None:
            self.fixed[phase, stream] += seconds
        else:
            self.streams[phase, stream][variable] += seconds

    def _compute(self, choices: list[list[tuple[int, Choice, bool, int]]]) -> None:
        micros = self.mode.micro_batches
        first = 1 if self.order == "depth" else micros
        for options in choices:
            for variable, choice, _, _ in options:
                ahead = self._call("forward", choice.forward)
                back = sum(
                    self._call("backward", c) for c in (choice.recompute, choice.backward) if c is not None
                )
                self._add("whole", "compute", variable, micros * (ahead + back))
                self._add("first", "compute", variable, first * ahead)
                self._add("second", "compute", variable, (micros - first) * ahead + micros * back)

    def _call(self, kind: str, call: Call) -> float:
        op = Op(kind, "compute", flops=call.flops, moved_bytes=call.moved_bytes, seconds=call.seconds)  # type: ignore[arg-type]
        return duration(op, self.machine)

    def _transfers(self, choices: list[list[tuple[int, Choice, bool, int]]], held: list[int]) -> None:
        micros, both = self.mode.micro_batches, ("whole", "second")
        passes = self._passes()
        for g, group in enumerate(self.work.groups):
            fetch = duration(Op("prefetch", "h2d", nbytes=group.nbytes), self.machine)
            self._add("whole", "h2d", None, fetch * passes[g])
            self._add("whole", "h2d", held[g], fetch * (1 - passes[g]))
            if g in self.work.contributions:
                self._add("first", "h2d", None, fetch)
        for block in self.work.blocks:
            for _, nbytes in block.grad_groups:
                push = duration(Op("push_grad", "d2h", nbytes=nbytes), self.machine)
                for phase in both:
                    self._add(phase, "d2h", None, micros * push)
        for options in choices:
            for variable, _, on_host, nbytes in options:
                if on_host and nbytes:
                    for kind, stream in (("offload", "d2h"), ("reload", "h2d")):
                        op = Op(kind, stream, nbytes=nbytes)  # type: ignore[arg-type]
                        self._add("whole", stream, variable, micros * duration(op, self.machine))

    def _passes(self) -> list[int]:
        """Fetches of each group that is not held: one for a forward and one for a backward, per pass.

        Neighbouring uses may share one, so blocks that follow each other count once.
        """
        backward = {g for b in self.work.blocks for c in b.choices for call in (c.recompute, c.backward)
                    if call is not None for g in call.groups}  # fmt: skip
        last = len(self.work.blocks) - 1
        passes = []
        for g in range(len(self.work.groups)):
            users = [i for i, b in enumerate(self.work.blocks)
                     if any(g in c.forward.groups for c in b.choices)]  # fmt: skip
            once = g not in backward or last in users
            each = 1 if once else 2
            passes.append(1 if self.order == "breadth" and once else each * (
                self.mode.micro_batches if self.order == "depth" else 1))  # fmt: skip
        return passes

    def _updates(self) -> None:
        for g in self.work.contributions:
            elements = self.work.groups[g].elements
            adam = duration(Op("adam", "host", nbytes=28 * elements), self.machine)
            norm = duration(Op("norm", "host", nbytes=4 * elements), self.machine)
            self._add("whole", "host", None, adam + norm * self.mode.keeps_gradients)
            self._add("first", "host", None, adam)
            self._add("second", "host", None, norm)

    def _memory(self, choices: list[list[tuple[int, Choice, bool, int]]], held: list[int]) -> None:
        """Stashes of earlier blocks, the running block's own tensors, and the slab, at every operation."""
        room = GB * (self.budget - self.work.constant_bytes)
        times = self.mode.micro_batches if self.order == "breadth" else 1
        kept: Row = {}
        total = self._variable(None)  # stashes of the blocks before, on the device
        self.equal.append(({total: 1.0}, 0.0))
        resident: Row = {}  # groups held since an earlier block
        for b, options in enumerate(choices):
            block = self.work.blocks[b]
            groups = sorted({g for _, c, _, _ in options for g in c.forward.groups})
            slots: Row = {self.slab: -1.0} | resident
            for g in groups:
                slots.pop(held[g], None)
            self.rows.append((slots, -GB * sum(self.work.groups[g].nbytes for g in groups)))
            resident |= {held[g]: GB * self.work.groups[g].nbytes for g in groups}
            tangents = sum(self.work.values[v].nbytes for v in block.tangents)
            high: list[Row] = [{total: 1.0, self.slab: 1.0} for _ in range(3)]
            for variable, choice, _, _ in options:
                high[0][variable] = GB * max(0, choice.forward.peak_bytes)
                kept_saved = choice.saved_bytes if choice.backward is not None else 0
                if choice.backward is not None:
                    high[1][variable] = GB * (kept_saved + tangents + max(0, choice.backward.peak_bytes))
                if choice.recompute is not None:
                    high[2][variable] = GB * (tangents + max(0, choice.recompute.peak_bytes))
            self.rows += [(row, room) for row in high]
            kept = {variable: GB * times * nbytes for variable, _, host, nbytes in options if not host}
            after = self._variable(None)
            self.equal.append(({after: 1.0, total: -1.0} | {v: -n for v, n in kept.items()}, 0.0))
            total = after

    def _time(self) -> None:
        whole, first, second = (self.time[name] for name in _PHASES)
        deferred = self.mode.keeps_gradients
        for (phase, stream), row in list(self.streams.items()) + [
            (key, {}) for key in self.fixed if key not in self.streams
        ]:
            if phase == "whole" or deferred:
                limit = -self.fixed[phase, stream]
                self.rows.append((dict(row) | {self.time[phase]: -1.0}, limit))
        if self.machine.shared_memory:
            self._share_memory()
        if deferred:
            self.rows.append(({first: 1.0, second: 1.0, whole: -1.0}, 0.0))
            self.rows.append((dict(self.streams["first", "compute"]) | {first: -1.0}, -self._entry()))
            self.rows.append(({first: -1.0}, -self._adams() - self._last_update_to_turn()))
            self.rows.append((dict(self.streams["second", "compute"]) | {second: -1.0}, -self._exit()))
        else:
            around = self._entry() + self._exit()
            self.rows.append((dict(self.streams["whole", "compute"]) | {whole: -1.0}, -around))
            idle = self._last_update_to_turn() + self._turn_to_first_gradient()
            self.rows.append(({whole: -1.0}, -self._adams() - idle))

    def _share_memory(self) -> None:
        """Bytes of copies, norms and updates through host memory, which carries one rate in all."""
        share = {"h2d": self.machine.h2d_bandwidth, "d2h": self.machine.d2h_bandwidth,
                 "host": self.machine.host_bandwidth}  # fmt: skip
        for phase in _PHASES if self.mode.keeps_gradients else _PHASES[:1]:
            row: defaultdict[int, float] = defaultdict(float)
            offloads: defaultdict[int, float] = defaultdict(float)
            fixed = 0.0
            for stream, rate in share.items():
                part = rate / self.machine.host_bandwidth
                fixed += part * self.fixed[phase, stream]
                for variable, seconds in self.streams[phase, stream].items():
                    (offloads if stream == "d2h" else row)[variable] += part * seconds
            copies = self.machine.copy_seconds * 4 * len(self.work.groups)  # fixed costs draw nothing
            time: Row = {self.time[phase]: -1.0}
            every = {v: row[v] + offloads[v] for v in {*row, *offloads}}
            self.rows.append((every | time, copies - fixed))
            # where nothing draws all there is, offloads may run beside: they are left out
            self.rows.append((row | time, copies - fixed + self._pushed_first() - self._undrawn(phase)))

    def _undrawn(self, phase: str) -> float:
        """Seconds' worth of host memory that nobody can draw: no update runs between the last one and the
        first gradient of the next step, and fetches alone draw less than all.
        """
        idle = self._last_update_to_turn()
        if self.mode.keeps_gradients and phase != "first":
            return 0.0
        if not self.mode.keeps_gradients:
            idle += self._turn_to_first_gradient()
        return idle * max(0.0, 1 - self.machine.h2d_bandwidth / self.machine.host_bandwidth)

    def _pushed_first(self) -> float:
        """Seconds' worth of host memory of the gradient that ends that time; it is pushed meanwhile."""
        if self.mode.keeps_gradients:
            return 0.0
        for block in reversed(self.work.blocks):
            if block.grad_groups:
                return sum(n for _, n in block.grad_groups) / self.machine.host_bandwidth
        return 0.0

    def _adams(self) -> float:
        return sum(self._seconds("adam", g) for g in self.work.contributions)

    def _seconds(self, kind: str, group: int, nbytes: int | None = None) -> float:
        sizes = {"adam": 28, "norm": 4}
        stream = {"adam": "host", "norm": "host", "prefetch": "h2d", "push_grad": "d2h"}[kind]
        own = self.work.groups[group]
        nbytes = nbytes if nbytes is not None else own.elements * sizes[kind] if kind in sizes else own.nbytes
        return duration(Op(kind, stream, nbytes=nbytes), self.machine)  # type: ignore[arg-type]

    def _entry(self) -> float:
        """Update and fetch of a group of the first block: before any compute of a step."""
        first = self.work.blocks[0]
        used = {g for g in self.work.contributions if all(g in c.forward.groups for c in first.choices)}
        return max((self._seconds("adam", g) + self._seconds("prefetch", g) for g in used), default=0.0)

    def _exit(self) -> float:
        """Push of what the last backward of a step gives, and its norm: after all compute of a step."""
        for block in self.work.blocks:
            if any(c.backward is not None for c in block.choices):
                norm = self.mode.keeps_gradients
                return max(
                    (self._seconds("push_grad", g, n) + norm * self._seconds("norm", g)
                     for g, n in block.grad_groups), default=0.0)  # fmt: skip
        return 0.0

    def _last_update_to_turn(self) -> float:
        """Whichever update is last: its group's fetch, and the forwards from its first user on."""
        rest, best = 0.0, float("inf")
        for block in reversed(self.work.blocks):
            rest += min(self._call("forward", c.forward) for c in block.choices)
            used = {g for c in block.choices for g in c.forward.groups} & set(self.work.contributions)
            best = min([best, *(rest + self._seconds("prefetch", g) for g in used)])
        return best if best < float("inf") else 0.0

    def _turn_to_first_gradient(self) -> float:
        """The backwards up to the first that gives a group its gradient, and that gradient's push."""
        total = 0.0
        for block in reversed(self.work.blocks):
            backs = [self._call("backward", c.backward) for c in block.choices if c.backward is not None]
            total += min(backs, default=0.0)
            if block.grad_groups:
                return total + min(self._seconds("push_grad", g, n) for g, n in block.grad_groups)
        return total

    # ---- solving ----------------------------------------------------------------------------------

    def _run(self) -> float:
        cost = np.zeros(len(self.upper))
        cost[self.time["whole"]] = 1.0
        result = linprog(
            cost, A_ub=self._matrix([r for r, _ in self.rows]), b_ub=[x for _, x in self.rows],
            A_eq=self._matrix([r for r, _ in self.equal]), b_eq=[x for _, x in self.equal],
            bounds=[(0, u) for u in self.upper], method="highs",
        )  # fmt: skip
        if result.status == 2:
            return float("inf")
        assert result.status == 0, result.message
        return float(result.fun)

    def _matrix(self, rows: list[Row]) -> coo_array:
        entries = [(i, j, x) for i, row in enumerate(rows) for j, x in row.items()]
        i, j, x = zip(*entries, strict=True)
        return coo_array((x, (i, j)), shape=(len(rows), len(self.upper)))
