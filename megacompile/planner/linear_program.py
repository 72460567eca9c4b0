"""Mix the checkpoint policies of equal blocks by a linear program, and make a plan of their counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import call_seconds, duration
from megacompile.schedule.plan import BlockPlan, GroupPlan, Mode, Plan, norm_bytes
from megacompile.schedule.step import Op
from megacompile.schedule.workload import CheckpointPolicy, Workload

# ------------------------------------------------------------------------------------------------------------
# A small linear program by the two-phase simplex method on a dense tableau.
#
# Minimises ``c · x`` under ``A x <= b`` and ``x >= 0`` (a row with a negative ``b`` is one with >=). Bland's
# rule takes over from the steepest column after a while, so it ends always. Meant for the tens of variables
# of :mod:`megacompile.planner.linear_program`; the solution is a vertex, so few variables are fractional.
#
# Why not ``scipy``'s HiGHS: over the 98 programs of three searches (26 x 51 and smaller) it took 2.0 ms a
# solve and this 0.85 ms, to the same values within 3e-13; and scipy would add 113 MB to an installation.


Array = NDArray[np.float64]
_EPSILON = 1e-9
_STEEP = 200  # pivots by the steepest column before Bland's rule


def minimise(c: Array, a: Array, b: Array) -> Array | None:
    """The minimising ``x``, or None where no ``x`` satisfies the rows."""
    rows, columns = a.shape
    signs = np.where(b < 0, -1.0, 1.0)
    negative = np.flatnonzero(b < 0)
    artificial = np.zeros((rows, len(negative)))
    artificial[negative, np.arange(len(negative))] = 1.0
    body = np.hstack([a * signs[:, None], np.diag(signs), artificial, (b * signs)[:, None]])
    basis = columns + np.arange(rows)
    basis[negative] = columns + rows + np.arange(len(negative))
    if len(negative):
        feasible = np.zeros(body.shape[1] - 1)
        feasible[columns + rows :] = 1.0
        if _descend(body, basis, feasible, len(feasible)) > 1e-7:
            return None
        for row in np.flatnonzero(basis >= columns + rows):  # at zero, from where it could grow again
            able = np.flatnonzero(np.abs(body[row, : columns + rows]) > _EPSILON)
            if len(able):
                _pivot(body, basis, int(row), int(able[0]))
    costs = np.concatenate([c, np.zeros(rows + len(negative))])
    _descend(body, basis, costs, columns + rows)
    x = np.zeros(body.shape[1] - 1)
    x[basis] = body[:, -1]
    return x[:columns]


def _descend(body: Array, basis: NDArray[np.int64], costs: Array, usable: int) -> float:
    """Pivot until no column of the first ``usable`` lowers the cost; returns the cost."""
    reduced = np.append(costs, 0.0) - costs[basis] @ body
    pivots = 0
    while True:
        falling = np.flatnonzero(reduced[:usable] < -_EPSILON)
        if not len(falling):
            return float(-reduced[-1])
        column = falling[0] if pivots > _STEEP else falling[np.argmin(reduced[falling])]
        able = np.flatnonzero(body[:, column] > _EPSILON)
        if not len(able):
            return -np.inf  # unbounded: no problem of ours is
        ratios = body[able, -1] / body[able, column]
        ties = able[ratios <= ratios.min() + 1e-12]
        row = ties[np.argmin(basis[ties])]
        _pivot(body, basis, int(row), int(column))
        reduced -= reduced[column] * body[row]
        pivots += 1


def _pivot(body: Array, basis: NDArray[np.int64], row: int, column: int) -> None:
    """Let a column enter the basis in a row."""
    body[row] /= body[row, column]
    others = np.arange(len(body)) != row
    body[others] -= np.outer(body[others, column], body[row])
    basis[row] = column


# ------------------------------------------------------------------------------------------------------------
# Takes: what each treatment of a block or of a weight group takes of a step, for the program over counts.
#
# In: a workload, a mode, a machine, an order. Out: kinds of interchangeable blocks and groups, and per
# treatment of a kind the seconds, device bytes and host bytes of one of its members.


Order = Literal["depth", "breadth"]
Treatment = tuple[str, str]  # of a block: (policy, place); of a group: ("", residency) or ("", "resident")
T = TypeVar("T", float, Array)


class Takes(NamedTuple, Generic[T]):
    """The rows of the program: seconds of each stream in the forward phase and in the backward phase, device
    bytes at the turn, host bytes of offloaded activations, and seconds that state on the device takes from
    (so below 0) all updates, norms and pushes of the host. Of one treatment numbers, of all treatments
    arrays.
    """

    compute_forward: T
    h2d_forward: T
    d2h_forward: T
    compute_backward: T
    h2d_backward: T
    d2h_backward: T
    device: T
    host: T
    adam: T
    norm: T
    push: T

    @property
    def forward(self) -> tuple[T, ...]:
        """Each stream's work in the first phase."""
        return self.compute_forward, self.h2d_forward, self.d2h_forward

    @property
    def backward(self) -> tuple[T, ...]:
        return self.compute_backward, self.h2d_backward, self.d2h_backward


