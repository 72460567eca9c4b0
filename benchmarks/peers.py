"""Fixed schedules of other systems, as light steps that the simulator runs like any of ours.

What they do is taken from their papers and sources: MegaTrain keeps two layers' weights on the device,
checkpoints every fourth layer, uploads weights for the forward, for the recompute of a segment and for
the backward, computes a layer's forward three times (10·P·T FLOPs in all), and updates after the
backward, nothing else running. ZeRO-3 with offload gathers each layer for its forward and its backward,
recomputes each layer once, and updates after the backward.
"""

from __future__ import annotations

from megacompile.passes import PASSES
from megacompile.planner.arrangements import Shape, uniform, with_deferred
from megacompile.schedule.op_table import Weights
from megacompile.schedule.plan import Mode
from megacompile.schedule.step import Op, Step
from megacompile.schedule.workload import Workload

_SEGMENT = 4  # layers between MegaTrain's checkpoints


def zero3_step(work: Workload, mode: Mode) -> Step:
    """ZeRO-3 with offload: full recompute, prefetch one ahead, updates after everything else."""
    return _lowered(work, mode, segment=0)


def megatrain_step(work: Workload, mode: Mode) -> Step:
    """MegaTrain: as ZeRO-3, and each segment of four layers computed once more before its backward."""
    return _lowered(work, mode, segment=_SEGMENT)


def _lowered(work: Workload, mode: Mode, *, segment: int) -> Step:
    plan = with_deferred(uniform(work, Shape("depth", 1, 1), "none", "device", "stream"), work, 1.0)
    step = Step((), {}, mode.micro_batches, constant_bytes=work.constant_bytes)
    for item in PASSES:
        step = item.run(step, work=work, plan=plan, mode=mode)
        if segment and item.name == "insert_recompute":
            step = step.with_(ops=_again(step.ops, work, segment))
    adams = [op for op in step.ops if op.kind == "adam"]
    first = next(i for i, op in enumerate(step.ops) if op.stream == "h2d")
    serial = step.ops[first].with_(waits=(*step.ops[first].waits, adams[-1].event))
    ops = (*step.ops[:first], serial, *step.ops[first + 1 :])
    return step.with_(ops=ops)


def _again(ops: tuple[Op, ...], work: Workload, segment: int) -> tuple[Op, ...]:
    """Before the last layer of a segment is recomputed, the segment's forwards once more."""
    forwards = {(op.block, op.micro): op for op in ops if op.kind == "forward"}
    last = len(work.blocks) - 1
    found: list[Op] = []
    for op in ops:
        if (
            op.kind == "recompute"
            and 0 < op.block < last
            and (op.block % segment == 0 or op.block == last - 1)
        ):
            start = max(1, op.block - (op.block - 1) % segment)
            for b in range(start, op.block + 1):
                run = forwards[b, op.micro]
                weights = tuple(t for t in run.reads if isinstance(t, Weights))
                found.append(run.with_(kind="recompute", reads=weights, writes=()))
        found.append(op)
    return tuple(found)
