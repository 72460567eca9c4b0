"""Arrange counts at places, and change one plan into its neighbours.

A :class:`~megacompile.planner.linear_program.Mixture` says how many; these functions say which. "runs" gives
the first places to blocks that wait on the host, the last ones to blocks that keep most; it holds the last
weight groups, and leaves the state of the first on the device. "spread" mixes all treatments evenly, so that
no stretch of the step loads one stream more than another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from megacompile.blocks.differentiated_template import CHECKPOINT_POLICIES
from megacompile.planner.linear_program import Mixture
from megacompile.planner.offload_windows import SHORTEST, OffloadWindows, Windows, window
from megacompile.planner.treatments import Kind, Order, Treatment
from megacompile.schedule.plan import BlockPlan, GroupPlan, Mode, Plan
from megacompile.schedule.workload import Workload

Place = Literal["host", "device"]  # of a group's state
Arrangement = Literal["runs", "spread"]
ARRANGEMENTS: tuple[Arrangement, ...] = ("runs", "spread")
_SAVES_LESS: dict[str, int] = {name: rank for rank, name in enumerate(reversed(CHECKPOINT_POLICIES))}


@dataclass(frozen=True, slots=True)
class Shape:
    """The part of a plan that is the same for all blocks and groups of a start; ``windows`` are the longest
    that a block has to offload what it saves."""

    order: Order
    prefetch_depth: int
    grad_lag: int
    windows: Windows = SHORTEST

    def block(self, checkpoint: str, saved_on: str, windows: Windows) -> BlockPlan:
        """A block's plan; what stays on the device is not brought back."""
        return BlockPlan(checkpoint, saved_on, *(SHORTEST if saved_on == "device" else windows))  # type: ignore[arg-type]


def policies_of(work: Workload) -> list[str]:
    """The checkpoint policies that any block has, those that keep most first."""
    names = {c.name for block in work.blocks for c in block.policies}
    return [name for name in CHECKPOINT_POLICIES if name in names]


def orders(work: Workload, mode: Mode) -> list[Order]:
    """Orders of micro-batches that differ."""
    return ["depth", "breadth"] if mode.micro_batches > 1 and not work.in_turn else ["depth"]


def shapes_of(order: Order) -> list[Shape]:
    """List how far transfers run ahead of compute in what starts are tried with, furthest first."""
    ahead = ((2, 1, SHORTEST), (1, 1, SHORTEST), (0, 0, SHORTEST), (0, 0, Windows(0, 1)))
    return [Shape(order, *given) for given in ahead]


def shapes(work: Workload, mode: Mode) -> list[Shape]:
    """The shapes that starts are tried with, of all orders."""
    return [shape for order in orders(work, mode) for shape in shapes_of(order)]


def uniform(work: Workload, shape: Shape, checkpoint: str, saved_on: str, residency: str) -> Plan:
    """One treatment for all blocks and one for all groups."""
    return Plan(
        blocks=(shape.block(checkpoint, saved_on, shape.windows),) * len(work.blocks),
        groups=(GroupPlan(residency, shape.prefetch_depth),) * len(work.groups),  # type: ignore[arg-type]
        order=shape.order,
        grad_lag=shape.grad_lag,
    )


def arrange(
    work: Workload, shape: Shape, mixture: Mixture, arrangement: Arrangement, windows: OffloadWindows
) -> Plan:
    """The plan in which each kind has its counts, rounded, at the places that the arrangement gives."""
    blocks: list[BlockPlan] = [BlockPlan("none")] * len(work.blocks)
    groups: list[GroupPlan] = [GroupPlan("stream", shape.prefetch_depth)] * len(work.groups)
    for kind, counts in mixture.blocks:
        for b, (checkpoint, saved_on) in _places(kind, counts, arrangement):
            blocks[b] = shape.block(checkpoint, saved_on, windows.of(b, checkpoint, shape.windows))
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
    chosen = _paced(kind, whole, order) if arrangement == "runs" else _evenly(whole, order)
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


def _paced(kind: Kind, counts: Sequence[int], order: Sequence[int]) -> list[int]:
    """Each t counts[t] times, in the given order; but what leaves the device comes as soon as the link has
    room for it, the largest first, and what stays in between.
    """
    left, found, behind = list(counts), [], 0.0
    out, beside = ([getattr(t, row) for t in kind.takes] for row in ("d2h_forward", "compute_forward"))
    leaves = [place == "host" for _, place in kind.treatments]
    largest_first = sorted(order, key=lambda t: -out[t])
    for _ in range(sum(counts)):
        leaving = [t for t in largest_first if left[t] and leaves[t]]
        staying = [t for t in order if left[t] and not leaves[t]]
        inside = (t for t in leaving if behind + out[t] <= window(out[t], beside[t]) * beside[t])
        t = next(inside, staying[0] if staying else leaving[-1])
        left[t] -= 1
        found.append(t)
        behind = max(0.0, behind + out[t] - beside[t])
    return found


def _evenly(counts: Sequence[int], order: Sequence[int]) -> list[int]:
    """Each t counts[t] times, at each place the one that is furthest behind its share."""
    total, given = sum(counts), [0] * len(counts)
    found = []
    for place in range(total):
        behind = max(order, key=lambda t: (counts[t] * (place + 1) / total - given[t], counts[t] > given[t]))
        given[behind] += 1
        found.append(behind)
    return found
