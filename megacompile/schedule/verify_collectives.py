"""Check what several ranks do together: weights that are whole, sums that are used once, losses agreed on.

That no rank can wait for another forever follows from three things: all ranks run one program, which they
compare before its first step (:mod:`megacompile.api.rank_agreement`); all collectives of devices are in order
on one stream; and every wait names what was recorded before it. The last two are shown here and by
:mod:`~megacompile.schedule.verify`.
"""

from __future__ import annotations

from megacompile.errors import ScheduleError
from megacompile.schedule.op_table import (
    COLLECTIVES,
    Agreed,
    Resident,
    Shard,
    Weights,
)
from megacompile.schedule.step import Op, Step, name
from megacompile.schedule.workload import Workload


def check_collectives(step: Step, work: Workload) -> None:
    """Check several ranks: every stay is gathered once, before its first use; every sum is used once; no
    update comes before the losses are agreed on. One rank has nothing of the kind."""
    if work.ranks == 1:
        shared = (*COLLECTIVES, "push_shard", "add_shard", "agree")
        alone = next((op for op in step.ops if op.kind in shared), None)
        if alone is not None:
            raise ScheduleError(f"{name(alone)} is for several ranks, and there is one.")
        return
    _check_gathers(step)
    _check_sums(step, work.replicas)
    _check_agreement(step)


def _check_gathers(step: Step) -> None:
    here: dict[int, bool] = {}  # groups in their slots: whether all ranks' shards are
    for op in step.ops:
        if op.kind == "prefetch":
            here[op.group] = False
        elif op.kind == "all_gather":
            if op.group not in here:
                raise ScheduleError(f"{name(op)} gathers weights that have no slot.")
            if here[op.group]:
                raise ScheduleError(f"{name(op)} gathers weights that are whole already.")
            here[op.group] = True
        elif op.kind == "evict":
            if not here.pop(op.group, True):
                raise ScheduleError(f"{name(op)} ends a stay that was never gathered: all_gather is missing.")
        else:
            parts = [t for t in op.reads if isinstance(t, Weights) and not here.get(t.group, True)]
            if parts:
                raise ScheduleError(f"{name(op)} reads {parts[0]} before its all_gather: it holds one shard.")
            kept = [t for t in op.reads if isinstance(t, Resident)]
            if kept:
                raise ScheduleError(f"{name(op)} reads {kept[0]}, which is one shard: a prefetch is missing.")


def _check_sums(step: Step, replicas: int) -> None:
    held: dict[Shard, Op] = {}  # what was summed into a buffer and has not left it
    for op in step.ops:
        if op.kind == "all_reduce":
            _check_all_reduce(op, held, replicas)
            continue
        for token in op.writes:
            if isinstance(token, Shard) and token in held:
                raise ScheduleError(f"{name(op)} overwrites what {name(held[token])} left in {token}.")
            if isinstance(token, Shard):
                held[token] = op
        if op.kind in ("push_grad", "push_rows", "accumulate"):
            raise ScheduleError(f"{name(op)} takes one rank's gradient: reduce is missing.")
        if op.kind in ("push_shard", "add_shard"):
            token = op.reads[0]
            last = held.pop(token, None) if isinstance(token, Shard) else None
            if last is None or (last.group, last.block, last.micro) != (op.group, op.block, op.micro):
                found = name(last) if last is not None else "nothing"
                raise ScheduleError(f"{name(op)} finds in {token} what {found} left there.")
            if replicas > 1 and last.kind != "all_reduce":
                raise ScheduleError(f"{name(op)} takes the sum of one replica: all_reduce is missing.")
    for op in held.values():
        raise ScheduleError(f"What {name(op)} left goes nowhere: push_shard or add_shard is missing.")


def _check_all_reduce(op: Op, held: dict[Shard, Op], replicas: int) -> None:
    """It adds up what a reduce of the same gradient left, once; and there are several replicas."""
    if replicas == 1:
        raise ScheduleError(f"{name(op)} is for several replicas, and there is one.")
    (token,) = op.writes
    assert isinstance(token, Shard)
    last = held.get(token)
    if last is None or (last.kind, last.group, last.block, last.micro) != ("reduce", *op.event[1:]):
        found = name(last) if last is not None else "nothing"
        raise ScheduleError(f"{name(op)} finds in {token} what {found} left there.")
    held[token] = op


def _check_agreement(step: Step) -> None:
    """One agree, over all losses, before the first update, unless gradients that wait are all it applies."""
    if not any(op.kind == "forward" for op in step.ops):
        return
    agreed = False
    for op in step.ops:
        if op.kind == "agree":
            if agreed or len(op.reads) != step.micro_batches:
                raise ScheduleError(f"{name(op)} is to come once, for all {step.micro_batches} losses.")
            agreed = True
        elif op.kind in ("momentum", "adam") and not (agreed and Agreed() in op.reads):
            raise ScheduleError(
                f"{name(op)} may update before all ranks' losses are known: agree is missing."
            )
