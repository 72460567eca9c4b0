"""Give each stay of a weight group a fixed place in one slab.

Stays that overlap in program order get disjoint places; places are reused as soon as a stay ends.
First fit over stays in order of size finds the smallest slab in the common case of equal layers.
"""

from __future__ import annotations

from megacompile.plan.plan import Mode, Plan
from megacompile.plan.workload import Workload
from megacompile.step.operations import Op, Step

ALIGNMENT = 512


def assign_slots(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Set ``offset`` of prefetches and evicts, the size of the slab, and the ring's buffers."""
    stays = _stays(step.ops)
    placed: list[tuple[int, int, int, int]] = []  # (start, end, offset, bytes)
    offsets: dict[int, int] = {}
    for start, end, group in sorted(stays, key=lambda s: (-work.groups[s[2]].nbytes, s[0])):
        nbytes = _aligned(work.groups[group].nbytes)
        busy = sorted((o, b) for s, e, o, b in placed if s < end and start < e)
        offset = _first_fit(busy, nbytes)
        placed.append((start, end, offset, nbytes))
        offsets[start] = offsets[end] = offset
    ops = tuple(op.with_(offset=offsets[i]) if i in offsets else op for i, op in enumerate(step.ops))
    slab = max((offset + nbytes for _, _, offset, nbytes in placed), default=0)
    return step.with_(ops=ops, slab_bytes=slab, ring=_ring_bytes(step.ops, work))


def _stays(ops: tuple[Op, ...]) -> list[tuple[int, int, int]]:
    """(index of prefetch, index of evict, group) of each stay."""
    open_stays: dict[int, int] = {}
    stays = []
    for index, op in enumerate(ops):
        if op.kind == "prefetch":
            open_stays[op.group] = index
        elif op.kind == "evict" and op.group >= 0:
            stays.append((open_stays.pop(op.group), index, op.group))
    return stays


def _first_fit(busy: list[tuple[int, int]], nbytes: int) -> int:
    offset = 0
    for start, size in busy:
        if start - offset >= nbytes:
            break
        offset = max(offset, start + size)
    return offset


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _ring_bytes(ops: tuple[Op, ...], work: Workload) -> tuple[int, ...]:
    """A buffer of the ring holds the largest group that ever passes through it."""
    sizes: dict[int, int] = {}
    for op in ops:
        for token in op.writes:
            if token[0] == "ring":
                sizes[token[1]] = max(sizes.get(token[1], 0), work.groups[op.group].nbytes)
    return tuple(sizes[i] for i in sorted(sizes))
