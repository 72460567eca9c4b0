"""Fixed schedules by name, on the same executor and with the same proof as what the search finds.

For knowing what a schedule is worth: each is one rule for the whole step, whatever the budget. A planner is
any function ``(work, mode, machine, budget_bytes) -> Plan``, so one's own goes wherever a name goes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from pathlib import Path

from megacompile.errors import MegacompileError
from megacompile.hardware.machine import Machine
from megacompile.planner.arrangements import Shape, orders, uniform, with_deferred
from megacompile.schedule.plan import Mode, Plan, check_counts
from megacompile.schedule.workload import Workload
from megacompile.text_files import path_of, read_text

Planner = Callable[[Workload, Mode, Machine, int], Plan]
SEARCH = "search"


def full_recompute(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
    """Each block keeps its input alone; weights come two operations ahead, for each use."""
    return uniform(work, Shape("depth", 2, 1), "none", "device", "stream")


def double_buffer(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
    """Two layers' weights on the device at a time, inputs kept, updates after the backward."""
    return with_deferred(uniform(work, Shape("depth", 1, 1), "none", "device", "stream"), work, 1.0)


def zero3_like(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
    """Weights fetched for each layer's forward and again for its backward, one ahead; inputs wait on the
    host; updates after the backward, as ZeRO-3 with offload does it.
    """
    return with_deferred(uniform(work, Shape("depth", 1, 0), "none", "host", "stream"), work, 1.0)


def greedysnake_like(work: Workload, mode: Mode) -> list[Plan]:
    """All micro-batches through a layer at a time, everything streamed, a share of the updates delayed."""
    shares = (0,) if mode.keeps_gradients else range(9)
    return [
        with_deferred(uniform(work, Shape("breadth", 1, 1), checkpoint, saved_on, "stream"), work, share / 8)
        for checkpoint in ("none", "all")
        for saved_on in ("host", "device")
        for share in shares
    ]


BASELINES: dict[str, Planner] = {
    "full-recompute": full_recompute,
    "double-buffer": double_buffer,
    "zero3-like": zero3_like,
}


def baselines(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Iterator[Plan]:
    """Every fixed schedule, so that a search that scores them is never slower than one of them."""
    for baseline in BASELINES.values():
        yield baseline(work, mode, machine, budget_bytes)
    if "breadth" in orders(work, mode):  # else it is a uniform one, whose deferred updates a search varies
        yield from greedysnake_like(work, mode)


def chosen_planner(planner: str | Planner, plan: Plan | str | Path | None) -> Planner | None:
    """Return what makes the plan instead of the search; None: the search. ``plan`` may name a plan file."""
    if plan is not None:
        if planner != SEARCH:
            raise MegacompileError("Give planner= or plan=, not both.")
        given = plan if isinstance(plan, Plan) else read_plan(plan)
        check_counts(given, "The given plan")
        return lambda work, mode, machine, budget_bytes: given
    if not isinstance(planner, str):
        return planner
    if planner == SEARCH:
        return None
    if planner not in BASELINES:
        near = difflib.get_close_matches(planner, [SEARCH, *BASELINES], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join([SEARCH, *BASELINES])}."
        raise MegacompileError(f"There is no planner {planner!r}: {hint}")
    return BASELINES[planner]


def read_plan(path: str | Path) -> Plan:
    """The plan in a file that ``dump=`` or ``Plan.to_json`` wrote."""
    path = path_of(path, "plan")
    return Plan.from_json(read_text(path), str(path))
