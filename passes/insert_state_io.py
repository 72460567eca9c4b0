"""Bring what lives on NVMe into a small window of host buffers before it is wanted, and write it back.

Two windows of ``plan.window`` buffers each: streamed weights are read before their prefetch, the rest of a
group's state before its adam, each as soon as the buffer that comes next has done its duty. Weights that
are still in the window when their group is prefetched again are not read a second time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megacompile.schedule.op_table import Disk, Master, Staged, Window
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step, weave
from megacompile.schedule.workload import Workload


def insert_state_io(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Insert read before each prefetch and adam of groups on NVMe, and write after each adam."""
    states: list[str] = [group.state for group in plan.groups]
    if all(state in ("host", "device") for state in states):
        return step
    before: dict[int, list[Op]] = defaultdict(list)
    after: dict[int, list[Op]] = defaultdict(list)
    ops = list(step.ops)
    _stage_weights(ops, states, plan.window, before, after)
    _pass_state(ops, states, work, plan.window, before, after)
    return step.with_(ops=weave(ops, before, after), window=plan.window)


def _stage_weights(
    ops: list[Op], states: Sequence[str], window: int, before: dict[int, list[Op]], after: dict[int, list[Op]]
) -> None:
    """Buffers are filled in turn; one is filled again right after the last prefetch out of it."""
    buffers: list[tuple[int, int]] = [(-1, -1)] * window  # (group, its last prefetch)
    reads = start = 0
    for index, op in enumerate(ops):
        if op.kind != "prefetch" or states[op.group] != "nvme-all":
            continue
        held = [group for group, _ in buffers]
        if op.group in held:
            slot = held.index(op.group)
        else:
            slot = reads % window
            reads += 1
            start = max(start, buffers[slot][1])  # reads start in the order of their buffers
            read = Op("read_weights", "nvme_read", group=op.group, nbytes=op.nbytes,
                      reads=(Disk(op.group, 0),), writes=(Staged(slot),))  # fmt: skip
            (after if buffers[slot][1] >= 0 or start else before)[start].append(read)
        buffers[slot] = (op.group, index)
        ops[index] = op.with_(reads=(Staged(slot),))


def _pass_state(
    ops: list[Op],
    states: Sequence[str],
    work: Workload,
    window: int,
    before: dict[int, list[Op]],
    after: dict[int, list[Op]],
) -> None:
    """The first reads start before the backward; one that follows waits for the write before it."""
    adams = [i for i, op in enumerate(ops) if op.kind == "adam" and states[op.group].startswith("nvme")]
    firsts = {op.group: i for i, op in enumerate(ops) if op.kind == "momentum"}
    begin = next((i for i, op in enumerate(ops) if op.kind == "backward"), 0)
    for number, index in enumerate(adams):
        op = ops[index]
        slot = Window(number % window)
        parts = (0, 1) if states[op.group] == "nvme-all" else (1,)
        places = tuple(Disk(op.group, part) for part in parts)
        group = work.groups[op.group]
        nbytes = group.state_bytes + (group.nbytes if 0 in parts else 0)
        read = Op("read_state", "nvme_read", group=op.group, nbytes=nbytes, reads=places, writes=(slot,))
        write = Op("write", "nvme_write", group=op.group, nbytes=nbytes, reads=(slot,), writes=places)
        if number < window:
            before[begin].append(read)
        else:
            after[adams[number - window]].append(read)
        for passing in {firsts.get(op.group, index), index}:
            update = ops[passing]
            writes = tuple(t for t in update.writes if not (0 in parts and isinstance(t, Master)))
            ops[passing] = update.with_(reads=(*update.reads, slot), writes=(*writes, slot))
        after[index].append(write)
