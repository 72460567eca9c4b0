"""The least that a step needs of the device: one answer for the search, the choice of cuts and reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megacompile.passes import lower_memory
from megacompile.planner.arrangements import policies_of, shapes, uniform
from megacompile.planner.lowest_bytes import lowest_bytes
from megacompile.planner.too_small import TooSmall
from megacompile.schedule.op_table import Direction, Saved, Token, Update, Value, ValueGrad, WeightGrad
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Step, memory_curve, peak_bytes
from megacompile.schedule.workload import Workload
from megacompile.units import format_bytes

_LEAN_POLICIES = ("none", "some", "least", "attention")
_FAMILIES = (("none", "all"), ("some", "all"), ("none", "some"), ("least", "some"), ("least", "none"))
_SHALLOW = 24  # blocks up to which all prefixes are tried
_PREFIXES = 4  # tried per family of deeper models
_NEAR = 1.001  # times the lower bound: no mixture is tried to save less
_REMEMBERED = 64  # workloads whose least is remembered


class Least(NamedTuple):
    """Device bytes of a plan's step, and the plan."""

    nbytes: int
    plan: Plan


def least(work: Workload, mode: Mode, enough: int = 0) -> Least:
    """The plan of least device bytes among those of small peak; the first that needs at most ``enough``."""
    lowest = lowest_bytes(work, mode)
    return _least(work, mode, lowest) if lowest > enough else _first(work, mode, enough)


@lru_cache(maxsize=_REMEMBERED)
def _least(work: Workload, mode: Mode, lowest: int) -> Least:
    return _first(work, mode, lowest)


def _first(work: Workload, mode: Mode, enough: int) -> Least:
    """The first small plan that needs at most ``enough``; where none does, the one of least bytes."""
    best: Least | None = None
    for found in small_plans(work, mode):
        if best is None or found.nbytes < best.nbytes:
            best = found
        if best.nbytes <= enough:
            break
    assert best is not None
    return best


def small_plans(work: Workload, mode: Mode) -> Iterator[Least]:
    """Plans of small peak: all blocks alike; then mixtures of what is kept. One that is sure to need no less
    than one before has a lower bound of its bytes.

    Blocks that differ may need less when they are treated differently. They do not if the leanest plans need
    the same whatever blocks keep, and hardly if one of these plans is close to the lower bound.
    """
    best: Least | None = None
    seen: set[Plan] = set()
    lean = set()
    for plan in _unseen(work, _uniform_plans(work, mode), seen):
        found = _lowered(work, plan, mode, best)
        best = found if best is None or found.nbytes < best.nbytes else best
        if not any(block.reload for block in plan.blocks):
            lean.add(found.nbytes)
        yield found
    assert best is not None
    if len(lean) == 1 or best.nbytes <= _NEAR * lowest_bytes(work, mode):
        return
    alike = best.plan
    for plan in _unseen(work, (_with(alike, names) for names in _mixed(len(work.blocks))), seen):
        found = _lowered(work, plan, mode, best)
        best = min(best, found, key=lambda f: f.nbytes)
        yield found


def _unseen(work: Workload, plans: Iterable[Plan], seen: set[Plan]) -> Iterator[Plan]:
    """The plans that differ from all before: a block that lacks a policy has another in its place."""
    for plan in plans:
        same = _with(
            plan, [b.policy(p.checkpoint).name for b, p in zip(work.blocks, plan.blocks, strict=True)]
        )
        if same not in seen:
            seen.add(same)
            yield plan


def _with(plan: Plan, checkpoints: Sequence[str]) -> Plan:
    """The plan with other checkpoint policies, one for each block."""
    blocks = zip(plan.blocks, checkpoints, strict=True)
    return replace(plan, blocks=tuple(replace(block, checkpoint=name) for block, name in blocks))


