"""The planner: search for the fastest plan that fits, scored by simulating the step it leads to.

Candidates are lowered by the very passes that make the final step; their peak is exact and their time
simulated. Starts come from a linear program over counts (:mod:`~megacompile.search.mixture`) whose room is
corrected until the step just fits, and from plans that treat everything alike; local search improves the
best of them. The search is deterministic: it is limited by the operations that it lowers, not by time.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from megacompile.errors import BudgetError, MegacompileError
from megacompile.host.needs import step_bytes
from megacompile.machine.rates import Machine
from megacompile.machine.simulate import simulate
from megacompile.passes import finish, lower_memory
from megacompile.plan.plan import Mode, Plan
from megacompile.plan.workload import Workload
from megacompile.search.arrange import CHOICES, with_state_at
from megacompile.search.candidates import Candidates, Planned
from megacompile.search.least import describe_peak, infeasible, small_plans
from megacompile.search.neighbours import neighbours
from megacompile.search.starts import all_resident, few_blocks, fixed, mixtures
from megacompile.search.tiers import Drive
from megacompile.step.operations import peak_bytes
from megacompile.units import format_bytes

_CLOSE = 1.003  # to the goal: no more to be looked for


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
) -> Planned:
    """The fastest plan found whose step never holds more than ``budget_bytes`` on the device.

    ``host_budget`` bounds the host bytes of a step beyond masters and moments: kept gradients, buffers,
    stashes; where no plan meets it, it is as if not given, and the caller refuses. A ``drive`` bounds them
    instead: by what all state leaves in RAM, where a plan meets that, so that nothing wears the drive; else
    each plan is scored over the state's best placement beside what its step takes. The state of the groups
    ``residents`` may be on the device, that of ``resident`` is. ``also`` are plans to score as well, such as
    those of smaller budgets: what is found is never slower than one of them that fits. On an interrupt the
    best plan so far is returned, if any.

    Raises :class:`BudgetError` with the least feasible budget where nothing fits.
    """
    for limit, spills in _host_limits(host_budget, drive):
        found = Candidates(work, mode, machine, budget_bytes, limit, drive, spills, residents, resident)
        try:
            with _without_garbage_collection():
                _run(found, also)
        except KeyboardInterrupt:
            if found.best is None:
                raise
        if found.best is not None:
            plan = replace(found.best.plan, workload=work.digest)
            return replace(found.best, plan=plan, evaluations=found.evaluations)
    raise infeasible(work, mode, budget_bytes)


def _host_limits(host_budget: int | None, drive: Drive | None) -> Iterator[tuple[int | None, bool]]:
    """Bounds of a step's host bytes to try in turn, and whether stashes may leave for the drive."""
    if drive is None:
        limits = [(host_budget, False)]
    else:
        limits = [(drive.spare, False), (drive.room, False), (drive.room, drive.stashes)]
    yield from dict.fromkeys(x for x in (*limits, (None, False)) if x[0] is None or x[0] >= 0)


def follow(
    plan: Plan,
    work: Workload,
    mode: Mode,
    machine: Machine,
    budget_bytes: int,
    *,
    drive: Drive | None = None,
) -> Planned:
    """The step of a given plan, if the plan was made for this workload and fits.

    Its state stays where the plan says, unless a ``drive`` has decided that or the host budget demands it.

    Raises :class:`MegacompileError` for a plan of another model or batch, :class:`BudgetError` for one
    that holds more than ``budget_bytes``.
    """
    check_fits(plan, work)
    step = lower_memory(work, plan, mode)
    peak = peak_bytes(step)
    if peak > budget_bytes:
        raise BudgetError(
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
        if planned.choice not in CHOICES:
            raise MegacompileError(
                f"The plan keeps {planned.choice!r} of {block.name}: choose from {', '.join(CHOICES)}."
            )


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Steps hold no cycles, and collections would walk the whole captured model each time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run(found: Candidates, also: Sequence[Plan]) -> None:
    for plan in also:
        others = {i for i, g in enumerate(plan.groups) if i not in found.residents or g.state != "device"}
        blocks = tuple(replace(b, stash="host") if b.stash == "nvme" else b for b in plan.blocks)
        found.score(replace(with_state_at(plan, others, "host"), blocks=blocks, workload=""))
    mixtures(found)
    fixed(found)
    few_blocks(found)
    if found.best is None:
        for small in small_plans(found.work, found.mode):
            found.score(small.plan)
    if found.best is not None:
        _improve(found)
    before = found.best
    all_resident(found)  # far from where counts lead; last, so that it costs no other start its evaluations
    if found.best is not before:
        found.restart()
        _improve(found)


def _improve(found: Candidates) -> None:
    """First improvement over the neighbours of the best, until none helps or the limit is reached."""
    assert found.best is not None
    while not found.spent and found.best.seconds > found.goal * _CLOSE:
        start = found.best.plan
        for plan in neighbours(found.work, found.mode, start, found.residents):
            if found.spent:
                return
            found.score(plan)
        if found.best.plan == start:
            return
