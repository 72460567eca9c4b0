"""Candidates: plans lowered by the passes that make the final step, measured and simulated; the best so far.

A plan's peak is exact, and known before its waits are; its time is simulated.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import Timeline, duration, simulate
from megacompile.passes import finish, lower_memory
from megacompile.planner.arrangements import with_state_at
from megacompile.planner.nvme_placement import Drive
from megacompile.planner.offload_windows import OffloadWindows
from megacompile.planner.plan_floor import Floor
from megacompile.planner.step_costs import StepCosts
from megacompile.schedule.op_table import SPECS, STREAMS, Kind
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step, peak_bytes
from megacompile.schedule.workload import Workload
from megacompile.state.host_budget import step_bytes

_LIMIT = 100_000  # operations lowered
_EVALUATIONS = 300  # where steps are short
_EFFORT = 8  # times the part by which the best is slower than expected: the share of these that it is worth
_BETTER = 1 - 1e-9


@dataclass(frozen=True)
class Planned:
    """A plan with the step it lowers to and what that step is predicted to take; ``evaluations`` is how many
    plans were tried for it."""

    plan: Plan
    step: Step
    timeline: Timeline
    peak_bytes: int
    evaluations: int = field(compare=False)

    @property
    def seconds(self) -> float:
        return self.timeline.step_seconds


class EvaluatedPlan(NamedTuple):
    """A plan as asked for and as placed, its step before its waits, its peak, and whether it fits."""

    asked: Plan
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
        self.costs = StepCosts(work, mode, machine, {*residents, *resident})
        self.floor, self.windows = Floor(self.costs), OffloadWindows(self.costs)
        self._calls: dict[tuple[Kind, int, str], float] = {}  # seconds of blocks' functions
        self._forget()

    def _forget(self) -> None:
        self.best: Planned | None = None
        self.expected = 0.0  # seconds of the linear program, of the fastest of its plans that fit; 0: of none
        self.lowered = 0  # operations so far
        self.evaluations = self._begun = 0
        self.seen: set[Plan] = set()
        self.misfits: dict[Plan, tuple[int, int]] = {}  # their peaks, and host bytes above the budget

    def anew(self) -> Candidates:
        """Return candidates for the same question, none of them tried."""
        other = copy(self)
        other._forget()
        return other

    def expect(self, seconds: float) -> None:
        """Note the seconds of the linear program of a plan that fits."""
        self.expected = min(self.expected or seconds, seconds)

    @property
    def gap(self) -> float:
        """By what part the best plan is slower than expected."""
        assert self.best is not None
        return self.best.seconds / self.expected - 1 if self.expected else 1.0

    @property
    def spent(self) -> bool:
        """Return whether the best plan has had the evaluations that it is worth: the closer to what is
        expected, the less is to be gained."""
        share = min(1.0, _EFFORT * self.gap)
        return self.evaluations - self._begun >= share * _EVALUATIONS or self.lowered >= share * _LIMIT

    def restart(self) -> None:
        """A new best plan has all evaluations for itself."""
        self.lowered, self._begun = 0, self.evaluations

    def take(self, other: Candidates) -> None:
        """Count what another search tried, and keep its best plan if that is faster."""
        self.evaluations += other.evaluations
        if other.best is not None and (self.best is None or other.best.seconds < self.best.seconds * _BETTER):
            self.best = other.best

    def measure(self, plan: Plan) -> EvaluatedPlan:
        """The plan over its best placement and the step before its waits."""
        self.evaluations += 1
        asked, plan = plan, with_state_at(plan, self.resident, "device")
        step = self._lower(plan)
        peak, taken = peak_bytes(step), step_bytes(step, self.work)
        over = 0 if self.host_budget is None else max(0, taken - self.host_budget)
        if over and self.spills and self.drive is not None and peak <= self.budget_bytes:
            spilled = self.drive.spill(plan, step, taken)
            if spilled is not None:
                return EvaluatedPlan(asked, spilled, self._lower(spilled), peak, True)
        fits = peak <= self.budget_bytes and not over
        if not fits:
            self.misfits[asked] = peak, over
        elif self.drive is not None and (placed := self.drive.place(plan, taken)) != plan:
            plan, step = placed, self._lower(placed)
        return EvaluatedPlan(asked, plan, step, peak, fits)

    def _lower(self, plan: Plan) -> Step:
        step = lower_memory(self.work, plan, self.mode)
        self.lowered += len(step.ops) // 2
        return step

    def score(self, plan: Plan) -> bool:
        """Return whether a plan fits and is faster than the best so far, which it then becomes."""
        if plan in self.seen:
            return False
        self.seen.add(plan)
        placed = with_state_at(plan, self.resident, "device")
        if (least := self.floor.nbytes(placed)) > self.budget_bytes:
            self.misfits[plan] = least, 0
            return False
        if self.best is not None and self.floor.seconds(placed) >= self.best.seconds:
            return False
        found = self.measure(plan)
        return found.fits and self.simulate(found)

    def measure_as_is(self, plan: Plan) -> EvaluatedPlan:
        """The plan as it is, and the step before its waits."""
        self.evaluations += 1
        step = self._lower(plan)
        peak = peak_bytes(step)
        return EvaluatedPlan(plan, plan, step, peak, peak <= self.budget_bytes)

    def simulate(self, found: EvaluatedPlan, within: float = _BETTER) -> bool:
        """Return whether a plan takes less than ``within`` times as long as the best, and replaces it."""
        _, plan, step, peak, _ = found
        seconds = [self._duration(op) for op in step.ops]
        if self.best is not None and _busiest(step, seconds) >= self.best.seconds * within:
            return False
        step = finish(step, self.work, plan, self.mode)
        self.lowered += len(step.ops) // 2
        timeline = simulate(step, self.machine, seconds)
        if self.best is not None and timeline.step_seconds >= self.best.seconds * within:
            return False
        self.best = Planned(plan, step, timeline, peak, 0)
        return True

    def _duration(self, op: Op) -> float:
        """Seconds of an operation; those of a block's function are the same in all steps."""
        if SPECS[op.kind].cost != "call":
            return duration(op, self.machine)
        key = op.kind, op.block, op.policy
        if key not in self._calls:
            self._calls[key] = duration(op, self.machine)
        return self._calls[key]


def _busiest(step: Step, seconds: Sequence[float]) -> float:
    """Seconds that the busiest stream takes alone: a step takes no less."""
    busy = dict.fromkeys(STREAMS, 0.0)
    for op, alone in zip(step.ops, seconds, strict=True):
        busy[op.stream] += alone
    return max(busy.values())
