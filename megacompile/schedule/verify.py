"""Prove that a step is safe in every order that its streams allow, or say where it is not."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import get_args

from megacompile.errors import ScheduleError
from megacompile.schedule.op_table import (
    COLLECTIVES,
    SPECS,
    STREAMS,
    Agreed,
    Buffer,
    Buffers,
    HostGrad,
    Master,
    PassingGrad,
    Resident,
    ResidentGrad,
    Ring,
    Shard,
    Spill,
    Token,
    Value,
    ValueGrad,
    Weights,
)
from megacompile.schedule.plan import Mode
from megacompile.schedule.step import Event, Op, Step, memory_curve, name, peak_bytes
from megacompile.schedule.workload import Workload
from megacompile.units import format_bytes

# ------------------------------------------------------------------------------------------------------------
# What several ranks do together: weights that are whole, sums that are used once, losses agreed on.
#
# That no rank can wait for another forever follows from three things: all ranks run one program, which they
# compare before its first step (:mod:`megacompile.world`); all collectives of devices are in order on one
# stream; and every wait names what was recorded before it. The last two are shown here and by
# :mod:`~megacompile.schedule.verify`.


def check_collectives(step: Step, work: Workload) -> None:
    """Check several ranks: every stay is gathered once, before its first use; every sum is used once; no
    update comes before the losses are agreed on. Of one rank: there is nothing of the kind."""
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


# ------------------------------------------------------------------------------------------------------------
# What a step's buffers hold: gradients that are whole, updates that are written, offloaded activations that
# come back, results that are all there.
#
# In program order, which stands for every order once :mod:`~megacompile.schedule.verify` has shown that all
# accesses are ordered.


_GRADIENTS = (HostGrad, Ring, ResidentGrad, PassingGrad)
_WHOLE = {kind for kind, spec in SPECS.items() if set(_GRADIENTS) & {*get_args(spec.reads), spec.reads}}
_WHOLE.remove("load_update")  # which reads what momentum made of it


def check_gradients(step: Step, work: Workload, repeated: list[Op]) -> None:
    """Check that what reads a group's gradient sees every contribution of this step to it and no other.

    ``repeated`` are the operations of the step several times over, as what is left over shows in the next.
    """
    if not any(op.kind == "backward" for op in step.ops):
        return
    expected = {g: len(b) * step.micro_batches for g, b in work.contributions.items()}
    adams = {op.group for op in step.ops if op.kind == "adam"}
    idle = sorted(set(expected) - adams)
    if adams and idle:
        raise ScheduleError(f"Groups {idle} get gradients and are never updated: adam is missing.")
    # (push into a buffer that adam awaits, group whose gradient it holds there)
    held: dict[Token | None, list[tuple[Op, int]]] = defaultdict(list)
    for op in repeated:
        if op.kind in ("push_grad", "push_rows", "push_shard", "add_shard", "accumulate"):
            for token in op.writes:
                group = token.group if isinstance(token, HostGrad | ResidentGrad) else op.group
                landed = held[token]
                if landed and (isinstance(token, Ring | PassingGrad) or landed[0][1] != group):
                    raise ScheduleError(f"{name(op)} overwrites what {name(landed[0][0])} left for adam.")
                landed.append((op, group))
        elif op.kind in _WHOLE:
            gradient = next((token for token in op.reads if isinstance(token, _GRADIENTS)), None)
            count, wanted = sum(g == op.group for _, g in held[gradient]), expected.get(op.group, 0)
            if count != wanted:
                raise ScheduleError(
                    f"{name(op)} comes after {count} of {wanted} contributions to its gradient."
                )
            if op.kind == "adam":
                held[gradient] = []


def check_matrices(step: Step, work: Workload) -> None:
    """Each update of a group's matrices comes from one orthogonalization of what one momentum made."""
    stages = ("momentum", "load_update", "orthogonalize", "push_update", "adam")
    passed: dict[int, int] = {}  # by group, how many of them
    homes: dict[int, Token] = {}  # the buffer that its updates are in
    for op in step.ops:
        if op.kind not in stages or (work.groups[op.group].matrices is None and op.kind == "adam"):
            continue
        stage = passed.get(op.group, 0)
        if work.groups[op.group].matrices is None or op.kind != stages[stage]:
            raise ScheduleError(
                f"{name(op)} comes where {stages[stage]} is due of a group's matrices, if it has any."
            )
        home = (op.writes if op.kind == "push_update" else op.reads)[0]
        if op.kind != "orthogonalize" and homes.setdefault(op.group, home) != home:
            raise ScheduleError(f"{name(op)} is of {home}, and the updates are in {homes[op.group]}.")
        passed[op.group] = (stage + 1) % len(stages)
    for group, stage in passed.items():
        if stage:
            raise ScheduleError(f"The matrices of group {group} are left behind: {stages[stage]} is missing.")


