"""The planner: search for the fastest plan that fits, scored by simulating the step it leads to.

Candidates are lowered by the very passes that make the final step; their peak is exact and their time
simulated. Block choices are tried as prefixes ("the first n blocks keep nothing, the rest everything"),
by bisection, since a step that keeps more never needs less memory. The search is deterministic.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megacompile.errors import BudgetError
from megacompile.machine import Machine
from megacompile.passes import lower
from megacompile.plan import BlockPlan, GroupPlan, Mode, Plan
from megacompile.simulate import Timeline, simulate
from megacompile.step import DEVICE_TOKENS, Step, Token, memory_curve, peak_bytes
from megacompile.units import format_bytes
from megacompile.workload import Workload


@dataclass(frozen=True)
class Planned:
    """A plan with the step it lowers to and what that step is predicted to take."""

    plan: Plan
    step: Step
    timeline: Timeline
    peak_bytes: int
    evaluations: int


def search(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Planned:
    """The fastest plan found whose step never holds more than ``budget_bytes``.

    Raises :class:`BudgetError` with the least feasible budget where nothing fits.
    """
    search = _Search(work, mode, machine, budget_bytes)
    best: Planned | None = None
    for shape in _shapes(mode):
        best = _faster(best, search.fill(shape))
    if best is None:
        raise _infeasible(work, mode, budget_bytes)
    best = search.hold(best)
    return replace(best, evaluations=search.evaluations)


def _faster(best: Planned | None, other: Planned | None) -> Planned | None:
    """The faster of two; the first where they tie, so that the order of trials decides."""
    if best is None or other is None:
        return best or other
    return other if other.timeline.step_seconds < best.timeline.step_seconds * (1 - 1e-9) else best


@dataclass(frozen=True, slots=True)
class _Shape:
    """The part of a plan that is the same for all blocks and groups of a candidate."""

    stash: str
    keep: str
    lead: int
    grad_lag: int
    order: str


def _shapes(mode: Mode) -> Iterator[_Shape]:
    orders = ["depth", "breadth"] if mode.micro_batches > 1 else ["depth"]
    for order, keep, (lead, lag), stash in itertools.product(
        orders, ["step", "micro", "stream"], [(2, 1), (1, 1), (0, 0)], ["device", "host"]
    ):
        if keep == "micro" and mode.micro_batches == 1:
            continue
        yield _Shape(stash, keep, lead, lag, order)


# (what the first blocks keep, what the rest keeps): each pair is one family of prefixes
_FAMILIES = (("none", "all"), ("some", "all"), ("none", "some"), ("least", "some"), ("least", "none"))


class _Search:
    """Lowers, measures and simulates candidates; each plan once."""

    def __init__(self, work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> None:
        self.work, self.mode, self.machine, self.budget_bytes = work, mode, machine, budget_bytes
        self._seen: dict[Plan, Planned | None] = {}

    @property
    def evaluations(self) -> int:
        return len(self._seen)

    def attempt(self, plan: Plan) -> Planned | None:
        """The plan's step and time, or None where it does not fit."""
        if plan not in self._seen:
            step = lower(self.work, plan, self.mode)
            peak = peak_bytes(step)
            self._seen[plan] = (
                Planned(plan, step, simulate(step, self.machine), peak, 0)
                if peak <= self.budget_bytes
                else None
            )
        return self._seen[plan]

    def fill(self, shape: _Shape) -> Planned | None:
        """The best of a shape: per family the shortest prefix that fits, by bisection."""
        count = len(self.work.blocks)

        def mixed(first: str, rest: str, n: int) -> Planned | None:
            return self.attempt(_plan(self.work, shape, (first,) * n + (rest,) * (count - n)))

        uniform = [mixed(name, name, count) for name in ("all", "some", "none", "least")]
        best = functools.reduce(_faster, uniform)
        fits_whole = uniform[0] is not None and shape.stash == "device"
        if fits_whole or self.mode.kind in ("evaluate", "update"):
            return best
        for first, rest in _FAMILIES:
            if mixed(first, rest, count) is not None:
                of_family = functools.partial(mixed, first, rest)
                best = _faster(best, of_family(_shortest(count, of_family)))
        return best

    def hold(self, best: Planned) -> Planned:
        """Spend what memory is left on weight groups that stay for the whole step, last ones first.

        Groups of the last layers are wanted again soonest, and every group that stays saves its
        second journey.
        """
        groups = best.plan.groups

        def holding(count: int) -> Planned | None:
            kept = tuple(
                replace(g, keep="step") if i >= len(groups) - count else g for i, g in enumerate(groups)
            )
            return self.attempt(replace(best.plan, groups=kept))

        if all(g.keep == "step" for g in groups) or self.mode.kind in ("evaluate", "update"):
            return best
        streamed = _shortest(len(groups), lambda n: holding(len(groups) - n))
        return _faster(best, holding(len(groups) - streamed)) or best


