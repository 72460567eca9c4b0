"""Starts of the search: plans of a linear program over counts, plans that treat everything alike, few blocks.

The program (:mod:`~megacompile.search.mixture`) knows bytes by kind; its room is corrected until the step
that comes of it just fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from megacompile.plan.plan import Plan
from megacompile.search.arrange import (
    CHOICES,
    Arrangement,
    Shape,
    arrange,
    shapes,
    uniform,
    with_late,
    with_state_at,
)
from megacompile.search.candidates import Candidates, Measured
from megacompile.search.mixture import Mixer
from megacompile.search.policies import rivals

_STARTS = 50_000  # operations lowered, after which no more mixtures are tried
_FEW = 4  # blocks
_FIRST = (1, 4)  # groups whose updates end a step, tried on the device: the program does not see them last
_CORRECTIONS = 6  # solutions of the linear program per start
_EVERYTHING = 1e15  # bytes that no device has


def mixtures(candidates: Candidates) -> None:
    """Score what the linear program over counts leads to, in runs and evenly spread."""
    if candidates.mode.kind in ("evaluate", "update"):
        return
    arrangements: tuple[Arrangement, ...] = ("runs", "spread")
    mixers = {}
    for shape, arrangement in product(shapes(candidates.mode), arrangements):
        if candidates.lowered > _STARTS:
            return
        if shape.order not in mixers:
            mixer = mixers[shape.order] = _mixer(candidates, shape)
            ideal = mixer.solve(_EVERYTHING, None)
            if ideal is not None:
                candidates.goal = min(candidates.goal or ideal.seconds, ideal.seconds)
        _fill(candidates, mixers[shape.order], shape, arrangement)
    shape = shapes(candidates.mode)[0]
    for count in _FIRST if candidates.residents else ():
        mixer = _mixer(candidates, shape, frozenset(sorted(candidates.residents)[:count]))
        for arrangement in arrangements:
            _fill(candidates, mixer, shape, arrangement)


def _mixer(candidates: Candidates, shape: Shape, resident: frozenset[int] = frozenset()) -> Mixer:
    return Mixer(
        candidates.work, candidates.mode, candidates.machine, shape.order,
        resident=resident | candidates.resident, residents=candidates.residents,
        drive_after=None if candidates.drive is None else candidates.drive.spare,
    )  # fmt: skip


def _fill(candidates: Candidates, mixer: Mixer, shape: Shape, arrangement: Arrangement) -> None:
    """Correct the program's room until the step that comes of it just fits, and score that one."""
    budget = candidates.budget_bytes
    room, host_room = float(budget), None if candidates.spills else candidates.host_budget
    fits_at, fails_at = 0.0, _EVERYTHING
    fitting: tuple[Plan, Measured] | None = None
    for _ in range(_CORRECTIONS):
        mixture = mixer.solve(room, host_room)
        if mixture is None:
            break
        plan = arrange(candidates.work, shape, mixture, arrangement)
        if not candidates.mode.keeps_gradients:
            plan = with_late(plan, candidates.work, mixture.late)
        found = None if plan in candidates.misfits else candidates.measure(plan)
        if found is not None and found.fits:
            same, fits_at = fitting is not None and fitting[0] == plan, room
            fitting, peak = (plan, found), found.peak
            if same or budget - peak < 0.01 * budget:
                break
        else:
            fails_at = room
            peak, over = candidates.misfits[plan]
            if host_room is not None:
                host_room -= over
        room += 0.98 * (budget - peak)
        if not fits_at < room < fails_at:
            room = (fits_at + min(fails_at, budget)) / 2
    if fitting is not None and fitting[0] not in candidates.seen:
        candidates.seen.add(fitting[0])
        candidates.simulate(fitting[1])


def fixed(candidates: Candidates) -> None:
    """Plans that treat everything alike, and the schedules of other systems.

    Where streamed groups do not fit, held ones do not either.
    """
    keeps = ("stream", "step") if candidates.mode.micro_batches == 1 else ("stream", "micro", "step")
    for shape, choice, stash in product(shapes(candidates.mode), CHOICES, ("device", "host")):
        for keep in keeps:
            plan = uniform(candidates.work, shape, choice, stash, keep)
            candidates.score(plan)
            if plan in candidates.misfits:
                break
    if candidates.mode.kind == "train":
        for plan in rivals(candidates.work, candidates.mode, candidates.machine, candidates.budget_bytes):
            candidates.score(plan)


def all_resident(candidates: Candidates) -> None:
    """All state on the device, where that leaves room: of each shape the plan that keeps most and fits."""
    groups = [candidates.work.groups[g] for g in candidates.residents]
    if not groups or sum(g.nbytes + g.state_bytes for g in groups) > candidates.budget_bytes:
        return
    for shape in shapes(candidates.mode):
        for choice, keep in product(CHOICES, ("step", "stream")):  # of frozen groups
            plan = uniform(candidates.work, shape, choice, "device", keep)
            plan = with_state_at(plan, candidates.residents, "device")
            candidates.score(plan)
            if plan not in candidates.misfits:
                break


def few_blocks(candidates: Candidates) -> None:
    """Where counts are too coarse: keep everything, then step by step what lowers the peak most."""
    if len(candidates.work.blocks) > _FEW or candidates.mode.kind in ("evaluate", "update"):
        return
    for shape in shapes(candidates.mode):
        plan = uniform(candidates.work, shape, CHOICES[0], "device", "stream")
        now = candidates.measure(plan)
        while not now.fits:
            less = (candidates.measure(p) for p in _keeping_less(now.plan))
            least = min(less, key=lambda other: other.peak, default=now)
            if least.peak >= now.peak:
                break
            now = least
        if now.fits:
            candidates.score(now.plan)


def _keeping_less(plan: Plan) -> Iterator[Plan]:
    for b, now in enumerate(plan.blocks):
        for choice in CHOICES[CHOICES.index(now.choice) + 1 :]:
            yield replace(plan, blocks=(*plan.blocks[:b], replace(now, choice=choice), *plan.blocks[b + 1 :]))
