"""Prove that a step is safe in every order that its streams allow, or say where it is not.

The proof shares nothing with the passes but the meaning of an operation. The step is repeated, as in
training; every operation gets a vector clock from stream order and waits; then each access to a token,
a slot, a host buffer or a master must be ordered against every conflicting one, every device token
must be alive where it is touched and gone at the end, every gradient must have landed before its
update, and device bytes must fit the budget at every compute operation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megacompile.errors import ScheduleError
from megacompile.step import DEVICE_TOKENS, STREAMS, Event, Op, Step, Token, peak_bytes
from megacompile.workload import Workload

_REPEATS = 3  # enough for every wait to refer to a step that itself had a predecessor


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proven: counts for the report, and the peak in bytes that holds in every order."""

    operations: int
    ordered_pairs: int
    peak_bytes: int

    def __str__(self) -> str:
        return (
            f"verified: {self.operations} operations, {self.ordered_pairs} conflicting pairs ordered, "
            f"peak {self.peak_bytes / 1e6:.1f} MB in every order that the streams allow"
        )


@dataclass(frozen=True, slots=True)
class _Access:
    op: Op
    clock: tuple[int, ...]


def verify(step: Step, work: Workload, *, budget_bytes: int | None = None) -> Proof:
    """Raise :class:`ScheduleError` naming the first operation that is not safe.

    ``budget_bytes`` bounds the device bytes of the step; None checks everything else.
    """
    accesses = _clocks(step)
    pairs = _check_tokens(step, accesses) + _check_slots(step, accesses)
    _check_updates(step, work, accesses)
    _check_leftovers(step)
    peak = peak_bytes(step)
    if budget_bytes is not None and peak > budget_bytes:
        raise ScheduleError(
            f"The schedule holds up to {peak} device bytes and the budget is {budget_bytes}: "
            "choose a plan that keeps less, or a larger hbm_budget."
        )
    return Proof(len(step.ops), pairs, peak)


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
    """Whether ``first`` is over before ``second`` starts, in every order."""
    stream = STREAMS.index(first.op.stream)
    if first.op.stream == second.op.stream:
        return first.clock[stream] < second.clock[stream]
    return second.clock[stream] >= first.clock[stream]


def _check_tokens(step: Step, accesses: list[_Access]) -> int:
    """Every use follows its write, every change follows all uses before it; returns pairs checked."""
    pairs = 0
    writer: dict[Token, _Access] = {}
    readers: dict[Token, list[_Access]] = defaultdict(list)
    ended: dict[Token, _Access] = {}
    for access in accesses:
        op = access.op
        for token in op.reads:
            if token[0] in DEVICE_TOKENS or token[0] in ("w", "stash"):
                if token in ended and token not in writer:
                    raise ScheduleError(f"{name(op)} uses {token} after {name(ended[token].op)}.")
                if token not in writer:
                    raise ScheduleError(f"{name(op)} uses {token}, which nothing has written.")
            if token in writer:
                pairs += 1
                if not _before(writer[token], access):
                    raise ScheduleError(
                        f"{name(op)} may use {token} before {name(writer[token].op)} is over: "
                        "a wait is missing."
                    )
        for token in dict.fromkeys((*op.writes, *op.donates, *op.frees)):
            for other in (*readers[token], *([writer[token]] if token in writer else [])):
                if other is access:
                    continue
                pairs += 1
                if not _before(other, access):
                    raise ScheduleError(
                        f"{name(op)} may change {token} while {name(other.op)} still uses it."
                    )
            readers[token] = []
            writer[token] = access
        for token in op.reads:
            readers[token].append(access)
        for token in (*op.donates, *op.frees, *_evicted(op)):
            writer.pop(token, None)
            ended[token] = access
            readers[token] = [access]
    return pairs


def _evicted(op: Op) -> tuple[Token, ...]:
    return (("w", op.group),) if op.kind == "evict" and op.group >= 0 else ()