def _shortest(high: int, candidate: Callable[[int], Planned | None]) -> int:
    """The least n in [0, high] whose candidate fits, given that ``high`` does and more fits better."""
    low = 0
    while low < high:
        middle = (low + high) // 2
        if candidate(middle) is not None:
            high = middle
        else:
            low = middle + 1
    return low


def _plan(work: Workload, shape: _Shape, names: Sequence[str]) -> Plan:
    return Plan(
        blocks=tuple(BlockPlan(n, shape.stash) for n in names),  # type: ignore[arg-type]
        groups=tuple(GroupPlan(shape.keep, shape.lead) for _ in work.groups),  # type: ignore[arg-type]
        order=shape.order,  # type: ignore[arg-type]
        grad_lag=shape.grad_lag,
    )


def _infeasible(work: Workload, mode: Mode, budget_bytes: int) -> BudgetError:
    def lowered(shape: _Shape, names: Sequence[str]) -> tuple[int, Step]:
        step = lower(work, _plan(work, shape, names), mode)
        return peak_bytes(step), step

    count = len(work.blocks)
    uniform = [(*lowered(s, (c,) * count), s) for s in _shapes(mode) for c in ("none", "some", "least")]
    peak, step, shape = min(uniform, key=lambda found: found[0])
    for first, rest in _FAMILIES:  # blocks that differ may need less when they are treated differently
        for n in range(1, count):
            mixed = lowered(shape, (first,) * n + (rest,) * (count - n))
            peak, step = min((peak, step), mixed, key=lambda found: found[0])
    return BudgetError(
        f"hbm_budget={format_bytes(budget_bytes)} is too small: the least feasible budget for this "
        f"model and batch is {peak} bytes ({format_bytes(peak)}); {describe_peak(step, work)}. "
        "Raise the budget, or make the batch or the sequences smaller.",
        least_bytes=peak,
    )


def describe_peak(step: Step, work: Workload) -> str:
    """What is alive at the highest point, in one clause: the operation, slots, stashes, workspace."""
    curve = memory_curve(step)
    if not curve:
        return "nothing runs on the device"
    index, peak = max(curve, key=lambda point: point[1])
    op = step.ops[index]
    where = f"{op.kind} of {work.blocks[op.block].name}" if op.block >= 0 else op.kind
    alive = alive_before(step, index)
    stashes = sum(step.token_bytes[t] for t in alive)
    workspace = peak - stashes - step.slab_bytes - step.constant_bytes
    return (
        f"at its highest point, {where}, it holds {format_bytes(step.slab_bytes)} of weight slots, "
        f"{format_bytes(stashes)} of activations and gradients, and {format_bytes(workspace)} of "
        "that block's own tensors"
    )


def alive_before(step: Step, index: int) -> set[Token]:
    """Device tokens alive when the operation at ``index`` starts."""
    alive: set[Token] = set()
    for op in step.ops[:index]:
        alive |= {t for t in op.writes if t[0] in DEVICE_TOKENS}
        alive -= {*op.donates, *op.frees}
    return alive
