"""The slots of the relaxation: what the link has to bring between two operations because the slab is small.

In: spans of compute with variables for their start and end, the variable of the slab's bytes and the most
that these can be. Out: rows of the program.

*Claim.* Let A be the groups that the last function of operation i reads, and B those that the first
functions of operations i+1 … j read, without A; all whatever the blocks keep. Let S be the bytes of the slab.
Then between the end of i and the start of j lie at least the fetches of B, less those of any part of B
that fits into S - bytes(A).

*Proof.* Call a stay of a group present if its fetch has started before the end of i, and the group has not
been let go by then. A is present, as it is let go after i. Present stays have disjoint places in the slab:
a fetch into a place that overlaps another stay's waits for that one's end. So those of B that are present
fit into S - bytes(A) beside A. No stay of any other group of B that started before the end of i serves
after it; the group's first use in i+1 … j needs another, whose fetch starts after the end of i and is over
before that use starts, so before j does. Fetches run one after the other on one stream, and what shares
host memory with them only makes them longer.

Steps follow each other, so j may be in the next one. Two rows come of each pair: with the variable S, where
parts of groups count as well (and no fetch its fixed cost), and with the largest S, where only whole groups
do: as many as the smallest that fit together, and of the fetches of those that fit at all the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.linear import LinearProgram, Row, times, total
from benchmarks.relaxed_memory import GB
from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import duration
from megacompile.schedule.step import Op
from megacompile.schedule.workload import Call, Workload

_AHEAD = (1, 2, 3, 4, 6, 8, 16, 32)  # operations between i and j, and one more


@dataclass(frozen=True)
class Span:
    """A forward, or a recompute with its backward: its block, variables for its start and end."""

    block: int
    start: int
    end: int
    backward: bool


def limit_fetches(
    program: LinearProgram,
    work: Workload,
    machine: Machine,
    spans: Sequence[Span],
    period: int,
    slab: int,
    most: float,
) -> None:
    """Add the claim's rows for all pairs of operations at some distances; ``most`` in bytes."""
    first = [_surely(work, s, last=False) for s in spans]
    last = [_surely(work, s, last=True) for s in spans]
    count = len(spans)
    for i, span in enumerate(spans):
        wanted: dict[int, None] = {}
        for j in range(i + 1, i + min(max(_AHEAD), count - 1) + 1):
            wanted |= dict.fromkeys(first[j % count] - last[i])
            if j - i in _AHEAD and wanted:
                start: Row = {spans[j % count].start: 1.0}
                if j >= count:
                    start = total(start, {period: 1.0})
                interval = total(start, {span.end: -1.0})
                there = sum(work.groups[g].nbytes for g in last[i])
                sizes = [work.groups[g].nbytes for g in wanted]
                _add(program, machine, interval, sizes, there, slab, most)


def _add(
    program: LinearProgram,
    machine: Machine,
    interval: Row,
    sizes: list[int],
    there: int,
    slab: int,
    most: float,
) -> None:
    """Both rows of one pair: ``sizes`` are the bytes of B, ``there`` those of A."""
    fetches = sorted((_fetch(machine, n) for n in sizes if n <= most - there), reverse=True)
    whole, room = 0, most - there
    for n in sorted(sizes):
        room -= n
        whole += room >= 0
    left = sum(_fetch(machine, n) for n in sizes) - sum(fetches[:whole])
    if left > 0:
        program.at_least(interval, left)
    rate = machine.h2d_bandwidth
    program.at_least(total(interval, times(1 / GB / rate, {slab: 1.0})), (sum(sizes) + there) / rate)


def _fetch(machine: Machine, nbytes: int) -> float:
    return duration(Op("prefetch", "h2d", nbytes=nbytes), machine)


def _surely(work: Workload, span: Span, *, last: bool) -> set[int]:
    """Groups that the first or last function of an operation reads, whatever its block keeps."""

    def call(c_forward: Call, recompute: Call | None, backward: Call | None) -> Call | None:
        if not span.backward:
            return c_forward
        return backward if last or recompute is None else recompute

    calls = [call(c.forward, c.recompute, c.backward) for c in work.blocks[span.block].policies]
    return set.intersection(*(set(c.groups) if c is not None else set() for c in calls))