def _uniform_plans(work: Workload, mode: Mode) -> Iterator[Plan]:
    """Everything streamed just in time, little kept."""
    offered = policies_of(work)
    lean = [name for name in _LEAN_POLICIES if name != "attention" or name in offered]
    for shape in shapes(work, mode):
        if shape.prefetch_depth == 0:
            for checkpoint in lean if shape.windows.reload else [*lean, "all"]:
                for saved_on in ("device", "host") if shape.windows.reload else ("host",):
                    yield uniform(work, shape, checkpoint, saved_on, "stream")


def _mixed(count: int) -> Iterator[tuple[str, ...]]:
    """Checkpoint policies of blocks that differ: one for the first, another for the rest."""
    stride = 1 if count <= _SHALLOW else -(-count // _PREFIXES)
    for first, rest in _FAMILIES:
        for n in sorted({*range(1, count, stride), count - 1} - {0}):
            yield (first,) * n + (rest,) * (count - n)


def _lowered(work: Workload, plan: Plan, mode: Mode, best: Least | None) -> Least:
    bound = lowest_bytes(work, mode, [block.checkpoint for block in plan.blocks])
    if best is not None and bound >= best.nbytes:
        return Least(bound, plan)
    return Least(peak_bytes(lower_memory(work, plan, mode)), plan)


def infeasible(work: Workload, mode: Mode, budget_bytes: int) -> TooSmall:
    """Name the least budget, and what is alive where the step needs it."""
    peak, plan = least(work, mode)
    why = describe_peak(lower_memory(work, plan, mode), work)
    return TooSmall(
        f"hbm_budget={format_bytes(budget_bytes)} is too small: the least feasible budget for this "
        f"model and batch is {peak} bytes ({format_bytes(peak)}); {why}. "
        "Raise the budget, or make the batch or the sequences smaller.",
        least_bytes=peak,
    )


def describe_peak(step: Step, work: Workload) -> str:
    """Say in one clause what is alive at the highest point: the operation, and the bytes of each kind."""
    where, parts = highest_point(step, work)
    *most, last = [f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items()] or ["nothing"]
    return f"at its highest point, {where}, it holds {' and '.join(filter(None, [', '.join(most), last]))}"


def highest_point(step: Step, work: Workload) -> tuple[str, dict[str, int]]:
    """Return the operation where the step holds the most of the device, and the bytes of each kind that it
    holds there; they add up to the peak."""
    curve = memory_curve(step)
    empty = 0, step.slab_bytes + step.constant_bytes
    index, peak = max(curve, key=lambda point: point[1], default=empty)
    exchanged = sum(step.shards) + 2 * step.exchange_bytes
    parts = {
        "weight slots": step.slab_bytes,
        "weights and state that stay": step.constant_bytes - work.constant_bytes - exchanged,
        "buffers of exchanges": exchanged,
        "buffers and constants": work.constant_bytes,
    }
    kinds = {Value: "activations between blocks", Saved: "tensors kept for the backward",
             ValueGrad: "activation gradients", WeightGrad: "weight gradients on their way",
             Update: "updates of matrices", Direction: "updates of matrices"}  # fmt: skip
    parts |= dict.fromkeys(kinds.values(), 0)
    for token in _alive_before(step, index):
        parts[kinds[type(token)]] += step.token_bytes[token]
    parts["the running block's own"] = peak - sum(parts.values())
    op = step.ops[index] if curve else None
    block = f" of {work.blocks[op.block].name}" if op is not None and op.block >= 0 else ""
    where = f"{op.kind}{block}" if op is not None else "where nothing runs on the device"
    return where, {name: nbytes for name, nbytes in parts.items() if nbytes}


def _alive_before(step: Step, index: int) -> set[Token]:
    """Return the device tokens alive when the operation at ``index`` starts."""
    alive: set[Token] = set()
    for op in step.ops[:index]:
        alive |= {t for t in op.writes if t.on_device}
        alive -= {*op.donates, *op.frees}
    return alive
