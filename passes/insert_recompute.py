"""Compute the saved tensors of a block that keeps nothing again, right before its backward."""

from __future__ import annotations

from megacompile.schedule.op_table import (
    Saved,
)
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step, compute_op
from megacompile.schedule.workload import Workload


def insert_recompute(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Insert a recompute before each backward whose block was planned to keep nothing."""
    ops: list[Op] = []
    token_bytes = dict(step.token_bytes)
    for op in step.ops:
        if op.kind == "backward":
            policy = work.blocks[op.block].policy(plan.blocks[op.block].checkpoint)
            if policy.recompute is not None:
                saved = Saved(op.block, op.micro)
                token_bytes[saved] = policy.saved_bytes
                ops.append(
                    compute_op("recompute", op.block, op.micro, policy, policy.recompute, (), (saved,))
                )
        ops.append(op)
    return step.with_(ops=tuple(ops), token_bytes=token_bytes)
