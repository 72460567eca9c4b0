"""Route offloaded activations that wait on NVMe through a few host buffers: written as they leave, read ahead
of use.

The buffers are filled in turn, by what leaves the device and by what returns from the drive. A read starts
as soon as the buffer that comes next has done its duty.
"""

from __future__ import annotations

from collections import defaultdict

from megacompile.schedule.op_table import Kind, Spill, Stream, Token
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step, weave
from megacompile.schedule.workload import Workload

_PAGE = 4096  # a drive moves whole pages


def insert_offloaded_io(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Insert write after each offload, and read before each reload, of blocks that offload to NVMe."""
    ops = list(step.ops)
    fills = [
        i
        for i, op in enumerate(ops)
        if op.kind in ("offload", "reload") and plan.blocks[op.block].saved_on == "nvme"
    ]
    if not fills:
        return step
    after: dict[int, list[Op]] = defaultdict(list)
    begin = 0  # where a read may start: reads and offloads fill buffers in the order of their numbers
    for number, index in enumerate(fills):
        op, buffer = ops[index], Spill(number % plan.window)
        if op.kind == "offload":
            home = op.writes
            ops[index] = op.with_(writes=(buffer,))
            after[index].append(_drive_move("write_offloaded", op, reads=(buffer,), writes=home))
            begin = index
        else:
            if number >= plan.window:  # what the buffer held is on its way to the drive or to the device
                begin = max(begin, fills[number - plan.window])
            after[begin].append(_drive_move("read_offloaded", op, reads=op.reads, writes=(buffer,)))
            ops[index] = op.with_(reads=(buffer,))
    return step.with_(ops=weave(tuple(ops), {}, after), window=plan.window)


def _drive_move(kind: Kind, op: Op, *, reads: tuple[Token, ...], writes: tuple[Token, ...]) -> Op:
    stream: Stream = "nvme_read" if kind == "read_offloaded" else "nvme_write"
    nbytes = -(-op.nbytes // _PAGE) * _PAGE
    return Op(kind, stream, op.block, micro=op.micro, reads=reads, writes=writes, nbytes=nbytes)
