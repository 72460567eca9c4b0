"""Candidates: plans lowered by the passes that make the final step, measured and simulated; the best so far.

A plan's peak is exact, and known before its waits are; its time is simulated.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from megacompile.host.needs import step_bytes
from megacompile.machine.rates import Machine
from megacompile.machine.simulate import Timeline, duration, simulate
from megacompile.passes import finish, lower_memory
from megacompile.plan.plan import Mode, Plan
from megacompile.plan.workload import Workload
from megacompile.search.arrange import with_state_at
from megacompile.search.floor import Floor
from megacompile.search.tiers import Drive
from megacompile.step.operations import Step, peak_bytes

_LIMIT = 100_000  # operations lowered
_EVALUATIONS = 300  # where steps are short
_BETTER = 1 - 1e-9


@dataclass(frozen=True)
class Planned:
    """A plan with the step it lowers to and what that step is predicted to take."""

    plan: Plan
    step: Step
    timeline: Timeline
    peak_bytes: int
    evaluations: int

    @property
    def seconds(self) -> float:
        return self.timeline.step_seconds


class Measured(NamedTuple):
    """A plan, its step before its waits, its peak, and whether it fits device and host."""

    plan: Plan
    step: Step
    peak: int
    fits: bool


class Candidates:
    """Lowers, measures and simulates candidates, each plan once; keeps the best."""

    def __init__(
        self,
        work: Workload,
        mode: Mode,
        machine: Machine,
        budget_bytes: int,
        host_budget: int | None,
        drive: Drive | None,
        spills: bool,
        residents: Collection[int],
        resident: Collection[int],
    ) -> None:
        self.work, self.mode, self.machine = work, mode, machine
        self.budget_bytes, self.host_budget, self.drive = budget_bytes, host_budget, drive
        self.spills, self.residents, self.resident = spills, residents, frozenset(resident)
        self.floor = Floor(work, mode, machine)
        self.best: Planned | None = None
        self.goal = 0.0  # seconds that no plan is expected to beat by much, whatever its memory
        self.lowered = 0  # operations so far
        self.evaluations = 0
        self.seen: set[Plan] = set()
        self.misfits: dict[Plan, tuple[int, int]] = {}  # their peaks, and host bytes above the budget

    @property
    def spent(self) -> bool:
        return self.lowered >= _LIMIT or self.evaluations >= _EVALUATIONS

    def restart(self) -> None:
        """A new start, far from those before, has all evaluations for itself."""
        self.lowered = self.evaluations = 0

    def measure(self, plan: Plan) -> Measured:
        """The plan over its best placement and the step before its waits."""
        self.evaluations += 1
        asked, plan = plan, with_state_at(plan, self.resident, "device")
        step = self._lower(plan)
        peak, taken = peak_bytes(step), step_bytes(step, self.work)
        over = 0 if self.host_budget is None else max(0, taken - self.host_budget)
        if over and self.spills and self.drive is not None and peak <= self.budget_bytes:
            spilled = self.drive.spill(plan, step, taken)
            if spilled is not None:
                return Measured(spilled, self._lower(spilled), peak, True)
        fits = peak <= self.budget_bytes and not over
        if not fits:
            self.misfits[asked] = peak, over
        elif self.drive is not None and (placed := self.drive.place(plan, taken)) != plan:
            plan, step = placed, self._lower(placed)
        return Measured(plan, step, peak, fits)

    def _lower(self, plan: Plan) -> Step:
        step = lower_memory(self.work, plan, self.mode)
        self.lowered += len(step.ops) // 2
        return step

    def score(self, plan: Plan) -> bool:
        """Whether a plan fits and is faster than the best so far, which it then becomes."""
        if plan in self.seen or (self.best and self.floor.seconds(plan) >= self.best.seconds):
            return False
        self.seen.add(plan)
        found = self.measure(plan)
        return found.fits and self.simulate(found)

    def simulate(self, found: Measured) -> bool:
        plan, step, peak, _ = found
        if self.best is not None and self._on_drive(step) >= self.best.seconds:
            return False
        step = finish(step, self.work, plan, self.mode)
        self.lowered += len(step.ops) // 2
        timeline = simulate(step, self.machine)
        if self.best is not None and timeline.step_seconds >= self.best.seconds * _BETTER:
            return False
        self.best = Planned(plan, step, timeline, peak, 0)
        return True

    def _on_drive(self, step: Step) -> float:
        """Seconds that a step's reads take, or its writes."""
        if not step.window:
            return 0.0
        streams = (step.on("nvme_read"), step.on("nvme_write"))
        return max(sum(duration(op, self.machine) for op in stream) for stream in streams)