def check_results(step: Step, work: Workload, mode: Mode | None) -> None:
    """A forward alone gives each of its results once to the host, from the value itself; so does one whose
    loss is computed outside, which gives the gradient of each once.
    """
    copies = [op for op in step.ops if op.kind == "copy_result"]
    for op in copies:
        if op.reads != (Value(op.value, op.micro),):
            raise ScheduleError(f"{name(op)} takes {op.reads} for the value {op.value}.")
    trains = any(op.kind == "backward" for op in step.ops)
    given = Counter((op.value, op.micro) for op in step.ops if op.kind == "load_grad")
    for (value, micro), times in given.items():
        if times > 1 or value not in work.results:
            raise ScheduleError(f"The gradient by the value {value} of micro-batch {micro} is not due.")
    if not copies and not (trains and work.outside) and (mode is None or mode.kind != "evaluate"):
        return
    copied = Counter((op.value, op.micro) for op in copies)
    wanted = {(v, m) for v in work.results for m in range(step.micro_batches)}
    for value, micro in copied.keys() | wanted:
        times, due = copied[value, micro], (value, micro) in wanted
        if times != due:
            raise ScheduleError(
                f"The value {value} of micro-batch {micro} is copied to the host {times} times, where "
                f"{due:d} is due."
            )


def check_buffers(step: Step, work: Workload) -> None:
    """Forwards alone use buffers of the model that change: each once for a micro-batch, in turn."""
    uses: dict[int, list[Op]] = {n: [] for n in range(len(work.changes))}
    for op in step.ops:
        for token in {t for t in (*op.reads, *op.writes) if isinstance(t, Buffers)}:
            if op.block not in work.changes[token.number]:
                raise ScheduleError(f"{name(op)} touches {token}, which is none of its own.")
            uses[token.number].append(op)
    if not any(op.kind == "forward" for op in step.ops):
        return
    for number, blocks in enumerate(work.changes):
        due = [(m, b) for m in range(step.micro_batches) for b in blocks]
        for op, place in itertools.zip_longest(uses[number], due):
            if op is None or place is None or (op.micro, op.block) != place:
                what = f"the forward of block {place[1]} of micro-batch {place[0]}" if place else "nothing"
                found = name(op) if op is not None else "nothing"
                raise ScheduleError(f"{Buffers(number)} is changed by {found}, where {what} is due.")


def check_weights(step: Step) -> None:
    """All of a step's computation sees the weights that the step began with, and those that are kept."""
    for op in step.ops:
        if _fetched(op) & set(step.resident):
            raise ScheduleError(f"{name(op)} fetches masters whose state is on the device.")
        if any(isinstance(t, Resident) and t.group not in step.resident for t in op.reads):
            raise ScheduleError(f"{name(op)} reads on the device what is kept on the host.")
    if not any(op.kind == "backward" for op in step.ops):
        return
    updated: set[int] = set()
    for op in step.ops:
        if op.kind == "adam":
            updated.add(op.group)
        elif _fetched(op) & updated:
            raise ScheduleError(f"{name(op)} fetches masters that this step has updated already.")
        elif op.kind != "norm" and any(isinstance(t, Resident) and t.group in updated for t in op.reads):
            raise ScheduleError(f"{name(op)} reads weights that this step has updated already.")


