"""Fill the device with state: which weight groups keep theirs there beyond what the search chose, a plan's
last choice.

A group on the device takes its weights, masters, moments and, where gradients wait, its gradient: 12 to
16 bytes per parameter, for which nothing of it crosses the link and the host does not update it. First
groups in the order of the forward come first: theirs are the updates that end a step last and that the
next step wants first. Frozen groups come before them: they take their weights alone, which a plan that holds
them through a step has room for anyway.

A model has one state. The groups chosen for its first training program stay for all others that fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megacompile.blocks.weight_groups import Assembly, GroupLayout
from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import simulate
from megacompile.passes import finish, lower_memory
from megacompile.planner.arrangements import with_state_at
from megacompile.planner.plan_evaluator import Planned
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import peak_bytes
from megacompile.schedule.workload import GroupWork, Workload
from megacompile.state.moment_formats import Form, group_arrays
from megacompile.state.torch_optimizer import Foreign


def with_state(assembly: Assembly, form: Form) -> Assembly:
    """The assembly with what each group's state and gradient take, and an update by an optimizer's own
    class."""

    def work_of(work: GroupWork, layout: GroupLayout) -> GroupWork:
        moved, flops, matrices = 0, 0, None
        if isinstance(form, Foreign) and layout.trainable:
            (moved, flops), matrices = form.update_work(layout), form.matrix_updates(layout)
        return replace(
            work,
            state_bytes=sum(a.nbytes for a in group_arrays(layout, form) if a.name != "weights"),
            gradient_bytes=4 * layout.share,
            update_moved=moved,
            update_flops=flops,
            matrices=matrices,
        )

    groups = tuple(map(work_of, assembly.work.groups, assembly.groups))
    return replace(assembly, work=replace(assembly.work, groups=groups))


def trained_groups(work: Workload) -> tuple[int, ...]:
    """Groups whose masters and moments may be on the device: not those whose rows the host gathers, nor those
    that another optimizer than Adam updates."""
    return not_gathered(work, [g for g in sorted(work.contributions) if not work.groups[g].update_moved])


def not_gathered(work: Workload, groups: Iterable[int]) -> tuple[int, ...]:
    """``groups`` without those whose rows the host gathers, from masters in its memory."""
    gathered = {g for found in work.gathered.values() for g in found}
    return tuple(g for g in groups if g not in gathered)


def reside(
    best: Planned,
    work: Workload,
    mode: Mode,
    machine: Machine,
    budget_bytes: int,
    candidates: tuple[int, ...] | None,
) -> Planned:
    """The plan with the state of as many ``candidates`` on the device as fit, if that is faster.

    ``candidates`` None allows every group that a block uses and whose state the plan keeps in RAM. Frozen
    groups, which are all weights, come first, and stay from step to step even where that is as fast and no
    faster. Modes that do not train take all candidates that fit, so that state need not move.
    """
    if candidates is None:
        candidates = tuple(g for g in sorted(work.used) if best.plan.groups[g].state == "host")
    candidates = not_gathered(work, candidates)
    again = {g for block in work.blocks for c in block.policies
             for call in (c.recompute, c.backward) if call is not None for g in call.groups}  # fmt: skip
    frozen = [g for g in candidates if g not in work.contributions and not work.groups[g].state_bytes]
    held = {g for g in again if best.plan.groups[g].residency == "step"}
    frozen.sort(key=lambda g: g not in held)  # theirs are slots that no other group uses
    trained = [g for g in candidates if g not in frozen]
    for groups, factor in ((frozen, 1 + 1e-9), (trained, 1 - 1e-9)):
        found = _with_most(best, groups, work, mode, machine, budget_bytes)
        if mode.kind != "train" or found.seconds <= factor * best.seconds:
            best = found
    return best


def _with_most(
    best: Planned,
    candidates: Sequence[int],
    work: Workload,
    mode: Mode,
    machine: Machine,
    budget_bytes: int,
) -> Planned:
    """The plan with the state of as many of the first candidates on the device as fit."""
    count = _most(best.plan, candidates, work, mode, budget_bytes)
    if count == 0:
        return best
    plan = with_state_at(best.plan, candidates[:count], "device")
    step = finish(lower_memory(work, plan, mode), work, plan, mode)
    return Planned(plan, step, simulate(step, machine), peak_bytes(step), best.evaluations)


def _most(plan: Plan, candidates: Sequence[int], work: Workload, mode: Mode, budget_bytes: int) -> int:
    """Return how many of the first candidates fit, by bisection: one more never needs less memory."""
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high + 1) // 2
        step = lower_memory(work, with_state_at(plan, candidates[:middle], "device"), mode)
        if peak_bytes(step) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low
