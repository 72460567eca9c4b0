"""The least that a step needs of the device: one answer for the search, the choice of cuts and reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megacompile.assemble.plan import Mode, Plan
from megacompile.assemble.workload import Workload
from megacompile.errors import BudgetError
from megacompile.passes import lower_memory
from megacompile.plan.arrange import Shape, policies_of, shapes, uniform
from megacompile.step.operations import Step, memory_curve, peak_bytes
from megacompile.step.spec import Token
from megacompile.units import format_bytes

_LEAN_POLICIES = ("none", "some", "least", "attention")
_FAMILIES = (("none", "all"), ("some", "all"), ("none", "some"), ("least", "some"), ("least", "none"))
_SHALLOW = 24  # blocks up to which all prefixes are tried
_PREFIXES = 4  # tried per family of deeper models


class Least(NamedTuple):
    """Device bytes of a plan's step, the plan, and the step before its waits."""

    nbytes: int
    plan: Plan
    step: Step


def least(work: Workload, mode: Mode, enough: int = 0) -> Least:
    """The plan of least device bytes among those of small peak; the first that needs at most ``enough``."""
    best: Least | None = None
    for found in small_plans(work, mode):
        if best is None or found.nbytes < best.nbytes:
            best = found
        if best.nbytes <= enough:
            break
    assert best is not None
    return best


def small_plans(work: Workload, mode: Mode) -> Iterator[Least]:
    """Plans of small peak: all blocks alike; then mixtures of what is kept.

    Blocks that differ may need less when they are treated differently.
    """
    found: list[tuple[Least, Shape, str]] = []
    for plan in _alike(work, mode):
        found.append(plan)
        yield plan[0]
    _, shape, saved_on = min(found, key=lambda f: f[0].nbytes)
    count = len(work.blocks)
    stride = 1 if count <= _SHALLOW else -(-count // _PREFIXES)
    for first, rest in _FAMILIES:
        for n in sorted({*range(1, count, stride), count - 1} - {0}):
            names = (first,) * n + (rest,) * (count - n)
            yield _lowered(work, uniform(work, shape, "", saved_on, "stream", checkpoints=names), mode)


def least_alike(work: Workload, mode: Mode) -> int:
    """The least device bytes of plans that treat all blocks alike: nearly the least, at less cost."""
    return min(small.nbytes for small, _, _ in _alike(work, mode))


def _alike(work: Workload, mode: Mode) -> Iterator[tuple[Least, Shape, str]]:
    """Everything streamed just in time, little kept, with the shape and the place of what is kept."""
    offered = policies_of(work)
    lean = [name for name in _LEAN_POLICIES if name != "attention" or name in offered]
    for shape in shapes(mode):
        for checkpoint in lean if shape.prefetch_depth == 0 else ():
            for saved_on in ("device", "host") if shape.reload else ("host",):
                small = _lowered(work, uniform(work, shape, checkpoint, saved_on, "stream"), mode)
                yield small, shape, saved_on


def _lowered(work: Workload, plan: Plan, mode: Mode) -> Least:
    step = lower_memory(work, plan, mode)
    return Least(peak_bytes(step), plan, step)


def infeasible(work: Workload, mode: Mode, budget_bytes: int) -> BudgetError:
    """The error that names the least budget, and what is alive where the step needs it."""
    peak, _, step = least(work, mode)
    return BudgetError(
        f"hbm_budget={format_bytes(budget_bytes)} is too small: the least feasible budget for this "
        f"model and batch is {peak} bytes ({format_bytes(peak)}); {describe_peak(step, work)}. "
        "Raise the budget, or make the batch or the sequences smaller.",
        least_bytes=peak,
    )


def describe_peak(step: Step, work: Workload) -> str:
    """What is alive at the highest point, in one clause: the operation, slots, saved activations,
    workspace."""
    curve = memory_curve(step)
    if not curve:
        return "nothing runs on the device"
    index, peak = max(curve, key=lambda point: point[1])
    op = step.ops[index]
    where = f"{op.kind} of {work.blocks[op.block].name}" if op.block >= 0 else op.kind
    alive = alive_before(step, index)
    offloaded = sum(step.token_bytes[t] for t in alive)
    workspace = peak - offloaded - step.slab_bytes - step.constant_bytes
    return (
        f"at its highest point, {where}, it holds {format_bytes(step.slab_bytes)} of weight slots, "
        f"{format_bytes(offloaded)} of activations and gradients, and {format_bytes(workspace)} of "
        "that block's own tensors"
    )


def alive_before(step: Step, index: int) -> set[Token]:
    """Device tokens alive when the operation at ``index`` starts."""
    alive: set[Token] = set()
    for op in step.ops[:index]:
        alive |= {t for t in op.writes if t.on_device}
        alive -= {*op.donates, *op.frees}
    return alive
