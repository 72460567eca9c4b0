"""List the neighbours of a plan: kinds of moves that local search tries, those that gain most per plan first.

The order is by what was gained over the instances of ``benchmarks/plan_quality``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from megacompile.planner.arrangements import Place, policies_of, with_deferred, with_state_at
from megacompile.planner.nvme_placement import WINDOWS
from megacompile.planner.offload_windows import LONGEST, SHORTEST, OffloadWindows, Windows
from megacompile.schedule.plan import LONGEST_WINDOW, BlockPlan, Mode, Plan
from megacompile.schedule.workload import Workload

Move = Callable[[Plan], Iterator[Plan]]
_LARGE = 1.05  # times the size of the middle group
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def moves(work: Workload, mode: Mode, residents: Collection[int], windows: OffloadWindows) -> Iterator[Move]:
    """Each gives plans that differ in one decision, or in one decision for a stretch of blocks or groups."""
    if mode.kind == "train" and not mode.keeps_gradients:
        yield partial(_updates, work)
    yield partial(_prefetch_depths_of_small, work)
    yield partial(_groups, work)
    yield _windows
    if residents:
        yield partial(_other_states, residents)
    yield _flow
    yield partial(_blocks, work, windows)
    yield _prefetch_depths
    yield _offload_windows


def _windows(plan: Plan) -> Iterator[Plan]:
    """Other numbers of buffers for what passes through from a drive: each takes RAM from state."""
    if any(g.state in ("nvme", "nvme-all") for g in plan.groups):
        yield from (replace(plan, window=window) for window in WINDOWS)


def _updates(work: Workload, plan: Plan) -> Iterator[Plan]:
    there = [g for g in work.contributions if plan.groups[g].state != "device"]
    trained = sum(work.groups[g].elements for g in there)
    deferred = sum(work.groups[g].elements for g, p in enumerate(plan.groups) if p.update == "deferred")
    now = deferred / max(1, trained)
    for share in (*_SHARES, now - 0.1, now + 0.1, now - 0.04, now + 0.04):
        if 0 <= share <= 1:
            yield with_deferred(plan, work, share)
    places = [g for g, p in enumerate(plan.groups) if p.update == "deferred"]
    for g in (*places[-3:], *(g for g in range(4) if g not in places)):
        yield _flipped(plan, {g})
    for g in places[-3:]:  # another group's update waits in its stead
        before = [i for i in range(g) if i not in places]
        for other in before[-1:]:
            yield _flipped(plan, {g, other})


def _flipped(plan: Plan, places: set[int]) -> Plan:
    return replace(plan, groups=tuple(
        replace(p, update="immediate" if p.update == "deferred" else "deferred") if g in places else p
        for g, p in enumerate(plan.groups)))  # fmt: skip


def _prefetch_depths(plan: Plan) -> Iterator[Plan]:
    for change in (1, -1):
        yield _with_prefetch_depths(plan, [g.prefetch_depth + change for g in plan.groups])


def _prefetch_depths_of_small(work: Workload, plan: Plan) -> Iterator[Plan]:
    """Earlier fetches where no large group, such as a vocabulary's, fills the slab meanwhile.

    Fetches and gradients each hide the other's wait, so gradients are also given longer to leave.
    """
    sizes = [g.nbytes for g in work.groups]
    used = sorted(sizes[g] for g in work.used)
    usual = used[len(used) // 2] if used else 0
    uses = [{g for c in b.policies for g in c.forward.groups} for b in work.blocks]
    large = [b for b, groups in enumerate(uses) if any(sizes[g] > _LARGE * usual for g in groups)]
    for prefetch_depth in (1, 2, 3) if large else ():
        near = {b for other in large for b in range(other - prefetch_depth, other + prefetch_depth + 1)}
        beside = {g for b, groups in enumerate(uses) if b in near for g in groups}
        ahead = _with_prefetch_depths(
            plan,
            [
                g.prefetch_depth if i in beside else max(g.prefetch_depth, prefetch_depth)
                for i, g in enumerate(plan.groups)
            ],
        )
        yield replace(ahead, grad_lag=plan.grad_lag + 1)
        yield ahead


def _with_prefetch_depths(plan: Plan, prefetch_depths: list[int]) -> Plan:
    groups = (
        replace(g, prefetch_depth=max(0, prefetch_depth))
        for g, prefetch_depth in zip(plan.groups, prefetch_depths, strict=True)
    )
    return replace(plan, groups=tuple(groups))


def _flow(plan: Plan) -> Iterator[Plan]:
    yield replace(plan, grad_lag=plan.grad_lag + 1)
    if plan.grad_lag:
        yield replace(plan, grad_lag=plan.grad_lag - 1)
    for ahead in sorted({int(not b.reload) for b in plan.blocks if b.saved_on != "device"}):
        yield replace(
            plan, blocks=tuple(b if b.saved_on == "device" else replace(b, reload=ahead) for b in plan.blocks)
        )
    for ring in (2, 4):
        yield replace(plan, ring=ring)


def _offload_windows(plan: Plan) -> Iterator[Plan]:
    """Longer and shorter windows for all that leaves the device for a while."""
    if any(b.saved_on != "device" for b in plan.blocks):
        for sooner, later in ((1, 0), (0, 1), (1, 1), (-1, 0), (0, -1)):
            yield replace(plan, blocks=tuple(_with_windows(b, sooner, later) for b in plan.blocks))


def _with_windows(plan: BlockPlan, sooner: int, later: int) -> BlockPlan:
    """The block's plan, which comes back by so many operations sooner and may leave by so many later."""
    if plan.saved_on == "device":
        return plan
    reload = min(max(0, plan.reload + sooner), LONGEST_WINDOW)
    return replace(plan, reload=reload, free_after=min(max(1, plan.free_after + later), LONGEST_WINDOW))


