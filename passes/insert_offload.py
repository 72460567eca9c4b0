"""Send what a block saved to the host (or NVMe) after its forward, and bring it back before its backward.

That is what only the block's own backward still needs: its saved tensors, and the inputs that no other
block reads again.
"""

from __future__ import annotations

from collections import defaultdict

from megacompile.schedule.op_table import Offloaded, Saved, Token, Value
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step, weave
from megacompile.schedule.workload import Workload


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
