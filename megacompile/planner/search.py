"""Search for the fastest plan that fits, scored by simulating the step it leads to.

Candidates are lowered by the very passes that make the final step; their peak is exact and their time
simulated. Starts come from a linear program over counts (:mod:`~megacompile.planner.linear_program`) whose
room is corrected until the step just fits, and from plans that treat everything alike; local search
improves the best of them. The search is deterministic: it is limited by the operations that it lowers, not
by time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from megacompile.blocks.differentiated_template import CHECKPOINT_POLICIES
from megacompile.errors import MegacompileError
from megacompile.garbage_collection import without_garbage_collection
from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import simulate
from megacompile.passes import finish, lower_memory
from megacompile.planner.arrangements import with_state_at
from megacompile.planner.lowest_bytes import lowest_bytes
from megacompile.planner.min_feasible_budget import describe_peak, infeasible, small_plans
from megacompile.planner.nvme_placement import Drive
from megacompile.planner.plan_cache import place_of, read, write
from megacompile.planner.plan_evaluator import Candidates, Planned
from megacompile.planner.plan_moves import Move, moves
from megacompile.planner.search_starts import (
    all_resident,
    apart,
    few_blocks,
    fill_device,
    fixed,
    less_on_host,
    mixtures,
)
from megacompile.planner.too_small import TooSmall
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import peak_bytes
from megacompile.schedule.workload import Workload
from megacompile.state.host_budget import step_bytes
from megacompile.units import format_bytes

_GAIN = 0.9995  # of the seconds before: less is not worth another round


def search(
    work: Workload,
    mode: Mode,
    machine: Machine,
    budget_bytes: int,
    *,
    host_budget: int | None = None,
    drive: Drive | None = None,
    residents: Collection[int] = (),
    resident: Collection[int] = (),
    also: Sequence[Plan] = (),
) -> Planned | TooSmall:
    """The fastest plan found whose step never holds more than ``budget_bytes`` on the device;
    the least feasible budget where nothing fits.

    ``host_budget`` bounds the host bytes of a step beyond masters and moments: kept gradients, buffers,
    offloaded activations; where no plan meets it, it is as if not given, and the caller refuses. A ``drive``
    bounds them instead: by the RAM beside all state, if a plan meets that, so that nothing wears the drive.
    Otherwise each plan is scored over the state's best placement beside the bytes of its step. The state of
    the groups ``residents`` may be on the device. That of ``resident`` is there from another program: it
    stays where a plan with all of it fits, else as much of it as the fastest leaves room for. ``also`` are
    plans to score as well, such as those of smaller budgets: what is found is never slower than one of them
    that fits. On an interrupt the best plan so far is returned, if any. What was found is kept for later
    searches for the same.
    """
    places = sorted(residents), sorted(resident), drive and drive.digest
    kept = place_of(work.digest, work.updates, mode, machine, budget_bytes, host_budget, places, also)
    with suppress(MegacompileError):
        if (known := read(kept)) is not None:
            again = follow(known, work, mode, machine, budget_bytes)
            if not isinstance(again, TooSmall):
                return again
    if lowest_bytes(work, mode) > budget_bytes:
        return infeasible(work, mode, budget_bytes)
    trains = mode.kind == "train" and drive is None
    weighed = [g for g in residents if g in work.contributions] if trains else []
    terms: list[tuple[int | None, bool, Drive | None, Collection[int]]] = []
    if resident:  # state that need not move between programs, if its place can be spared
        room = host_budget if drive is None else drive.room
        terms += [(*limit, None, resident) for limit in _host_limits(room, None)]
    terms += [(*limit, drive, ()) for limit in _host_limits(host_budget, drive)]
    for limit, spills, place, there in terms:
        found = Candidates(work, mode, machine, budget_bytes, limit, place, spills, weighed, there)
        try:
            with without_garbage_collection():
                _try_starts(found, also)
                fill_device(found, residents or resident)
            whole = True
        except KeyboardInterrupt:
            whole = False
            if found.best is None:
                raise
        if found.best is not None:
            plan = replace(found.best.plan, workload=work.digest)
            if whole:
                write(kept, plan)
            return replace(found.best, plan=plan, evaluations=found.evaluations)
    return infeasible(work, mode, budget_bytes)


def _host_limits(host_budget: int | None, drive: Drive | None) -> Iterator[tuple[int | None, bool]]:
    """Bounds of a step's host bytes to try in turn, and whether activations may leave for the drive."""
    if drive is None:
        limits = [(host_budget, False)]
    else:
        limits = [(drive.spare, False), (drive.room, False), (drive.room, drive.takes_activations)]
    yield from dict.fromkeys(x for x in (*limits, (None, False)) if x[0] is None or x[0] >= 0)


