"""Send what a block saved to the host (or NVMe) after its forward, and bring it back before its backward."""

from __future__ import annotations

from collections import defaultdict

from megacompile.schedule.op_table import Kind, Offloaded, Saved, Spill, Stream, Token, Value
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step, weave
from megacompile.schedule.workload import Workload

# ------------------------------------------------------------------------------------------------------------
# Send what a block saved to the host after its forward and bring it back before its backward.
#
# That is what only the block's own backward still needs: its saved tensors, and the inputs that no other
# block reads again.


def insert_offload(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Insert offload, free, reload for each block whose saved activations were planned to leave the
    device."""
    if mode.kind in ("evaluate", "update") or all(block.saved_on == "device" for block in plan.blocks):
        return step
    readers: dict[Token, list[int]] = defaultdict(list)
    for index, op in enumerate(step.ops):
        for token in op.reads:
            readers[token].append(index)
    after: dict[int, list[Op]] = defaultdict(list)
    before: dict[int, list[Op]] = defaultdict(list)
    for index, op in enumerate(step.ops):
        if op.kind != "forward" or plan.blocks[op.block].saved_on == "device":
            continue
        saved = _saved(step, index, readers, work)
        if not saved:
            continue
        back = min(i for token in saved for i in readers[token] if i > index)
        nbytes = sum(step.token_bytes[t] for t in saved)
        home = Offloaded(op.block, op.micro)
        start = min(index + 1, back - 1)
        if back - index < 4:
            continue  # the backward is next: there is nothing to gain
        place = {"block": op.block, "micro": op.micro, "nbytes": nbytes}
        after[index].append(Op("offload", "d2h", reads=saved, writes=(home,), **place))  # type: ignore[arg-type]
        after[start].append(Op("free_offloaded", "compute", op.block, micro=op.micro, frees=saved))
        before[max(back - plan.blocks[op.block].reload, start + 1)].append(
            Op("reload", "h2d", reads=(home,), writes=saved, **place)  # type: ignore[arg-type]
        )
    return step.with_(ops=weave(step.ops, before, after))


def _saved(step: Step, index: int, readers: dict[Token, list[int]], work: Workload) -> tuple[Token, ...]:
    """Return what only this block's own backward still reads; leaves of the batch are too small to move."""
    op = step.ops[index]
    own = []
    for token in (*op.reads, *op.writes):
        saved = isinstance(token, Saved) or (isinstance(token, Value) and not work.values[token.value].batch)
        if saved and token[-1] == op.micro and _alone(step, index, readers[token]):
            own.append(token)
    return tuple(own)


def _alone(step: Step, index: int, readers: list[int]) -> bool:
    """Return whether of what reads a token after this operation all is of the same block, and there is
    any."""
    any_later = False
    for i in reversed(readers):
        if i <= index:
            break
        if step.ops[i].block != step.ops[index].block:
            return False
        any_later = True
    return any_later


# ------------------------------------------------------------------------------------------------------------
# Let offloaded activations that wait on NVMe pass through a few host buffers: written as they leave, read
# ahead of use.
#
# The buffers are filled in turn, by what leaves the device and by what returns from the drive. A read starts
# as soon as the buffer that comes next has done its duty.


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
            after[index].append(_move("write_offloaded", op, reads=(buffer,), writes=home))
            begin = index
        else:
            if number >= plan.window:  # what the buffer held is on its way to the drive or to the device
                begin = max(begin, fills[number - plan.window])
            after[begin].append(_move("read_offloaded", op, reads=op.reads, writes=(buffer,)))
            ops[index] = op.with_(reads=(buffer,))
    return step.with_(ops=weave(tuple(ops), {}, after), window=plan.window)


def _move(kind: Kind, op: Op, *, reads: tuple[Token, ...], writes: tuple[Token, ...]) -> Op:
    stream: Stream = "nvme_read" if kind == "read_offloaded" else "nvme_write"
    nbytes = -(-op.nbytes // _PAGE) * _PAGE
    return Op(kind, stream, op.block, micro=op.micro, reads=reads, writes=writes, nbytes=nbytes)