def _check_slots(step: Step, accesses: list[_Access]) -> int:
    """Two stays whose bytes overlap in the slab never overlap in time."""
    pairs = 0
    stays: list[tuple[_Access, _Access]] = []
    current: dict[int, _Access] = {}
    for access in accesses:
        op = access.op
        if op.kind == "prefetch":
            if op.group in current:
                raise ScheduleError(f"{name(op)} follows a stay of the group that was not evicted.")
            if op.offset < 0 or op.offset + op.nbytes > step.slab_bytes:
                raise ScheduleError(f"{name(op)} lies outside the slab of {step.slab_bytes} bytes.")
            current[op.group] = access
            for start, end in stays:
                overlap = (
                    start.op.offset < op.offset + op.nbytes
                    and op.offset < start.op.offset + start.op.nbytes
                )
                if overlap:
                    pairs += 1
                    if not _before(end, access):
                        raise ScheduleError(
                            f"{name(op)} may overwrite the slot that {name(end.op)} gives back."
                        )
            for group, other in current.items():
                if group != op.group and _overlap(other.op, op):
                    raise ScheduleError(f"{name(op)} takes the slot that group {group} still holds.")
        elif op.kind == "evict" and op.group >= 0:
            if op.group not in current:
                raise ScheduleError(f"{name(op)} ends a stay that never began.")
            start = current.pop(op.group)
            stays = [s for s in stays if s[0].op.group != op.group] + [(start, access)]
    if current:
        raise ScheduleError(f"Groups {sorted(current)} are never evicted: a missing evict.")
    return pairs


def _overlap(a: Op, b: Op) -> bool:
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


def _check_updates(step: Step, work: Workload, accesses: list[_Access]) -> None:
    """adam comes after every contribution, and the next prefetch of its group after adam."""
    expected = {g: len(b) * step.micro_batches for g, b in work.contributions.items()}
    backward = any(op.kind == "backward" for op in step.ops)
    landed: dict[int, list[_Access]] = defaultdict(list)
    update: dict[int, _Access] = {}
    for access in accesses:
        op = access.op
        if op.kind == "push_grad":
            landed[op.group].append(access)
        elif op.kind == "adam":
            if backward and len(landed[op.group]) != expected[op.group]:
                raise ScheduleError(
                    f"{name(op)} comes after {len(landed[op.group])} of {expected[op.group]} "
                    "contributions to its gradient."
                )
            late = next((p for p in landed[op.group] if not _before(p, access)), None)
            if late is not None:
                raise ScheduleError(f"{name(op)} may run before {name(late.op)} has landed.")
            landed[op.group] = []
            update[op.group] = access
        elif op.kind == "prefetch" and op.group in update:
            if not _before(update[op.group], access):
                raise ScheduleError(f"{name(op)} may read masters that adam is still updating.")
    if backward and update:
        idle = sorted(g for g in expected if g not in update)
        if idle:
            raise ScheduleError(f"Groups {idle} get gradients and are never updated: adam is missing.")


def _check_leftovers(step: Step) -> None:
    """What the step takes on the device it gives back, in the compute stream's order."""
    alive: set[Token] = set()
    for op in step.ops:
        alive |= {t for t in op.writes if t[0] in DEVICE_TOKENS}
        gone = {*op.donates, *op.frees}
        if gone and op.stream != "compute":
            raise ScheduleError(f"{name(op)} frees device memory outside the compute stream.")
        alive -= gone
    if alive:
        raise ScheduleError(f"{sorted(alive)[0]} is never freed: a missing evict.")


def name(op: Op) -> str:
    """How an operation is called in messages: ``prefetch of group 3 (h2d)``."""
    where = f" of group {op.group}" if op.group >= 0 else ""
    where += f" of block {op.block}" if op.block >= 0 else ""
    where += f", micro-batch {op.micro}" if op.micro else ""
    return f"{op.kind}{where} ({op.stream})"
