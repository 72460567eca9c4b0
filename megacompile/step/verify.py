"""Prove that a step is safe in every order that its streams allow, or say where it is not.

The proof shares nothing with the passes but the meaning of an operation. The step is repeated, as in
training; every operation gets a vector clock from stream order and waits; then each access to a token,
a slot, a host buffer or a master must be ordered against every conflicting one, every device token
must be alive where it is touched and gone at the end, every gradient must be whole when it is used and
used before it is overwritten, and device bytes must fit the budget at every operation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megacompile.errors import ScheduleError
from megacompile.plan.workload import Workload
from megacompile.step.operations import (
    DEVICE_TOKENS,
    STREAMS,
    Event,
    Op,
    Step,
    Token,
    memory_curve,
    peak_bytes,
)

_REPEATS = 3  # enough for every wait to refer to a step that itself had a predecessor
_LASTING = ("master", "hgrad", "disk", "resident", "dgrad")  # what outlives the step


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
    pairs = _check_tokens(accesses) + _check_slots(step, accesses)
    _check_updates(step, work, accesses)
    _check_window(step)
    _check_spills(step)
    _check_device_memory(step, accesses)
    peak = peak_bytes(step)
    if budget_bytes is not None and peak > budget_bytes:
        index, _ = max(memory_curve(step), key=lambda point: point[1])
        raise ScheduleError(
            f"{name(step.ops[index])} holds up to {peak} device bytes and the budget is "
            f"{budget_bytes}: choose a plan that keeps less, or a larger hbm_budget."
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


def _check_tokens(accesses: list[_Access]) -> int:
    """Every use follows its write, every change follows all uses before it; returns pairs checked."""
    pairs = 0
    writer: dict[Token, _Access] = {}
    readers: dict[Token, list[_Access]] = defaultdict(list)
    ended: dict[Token, _Access] = {}
    for access in accesses:
        op = access.op
        for token in (*op.reads, *(t for t in op.frees if t not in op.writes)):
            if token in writer:
                pairs += 1
                if not _before(writer[token], access):
                    raise ScheduleError(
                        f"{name(op)} may use {token} before {name(writer[token].op)} is over: "
                        "a wait is missing."
                    )
            elif token in ended:
                raise ScheduleError(f"{name(op)} uses {token} after {name(ended[token].op)}.")
            elif token[0] not in _LASTING:
                raise ScheduleError(f"{name(op)} uses {token}, which nothing has written.")
        for token in dict.fromkeys((*op.writes, *op.donates, *op.frees)):
            for other in (*readers[token], *([writer[token]] if token in writer else [])):
                pairs += 1
                if not _before(other, access):
                    raise ScheduleError(
                        f"{name(op)} may change {token} while {name(other.op)} still uses it."
                    )
        for token in op.writes:
            if token[0] in DEVICE_TOKENS and token[0] != "g" and token in writer:
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


def _evicted(op: Op) -> tuple[Token, ...]:
    return (("w", op.group),) if op.kind == "evict" and op.group >= 0 else ()


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
        elif op.kind == "evict" and op.group >= 0:
            if op.group not in current:
                raise ScheduleError(f"{name(op)} ends a stay that never began.")
            start = current.pop(op.group).op
            ended[op.group, start.offset] = (start, access)
    if current:
        raise ScheduleError(f"Groups {sorted(current)} are never evicted: a missing evict.")
    return pairs


def _overlap(a: Op, b: Op) -> bool:
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


def _check_updates(step: Step, work: Workload, accesses: list[_Access]) -> None:
    """norm and adam see every contribution of this step to their group's gradient and no other.

    A prefetch never follows the adam of its group within a step: all of a step's computation sees the
    weights that the step began with. (That each access is ordered is checked as for any token.)
    """
    if not any(op.kind == "backward" for op in step.ops):
        return
    expected = {g: len(b) * step.micro_batches for g, b in work.contributions.items()}
    adams = {op.group for op in step.ops if op.kind == "adam"}
    idle = sorted(set(expected) - adams)
    if adams and idle:
        raise ScheduleError(f"Groups {idle} get gradients and are never updated: adam is missing.")
    # (push into a host buffer that adam awaits, group whose gradient it holds there)
    held: dict[Token, list[tuple[Op, int]]] = defaultdict(list)
    updated: set[int] = set()
    for index, access in enumerate(accesses):
        op = access.op
        if index % len(step.ops) == 0:
            updated = set()
        if op.kind in ("push_grad", "accumulate"):
            for token in op.writes:
                group = token[1] if token[0] in ("hgrad", "dgrad") else op.group
                landed = held[token]
                if landed and (token[0] in ("ring", "dring") or landed[0][1] != group):
                    raise ScheduleError(f"{name(op)} overwrites what {name(landed[0][0])} left for adam.")
                landed.append((op, group))
        elif op.kind in ("norm", "adam"):
            count = sum(group == op.group for _, group in held[op.reads[0]])
            if count != expected.get(op.group, 0):
                raise ScheduleError(
                    f"{name(op)} comes after {count} of {expected.get(op.group, 0)} "
                    "contributions to its gradient."
                )
            if op.kind == "adam":
                held[op.reads[0]] = []
                updated.add(op.group)
        elif any(t[0] == "resident" and t[1] in updated for t in op.reads):
            raise ScheduleError(f"{name(op)} reads weights that this step has updated already.")
        elif op.kind in ("prefetch", "load"):
            masters = {t[1] for t in op.reads if t[0] == "master"}
            if masters & updated:
                raise ScheduleError(f"{name(op)} fetches masters that this step has updated already.")
            if masters & set(step.resident):
                raise ScheduleError(f"{name(op)} fetches masters whose state is on the device.")


def _check_window(step: Step) -> None:
    """Buffers of the host window hold what is taken from them, and no update in one is lost.

    In program order, which stands for every order since all accesses are known to be ordered.
    """
    held: dict[Token, Op] = {}  # what a buffer was last filled or changed by, in this step
    written: set[int] = set()
    for op in step.ops:
        buffer = next((t for t in (*op.reads, *op.writes) if t[0] in ("window", "staged")), None)
        if buffer is None:
            continue
        last = held.get(buffer)
        if op.kind == "read":
            if last is not None and last.kind == "adam":
                raise ScheduleError(f"{name(op)} overwrites what {name(last)} left in {buffer}.")
            if op.group in written:
                raise ScheduleError(f"{name(op)} reads what this step has updated already.")
        elif last is None or last.group != op.group or (op.kind == "write") != (last.kind == "adam"):
            found = name(last) if last is not None else "nothing"
            raise ScheduleError(f"{name(op)} finds in {buffer} what {found} left there.")
        if op.kind in ("read", "adam", "write"):
            held[buffer] = op
        if op.kind == "adam":
            written.add(op.group)
    lost = next((op for op in held.values() if op.kind == "adam"), None)
    if lost is not None:
        raise ScheduleError(f"What {name(lost)} left in the window is never written: write is missing.")


def _check_spills(step: Step) -> None:
    """Buffers that stashes on NVMe pass through hold what is taken from them, and none is lost in one."""
    held: dict[Token, Op] = {}  # what a buffer was last filled by
    taken: set[Token] = set()  # buffers whose content is where it shall be
    for op in step.ops:
        buffer = next((t for t in (*op.reads, *op.writes) if t[0] == "spill"), None)
        if buffer is None:
            continue
        last = held.get(buffer)
        if op.kind in ("offload", "read"):
            if last is not None and buffer not in taken:
                raise ScheduleError(f"{name(op)} overwrites what {name(last)} left in {buffer}.")
            held[buffer] = op
            taken.discard(buffer)
            continue
        wanted = ("offload" if op.kind == "write" else "read", op.block, op.micro)
        if last is None or (last.kind, last.block, last.micro) != wanted:
            found = name(last) if last is not None else "nothing"
            raise ScheduleError(f"{name(op)} finds in {buffer} what {found} left there.")
        taken.add(buffer)
    lost = next((op for buffer, op in held.items() if buffer not in taken), None)
    if lost is not None:
        raise ScheduleError(f"What {name(lost)} left in a buffer goes nowhere: write or reload is missing.")


def _check_device_memory(step: Step, accesses: list[_Access]) -> None:
    """The step gives back what it takes, and its peak holds in every order.

    Memory is given back by the compute stream alone, and taken by it or after all that it was given
    before: so :func:`~megacompile.step.operations.memory_curve` bounds every order.
    """
    alive: dict[Token, Op] = {}
    for op in step.ops:
        alive |= {t: op for t in op.writes if t[0] in DEVICE_TOKENS}
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
        elif not any(t[0] in DEVICE_TOKENS for t in access.op.writes):
            continue
        elif compute and not _before(compute, access):
            raise ScheduleError(
                f"{name(access.op)} may take device memory before {name(compute.op)} is over: "
                "the peak would depend on the order."
            )


def name(op: Op) -> str:
    """How an operation is called in messages: ``prefetch of group 3 (h2d)``."""
    where = f" of group {op.group}" if op.group >= 0 else ""
    where += f" of block {op.block}" if op.block >= 0 else ""
    where += f", micro-batch {op.micro}" if op.micro else ""
    return f"{op.kind}{where} ({op.stream})"
