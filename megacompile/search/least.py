"""The least that a step needs: plans of small peak, and the error that names the smallest."""

from __future__ import annotations

from collections.abc import Iterator

from megacompile.errors import BudgetError
from megacompile.passes import lower_memory
from megacompile.plan.plan import Mode, Plan
from megacompile.plan.workload import Workload
from megacompile.search.arrange import Shape, shapes, uniform
from megacompile.step.operations import Step, memory_curve, peak_bytes
from megacompile.step.spec import Token
from megacompile.units import format_bytes

_KEEPS = ("none", "some", "least")
_FAMILIES = (("none", "all"), ("some", "all"), ("none", "some"), ("least", "some"), ("least", "none"))
_MOST = 24  # prefixes tried per family


def least_plans(work: Workload, mode: Mode) -> Iterator[Plan]:
    """Plans of small peak: everything streamed, little kept; then mixtures of what is kept.

    Blocks that differ may need less when they are treated differently.
    """
    found: list[tuple[int, Plan, Shape, str]] = []
    for shape in shapes(mode):
        for choice in _KEEPS:
            for stash in ("device", "host"):
                for keep in ("stream", "step") if shape.lead == 2 else ("stream",):
                    plan = uniform(work, shape, choice, stash, keep)
                    found.append((peak_bytes(lower_memory(work, plan, mode)), plan, shape, stash))
    found.sort(key=lambda f: f[0])
    yield from (plan for _, plan, _, _ in found)
    _, best, shape, stash = found[0]
    count = len(work.blocks)
    for first, rest in _FAMILIES:
        for n in range(1, count, -(-count // _MOST)):
            names = (first,) * n + (rest,) * (count - n)
            yield uniform(work, shape, "", stash, best.groups[0].keep, choices=names)


def infeasible(work: Workload, mode: Mode, budget_bytes: int) -> BudgetError:
    """The error that names the least budget, and what is alive where the step needs it."""
    steps = (lower_memory(work, plan, mode) for plan in least_plans(work, mode))
    step = min(steps, key=peak_bytes)
    peak = peak_bytes(step)
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
        alive |= {t for t in op.writes if t.on_device}
        alive -= {*op.donates, *op.frees}
    return alive
