"""Start the search: plans of a linear program over counts, plans that treat everything alike, few blocks.

The program (:mod:`~megacompile.planner.linear_program`) knows bytes by kind; its room is corrected until
the step that comes of it just fits.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product

from megacompile.planner.arrangements import (
    ARRANGEMENTS,
    Arrangement,
    Shape,
    arrange,
    orders,
    policies_of,
    shapes,
    shapes_of,
    uniform,
    with_deferred,
    with_state_at,
)
from megacompile.planner.baselines import baselines
from megacompile.planner.linear_program import Mixer
from megacompile.planner.offload_windows import LONGEST, SHORTEST, Windows
from megacompile.planner.plan_evaluator import Candidates, EvaluatedPlan
from megacompile.planner.treatments import Order, Treatments
from megacompile.schedule.plan import Plan

_CLOSE = 0.01  # to what is expected: no other start is tried
_FAR = 0.02  # from what is expected: starts are improved each by itself
_FEW = 4  # blocks
_FIRST = (1, 4)  # groups whose updates end a step, tried on the device: the program does not see them last
_APART = (4, 8)  # of these groups, each number searched from by itself
_CORRECTIONS = 10  # solutions of the linear program per start
_EVERYTHING = 1e15  # bytes that no device has


def mixtures(candidates: Candidates) -> None:
    """Score what the linear program over counts leads to, in runs and evenly spread."""
    if candidates.mode.kind in ("evaluate", "update"):
        return
    for order in orders(candidates.work, candidates.mode):
        fits, mixers = False, {w: _mixer(candidates, order, w) for w in (LONGEST, SHORTEST)}
        for shape in (_hiding(order), *shapes_of(order)):
            # with nothing ahead of its use a step is slower, but needs least
            if shape.prefetch_depth or not fits:
                fits |= _arranged(
                    candidates, mixers[LONGEST if shape.windows == LONGEST else SHORTEST], shape
                )
    for count, shape in product(
        _FIRST if candidates.residents else (), (_hiding("depth"), shapes_of("depth")[0])
    ):
        some = frozenset(sorted(candidates.residents)[:count])
        _arranged(candidates, _mixer(candidates, "depth", shape.windows, some), shape)


def _hiding(order: Order) -> Shape:
    """The shape whose windows are as long as copies take: faster, unless copies fill the link."""
    return replace(shapes_of(order)[0], windows=LONGEST)


def apart(candidates: Candidates, begun: Collection[Plan]) -> Iterator[Candidates]:
    """Yield starts beside those where local search has ``begun``, each to be improved by itself, where the
    best plan is far from what is expected.

    They differ in how many of the groups whose updates end a step have their state on the device. A start
    that is slower may lead to a faster plan: by the rates of an H100's steps, Qwen2.5-3B in 24 GB took
    0.755 s from the fastest start and 0.732 from one of these, and a plan that was made for near rates was up
    to 11 % faster than what was found for the true ones.
    """
    known = set(begun)
    if not candidates.residents or candidates.gap <= _FAR:
        return
    for count in _APART:
        other = candidates.anew()
        some = frozenset(sorted(candidates.residents)[:count])
        for shape in (_hiding("depth"), shapes_of("depth")[0]):
            _arranged(other, _mixer(other, "depth", shape.windows, some), shape)
        if other.best is not None and other.best.plan not in known:
            known.add(other.best.plan)
            yield other


def _arranged(candidates: Candidates, mixer: Mixer, shape: Shape) -> bool:
    """Return whether a step of this shape fits; the second arrangement begins with the room of the first."""
    room: float | None = None
    for arrangement in ARRANGEMENTS:
        if candidates.best is None or candidates.gap > _CLOSE:
            room = _fill(candidates, mixer, shape, arrangement, room)
    return room is not None


def _mixer(
    candidates: Candidates, order: Order, longest: Windows, resident: frozenset[int] = frozenset()
) -> Mixer:
    drive = None if candidates.host_budget is None else candidates.drive
    found = Treatments(candidates.costs, order, resident | candidates.resident, longest)
    return Mixer(found, None if drive is None else drive.spare)


def _fill(
    candidates: Candidates, mixer: Mixer, shape: Shape, arrangement: Arrangement, room: float | None
) -> float | None:
    """Correct the program's room until the step that comes of it just fits; score it, return its room."""
    budget = candidates.budget_bytes
    room, host_room = room or float(budget), None if candidates.spills else candidates.host_budget
    fits_at, fails_at = 0.0, _EVERYTHING
    fitting: EvaluatedPlan | None = None
    for _ in range(_CORRECTIONS):
        mixture = mixer.solve(room, host_room)
        if mixture is None or (candidates.best and mixture.seconds >= candidates.best.seconds):
            break
        plan = arrange(candidates.work, shape, mixture, arrangement, candidates.windows)
        if not candidates.mode.keeps_gradients:
            plan = with_deferred(plan, candidates.work, mixture.deferred)
        if fitting is not None and plan == fitting.asked:
            break
        found = None if plan in candidates.misfits else candidates.measure(plan)
        if found is not None and found.fits:
            fitting, peak, fits_at = found, found.peak, room
            expected = mixture.seconds
            if budget - peak < 0.01 * budget:
                break
        else:
            peak, over = candidates.misfits[plan]
            if host_room is not None:
                host_room -= over
            if peak <= budget:
                continue
            fails_at = room
        room += 0.98 * (budget - peak)
        if not fits_at < room < fails_at:
            room = (fits_at + min(fails_at, budget)) / 2
    if fitting is None:
        return None
    candidates.expect(expected)
    if fitting.asked not in candidates.seen:
        candidates.seen.add(fitting.asked)
        candidates.simulate(fitting)
    return fits_at


