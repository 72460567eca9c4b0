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
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from megacompile.errors import BudgetError, MegacompileError
from megacompile.machine.rates import Machine
from megacompile.machine.simulate import Timeline, duration, simulate
from megacompile.passes import finish, lower_memory
from megacompile.plan.plan import Mode, Plan
from megacompile.plan.workload import Workload
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
from megacompile.search.floor import Floor
from megacompile.search.least import describe_peak, infeasible, least_plans
from megacompile.search.mixture import Mixer
from megacompile.search.neighbours import neighbours
from megacompile.search.policies import rivals
from megacompile.search.tiers import Drive
from megacompile.step.operations import Step, host_bytes, peak_bytes
from megacompile.units import format_bytes

_STARTS, _LIMIT = 50_000, 100_000  # operations lowered before local search begins, and in all
_EVALUATIONS = 300  # where steps are short
_FEW = 4  # blocks
_FIRST = (1, 4)  # groups whose updates end a step, tried on the device: the program does not see them last
_CORRECTIONS = 6  # solutions of the linear program per start
_BETTER = 1 - 1e-9
_CLOSE = 1.003  # to the goal: no more to be looked for
_EVERYTHING = 1e15  # bytes that no device has


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
        found = _Search(work, mode, machine, budget_bytes, limit, drive, spills, residents, resident)
        try:
            with _without_garbage_collection():
                found.run(also)
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
    taken = host_bytes(step, work)
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


class _Measured(NamedTuple):
    """A plan, its step before its waits, its peak, and whether it fits device and host."""

    plan: Plan
    step: Step
    peak: int
    fits: bool


