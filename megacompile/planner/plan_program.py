"""Plan a program: how far its weights are cut, and the search.

In:  one kind of batch at ever smaller pieces, a mode, and :class:`PlanTerms`. Out: the batch as it is cut,
and its plan. ``megacompile.compile`` and ``megacompile plan`` both plan here, so they cannot disagree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from megacompile.blocks.weight_groups import Assembly
from megacompile.errors import BudgetError, MegacompileError
from megacompile.hardware.machine import Machine
from megacompile.planner.baselines import Planner
from megacompile.planner.group_state import may_reside, not_gathered
from megacompile.planner.nvme_placement import Drive, Tiers
from megacompile.planner.plan_evaluator import Planned
from megacompile.planner.search import follow, search
from megacompile.planner.tiling import Tiling, TilingCandidate, choose
from megacompile.planner.too_small import TooSmall
from megacompile.schedule.plan import Mode, Plan
from megacompile.state.host_budget import state_in_ram, step_bytes
from megacompile.state.nvme_offload import StatePlacement

T = TypeVar("T")


Known = dict[tuple[Mode, str], list[Plan]]
"""Winners of earlier searches by mode and digest of the workload, which later ones score too."""
_SCORED = 8  # of them, the last


@dataclass(frozen=True)
class PlanTerms:
    """The terms that a plan has to keep to.

    ``tiers`` None: host memory without end. ``placement`` says where the state is once it is allocated.
    ``residents`` are the groups whose state may be on the device, None: any that the search likes.
    ``planner`` plans steps that train in the place of the search.
    """

    machine: Machine
    budget_bytes: int
    tiers: Tiers | None = None
    placement: StatePlacement | None = None
    residents: tuple[int, ...] | None = None
    planner: Planner | None = None

    def places_state(self, mode: Mode) -> bool:
        """Return whether the search chooses the groups whose state is on the device."""
        stored = self.tiers is not None and self.tiers.stored
        return mode.kind == "train" and self.residents is None and self.planner is None and not stored

    def drive(self, assembly: Assembly) -> Drive | None:
        """Return the places that state may have beside RAM until this is decided, then the places that it
        has."""
        if self.tiers is None or not self.tiers.stored:
            return None
        if self.placement is None:
            return Drive.of(assembly.groups, self.tiers)
        return Drive.fixed(assembly.groups, self.tiers, self.placement.states, self.placement.window)

    def fits_host(self, assembly: Assembly, planned: Planned) -> bool:
        """Return whether what a step takes of the host fits beside the state that is in RAM."""
        room = self.host_room(assembly, self.drive(assembly))
        return room is None or step_bytes(planned.step, assembly.work) <= room

    def host_room(self, assembly: Assembly, drive: Drive | None) -> int | None:
        """Host bytes that state in RAM leaves to a step; None: without end."""
        if drive is not None:
            return drive.room
        if self.tiers is None:
            return None
        return max(0, self.tiers.host_budget_bytes - state_in_ram(assembly.groups, self.tiers.form))


def plan_program(
    candidates: Iterable[TilingCandidate[Tiling]],
    mode: Mode,
    terms: PlanTerms,
    *,
    gathers: bool = False,
    known: Known | None = None,
    most: int = sys.maxsize,
) -> tuple[Tiling, Planned] | TooSmall:
    """The tiling taken and the fastest plan found for it; the least device budget where nothing fits.

    ``gathers`` says that the second tiling gathers rows of tables. Tilings are tried up to one whose
    activations alone take more than ``most`` bytes.
    """
    return choose(
        candidates, mode, terms.budget_bytes, lambda r: _find(r.assembly, mode, terms, known),
        gathers=gathers, resides=terms.places_state(mode), most=most,
        fits_host=lambda r, planned: terms.fits_host(r.assembly, planned),
    )  # fmt: skip


def first_that_fits(
    chunks: Iterable[int], budget_bytes: int, plan: Callable[[int, int], T | TooSmall]
) -> T | TooSmall:
    """Return what ``plan`` gives for the first number of positions in a chunk that fits.

    Its second argument is the most bytes that activations alone may take for finer cuts to be tried. That is
    the budget. If nothing fits, chunks that needed less than all longer ones are planned once more, with the
    least that any chunk needed so far. If none fits, returns the least budget of all chunks. A plan that was
    given is of one chunk and refuses all others; if it refuses all, its error is raised.
    """
    least: TooSmall | None = None
    other: MegacompileError | None = None
    again: list[int] = []
    for chunk in chunks:
        try:
            found = plan(chunk, budget_bytes)
        except MegacompileError as error:
            other = other or error
            continue
        if not isinstance(found, TooSmall):
            return found
        if least is None or found.is_less_than(least):
            least = found
            again.append(chunk)
    if least is None:
        assert other is not None
        raise other
    for chunk in again:
        found = plan(chunk, least.least_bytes or 0)
        if not isinstance(found, TooSmall):
            return found
        if found.is_less_than(least):
            least = found
    return least


def _find(assembly: Assembly, mode: Mode, terms: PlanTerms, known: Known | None) -> Planned | TooSmall:
    """By the planner that was given, if it plans such steps; else by the search, within host bytes."""
    work, machine, budget, drive = assembly.work, terms.machine, terms.budget_bytes, terms.drive(assembly)
    if terms.planner is not None and mode.computes_gradients:  # as it gives it, and no more
        try:
            given = terms.planner(work, mode, machine, budget)
        except BudgetError as error:  # a planner of one's own says so by an error
            return TooSmall(str(error), error.least_bytes)
        return follow(given, work, mode, machine, budget, drive=drive)
    room = terms.host_room(assembly, drive)
    winners = [] if known is None else known.setdefault((mode, work.digest), [])
    planned = search(
        work, mode, machine, budget, host_budget=None if drive is not None else room, drive=drive,
        residents=may_reside(work) if terms.residents is None else (),
        resident=not_gathered(work, terms.residents or ()), also=winners[-_SCORED:],
    )  # fmt: skip
    if not isinstance(planned, TooSmall):
        winners.append(planned.plan)
    return planned