def _fetched(op: Op) -> set[int]:
    """The groups whose masters on the host an operation reads for the device."""
    return {t.group for t in op.reads if isinstance(t, Master) and op.kind in ("prefetch", "gather")}


def check_window(step: Step) -> None:
    """Buffers of the host window hold what is taken from them, and no update in one is lost."""
    held: dict[Buffer, Op] = {}  # what a buffer was last filled or changed by, in this step
    written: set[int] = set()
    for op in step.ops:
        buffer = op.buffer
        if buffer is None or isinstance(buffer, Spill):
            continue
        last = held.get(buffer)
        if op.kind in ("read_weights", "read_state"):
            if last is not None and last.kind == "adam":
                raise ScheduleError(f"{name(op)} overwrites what {name(last)} left in {buffer}.")
            if op.group in written:
                raise ScheduleError(f"{name(op)} reads what this step has updated already.")
        elif last is None or last.group != op.group or (op.kind == "write") != (last.kind == "adam"):
            found = name(last) if last is not None else "nothing"
            raise ScheduleError(f"{name(op)} finds in {buffer} what {found} left there.")
        if op.kind != "prefetch":
            held[buffer] = op
        if op.kind == "adam":
            written.add(op.group)
    lost = next((op for op in held.values() if op.kind == "adam"), None)
    if lost is not None:
        raise ScheduleError(f"What {name(lost)} left in the window is never written: write is missing.")


def check_spills(step: Step) -> None:
    """Buffers that offloaded activations on NVMe pass through hold what is taken from them, and none is lost
    in one."""
    held: dict[Buffer, Op] = {}  # what a buffer was last filled by
    taken: set[Buffer] = set()  # buffers whose content is where it shall be
    for op in step.ops:
        buffer = op.buffer
        if not isinstance(buffer, Spill):
            continue
        last = held.get(buffer)
        if op.kind in ("offload", "read_offloaded"):
            if last is not None and buffer not in taken:
                raise ScheduleError(f"{name(op)} overwrites what {name(last)} left in {buffer}.")
            held[buffer] = op
            taken.discard(buffer)
            continue
        wanted = ("offload" if op.kind == "write_offloaded" else "read_offloaded", op.block, op.micro)
        if last is None or (last.kind, last.block, last.micro) != wanted:
            found = name(last) if last is not None else "nothing"
            raise ScheduleError(f"{name(op)} finds in {buffer} what {found} left there.")
        taken.add(buffer)
    lost = next((op for buffer, op in held.items() if buffer not in taken), None)
    if lost is not None:
        raise ScheduleError(f"What {name(lost)} left in a buffer goes nowhere: write or reload is missing.")


# ------------------------------------------------------------------------------------------------------------
# Prove that a step is safe in every order that its streams allow, or say where it is not.
#
# The proof shares nothing with the passes but the meaning of an operation. The step is repeated, as in
# training; every operation gets a vector clock from stream order and waits; then each access to a token, a
# slot, a host buffer or a master must be ordered against every conflicting one, every device token must be
# alive where it is touched and gone at the end, every gradient must be whole when it is used and used before
# it is overwritten, and device bytes must fit the budget at every operation.