class _Search:
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
        self._seen: set[Plan] = set()
        self._misfits: dict[Plan, tuple[int, int]] = {}  # their peaks, and host bytes above the budget

    def run(self, also: Sequence[Plan]) -> None:
        for plan in also:
            others = {i for i, g in enumerate(plan.groups) if i not in self.residents or g.state != "device"}
            blocks = tuple(replace(b, stash="host") if b.stash == "nvme" else b for b in plan.blocks)
            self.score(replace(with_state_at(plan, others, "host"), blocks=blocks, workload=""))
        self._mixtures()
        self._fixed()
        self._few_blocks()
        if self.best is None:
            for plan in least_plans(self.work, self.mode):
                self.score(plan)
        if self.best is not None:
            self._improve()

    @property
    def _spent(self) -> bool:
        return self.lowered >= _LIMIT or self.evaluations >= _EVALUATIONS

    # ---- one candidate ------------------------------------------------------------------------------

    def measure(self, plan: Plan) -> _Measured:
        """The plan over its best placement and the step before its waits."""
        self.evaluations += 1
        asked, plan = plan, with_state_at(plan, self.resident, "device")
        step = self._lower(plan)
        peak, taken = peak_bytes(step), host_bytes(step, self.work)
        over = 0 if self.host_budget is None else max(0, taken - self.host_budget)
        if over and self.spills and self.drive is not None and peak <= self.budget_bytes:
            spilled = self.drive.spill(plan, step, taken)
            if spilled is not None:
                return _Measured(spilled, self._lower(spilled), peak, True)
        fits = peak <= self.budget_bytes and not over
        if not fits:
            self._misfits[asked] = peak, over
        elif self.drive is not None and (placed := self.drive.place(plan, taken)) != plan:
            plan, step = placed, self._lower(placed)
        return _Measured(plan, step, peak, fits)

    def _lower(self, plan: Plan) -> Step:
        step = lower_memory(self.work, plan, self.mode)
        self.lowered += len(step.ops) // 2
        return step

    def score(self, plan: Plan) -> bool:
        """Whether a plan fits and is faster than the best so far, which it then becomes."""
        if plan in self._seen or (self.best and self.floor.seconds(plan) >= self.best.seconds):
            return False
        self._seen.add(plan)
        found = self.measure(plan)
        return found.fits and self._simulate(found)

    def _simulate(self, found: _Measured) -> bool:
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

    # ---- starts -------------------------------------------------------------------------------------

    def _mixtures(self) -> None:
        if self.mode.kind in ("evaluate", "update"):
            return
        arrangements: tuple[Arrangement, ...] = ("runs", "spread")
        mixers = {}
        for shape, arrangement in product(shapes(self.mode), arrangements):
            if self.lowered > _STARTS:
                return
            if shape.order not in mixers:
                mixer = mixers[shape.order] = self._mixer(shape)
                ideal = mixer.solve(_EVERYTHING, None)
                if ideal is not None:
                    self.goal = min(self.goal or ideal.seconds, ideal.seconds)
            self._fill(mixers[shape.order], shape, arrangement)
        shape = shapes(self.mode)[0]
        for count in _FIRST if self.residents else ():
            mixer = self._mixer(shape, frozenset(sorted(self.residents)[:count]))
            for arrangement in arrangements:
                self._fill(mixer, shape, arrangement)

    def _mixer(self, shape: Shape, resident: frozenset[int] = frozenset()) -> Mixer:
        return Mixer(
            self.work, self.mode, self.machine, shape.order,
            resident=resident | self.resident, residents=self.residents,
            drive_after=None if self.drive is None else self.drive.spare,
        )  # fmt: skip

    def _fill(self, mixer: Mixer, shape: Shape, arrangement: Arrangement) -> None:
        """Correct the program's room until the step that comes of it just fits, and score that one."""
        budget = self.budget_bytes
        room, host_room = float(budget), None if self.spills else self.host_budget
        fits_at, fails_at = 0.0, _EVERYTHING
        fitting: tuple[Plan, _Measured] | None = None
        for _ in range(_CORRECTIONS):
            mixture = mixer.solve(room, host_room)
            if mixture is None:
                break
            plan = arrange(self.work, shape, mixture, arrangement)
            if not self.mode.keeps_gradients:
                plan = with_late(plan, self.work, mixture.late)
            found = None if plan in self._misfits else self.measure(plan)
            if found is not None and found.fits:
                same, fits_at = fitting is not None and fitting[0] == plan, room
                fitting, peak = (plan, found), found.peak
                if same or budget - peak < 0.01 * budget:
                    break
            else:
                fails_at = room
                peak, over = self._misfits[plan]
                if host_room is not None:
                    host_room -= over
            room += 0.98 * (budget - peak)
            if not fits_at < room < fails_at:
                room = (fits_at + min(fails_at, budget)) / 2
        if fitting is not None and fitting[0] not in self._seen:
            self._seen.add(fitting[0])
            self._simulate(fitting[1])

    def _fixed(self) -> None:
        """Plans that treat everything alike, and the schedules of other systems.

        Where streamed groups do not fit, held ones do not either.
        """
        keeps = ("stream", "step") if self.mode.micro_batches == 1 else ("stream", "micro", "step")
        for shape, choice, stash in product(shapes(self.mode), CHOICES, ("device", "host")):
            for keep in keeps:
                plan = uniform(self.work, shape, choice, stash, keep)
                self.score(plan)
                if plan in self._misfits:
                    break
        if self.mode.kind == "train":
            for plan in rivals(self.work, self.mode, self.machine, self.budget_bytes):
                self.score(plan)

    def _few_blocks(self) -> None:
        """Where counts are too coarse: keep everything, then step by step what lowers the peak most."""
        if len(self.work.blocks) > _FEW or self.mode.kind in ("evaluate", "update"):
            return
        for shape in shapes(self.mode):
            plan = uniform(self.work, shape, CHOICES[0], "device", "stream")
            found = self.measure(plan)
            while not found.fits:
                lower = (self.measure(p) for p in self._keeping_less(found.plan))
                least = min(lower, key=lambda other: other.peak, default=found)
                if least.peak >= found.peak:
                    break
                found = least
            if found.fits:
                self.score(found.plan)

    def _keeping_less(self, plan: Plan) -> Iterator[Plan]:
        for b, now in enumerate(plan.blocks):
            for choice in CHOICES[CHOICES.index(now.choice) + 1 :]:
                yield replace(
                    plan, blocks=(*plan.blocks[:b], replace(now, choice=choice), *plan.blocks[b + 1 :])
                )

    # ---- local search -------------------------------------------------------------------------------

    def _improve(self) -> None:
        """First improvement over the neighbours of the best, until none helps or the limit is reached."""
        assert self.best is not None
        while not self._spent and self.best.seconds > self.goal * _CLOSE:
            start = self.best.plan
            for plan in neighbours(self.work, self.mode, start, self.residents):
                if self._spent:
                    return
                self.score(plan)
            if self.best.plan == start:
                return