_NOTHING = Takes(*(0.0,) * 11)


@dataclass(frozen=True)
class Kind:
    """Interchangeable blocks, or weight groups, and what each treatment of one of them takes."""

    members: tuple[int, ...]
    treatments: tuple[Treatment, ...]
    takes: tuple[Takes[float], ...]  # per treatment


class Treatments:
    """The kinds of one workload's blocks and groups. The state of the groups ``residents`` may be on the
    device, that of ``resident`` is.
    """

    def __init__(
        self,
        work: Workload,
        mode: Mode,
        machine: Machine,
        order: Order,
        residents: Collection[int] = (),
        resident: Collection[int] = (),
    ) -> None:
        self.work, self.mode, self.machine = work, mode, machine
        self.residents, self.resident = frozenset(residents), frozenset(resident)
        self.breadth = order == "breadth"
        m = mode.micro_batches
        self.forwards = (m, 0) if self.breadth else (1, m - 1)  # in the first phase, in the second
        self.blocks = _kinds([self._block(b) for b in range(len(work.blocks))])
        self.groups = _kinds([self._group(g) for g in range(len(work.groups))])

    def _block(self, b: int) -> dict[Treatment, Takes[float]]:
        ahead, later = self.forwards
        m = self.mode.micro_batches
        takes: dict[Treatment, Takes[float]] = {}
        for policy in self.work.blocks[b].policies:
            forward = call_seconds(policy.forward, self.machine)
            backward = call_seconds(policy.backward, self.machine)
            back = call_seconds(policy.recompute, self.machine) + backward
            saved_on = self.offloaded_bytes(b, policy)
            alive = saved_on * (m if self.breadth else 1)
            here = _NOTHING._replace(
                compute_forward=ahead * forward,
                compute_backward=later * forward + m * back,
                device=float(alive),
            )
            takes[policy.name, "device"] = here
            if saved_on:
                out = duration(Op("offload", "d2h", nbytes=saved_on), self.machine)
                back_in = duration(Op("reload", "h2d", nbytes=saved_on), self.machine)
                # one operation may run beside offloaded activations on its way; compute waits for the rest
                away, home = max(0.0, out - forward), max(0.0, back_in - backward)
                takes[policy.name, "host"] = here._replace(
                    compute_forward=here.compute_forward + ahead * away,
                    compute_backward=here.compute_backward + later * away + m * home,
                    d2h_forward=ahead * out,
                    h2d_backward=m * back_in,
                    d2h_backward=later * out,
                    device=0.0,
                    host=float(saved_on * m),
                )
        return takes

    def _group(self, g: int) -> dict[Treatment, Takes[float]]:
        if g not in self.work.used:
            return {("", "stream"): _NOTHING}
        m, again = self.mode.micro_batches, g in self._wanted_again
        whole = Op("prefetch", "h2d", nbytes=self.work.groups[g].nbytes, ranks=self.work.ranks)
        fetch = duration(whole, self.machine)
        later = m - 1 if not self.breadth else 0
        nbytes = float(self.work.groups[g].nbytes)

        def takes(second: int, held: float) -> Takes[float]:
            return _NOTHING._replace(h2d_forward=fetch, h2d_backward=second * fetch, device=held)

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

    def _resident(self, g: int) -> Takes[float]:
        """State on the device: updated there, nothing of it on the link or the host."""
        group, m, ranks = self.work.groups[g], self.mode.micro_batches, self.work.ranks
        waits = self.mode.keeps_gradients or len(self.work.contributions[g]) > 1 or ranks > 1
        held = group.resident_bytes + waits * group.gradient_bytes
        update = group.update_bytes / self.machine.memory_bandwidth
        pushes = [n for block in self.work.blocks for other, n in block.grad_groups if other == g]
        norm = norm_bytes(self.work, self.mode, g)
        if waits:
            update += (m * sum(pushes) + 2 * norm) / self.machine.memory_bandwidth
        return _NOTHING._replace(
            compute_backward=update,
            device=float(held),
            adam=-duration(Op("adam", "host", nbytes=group.update_bytes), self.machine),
            norm=-duration(Op("norm", "host", nbytes=norm), self.machine),
            push=-m
            * sum(duration(Op("push_grad", "d2h", nbytes=n, ranks=ranks), self.machine) for n in pushes),
        )

    def offloaded_bytes(self, b: int, policy: CheckpointPolicy) -> int:
        """Bytes that wait from a block's forward for its own backward alone."""
        calls = [c for c in (policy.recompute, policy.backward) if c is not None]
        reads = {v for call in calls for v in call.reads}
        own = [v for v in reads if self._readers[v] == {b} and not self.work.values[v].batch]
        saved = policy.saved_bytes if policy.recompute is None and policy.backward is not None else 0
        return saved + sum(self.work.values[v].nbytes for v in own)

    @cached_property
    def _readers(self) -> dict[int, set[int]]:
        """Per value the blocks that read it again after their forward."""
        readers: dict[int, set[int]] = defaultdict(set)
        for b, block in enumerate(self.work.blocks):
            for policy in block.policies:
                for call in (policy.recompute, policy.backward):
                    for v in call.reads if call is not None else ():
                        readers[v].add(b)
        return readers

    @cached_property
    def _wanted_again(self) -> set[int]:
        """Groups that a backward wants after other blocks have run since their forward."""
        last = len(self.work.blocks) - 1
        return {g for b, block in enumerate(self.work.blocks) if b < last for c in block.policies
                for call in (c.recompute, c.backward) if call is not None for g in call.groups}  # fmt: skip