_REPEATS = 3  # enough for every wait to refer to a step that itself had a predecessor


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a proof: counts for the report, and the peak in bytes that holds in every order."""

    operations: int
    ordered_pairs: int
    peak_bytes: int

    def __str__(self) -> str:
        return (
            f"verified: {self.operations} operations, {self.ordered_pairs} conflicting pairs ordered, "
            f"peak {format_bytes(self.peak_bytes)} in every order that the streams allow"
        )


@dataclass(frozen=True, slots=True)
class _Access:
    op: Op
    clock: tuple[int, ...]


def verify(step: Step, work: Workload, *, mode: Mode | None = None, budget_bytes: int | None = None) -> Proof:
    """Raise :class:`ScheduleError` naming the first operation that is not safe.

    ``mode`` says whether the step has to give results, None: if it gives any. ``budget_bytes`` bounds the
    device bytes of the step; None checks everything else.
    """
    accesses = _clocks(step)
    pairs = _check_tokens(accesses) + _check_slots(step, accesses)
    check_gradients(step, work, [access.op for access in accesses])
    check_results(step, work, mode)
    check_buffers(step, work)
    check_weights(step)
    check_matrices(step, work)
    check_window(step)
    check_spills(step)
    check_collectives(step, work)
    _check_device_memory(step, accesses)
    for op in step.ops:
        _check_kind(op)
    peak = peak_bytes(step)
    if budget_bytes is not None and peak > budget_bytes:
        index, _ = max(memory_curve(step), key=lambda point: point[1])
        raise ScheduleError(
            f"{name(step.ops[index])} holds up to {peak} device bytes and the budget is "
            f"{budget_bytes}: choose a plan that keeps less, or a larger hbm_budget."
        )
    return Proof(len(step.ops), pairs, peak)


def _check_kind(op: Op) -> None:
    """An operation runs where its kind may, and touches nothing that its kind does not."""
    spec, stream = SPECS[op.kind], op.stream
    if op.kind == "prefetch" and any(isinstance(t, Resident) for t in op.reads):
        runs = stream == "comm"
    else:
        runs = stream == spec.stream or (spec.cost, stream) == ("state", "compute")
    if not runs:
        raise ScheduleError(f"{name(op)} runs on a stream that is not its own.")
    for tokens, kinds in ((op.reads, spec.reads), (op.writes, spec.writes)):
        for token in tokens:
            if not isinstance(token, kinds):
                raise ScheduleError(f"{name(op)} touches {token}, which no {op.kind} does.")


def _clocks(step: Step) -> list[_Access]:
    """Vector clocks of the repeated step; a wait refers to the latest record of its event."""
    latest: dict[Event, tuple[int, ...]] = {}
    now = {s: [0] * len(STREAMS) for s in STREAMS}
    accesses: list[_Access] = []
    known = {op.event for op in step.ops}
    for _ in range(_REPEATS):
        for op in step.ops:
            clock = now[op.stream]
            for event in op.waits:
                if event not in known:
                    raise ScheduleError(f"{name(op)} waits for {event}, which nothing records.")
                for i, t in enumerate(latest.get(event, ())):
                    clock[i] = max(clock[i], t)
            clock[STREAMS.index(op.stream)] += 1
            frozen = tuple(clock)
            latest[op.event] = frozen
            accesses.append(_Access(op, frozen))
    return accesses


def _before(first: _Access, second: _Access) -> bool:
    """Return whether ``first`` is over before ``second`` starts, in every order."""
    stream = STREAMS.index(first.op.stream)
    if first.op.stream == second.op.stream:
        return first.clock[stream] < second.clock[stream]
    return second.clock[stream] >= first.clock[stream]


def _check_tokens(accesses: list[_Access]) -> int:
    """Every use follows its write, every change follows all uses before it; returns pairs checked."""
    pairs = 0
    writer: dict[Token, _Access] = {}
    readers: dict[Token, list[_Access]] = defaultdict(list)
    ended: dict[Token, _Access] = {}
    for access in accesses:
        op = access.op
        for token in (*op.reads, *(t for t in op.frees if t not in op.writes)):
            _check_written(access, token, writer.get(token), ended.get(token))
            pairs += token in writer
        for token in dict.fromkeys((*op.writes, *op.donates, *op.frees)):
            for other in (*readers[token], *([writer[token]] if token in writer else [])):
                pairs += 1
                if not _before(other, access):
                    raise ScheduleError(
                        f"{name(op)} may change {token} while {name(other.op)} still uses it."
                    )
        for token in op.writes:
            if token.on_device and not isinstance(token, ValueGrad) and token in writer:
                raise ScheduleError(
                    f"{name(op)} writes {token}, which {name(writer[token].op)} wrote and nothing "
                    "has freed: a missing evict."
                )
        for token in (*op.writes, *op.donates, *op.frees):
            writer[token] = access
            readers[token] = []
        for token in op.reads:
            readers[token].append(access)
        for token in (*op.donates, *op.frees, *_evicted(op)):
            writer.pop(token, None)
            ended[token] = access
            readers[token] = [access]
    return pairs


def _check_written(access: _Access, token: Token, writer: _Access | None, ended: _Access | None) -> None:
    """Check that what is used was written, that this is over, and that nothing has ended it since."""
    if writer is not None:
        if not _before(writer, access):
            raise ScheduleError(
                f"{name(access.op)} may use {token} before {name(writer.op)} is over: a wait is missing."
            )
    elif ended is not None:
        raise ScheduleError(f"{name(access.op)} uses {token} after {name(ended.op)}.")
    elif not token.lasting:
        raise ScheduleError(f"{name(access.op)} uses {token}, which nothing has written.")


def _evicted(op: Op) -> tuple[Token, ...]:
    return (Weights(op.group),) if op.kind == "evict" else ()


def _check_slots(step: Step, accesses: list[_Access]) -> int:
    """Two stays whose bytes overlap in the slab never overlap in time."""
    pairs = 0
    ended: dict[tuple[int, int], tuple[Op, _Access]] = {}  # (group, offset): prefetch, evict
    current: dict[int, _Access] = {}
    for access in accesses:
        op = access.op
        if op.kind == "prefetch":
            if op.group in current:
                raise ScheduleError(f"{name(op)} follows a stay of the group that was not evicted.")
            if op.offset < 0 or op.offset + op.nbytes > step.slab_bytes:
                raise ScheduleError(f"{name(op)} lies outside the slab of {step.slab_bytes} bytes.")
            for group, other in current.items():
                if _overlap(other.op, op):
                    raise ScheduleError(f"{name(op)} takes the slot that group {group} still holds.")
            for start, end in ended.values():
                if _overlap(start, op):
                    pairs += 1
                    if not _before(end, access):
                        raise ScheduleError(
                            f"{name(op)} may overwrite the slot that {name(end.op)} gives back."
                        )
            current[op.group] = access
        elif op.kind == "evict":
            if op.group not in current:
                raise ScheduleError(f"{name(op)} ends a stay that never began.")
            start = current.pop(op.group).op
            ended[op.group, start.offset] = (start, access)
    if current:
        raise ScheduleError(f"Groups {sorted(current)} are never evicted: a missing evict.")
    return pairs


def _overlap(a: Op, b: Op) -> bool:
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


def _check_device_memory(step: Step, accesses: list[_Access]) -> None:
    """The step gives back what it takes, and its peak holds in every order.

    Memory is given back by the compute stream alone, and taken by it or after all that it was given
    before: so :func:`~megacompile.schedule.step.memory_curve` bounds every order.
    """
    alive: dict[Token, Op] = {}
    for op in step.ops:
        alive |= {t: op for t in op.writes if t.on_device}
        gone = {*op.donates, *op.frees}
        if gone and op.stream != "compute":
            raise ScheduleError(f"{name(op)} frees device memory outside the compute stream.")
        alive = {t: writer for t, writer in alive.items() if t not in gone}
    for token, writer in alive.items():
        raise ScheduleError(f"{token} of {name(writer)} is never freed: a missing evict.")
    compute: _Access | None = None
    for access in accesses:
        if access.op.stream == "compute":
            compute = access
        elif not any(t.on_device for t in access.op.writes):
            continue
        elif compute and not _before(compute, access):
            raise ScheduleError(
                f"{name(access.op)} may take device memory before {name(compute.op)} is over: "
                "the peak would depend on the order."
            )
