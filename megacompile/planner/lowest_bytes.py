"""Find the device bytes that a step holds at some time, whatever else its plan says.

In: a workload and a mode; then, if need be, the checkpoint policies of a plan. Out: bytes, found without
lowering anything. While a block's function runs, its arguments are on the device beside its own tensors. So
is what passes by it: values between earlier blocks and later forwards, gradients for earlier blocks, leaves
of the batch with readers to come. Only what a block's own backward alone still reads may wait elsewhere. So
no cuts are weighed that cannot help, and no budget is searched that nothing meets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from megacompile.blocks.partition import Partition
from megacompile.schedule.plan import Mode
from megacompile.schedule.workload import BlockWork, CheckpointPolicy, Workload

_REMEMBERED = 64  # workloads whose bytes are remembered
_WEIGHT_COPIES = 4  # of a block's weights at most: its slot, its gradient, and a sum of that in FP32


def lowest_bytes(work: Workload, mode: Mode, checkpoints: Sequence[str] = ()) -> int:
    """Device bytes below which no step of this mode stays, or none with these checkpoint policies."""
    if checkpoints:
        pairs = zip(work.blocks, checkpoints, strict=True)
        chosen = tuple(replace(block, policies=(block.policy(name),)) for block, name in pairs)
        needs = _find_needs(replace(work, blocks=chosen), mode)
    else:
        needs = _needs(work, mode)
    return work.constant_bytes + max((min(n.values()) for n in needs), default=0)


def values_bytes(part: Partition) -> int:
    """Return the part of the lowest bytes that is known before blocks are differentiated: while the forward
    of a block runs, its arguments, or its results, and the values that pass by it."""
    reads = [{i.value for i in block.inputs if i.kind == "value"} for block in part.blocks]
    made = {v: value.producer for v, value in enumerate(part.values) if value.producer >= 0}
    sizes = [value.nbytes for value in part.values]
    passing = _pass_by(reads, reads, made, sizes)
    return max(
        passing[b] + max(sum(sizes[v] for v in reads[b]), sum(sizes[v] for v in block.outputs))
        for b, block in enumerate(part.blocks)
    )


def activations_bytes(work: Workload, mode: Mode) -> int:
    """Return the part of the lowest bytes that smaller pieces of weights leave: those beside a block's
    weights and gradients.

    Blocks that give results are left out, as heads are cut with their logits.
    """
    results = {work.loss, *work.results}
    return max(
        (
            min(needs.values()) - _WEIGHT_COPIES * sum(work.groups[g].nbytes for g in _weights(block))
            for block, needs in zip(work.blocks, _needs(work, mode), strict=True)
            if not results.intersection(block.outputs)
        ),
        default=0,
    )


def _weights(block: BlockWork) -> set[int]:
    return {g for policy in block.policies for g in policy.forward.groups}


@lru_cache(maxsize=_REMEMBERED)
def _needs(work: Workload, mode: Mode) -> list[dict[str, int]]:
    return _find_needs(work, mode)


def _find_needs(work: Workload, mode: Mode) -> list[dict[str, int]]:
    """Per block and checkpoint policy, bytes at the highest of its functions."""
    if mode.kind == "update":
        return [dict.fromkeys((p.name for p in block.policies), 0) for block in work.blocks]
    trains = mode.kind != "evaluate"
    passing, awaited = _passing(work), _awaited(work)
    waiting, left = _batch_leaves(work, trains)
    return [
        {
            p.name: _highest(work, block, p, trains, (passing[b], waiting[b]), (awaited[b], left[b]))
            for p in block.policies
        }
        for b, block in enumerate(work.blocks)
    ]


_Others = tuple[int, set[int]]
"""What is on the device whatever a function reads: bytes, and leaves of the batch."""


def _highest(
    work: Workload, block: BlockWork, policy: CheckpointPolicy, trains: bool, before: _Others, after: _Others
) -> int:
    """The highest of a block's functions, with what stays beside its forward and what does afterwards."""
    given = policy.saved_bytes + sum(work.values[v].nbytes for v in block.tangents)
    calls = [(policy.forward, 0, before), (policy.recompute, 0, after), (policy.backward, given, after)]
    return max(
        kept
        + others
        + sum(work.values[v].nbytes for v in leaves.union(call.reads))
        + sum(work.groups[g].nbytes for g in call.groups)
        + call.peak_bytes
        for call, kept, (others, leaves) in (calls if trains else calls[:1])
        if call is not None
    )


def _batch_leaves(work: Workload, trains: bool) -> tuple[list[set[int]], list[set[int]]]:
    """Per block, leaves of the batch that later functions read: those of its forward, those of its backward.

    Leaves are loaded first, stay until the last function that reads them, and never wait elsewhere.
    """
    leaves = {v for v, value in enumerate(work.values) if value.batch}

    def read(block: BlockWork, forward: bool) -> set[int]:
        """By whatever policy."""
        found = leaves
        for policy in block.policies:
            calls = [policy.forward] if forward else [policy.recompute, policy.backward]
            found = found & {v for call in calls if call is not None for v in call.reads}
        return found

    backwards = [read(block, False) for block in work.blocks] if trains else [set[int]()] * len(work.blocks)
    after = list(accumulate(backwards, set.union, initial=set[int]()))
    forwards = [read(block, True) for block in reversed(work.blocks)]
    before = list(accumulate(forwards, set.union, initial=after[-1]))
    return before[-2::-1], after[:-1]


def _passing(work: Workload) -> list[int]:
    """Per block, bytes of values from earlier blocks for later forwards that it does not read itself."""
    made = {v: b for b, block in enumerate(work.blocks) for v in block.outputs}
    reads = [[set(policy.forward.reads) for policy in block.policies] for block in work.blocks]
    sure = [set.intersection(*values) for values in reads]
    return _pass_by(sure, [set.union(*values) for values in reads], made, [v.nbytes for v in work.values])


def _pass_by(
    sure: Sequence[set[int]], reads: Sequence[set[int]], made: Mapping[int, int], sizes: Sequence[int]
) -> list[int]:
    """Per block, bytes of values that an earlier one made and a later one is ``sure`` to read, without those
    that it may read itself."""
    last = {v: b for b, values in enumerate(sure) for v in values if v in made}
    total = _bytes_across(len(reads), [(made[v], b, sizes[v]) for v, b in last.items()])
    for b, values in enumerate(reads):
        total[b] -= sum(sizes[v] for v in values if v in last and made[v] < b < last[v])
    return total


def _awaited(work: Workload) -> list[int]:
    """Per block, bytes of gradients that later blocks gave to values of earlier ones."""
    made = {v: b for b, block in enumerate(work.blocks) for v in block.outputs}
    last = {v: b for b, block in enumerate(work.blocks) for v in block.grad_values if v in made}
    return _bytes_across(len(work.blocks), [(made[v], b, work.values[v].nbytes) for v, b in last.items()])


def _bytes_across(count: int, spans: list[tuple[int, int, int]]) -> list[int]:
    """At each place the bytes of the spans that begin before it and end after it."""
    changes = [0] * (count + 1)
    for start, end, nbytes in spans:
        if end - start > 1:
            changes[start + 1] += nbytes
            changes[end] -= nbytes
    return list(accumulate(changes[:count]))
