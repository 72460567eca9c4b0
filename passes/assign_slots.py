"""Give each stay of a weight group a fixed place in one slab.

Stays that overlap in program order get disjoint places; places are reused as soon as a stay ends. First fit
over stays in order of size finds the smallest slab in the common case of equal layers.
"""

from __future__ import annotations

from bisect import bisect, insort

from megacompile.schedule.op_table import Ring
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step
from megacompile.schedule.workload import Workload

ALIGNMENT = 512
_Slot = tuple[int, int]  # offset and bytes


def assign_slots(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Set ``offset`` of prefetches and evicts, the size of the slab, and the ring's buffers."""
    stays = sorted(_stay_spans(step.ops), key=lambda s: (-work.groups[s[2]].nbytes, s[0]))
    places: dict[_Slot, list[tuple[int, int]]] = {}  # by offset; per place its stays in order of time
    offsets: dict[int, int] = {}
    for start, end, group in stays:
        nbytes = _aligned_bytes(work.groups[group].nbytes)
        offset = _first_fit(places, start, end, nbytes)
        if (offset, nbytes) not in places:
            places = dict(sorted([*places.items(), ((offset, nbytes), [])]))
        insort(places[offset, nbytes], (start, end))
        offsets[start] = offsets[end] = offset
    ops = tuple(op.with_(offset=offsets[i]) if i in offsets else op for i, op in enumerate(step.ops))
    slab = max((offset + nbytes for offset, nbytes in places), default=0)
    return step.with_(ops=ops, slab_bytes=slab, ring=_ring_bytes(step.ops, work))


def _stay_spans(ops: tuple[Op, ...]) -> list[tuple[int, int, int]]:
    """(index of prefetch, index of evict, group) of each stay."""
    open_stays: dict[int, int] = {}
    stays = []
    for index, op in enumerate(ops):
        if op.kind == "prefetch":
            open_stays[op.group] = index
        elif op.kind == "evict":
            stays.append((open_stays.pop(op.group), index, op.group))
    return stays


def _first_fit(places: dict[_Slot, list[tuple[int, int]]], start: int, end: int, nbytes: int) -> int:
    """The least offset that is free from ``start`` to ``end``; one place's stays never overlap."""
    offset = 0
    for (begin, size), stays in places.items():
        if begin - offset >= nbytes:
            break
        after = bisect(stays, (start, end))
        if (after and stays[after - 1][1] > start) or (after < len(stays) and stays[after][0] < end):
            offset = max(offset, begin + size)
    return offset


def _aligned_bytes(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _ring_bytes(ops: tuple[Op, ...], work: Workload) -> tuple[int, ...]:
    """A buffer of the ring holds the largest gradient, or shard of one, that ever passes through it."""
    sizes: dict[int, int] = {}
    for op in ops:
        for token in op.writes:
            if isinstance(token, Ring):
                passing = op.nbytes if op.kind == "push_shard" else work.groups[op.group].nbytes
                sizes[token.slot] = max(sizes.get(token.slot, 0), passing)
    return tuple(sizes[i] for i in sorted(sizes))
