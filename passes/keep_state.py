"""Keep the state of some weight groups on the device: their blocks read it where it is updated.

Such a group is never fetched and its gradient never leaves. It takes its weights, masters and moments all the
time, and its gradient in FP32 if that has to wait (clipping, several contributions). All such groups together
take one buffer for a gradient that is used at once.

Where ranks share the group, each keeps its shards. Blocks then read what is gathered from those, and a
gradient always waits, as a shard in FP32, so that no block waits for an exchange.
"""

from __future__ import annotations

from megacompile.schedule.op_table import Resident, Token, Weights
from megacompile.schedule.plan import Mode, Plan, updated_groups
from megacompile.schedule.step import Op, Step
from megacompile.schedule.workload import Workload


def keep_state(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Replace Weights by Resident in what blocks of one rank read, and count the bytes of the groups."""
    resident = tuple(g for g, group in enumerate(plan.groups) if group.state == "device")
    if not resident:
        return step
    kept = set(resident)

    def where(token: Token) -> Token:
        return Resident(token.group) if isinstance(token, Weights) and token.group in kept else token

    ops = step.ops
    if work.ranks == 1:
        ops = tuple(op.with_(reads=tuple(map(where, op.reads))) for op in ops)
    nbytes = sum(work.groups[g].resident_bytes for g in resident)
    waiting = gradients_that_wait(ops, work, mode) & kept
    nbytes += sum(work.groups[g].gradient_bytes for g in waiting)
    used = [g for g in resident if g in updated_groups(work, mode) and g not in waiting]
    nbytes += max((work.groups[g].nbytes for g in used), default=0)
    return step.with_(ops=ops, resident=resident, constant_bytes=step.constant_bytes + nbytes)


def gradients_that_wait(ops: tuple[Op, ...], work: Workload, mode: Mode) -> set[int]:
    """Trained groups on the device whose update does not directly follow their gradient.

    Between steps of accumulation, gradients wait through other steps too.
    """
    if mode.keeps_gradients or work.ranks > 1:
        return set(updated_groups(work, mode))
    waiting = {g for g, blocks in work.contributions.items() if len(blocks) > 1}
    given: dict[int, int] = {}
    for index, op in enumerate(ops):
        if op.kind == "backward":
            given |= {g: index for g, _ in work.blocks[op.block].grad_groups}
        waiting |= {
            t.group for t in op.reads if isinstance(t, Resident) and given.get(t.group, index) < index
        }
    return waiting