def fixed(candidates: Candidates) -> None:
    """Plans that treat everything alike, and the schedules of other systems.

    Each has the fitting shape whose transfers run furthest ahead; further shapes are tried if that one helps.
    Where streamed groups do not fit, held ones do not either.
    """
    residencies = ("stream", "step") if candidates.mode.micro_batches == 1 else ("stream", "micro", "step")
    for order, checkpoint, saved_on in product(
        orders(candidates.work, candidates.mode), policies_of(candidates.work), ("device", "host")
    ):
        for residency in residencies:
            for shape in shapes_of(order):
                plan = uniform(candidates.work, shape, checkpoint, saved_on, residency)
                better = candidates.score(plan)
                fits = plan not in candidates.misfits
                if fits and not better:
                    break
            if not fits:
                break
    if candidates.mode.kind == "train":
        for plan in baselines(candidates.work, candidates.mode, candidates.machine, candidates.budget_bytes):
            candidates.score(plan)


def all_resident(candidates: Candidates) -> None:
    """Score plans with all state on the device, if that leaves room: for each shape the fitting plan that
    keeps most."""
    groups = [candidates.work.groups[g] for g in candidates.residents]
    if not groups or sum(g.resident_bytes for g in groups) > candidates.budget_bytes:
        return
    for shape in shapes(candidates.work, candidates.mode):
        # of frozen groups, and of what ranks gather
        for checkpoint, residency in product(policies_of(candidates.work), ("step", "stream")):
            plan = uniform(candidates.work, shape, checkpoint, "device", residency)
            plan = with_state_at(plan, candidates.residents, "device")
            candidates.score(plan)
            if plan not in candidates.misfits:
                break


def less_on_host(candidates: Candidates) -> None:
    """Plans that fit the device and not the host, with just as many blocks' activations on the device as the
    host has no room for, where nothing else fits."""
    if candidates.best is not None:
        return
    misfits = candidates.misfits.items()
    near = [(over, plan) for plan, (peak, over) in misfits if over and peak <= candidates.budget_bytes]
    for _, plan in sorted(near, key=lambda pair: pair[0]):
        count = bisect_left(range(len(plan.blocks)), True, key=lambda n: _host_has_room(candidates, plan, n))
        if candidates.score(_with_first_on_device(plan, count)):
            return


def _host_has_room(candidates: Candidates, plan: Plan, count: int) -> bool:
    other = _with_first_on_device(plan, count)
    return candidates.measure(other).fits or not candidates.misfits[other][1]


def _with_first_on_device(plan: Plan, count: int) -> Plan:
    """The plan with what the first blocks save on the device: what later ones do waits for a shorter time."""
    first = (replace(block, saved_on="device") for block in plan.blocks[:count])
    return replace(plan, blocks=(*first, *plan.blocks[count:]))


def few_blocks(candidates: Candidates) -> None:
    """Yield plans where counts are too coarse: keep everything, then step by step what lowers the peak
    most."""
    if len(candidates.work.blocks) > _FEW or candidates.mode.kind in ("evaluate", "update"):
        return
    names = policies_of(candidates.work)
    for shape in shapes(candidates.work, candidates.mode):
        if not shape.windows.reload:  # nothing here waits on the host
            continue
        plan = uniform(candidates.work, shape, names[0], "device", "stream")
        now = candidates.measure(plan)
        while not now.fits:
            less = (candidates.measure(p) for p in _keeping_less(now.plan, names))
            least = min(less, key=lambda other: other.peak, default=now)
            if least.peak >= now.peak:
                break
            now = least
        if now.fits:
            candidates.score(now.plan)


def _keeping_less(plan: Plan, names: Sequence[str]) -> Iterator[Plan]:
    for b, now in enumerate(plan.blocks):
        for checkpoint in names[names.index(now.checkpoint) + 1 :]:
            yield replace(
                plan, blocks=(*plan.blocks[:b], replace(now, checkpoint=checkpoint), *plan.blocks[b + 1 :])
            )


def fill_device(candidates: Candidates, groups: Collection[int]) -> None:
    """Keep the state of as many more of these groups on the device as fit beside the best plan, if that is
    faster.

    Frozen groups, which are all weights, come first, and stay from step to step even if that is no faster.
    Then others in the order of the forward: theirs are the updates that end a step last and that the next
    step wants first. Modes without training take all groups that fit, so that state need not move.
    """
    work, best = candidates.work, candidates.best
    if best is None or any(group.state.startswith("nvme") for group in best.plan.groups):
        return
    plans = best.plan.groups
    left = [g for g in sorted(groups) if plans[g].state == "host"]
    frozen = [g for g in left if g not in work.contributions and not work.groups[g].state_bytes]
    others = [g for g in left if g not in frozen]
    held = {g for g in candidates.floor.again if plans[g].residency == "step"}
    frozen.sort(key=lambda g: g not in held)  # theirs are slots that no other group uses
    trains = candidates.mode.kind == "train"
    for more, within in ((frozen, 1 + 1e-9), (others, 1 - 1e-9)):
        _fill_with(candidates, more, within if trains else math.inf)


def _fill_with(candidates: Candidates, groups: Sequence[int], within: float) -> None:
    """Take the plan with as many of the first groups on the device as fit, if it takes no more than
    ``within`` times as long."""
    assert candidates.best is not None
    plan, budget = candidates.best.plan, candidates.budget_bytes

    def too_many(count: int) -> bool:  # one more never needs less memory
        return candidates.measure_as_is(with_state_at(plan, groups[:count], "device")).peak > budget

    count = bisect_left(range(1, len(groups) + 1), True, key=too_many)
    if count:
        candidates.simulate(candidates.measure_as_is(with_state_at(plan, groups[:count], "device")), within)
