"""Bring each weight group to the device before its uses and let it go after them.

A stay is one prefetch, the uses it serves, and one evict. Uses belong to one stay if the plan keeps the
group between them, or if they are so close that the next prefetch would start before the group could leave.

Ranks that share a group with state on the device copy their shards within the device.
"""

from __future__ import annotations

from collections import defaultdict

from megacompile.schedule.op_table import COMPUTES, Master, Resident, Weights
from megacompile.schedule.plan import GroupPlan, Mode, Plan
from megacompile.schedule.step import Op, Step, weave
from megacompile.schedule.workload import Workload


def insert_prefetch(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Insert a prefetch ``prefetch_depth`` compute operations ahead of each stay and an evict at its end."""
    compute = [i for i, op in enumerate(step.ops) if op.kind in COMPUTES]
    uses: dict[int, list[int]] = defaultdict(list)
    micro = [step.ops[i].micro for i in compute]
    for position, index in enumerate(compute):
        for token in step.ops[index].reads:
            if isinstance(token, Weights):
                uses[token.group].append(position)
    before: dict[int, list[Op]] = defaultdict(list)
    after: dict[int, list[Op]] = defaultdict(list)
    for first, last, group in sorted(
        (s[0], s[-1], g) for g, positions in uses.items() for s in _stays(positions, plan.groups[g], micro)
    ):
        start = max(0, first - plan.groups[group].prefetch_depth)
        nbytes = work.groups[group].nbytes
        here = group in step.resident
        before[compute[start]].append(
            Op(
                "prefetch",
                "comm" if here else "h2d",
                group=group,
                reads=(Resident(group) if here else Master(group),),
                writes=(Weights(group),),
                nbytes=nbytes,
            )
        )
        after[compute[last]].append(
            Op("evict", "compute", group=group, writes=(Weights(group),), nbytes=nbytes)
        )
    return step.with_(ops=weave(step.ops, before, after))


def _stays(positions: list[int], plan: GroupPlan, micro: list[int]) -> list[list[int]]:
    """Uses of a group, split into its stays; ``micro`` tells each operation's micro-batch."""
    stays = [[positions[0]]]
    begun = {micro[positions[0]]}
    for position in positions[1:]:
        near = position - stays[-1][-1] <= plan.prefetch_depth + 1
        same_micro = plan.residency == "micro" and micro[position] in begun
        if not (near or same_micro or plan.residency == "step"):
            stays.append([])
            begun = set()
        stays[-1].append(position)
        begun.add(micro[position])
    return stays
