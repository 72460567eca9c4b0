"""Send what a block saved to the host (or NVMe) after its forward, and bring it back before its backward.

That is what only the block's own backward still needs: its saved tensors, and the inputs that no other
block reads again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megacompile.schedule.op_table import Offloaded, Saved, Token, Value
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step, weave
from megacompile.schedule.workload import Workload


def insert_offload(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Insert offload, free, reload for each block whose saved activations were planned to leave the
    device."""
    if mode.kind in ("evaluate", "update") or all(block.saved_on == "device" for block in plan.blocks):
        return step
    after: dict[int, list[Op]] = defaultdict(list)
    before: dict[int, list[Op]] = defaultdict(list)
    for index, back, tokens in tokens_of_own_backward(step, work):
        op = step.ops[index]
        planned = plan.blocks[op.block]
        least = 2 + planned.free_after + max(1, planned.reload)
        if planned.saved_on == "device" or back - index < least:
            continue  # what comes back as soon as it is gone gains nothing
        offload, reload = moves(step, index, tokens)
        after[index].append(offload)
        gone = Op("free_offloaded", "compute", op.block, micro=op.micro, frees=tokens)
        after[index + planned.free_after].append(gone)
        before[back - planned.reload].append(reload)
    return step.with_(ops=weave(step.ops, before, after))


def moves(step: Step, forward: int, tokens: tuple[Token, ...]) -> tuple[Op, Op]:
    """The offload of tokens of the forward at that index, and their reload."""
    op, nbytes = step.ops[forward], sum(step.token_bytes[t] for t in tokens)
    home = (Offloaded(op.block, op.micro),)
    return (
        Op("offload", "d2h", op.block, micro=op.micro, reads=tokens, writes=home, nbytes=nbytes),
        Op("reload", "h2d", op.block, micro=op.micro, reads=home, writes=tokens, nbytes=nbytes),
    )


def tokens_of_own_backward(step: Step, work: Workload) -> Iterator[tuple[int, int, tuple[Token, ...]]]:
    """Yield a forward's index, the tokens that afterwards only the block's own backward reads, and between
    them the index of the first operation that does; leaves of the batch are too small to move."""
    readers: dict[Token, list[int]] = defaultdict(list)
    for index, op in enumerate(step.ops):
        for token in op.reads:
            readers[token].append(index)
    for index, op in enumerate(step.ops):
        if op.kind != "forward":
            continue
        found = tuple(
            token
            for token in (*op.reads, *op.writes)
            if isinstance(token, Saved) or (isinstance(token, Value) and not work.values[token.value].batch)
            if token[-1] == op.micro and _alone(step, index, readers[token])
        )
        if found:
            yield index, min(i for token in found for i in readers[token] if i > index), found


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
