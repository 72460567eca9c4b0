"""Where a block keeps nothing, compute its saved tensors again right before its backward."""

from __future__ import annotations

from megacompile.plan.plan import Mode, Plan
from megacompile.plan.workload import Workload
from megacompile.step.operations import Op, Step, compute_op
from megacompile.step.spec import Saved


def insert_recompute(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Insert a recompute before each backward whose block was planned to keep nothing."""
    ops: list[Op] = []
    token_bytes = dict(step.token_bytes)
    for op in step.ops:
        if op.kind == "backward":
            choice = work.blocks[op.block].choice(plan.blocks[op.block].choice)
            if choice.recompute is not None:
                saved = Saved(op.block, op.micro)
                token_bytes[saved] = choice.saved_bytes
                ops.append(
                    compute_op("recompute", op.block, op.micro, choice, choice.recompute,
                        donates=(), writes=(saved,))
                )  # fmt: skip
        ops.append(op)
    return step.with_(ops=tuple(ops), token_bytes=token_bytes)
