"""Give back each device token with the last compute operation that touches it."""

from __future__ import annotations

from collections import defaultdict

from megacompile.schedule.op_table import Token
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Step
from megacompile.schedule.workload import Workload


def insert_frees(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Add to ``frees`` what nothing later reads and no operation gives back already."""
    last: dict[Token, int] = {}
    for index, op in enumerate(step.ops):
        for token in (*op.reads, *op.writes):
            if token.on_device:
                last[token] = index
        for token in (*op.donates, *op.frees):
            last.pop(token, None)
    freed: dict[int, list[Token]] = defaultdict(list)
    for token, index in last.items():
        assert step.ops[index].stream == "compute", f"{token} is last read by another stream"
        freed[index].append(token)
    ops = tuple(
        op.with_(frees=op.frees + tuple(freed[index])) if index in freed else op
        for index, op in enumerate(step.ops)
    )
    return step.with_(ops=ops)