def _other_states(residents: Collection[int], plan: Plan) -> Iterator[Plan]:
    """The state of more groups on the device, or of fewer, by stretches from either end."""
    directions: tuple[tuple[Place, Place], ...] = (("host", "device"), ("device", "host"))
    for now, other in directions:
        places = [g for g in sorted(residents) if plan.groups[g].state == now]
        for stretch in _stretches(places):
            yield with_state_at(plan, stretch, other)


def _groups(work: Workload, plan: Plan) -> Iterator[Plan]:
    """Hold more groups, or fewer, by halving stretches from either end."""
    come = [i for i in sorted(work.used) if plan.groups[i].state != "device" or work.ranks > 1]
    streamed = [i for i in come if plan.groups[i].residency == "stream"]
    held = [i for i in come if plan.groups[i].residency != "stream"]
    for places, residency in ((streamed, "step"), (held, "stream")):
        for stretch in _stretches(places):
            yield replace(plan, groups=tuple(
                replace(g, residency=residency) if i in stretch else g for i, g in enumerate(plan.groups)  # type: ignore[arg-type]
            ))  # fmt: skip


def _blocks(work: Workload, windows: OffloadWindows, plan: Plan) -> Iterator[Plan]:
    """Another treatment for a stretch of the blocks that have one now."""
    names = sorted(policies_of(work), key=lambda n: n == "attention")
    places_of_saved: tuple[Place, ...] = ("device", "host")
    treatments = list(product(names, places_of_saved))
    present = sorted({(p.checkpoint, p.saved_on) for p in plan.blocks})
    longest = _longest_windows(plan)
    for checkpoint, saved_on in treatments:
        for now in present:
            if now == (checkpoint, saved_on):
                continue
            places = [i for i, p in enumerate(plan.blocks) if (p.checkpoint, p.saved_on) == now]
            for stretch in _stretches(places):
                limit = SHORTEST if saved_on == "device" else longest
                other = BlockPlan(checkpoint, saved_on, *windows.of(min(stretch), checkpoint, limit))
                blocks = (other if i in stretch else p for i, p in enumerate(plan.blocks))
                yield replace(plan, blocks=tuple(blocks))


def _longest_windows(plan: Plan) -> Windows:
    """Return the longest windows of further offloads: any in which copies hide, if some of the plan's are
    longer than the shortest; none at all if its own are just in time."""
    found = [Windows(b.reload, b.free_after) for b in plan.blocks if b.saved_on != "device"]
    if max(found, default=SHORTEST) > SHORTEST:
        return LONGEST
    return max(found, default=SHORTEST)


def _stretches(places: list[int]) -> Iterator[frozenset[int]]:
    """The first and the last n of the places, for n = 1, 4, 16, …; each alone where they are few."""
    if len(places) <= 6:
        yield from (frozenset([p]) for p in places)
        return
    size = 1
    while size < len(places):
        yield frozenset(places[:size])
        yield frozenset(places[-size:])
        size *= 4
