"""Prove that a step is safe in every order that its streams allow, or name the first unsafe operation.

The proof shares nothing with the passes but the meaning of an operation. The step is repeated, as in
training; every operation gets a vector clock from stream order and waits; then each access to a token, a
slot, a host buffer or a master must be ordered against every conflicting one, every device token must be
alive where it is touched and gone at the end, every gradient must be whole when it is used and used before
it is overwritten, and device bytes must fit the budget at every operation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megacompile.errors import ScheduleError
from megacompile.schedule.op_table import (
    SPECS,
    STREAMS,
    Resident,
    Token,
    ValueGrad,
    Weights,
)
from megacompile.schedule.plan import Mode
from megacompile.schedule.step import Event, Op, Step, memory_curve, name, peak_bytes
from megacompile.schedule.verify_buffers import (
    check_buffers,
    check_gradients,
    check_matrices,
    check_results,
    check_rows,
    check_spills,
    check_weights,
    check_window,
)
from megacompile.schedule.verify_collectives import check_collectives
from megacompile.schedule.workload import Workload
from megacompile.units import format_bytes

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
    check_rows(step, work)
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


def _is_over_before(first: _Access, second: _Access) -> bool:
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
                if not _is_over_before(other, access):
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
    """Check that each used value was written, that the write is over, and nothing has ended the value
    since."""
    if writer is not None:
        if not _is_over_before(writer, access):
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
                    if not _is_over_before(end, access):
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
        elif compute and not _is_over_before(compute, access):
            raise ScheduleError(
                f"{name(access.op)} may take device memory before {name(compute.op)} is over: "
                "the peak would depend on the order."
            )
