"""Say what the state of weight groups takes, and which groups may have it on the device.

In: groups as they are laid out, or a workload. A group on the device takes its weights, masters, moments and,
where gradients wait, its gradient: 12 to 16 bytes per parameter, for which nothing of it crosses the link and
the host does not update it. Which of them do is the search's choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megacompile.blocks.weight_groups import Assembly, GroupLayout
from megacompile.schedule.workload import GroupWork, Workload
from megacompile.state.moment_formats import Form, group_arrays
from megacompile.state.torch_optimizer import TorchOptimizer


def with_state(assembly: Assembly, form: Form) -> Assembly:
    """The assembly with what each group's state and gradient take, and an update by an optimizer's own
    class."""

    def work_of(work: GroupWork, layout: GroupLayout) -> GroupWork:
        moved, flops, matrices = 0, 0, None
        if isinstance(form, TorchOptimizer) and layout.trainable:
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


def may_reside(work: Workload) -> tuple[int, ...]:
    """Groups whose state may be on the device: those that blocks read, but for those that another optimizer
    than Adam updates."""
    return not_gathered(work, [g for g in sorted(work.used) if not work.groups[g].update_moved])


def trained_groups(work: Workload) -> tuple[int, ...]:
    """Those of them that are trained."""
    return tuple(g for g in may_reside(work) if g in work.contributions)


def not_gathered(work: Workload, groups: Iterable[int]) -> tuple[int, ...]:
    """``groups`` without those whose rows the host gathers, from masters in its memory."""
    gathered = {g for found in work.gathered.values() for g in found}
    return tuple(g for g in groups if g not in gathered)