def _kinds(items: list[dict[Treatment, Takes[float]]]) -> tuple[Kind, ...]:
    found: dict[tuple[tuple[Treatment, Takes[float]], ...], list[int]] = defaultdict(list)
    for index, takes in enumerate(items):
        found[tuple(takes.items())].append(index)
    return tuple(
        Kind(tuple(members), tuple(t for t, _ in key), tuple(v for _, v in key))
        for key, members in found.items()
    )


# ------------------------------------------------------------------------------------------------------------
# Mixture: how many blocks of a kind should be treated how, by a linear program over counts.
#
# Equal blocks are interchangeable but for their place, so the plan's large decisions are counts: of each kind
# of block, how many keep what and where that waits; of each kind of weight group, how many stay on the
# device. The program's rows are the streams' work in two phases (forward, then backward; transfers hide
# behind the compute of their own phase), the memory at the turn between them, and host memory. Its solution
# is a start for the search in the simulator, which knows what counts cannot tell: where and when.


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
        scale = max(1.0, *takes.device, *takes.host)
        rows.append([*(takes.device / scale), 0.0, 0.0, 0.0])
        limits.append(max(0.0, device_bytes) / scale)
        if host_bytes is not None:
            rows.append([*(takes.host / scale), 0.0, 0.0, 0.0])
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
        adam, norm, pushes = self._fixed
        matrices, nothing = self._matrices, (0.0, 0.0, 0.0)
        found: list[tuple[list[float], float]] = []

        def no_longer(work: np.ndarray, fixed: float, phase: np.ndarray) -> None:
            found.append(([*work, *-phase], -fixed))

        if self.drive_after is not None:
            # a byte of offloaded activations is a byte of state that is read and written for its update
            rate = min(self.machine.nvme_read_bandwidth, self.machine.nvme_write_bandwidth)
            updating = first if self.mode.keeps_gradients else whole
            no_longer(takes.host / rate, (self._kept - self.drive_after) / rate, updating)
        if self.machine.shared_cores:
            cores = self.machine.cores
            copy, update = 1 / cores, max(1, cores // 2) / cores
            computed = takes.compute_forward + takes.compute_backward
            copied = sum(takes.forward[1:] + takes.backward[1:]) + takes.push
            work = computed + copy * copied + update * (takes.adam + takes.norm)
            taken = matrices[0] + copy * sum(matrices[1:])
            no_longer(work, update * (adam + norm) + copy * pushes + taken, whole)
            return found
        link = self._link_share
        ahead_of, behind = (matrices, nothing) if self.mode.keeps_gradients else (nothing, matrices)
        for stream, fixed in zip(takes.forward, ahead_of, strict=True):
            no_longer(stream, fixed, first)
        for stream, fixed in zip(takes.backward[:2], behind, strict=False):
            no_longer(stream, fixed, second)
        # the host's norms slow the gradients that leave meanwhile
        leaving = pushes + link * norm + behind[2]
        no_longer(takes.d2h_backward + takes.push + link * takes.norm, leaving, second)
        no_longer(0 * takes.device, 0.0, whole - first - second)
        ahead, back = link * sum(takes.forward[1:]), link * sum(takes.backward[1:])
        if self.mode.keeps_gradients:
            no_longer(ahead + takes.adam, adam, first)
            no_longer(back + takes.norm + link * takes.push, norm + pushes * link, second)
        else:
            no_longer(ahead + back + takes.adam + link * takes.push, adam + pushes * link, whole)
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
            n * takes.adam for kind, given in counts for n, takes in zip(given, kind.takes, strict=True)
        )
        deferred = 1 - float(x[-2]) * unit / adam if adam > 1e-12 and not self.machine.shared_cores else 0.0
        return Mixture(
            tuple(counts[:blocks]), tuple(counts[blocks:]), min(1.0, max(0.0, deferred)), float(x[-1]) * unit
        )

    @property
    def _link_share(self) -> float:
        """Return the share of host memory bandwidth that a copy over the link draws, where that is shared."""
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
        moved, flops = sum(g.update_bytes for g in trained), sum(g.update_flops for g in trained)
        adam = duration(Op("adam", "host", nbytes=moved, flops=flops), self.machine)
        normed = sum(norm_bytes(self.work, self.mode, g) for g in updated)
        norm = duration(Op("norm", "host", nbytes=normed), self.machine)
        ops = (Op("push_grad", "d2h", nbytes=n, ranks=self.work.ranks) for n in pushed)
        pushes = sum(duration(op, self.machine) for op in ops)
        return adam, norm, pushes * self.mode.micro_batches

    @cached_property
    def _matrices(self) -> tuple[float, float, float]:
        """Seconds of each stream for the updates of matrices that the device makes orthogonal."""
        updated = self.work.contributions if self.mode.kind == "train" else ()
        known = [m for g in updated if (m := self.work.groups[g].matrices) is not None]
        compute = sum(call_seconds(m.call, self.machine) for m in known)
        loads = sum(duration(Op("load_update", "h2d", nbytes=m.nbytes), self.machine) for m in known)
        pushes = sum(duration(Op("push_update", "d2h", nbytes=m.nbytes), self.machine) for m in known)
        return compute, loads, pushes


