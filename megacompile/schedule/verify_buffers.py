"""Check a step's buffers: gradients are whole, updates are written, offloaded activations come back, no
result is missing.

In program order, which stands for every order once :mod:`~megacompile.schedule.verify` has shown that all
accesses are ordered.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import get_args

from megacompile.errors import ScheduleError
from megacompile.schedule.op_table import (
    SPECS,
    Buffer,
    Buffers,
    HostGrad,
    Loss,
    Master,
    OtherRows,
    PassingGrad,
    Resident,
    ResidentGrad,
    Ring,
    Scale,
    Spill,
    Token,
    Value,
)
from megacompile.schedule.plan import Mode
from megacompile.schedule.step import Op, Step, name
from megacompile.schedule.workload import Workload

_GRADIENTS = (HostGrad, Ring, ResidentGrad, PassingGrad)
_NEED_WHOLE_GRADIENT = {
    kind for kind, spec in SPECS.items() if set(_GRADIENTS) & {*get_args(spec.reads), spec.reads}
}
_NEED_WHOLE_GRADIENT.remove("load_update")  # which reads what momentum made of it


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
        elif op.kind in _NEED_WHOLE_GRADIENT:
            gradient = next((token for token in op.reads if isinstance(token, _GRADIENTS)), None)
            count, wanted = sum(g == op.group for _, g in held[gradient]), expected.get(op.group, 0)
            if count != wanted:
                raise ScheduleError(
                    f"{name(op)} comes after {count} of {wanted} contributions to its gradient."
                )
            if op.kind == "adam":
                held[gradient] = []


def check_rows(step: Step, work: Workload) -> None:
    """Rows of tables are updated once: those that the step names by their gradients, the others when it is
    known that the step updates."""
    rests = Counter(op.group for op in step.ops if op.kind == "adam_rest")
    named = Counter(op.group for op in step.ops if op.kind == "adam" and op.group in rests)
    clips = any(op.kind == "clip_scale" for op in step.ops)
    known = {Scale()} if clips else {Loss(m) for m in range(step.micro_batches)}
    for op in step.ops:
        if op.kind == "adam_rest":
            if rests[op.group] != 1 or named[op.group] != 1:
                raise ScheduleError(f"{name(op)} is to come once, beside one adam, for each row.")
            if set(op.reads) != known:
                raise ScheduleError(f"{name(op)} may come before it is known that the step updates.")
            if op.group not in work.lookups:
                raise ScheduleError(f"{name(op)} takes rows to have no gradient, which a block may give.")
        elif op.kind == "adam" and (OtherRows(op.group) in op.writes) != (op.group in rests):
            raise ScheduleError(f"{name(op)} updates rows that a step names alone: adam_rest is missing.")


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
        if op.kind in ("adam", "adam_rest"):
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
