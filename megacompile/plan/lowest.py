"""Lowest: device bytes that a step holds at some time, whatever else its plan says.

In: a workload and a mode; then, if need be, the checkpoint policies of a plan. Out: bytes, found without
lowering anything. While a block's function runs, what it reads is on the device beside its own tensors, and
so is what passes by it: values of earlier blocks that later forwards read, gradients that earlier blocks
await. Only what a block's own backward alone still reads may wait elsewhere. So no cuts are weighed that
cannot help, and no budget is searched that nothing meets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from megacompile.assemble.plan import Mode
from megacompile.assemble.workload import BlockWork, CheckpointPolicy, Workload

_KEPT = 64  # workloads whose bytes are remembered
_COPIES = 4  # of a block's weights at most: its slot, its gradient, and a sum of that in FP32


def lowest_bytes(work: Workload, mode: Mode, checkpoints: Sequence[str] = ()) -> int:
    """Device bytes below which no step of this mode stays, or none with these checkpoint policies."""
    needs = _needs(work, mode)
    if not checkpoints:
        return work.constant_bytes + max((min(n.values()) for n in needs), default=0)
    chosen = (n[name if name in n else "none"] for n, name in zip(needs, checkpoints, strict=True))
    return work.constant_bytes + max(chosen, default=0)


def activations_bytes(work: Workload, mode: Mode) -> int:
    """Of the lowest bytes what smaller pieces of weights leave: those beside a block's weights and gradients.

    Blocks that give results are left out, as heads are cut with their logits.
    """
    results = {work.loss, *work.results}
    return max(
        (
            min(needs.values()) - _COPIES * sum(work.groups[g].nbytes for g in _weights(block))
            for block, needs in zip(work.blocks, _needs(work, mode), strict=True)
            if not results.intersection(block.outputs)
        ),
        default=0,
    )


def _weights(block: BlockWork) -> set[int]:
    return {g for policy in block.policies for g in policy.forward.groups}


@lru_cache(maxsize=_KEPT)
def _needs(work: Workload, mode: Mode) -> list[dict[str, int]]:
    """Per block and checkpoint policy, bytes at the highest of its functions."""
    if mode.kind == "update":
        return [dict.fromkeys((p.name for p in block.policies), 0) for block in work.blocks]
    trains = mode.kind != "evaluate"
    passing, awaited = _passing(work), _awaited(work)
    return [
        {p.name: _highest(work, block, p, trains, passing[b], awaited[b]) for p in block.policies}
        for b, block in enumerate(work.blocks)
    ]


def _highest(
    work: Workload, block: BlockWork, policy: CheckpointPolicy, trains: bool, passing: int, awaited: int
) -> int:
    given = awaited + policy.saved_bytes + sum(work.values[v].nbytes for v in block.tangents)
    calls = [(policy.forward, passing), (policy.recompute, awaited), (policy.backward, given)]
    return max(
        others
        + sum(work.values[v].nbytes for v in call.reads)
        + sum(work.groups[g].nbytes for g in call.groups)
        + call.peak_bytes
        for call, others in (calls if trains else calls[:1])
        if call is not None
    )


def _passing(work: Workload) -> list[int]:
    """Per block, bytes of values from earlier blocks for later forwards that it does not read itself."""
    made = {v: b for b, block in enumerate(work.blocks) for v in block.outputs}
    last: dict[int, int] = {}
    read: list[set[int]] = []
    for b, block in enumerate(work.blocks):
        reads = [set(policy.forward.reads) for policy in block.policies]
        last |= dict.fromkeys(set.intersection(*reads) & made.keys(), b)
        read.append(set.union(*reads))
    total = _between(len(read), [(made[v], b, work.values[v].nbytes) for v, b in last.items()])
    for b, values in enumerate(read):
        total[b] -= sum(work.values[v].nbytes for v in values if v in last and made[v] < b < last[v])
    return total


def _awaited(work: Workload) -> list[int]:
    """Per block, bytes of gradients that later blocks gave to values of earlier ones."""
    made = {v: b for b, block in enumerate(work.blocks) for v in block.outputs}
    last = {v: b for b, block in enumerate(work.blocks) for v in block.grad_values if v in made}
    return _between(len(work.blocks), [(made[v], b, work.values[v].nbytes) for v, b in last.items()])


def _between(count: int, spans: list[tuple[int, int, int]]) -> list[int]:
    """At each place the bytes of the spans that begin before it and end after it."""
    changes = [0] * (count + 1)
    for start, end, nbytes in spans:
        if end - start > 1:
            changes[start + 1] += nbytes
            changes[end] -= nbytes
    return list(accumulate(changes[:count]))