# ------------------------------------------------------------------------------------------------------------
# Arrange: from counts to places, and from one plan to its neighbours.
#
# A :class:`~megacompile.planner.linear_program.Mixture` says how many; these functions say which. "runs"
# gives blocks that wait on the host the first places, those that keep most the last ones, holds the last
# weight groups, and leaves the state of the first on the device; "spread" mixes all treatments evenly, so
# that no stretch of the step loads one stream more than another.


CHECKPOINT_POLICIES = ("all", "some", "attention", "none", "least")
Place = Literal["host", "device"]  # of a group's state
Arrangement = Literal["runs", "spread"]
ARRANGEMENTS: tuple[Arrangement, ...] = ("runs", "spread")
_SAVES_LESS = {"least": 0, "none": 1, "attention": 2, "some": 3, "all": 4}


@dataclass(frozen=True, slots=True)
class Shape:
    """The part of a plan that is the same for all blocks and groups of a start."""

    order: Order
    prefetch_depth: int
    grad_lag: int
    reload: int = 1

    def block(self, checkpoint: str, saved_on: str) -> BlockPlan:
        """A block's plan; what stays on the device is not brought back."""
        return BlockPlan(checkpoint, saved_on, 1 if saved_on == "device" else self.reload)  # type: ignore[arg-type]


def policies_of(work: Workload) -> list[str]:
    """The checkpoint policies that any block has, those that keep most first."""
    names = {c.name for block in work.blocks for c in block.policies}
    return [name for name in CHECKPOINT_POLICIES if name in names]


def orders(work: Workload, mode: Mode) -> list[Order]:
    """Orders of micro-batches that differ."""
    return ["depth", "breadth"] if mode.micro_batches > 1 and not work.in_turn else ["depth"]


def shapes_of(order: Order) -> list[Shape]:
    """List how far transfers run ahead of compute in what starts are tried with, furthest first."""
    return [Shape(order, *ahead) for ahead in ((2, 1, 1), (1, 1, 1), (0, 0, 1), (0, 0, 0))]


def shapes(work: Workload, mode: Mode) -> list[Shape]:
    """The shapes that starts are tried with, of all orders."""
    return [shape for order in orders(work, mode) for shape in shapes_of(order)]


