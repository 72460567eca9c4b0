"""The device bytes of the relaxation: stashes, the running operation's own tensors, and weight slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.linear import LinearProgram
from megacompile.plan.plan import Mode
from megacompile.plan.workload import Choice, Workload

_GB = 1e-9  # memory rows count in GB, times in seconds: all coefficients are of about one size


@dataclass(frozen=True)
class Option:
    """One way to run a block: the variable of its share, and the stash that waits for its backward."""

    share: int
    choice: Choice
    host: bool
    stash: int


def limit_memory(
    program: LinearProgram,
    work: Workload,
    mode: Mode,
    order: str,
    budget: int,
    options: Sequence[Sequence[Option]],
    held: Sequence[int],
) -> None:
    """At every operation of a block: stashes of earlier blocks, its own tensors, and the slab."""
    slab = program.variable()
    room = _GB * (budget - work.constant_bytes)
    micros = mode.micro_batches if order == "breadth" else 1
    stashed = program.variable()  # of the blocks before, on the device
    program.equal({stashed: 1.0}, 0.0)
    resident: dict[int, float] = {}  # groups held since an earlier block
    for b, block in enumerate(work.blocks):
        groups = sorted({g for o in options[b] for g in o.choice.forward.groups})
        slots = {slab: -1.0} | {v: n for v, n in resident.items() if v not in {held[g] for g in groups}}
        program.at_most(slots, -_GB * sum(work.groups[g].nbytes for g in groups))
        resident |= {held[g]: _GB * work.groups[g].nbytes for g in groups}
        tangents = sum(work.values[v].nbytes for v in block.tangents)
        forward, backward, recompute = ({stashed: 1.0, slab: 1.0} for _ in range(3))
        for o in options[b]:
            forward[o.share] = _GB * max(0, o.choice.forward.peak_bytes)
            if o.choice.backward is not None:
                own = o.choice.saved_bytes + tangents + max(0, o.choice.backward.peak_bytes)
                backward[o.share] = _GB * own
            if o.choice.recompute is not None:
                recompute[o.share] = _GB * (tangents + max(0, o.choice.recompute.peak_bytes))
        for row in (forward, backward, recompute):
            program.at_most(row, room)
        after = program.variable()
        kept = {o.share: -_GB * micros * o.stash for o in options[b] if not o.host}
        program.equal({after: 1.0, stashed: -1.0} | kept, 0.0)
        stashed = after
