"""Stays of weight groups on the device: before their uses, after the last one, and where in one slab."""

from __future__ import annotations

from bisect import bisect, insort
from collections import defaultdict

from megacompile.schedule.op_table import COMPUTES, Master, Resident, Ring, Token, Weights
from megacompile.schedule.plan import GroupPlan, Mode, Plan
from megacompile.schedule.step import Op, Step, weave
from megacompile.schedule.workload import Workload

# ------------------------------------------------------------------------------------------------------------
# Bring each weight group to the device before its uses and let it go after them.
#
# A stay is one prefetch, the uses it serves, and one evict. Uses belong to one stay if the plan keeps the
# group between them, or if they are so close that the next prefetch would start before the group could leave.
#
# Of ranks that share a group whose state is on the device, each copies its shard within the device.


def insert_prefetch(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Insert a prefetch ``prefetch_depth`` compute operations ahead of each stay and an evict at its end."""
    compute = [i for i, op in enumerate(step.ops) if op.kind in COMPUTES]
    uses: dict[int, list[int]] = defaultdict(list)
    micro = [step.ops[i].micro for i in compute]
    for position, index in enumerate(compute):
        for token in step.ops[index].reads:
            if isinstance(token, Weights):
                uses[token.group].append(position)
    before: dict[int, list[Op]] = defaultdict(list)
    after: dict[int, list[Op]] = defaultdict(list)
    for first, last, group in sorted(
        (s[0], s[-1], g) for g, positions in uses.items() for s in _stays(positions, plan.groups[g], micro)
    ):
        start = max(0, first - plan.groups[group].prefetch_depth)
        nbytes = work.groups[group].nbytes
        here = group in step.resident
        before[compute[start]].append(
            Op(
                "prefetch",
                "comm" if here else "h2d",
                group=group,
                reads=(Resident(group) if here else Master(group),),
                writes=(Weights(group),),
                nbytes=nbytes,
            )
        )
        after[compute[last]].append(
            Op("evict", "compute", group=group, writes=(Weights(group),), nbytes=nbytes)
        )
    return step.with_(ops=weave(step.ops, before, after))


def _stays(positions: list[int], plan: GroupPlan, micro: list[int]) -> list[list[int]]:
    """Uses of a group, split into its stays; ``micro`` tells each operation's micro-batch."""
    stays = [[positions[0]]]
    begun = {micro[positions[0]]}
    for position in positions[1:]:
        near = position - stays[-1][-1] <= plan.prefetch_depth + 1
        same_micro = plan.residency == "micro" and micro[position] in begun
        if not (near or same_micro or plan.residency == "step"):
            stays.append([])
            begun = set()
        stays[-1].append(position)
        begun.add(micro[position])
    return stays


# ------------------------------------------------------------------------------------------------------------
# Give back each device token with the last compute operation that touches it.


def insert_frees(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Add to ``frees`` what nothing later reads and no operation gives back already."""
    last: dict[Token, int] = {}
    for index, op in enumerate(step.ops):
        for token in (*op.reads, *op.writes):
            if token.on_device:
                last[token] = index
        for token in (*op.donates, *op.frees):
            last.pop(token, None)
    freed: dict[int, list[Token]] = defaultdict(list)
    for token, index in last.items():
        assert step.ops[index].stream == "compute", f"{token} is last read by another stream"
        freed[index].append(token)
    ops = tuple(
        op.with_(frees=op.frees + tuple(freed[index])) if index in freed else op
        for index, op in enumerate(step.ops)
    )
    return step.with_(ops=ops)


# ------------------------------------------------------------------------------------------------------------
# Give each stay of a weight group a fixed place in one slab.
#
# Stays that overlap in program order get disjoint places; places are reused as soon as a stay ends. First fit
# over stays in order of size finds the smallest slab in the common case of equal layers.


ALIGNMENT = 512
_Place = tuple[int, int]  # offset and bytes


def assign_slots(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Set ``offset`` of prefetches and evicts, the size of the slab, and the ring's buffers."""
    stays = sorted(_spans(step.ops), key=lambda s: (-work.groups[s[2]].nbytes, s[0]))
    places: dict[_Place, list[tuple[int, int]]] = {}  # by offset; per place its stays in order of time
    offsets: dict[int, int] = {}
    for start, end, group in stays:
        nbytes = _aligned(work.groups[group].nbytes)
        offset = _first_fit(places, start, end, nbytes)
        if (offset, nbytes) not in places:
            places = dict(sorted([*places.items(), ((offset, nbytes), [])]))
        insort(places[offset, nbytes], (start, end))
        offsets[start] = offsets[end] = offset
    ops = tuple(op.with_(offset=offsets[i]) if i in offsets else op for i, op in enumerate(step.ops))
    slab = max((offset + nbytes for offset, nbytes in places), default=0)
    return step.with_(ops=ops, slab_bytes=slab, ring=_ring_bytes(step.ops, work))


def _spans(ops: tuple[Op, ...]) -> list[tuple[int, int, int]]:
    """(index of prefetch, index of evict, group) of each stay."""
    open_stays: dict[int, int] = {}
    stays = []
    for index, op in enumerate(ops):
        if op.kind == "prefetch":
            open_stays[op.group] = index
        elif op.kind == "evict":
            stays.append((open_stays.pop(op.group), index, op.group))
    return stays


def _first_fit(places: dict[_Place, list[tuple[int, int]]], start: int, end: int, nbytes: int) -> int:
    """The least offset that is free from ``start`` to ``end``; one place's stays never overlap."""
    offset = 0
    for (begin, size), stays in places.items():
        if begin - offset >= nbytes:
            break
        after = bisect(stays, (start, end))
        if (after and stays[after - 1][1] > start) or (after < len(stays) and stays[after][0] < end):
            offset = max(offset, begin + size)
    return offset


def _aligned(nbytes: int) -> int:
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