def uniform(
    work: Workload,
    shape: Shape,
    checkpoint: str,
    saved_on: str,
    residency: str,
    *,
    checkpoints: Sequence[str] = (),
) -> Plan:
    """One treatment for all blocks and one for all groups; ``checkpoints`` name the blocks' one by one."""
    names = checkpoints or (checkpoint,) * len(work.blocks)
    return Plan(
        blocks=tuple(shape.block(n, saved_on) for n in names),
        groups=(GroupPlan(residency, shape.prefetch_depth),) * len(work.groups),  # type: ignore[arg-type]
        order=shape.order,
        grad_lag=shape.grad_lag,
    )


def arrange(work: Workload, shape: Shape, mixture: Mixture, arrangement: Arrangement) -> Plan:
    """The plan in which each kind has its counts, rounded, at the places that the arrangement gives."""
    blocks: list[BlockPlan] = [BlockPlan("none")] * len(work.blocks)
    groups: list[GroupPlan] = [GroupPlan("stream", shape.prefetch_depth)] * len(work.groups)
    for kind, counts in mixture.blocks:
        for b, (checkpoint, saved_on) in _places(kind, counts, arrangement):
            blocks[b] = shape.block(checkpoint, saved_on)
    for kind, counts in mixture.groups:
        for g, (_, residency) in _places(kind, counts, arrangement):
            if residency == "resident":
                groups[g] = GroupPlan("stream", shape.prefetch_depth, state="device")
            else:
                groups[g] = GroupPlan(residency, shape.prefetch_depth)  # type: ignore[arg-type]
    return Plan(tuple(blocks), tuple(groups), shape.order, shape.grad_lag)


def with_deferred(plan: Plan, work: Workload, share: float) -> Plan:
    """The plan in which about this share of all updates, evenly spread, waits for the backward's end."""
    trained = [g for g, p in enumerate(plan.groups) if g in work.contributions and p.state != "device"]
    sizes = list(accumulate((work.groups[g].elements for g in trained), initial=0))
    total = max(1, sizes[-1])
    deferred, done = set(), 0.0
    for g, size in zip(trained, sizes[1:], strict=True):
        if share * size / total - done >= 0.5 * work.groups[g].elements / total:
            deferred.add(g)
            done += work.groups[g].elements / total
    return replace(
        plan,
        groups=tuple(
            replace(p, update="deferred" if g in deferred else "immediate") for g, p in enumerate(plan.groups)
        ),
    )


def with_state_at(plan: Plan, groups: Collection[int], state: Place) -> Plan:
    """The plan with the state of these groups there."""
    if not groups:
        return plan
    placed = (replace(g, state=state) if i in groups else g for i, g in enumerate(plan.groups))
    return replace(plan, groups=tuple(placed))


def _rank(treatment: Treatment) -> tuple[bool, int]:
    checkpoint, place = treatment
    if place == "resident":
        return False, -1
    return place not in ("host", "stream"), _SAVES_LESS.get(checkpoint, 0)


def _places(kind: Kind, counts: Sequence[float], arrangement: Arrangement) -> Iterator[tuple[int, Treatment]]:
    whole = _rounded(counts, len(kind.members))
    order = sorted(range(len(whole)), key=lambda t: _rank(kind.treatments[t]))
    chosen = [t for t in order for _ in range(whole[t])] if arrangement == "runs" else _evenly(whole, order)
    for member, t in zip(kind.members, chosen, strict=True):
        yield member, kind.treatments[t]


def _rounded(counts: Sequence[float], total: int) -> list[int]:
    """Whole counts with the given sum, by largest remainders; counts beyond it, which state on the device may
    have as it takes work away, are cut to it.
    """
    counts = [min(c, float(total)) for c in counts]
    whole = [int(c + 1e-9) for c in counts]
    by_rest = sorted(range(len(counts)), key=lambda t: (whole[t] - counts[t], t))
    for i in range(total - sum(whole)):
        whole[by_rest[i % len(whole)]] += 1
    while sum(whole) > total:
        whole[max(range(len(whole)), key=lambda t: whole[t])] -= 1
    return whole


def _evenly(counts: Sequence[int], order: Sequence[int]) -> list[int]:
    """Each t counts[t] times, at each place the one that is furthest behind its share."""
    total, given = sum(counts), [0] * len(counts)
    found = []
    for place in range(total):
        behind = max(order, key=lambda t: (counts[t] * (place + 1) / total - given[t], counts[t] > given[t]))
        given[behind] += 1
        found.append(behind)
    return found
