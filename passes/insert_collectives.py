"""Insert the exchanges of several ranks: weights are gathered, gradients exchanged and summed, losses agreed
on.

Each rank holds a shard of every group's state. A prefetch brings the own shard over the own link into its
place in the slot; an all_gather fills in the rest. A gradient is reduced to the own shard of its sum over all
ranks, in their order and in FP32, and only that leaves for the host, or is added to what waits on the device.
With several replicas the ranks are those of one, and an all_reduce adds up what the replicas have.
No rank updates anything before it knows the losses of all.

All ranks run the same program, and all collectives are in order on one stream: so no two ranks can wait for
each other's. With one rank the step stays as it is.
"""

from __future__ import annotations

from megacompile.passes.compute_order import known_losses
from megacompile.schedule.op_table import (
    Agreed,
    Kind,
    Loss,
    ResidentGrad,
    Shard,
    Stream,
    WeightGrad,
    Weights,
)
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step
from megacompile.schedule.workload import Workload

SHARD_BUFFERS = 2  # that one is summed into while another leaves
PIECE_BYTES = 8 << 20  # of a gradient that a rank sends to each other one at a time, at most


def insert_collectives(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Insert all_gather after each prefetch, reduce before each use of a gradient, agree after the losses."""
    if work.ranks == 1:
        return step
    ops: list[Op] = []
    losses = known_losses(step, work) if mode.computes_gradients else []
    trains, reduced = mode.kind == "train", 0
    for index, op in enumerate(step.ops):
        if op.kind == "prefetch":
            op = op.with_(ranks=work.ranks)
            ops += [op, _all_gather(op)]
        elif op.kind == "push_grad":
            ops += _pushed(op, Shard(reduced % SHARD_BUFFERS), work)
            reduced += 1
        elif index in losses:
            ops.append(op.with_(writes=(*op.writes, Loss(op.micro))))
            if index == losses[-1]:
                known = tuple(Loss(m) for m in range(mode.micro_batches))
                ops.append(Op("agree", "host", reads=known, writes=(Agreed(),)))
        else:
            changes = trains and op.kind in ("momentum", "adam")
            ops.append(op.with_(reads=(*op.reads, Agreed())) if changes else op)
    return _with_buffers(step.with_(ops=tuple(ops)), work)


def _all_gather(prefetch: Op) -> Op:
    place = (Weights(prefetch.group),)
    return Op(
        "all_gather", "comm", group=prefetch.group, reads=place, writes=place, nbytes=prefetch.nbytes,
        ranks=prefetch.ranks,
    )  # fmt: skip


def _pushed(push: Op, shard: Shard, work: Workload) -> list[Op]:
    place = {"block": push.block, "group": push.group, "micro": push.micro}
    assert all(isinstance(token, WeightGrad) for token in push.reads)
    nbytes, kept = work.groups[push.group].nbytes, work.groups[push.group].shard_bytes
    sums = [Op("reduce", "comm", reads=push.reads, writes=(shard,), nbytes=nbytes, ranks=work.ranks, **place)]  # type: ignore[arg-type]
    if work.replicas > 1:
        crossing = work.crossing_bytes(push.group)
        sums.append(sums[0].with_(kind="all_reduce", reads=(shard,), nbytes=crossing))
    stays = isinstance(push.writes[0], ResidentGrad)
    kind: Kind = "add_shard" if stays else "push_shard"
    stream: Stream = "comm" if stays else "d2h"
    return [*sums, Op(kind, stream, reads=(shard,), writes=push.writes, nbytes=kept, **place)]  # type: ignore[arg-type]


def _with_buffers(step: Step, work: Workload) -> Step:
    """Count what shards pass through, and what gradients are exchanged by: one buffer to send, one to get."""
    reduced = {op.group for op in step.ops if op.kind == "reduce"}
    if not reduced:
        return step
    largest = max(work.groups[g].shard_bytes for g in reduced)
    if work.replicas > 1:  # each sums an equal part of it
        largest = -(-largest // (4 * work.replicas)) * 4 * work.replicas
    buffers = {t.slot for op in step.ops for t in op.writes if isinstance(t, Shard)}
    piece = min(PIECE_BYTES, max(work.groups[g].nbytes // work.ranks for g in reduced))
    shards, exchange = (largest,) * len(buffers), max(work.ranks * piece, 4 * work.replicas)
    constant = step.constant_bytes + sum(shards) + 2 * exchange
    return step.with_(shards=shards, exchange_bytes=exchange, constant_bytes=constant)