def follow(
    plan: Plan,
    work: Workload,
    mode: Mode,
    machine: Machine,
    budget_bytes: int,
    *,
    drive: Drive | None = None,
) -> Planned | TooSmall:
    """The step of a given plan, unless it holds more than ``budget_bytes`` on the device.

    Its state stays where the plan says, unless a ``drive`` has decided that or the host budget demands it.

    Raises :class:`MegacompileError` for a plan of another model or batch.
    """
    check_fits(plan, work)
    step = lower_memory(work, plan, mode)
    peak = peak_bytes(step)
    if peak > budget_bytes:
        return TooSmall(
            f"The given plan holds {format_bytes(peak)} on the device and hbm_budget is "
            f"{format_bytes(budget_bytes)}: {describe_peak(step, work)}. Give a plan that keeps less.",
            least_bytes=peak,
        )
    taken = step_bytes(step, work)
    if drive is not None and (drive.decided or taken > drive.spare):
        plan = drive.place(plan, taken)
        step = lower_memory(work, plan, mode)
    step = finish(step, work, plan, mode)
    return Planned(plan, step, simulate(step, machine), peak, 1)


def check_fits(plan: Plan, work: Workload) -> None:
    """Raise :class:`MegacompileError` where a plan is not one for this workload."""
    groups = zip(plan.groups, work.groups, strict=False)
    if any(group.state == "device" and other.update_moved for group, other in groups):
        raise MegacompileError(
            "The plan keeps state on the device where Adam alone has it, and another optimizer updates it: "
            "plan again with that optimizer."
        )
    if plan.workload and plan.workload != work.digest:
        raise MegacompileError(
            "The plan was made for another model, batch or version (its digest is "
            f"{plan.workload[:8]}…, this workload's {work.digest[:8]}…): plan again."
        )
    if (len(plan.blocks), len(plan.groups)) != (len(work.blocks), len(work.groups)):
        raise MegacompileError(
            f"The plan has {len(plan.blocks)} blocks and {len(plan.groups)} weight groups, this model has "
            f"{len(work.blocks)} and {len(work.groups)}: plan again."
        )
    for block, planned in zip(work.blocks, plan.blocks, strict=True):
        if planned.checkpoint not in CHECKPOINT_POLICIES:
            raise MegacompileError(
                f"The plan keeps {planned.checkpoint!r} of {block.name}: choose from "
                f"{', '.join(CHECKPOINT_POLICIES)}."
            )


def _try_starts(found: Candidates, also: Sequence[Plan]) -> None:
    for plan in also:
        others = {i for i, g in enumerate(plan.groups) if i not in found.residents or g.state != "device"}
        blocks = tuple(replace(b, saved_on="host") if b.saved_on == "nvme" else b for b in plan.blocks)
        found.score(replace(with_state_at(plan, others, "host"), blocks=blocks, workload=""))
    begun = set[Plan]()
    for start in (
        mixtures,
        few_blocks,
        fixed,
        less_on_host,
        _least,
        all_resident,
    ):  # those that cost most, last
        before = found.best
        start(found)
        if found.best is not before:
            assert found.best is not None
            begun.add(found.best.plan)
            found.restart()
            _improve(found)
    for other in apart(found, begun) if found.best is not None else ():
        _improve(other)
        found.take(other)


def _least(found: Candidates) -> None:
    """Plans of small peak, where nothing else fits."""
    for small in small_plans(found.work, found.mode) if found.best is None else ():
        found.score(small.plan)


def _improve(found: Candidates) -> None:
    """Each kind of move from the best plan, again while it gains; until none gains or the effort is spent."""
    gains = True
    while gains:
        gains = False
        for move in moves(found.work, found.mode, found.residents, found.windows):
            while _gained(found, move):
                gains = True


def _gained(found: Candidates, move: Move) -> bool:
    """Return whether a kind of move from the best plan gained enough to go on with it."""
    assert found.best is not None
    before = found.best
    for plan in move(before.plan):
        if found.spent:
            return False
        found.score(plan)
    return found.best.seconds < before.seconds * _GAIN
