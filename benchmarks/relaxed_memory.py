"""The device bytes of the relaxation: offloaded activations, the running operation's own tensors, and weight
slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.linear import LinearProgram
from megacompile.schedule.plan import Mode
from megacompile.schedule.workload import CheckpointPolicy, Workload

GB = 1e-9  # memory rows count in GB, times in seconds: all coefficients are of about one size


@dataclass(frozen=True)
class BlockShare:
    """One way to run a block: the variable of its share, and the offloaded activations that waits for its
    backward."""

    share: int
    policy: CheckpointPolicy
    host: bool
    offloaded: int


def limit_memory(
    program: LinearProgram,
    work: Workload,
    mode: Mode,
    order: str,
    budget: int,
    shares: Sequence[Sequence[BlockShare]],
    held: Sequence[int],
) -> int:
    """At every operation of a block: offloaded activations of earlier blocks, what it reads, its own tensors,
    and the slab.

    In a breadth-first order, where all micro-batches of a block follow each other, also what is there of the
    others: before the first forward their inputs, after the last one their outputs and offloaded activations;
    before the first backward their offloaded activations and the gradients of their outputs, after the last
    one those of their inputs. Returns the variable of the slab, in GB.
    """
    values = _Values(work)
    slab = program.variable()
    room = GB * (budget - work.constant_bytes)
    micros = mode.micro_batches if order == "breadth" else 1
    kept_bytes = program.variable()  # of the blocks before, on the device
    program.equal({kept_bytes: 1.0}, 0.0)
    resident: dict[int, float] = {}  # groups held since an earlier block
    for b, block in enumerate(work.blocks):
        groups = sorted({g for o in shares[b] for g in o.policy.forward.groups})
        slots = {slab: -1.0} | {v: n for v, n in resident.items() if v not in {held[g] for g in groups}}
        program.at_most(slots, -GB * sum(work.groups[g].nbytes for g in groups))
        resident |= {held[g]: GB * work.groups[g].nbytes for g in groups}
        tangents, gradients = values.nbytes(block.tangents), values.nbytes(block.grad_values)
        for kind, others in (
            ("forward", values.handed(b)), ("forward after", values.handed(b + 1)),
            ("recompute", tangents), ("backward", tangents), ("backward after", gradients),
        ):  # fmt: skip
            row = {kept_bytes: 1.0, slab: 1.0}
            waits = micros > 1 and kind in ("forward after", "recompute", "backward")
            for o in shares[b]:
                own = values.own(b, o.policy, kind.split()[0], tangents)
                row[o.share] = GB * (own + (micros - 1) * o.offloaded * (waits and not o.host))
            program.at_most(row, room - GB * (micros - 1) * others)
        after = program.variable()
        kept = {o.share: -GB * micros * o.offloaded for o in shares[b] if not o.host}
        program.equal({after: 1.0, kept_bytes: -1.0} | kept, 0.0)
        kept_bytes = after
    return slab


class _Values:
    """Bytes of a workload's values that are surely on the device, and in no offloaded activations of an
    earlier block."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        readers: dict[int, set[int]] = defaultdict(set)  # blocks that read a value again
        for b, block in enumerate(work.blocks):
            for policy in block.policies:
                for call in (policy.recompute, policy.backward):
                    for v in call.reads if call is not None else ():
                        readers[v].add(b)
        self.owner = {v: min(blocks) for v, blocks in readers.items() if len(blocks) == 1}

    def nbytes(self, values: Iterable[int]) -> int:
        return sum(self.work.values[v].nbytes for v in values)

    def handed(self, b: int) -> int:
        """Outputs of the block before that a block's forward reads, whatever it keeps."""
        if not 0 < b < len(self.work.blocks):
            return 0
        read = set.intersection(*(set(c.forward.reads) for c in self.work.blocks[b].policies))
        return self.nbytes(v for v in self.work.blocks[b - 1].outputs if v in read and self._here(v, b))

    def own(self, b: int, policy: CheckpointPolicy, kind: str, tangents: int) -> int:
        """What one function of a block reads and has at its highest point; 0 where there is none."""
        call = {"forward": policy.forward, "recompute": policy.recompute, "backward": policy.backward}[kind]
        if call is None:
            return 0
        given = 0 if kind == "forward" else tangents + (kind == "backward") * policy.saved_bytes
        read = self.nbytes(v for v in call.reads if not self.work.values[v].batch and self._here(v, b))
        return given + read + max(0, call.peak_bytes)

    def _here(self, v: int, b: int) -> bool:
        return self.owner.get(v, b) >= b
