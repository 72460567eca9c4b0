"""The planner: search for the fastest plan that fits, scored by simulating the step it leads to.

Candidates are lowered by the very passes that make the final step; their peak is exact and their time
simulated. Block choices are tried as prefixes ("the first n blocks keep nothing, the rest everything"),
by bisection, since a step that keeps more never needs less memory. The search is deterministic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
    best: Planned | None = None
    evaluations = 0
    for shape in _shapes(mode):
        planned, tried = _fill(work, mode, machine, budget_bytes, shape)
        evaluations += tried
        if planned is not None and (
            best is None or planned.timeline.step_seconds < best.timeline.step_seconds * (1 - 1e-9)
        ):
            best = planned
    if best is None:
        raise _infeasible(work, mode, machine, budget_bytes)
    return Planned(best.plan, best.step, best.timeline, best.peak_bytes, evaluations)


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


def _fill(
    work: Workload, mode: Mode, machine: Machine, budget_bytes: int, shape: _Shape
) -> tuple[Planned | None, int]:
    """The best candidate of this shape: per family, the shortest prefix that fits, by bisection."""
    count = len(work.blocks)
    seen: dict[tuple[str, ...], Planned | None] = {}

    def attempt(names: tuple[str, ...]) -> Planned | None:
        if names not in seen:
            plan = _plan(work, shape, names)
            step = lower(work, plan, mode)
            peak = peak_bytes(step)
            fits = peak <= budget_bytes
            seen[names] = (
                Planned(plan, step, simulate(step, machine), peak, 0) if fits else None
            )
        return seen[names]

    everything = attempt(("all",) * count)
    if everything is not None or mode.kind in ("evaluate", "update"):
        return everything, len(seen)
    for first, rest in _FAMILIES:
        if attempt((first,) * count) is not None:
            _least(0, count, lambda n: attempt((first,) * n + (rest,) * (count - n)) is not None)  # noqa: B023
    found = [p for p in seen.values() if p is not None]
    best = min(found, key=lambda p: p.timeline.step_seconds, default=None)
    return best, len(seen)


def _least(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The least n in [low, high] that fits, given that ``high`` does and that more fits better."""
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
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


def _infeasible(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> BudgetError:
    least: tuple[int, Step] | None = None
    for shape in _shapes(mode):
        for choice in ("none", "some", "least"):
            step = lower(work, _plan(work, shape, [choice] * len(work.blocks)), mode)
            peak = peak_bytes(step)
            if least is None or peak < least[0]:
                least = (peak, step)
    assert least is not None
    peak, step = least
    return BudgetError(
        f"hbm_budget={format_bytes(budget_bytes)} is too small: the least feasible budget for this "
        f"model and batch is {peak} bytes ({format_bytes(peak)}); {describe_peak(step, work)}. "
        "Raise the budget, or make the batch or the sequences smaller."
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
