"""Bounds of a plan: the least device memory and the least seconds that any plan needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from megacompile.blocks.partition import Partition
from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import asking_seconds, attention_delay, call_seconds, duration
from megacompile.schedule.op_table import Kind
from megacompile.schedule.plan import BlockPlan, Mode, Plan, norm_bytes
from megacompile.schedule.step import Op
from megacompile.schedule.workload import BlockWork, Call, CheckpointPolicy, Workload

# ------------------------------------------------------------------------------------------------------------
# Floor: seconds and bytes that no step with a plan's choices can do without, without lowering the plan.
#
# In: a workload, a mode, a machine; then plans. Out, as seconds, the larger of two sums. All compute, with
# what lies between the last gradient of a step and the next forward: that gradient's way out, the update that
# needs it, the fetch of the updated weights. And, where updates wait for the end of the backward, all updates
# with all compute that follows the first use of the group that is updated last. As bytes, what blocks keep
# and what groups are held. All hold however well everything else overlaps, so no plan is lowered whose floor
# is above the best step or above the budget.


class Floor:
    """Floors of plans over one workload, mode and machine."""

    def __init__(self, work: Workload, mode: Mode, machine: Machine) -> None:
        self.work, self.mode, self.machine = work, mode, machine

    def seconds(self, plan: Plan) -> float:
        """A lower bound for the simulated step of ``plan``; state on the device is taken to cost nothing."""
        taken = [
            self._blocks[b].get(p.checkpoint) or self._blocks[b]["none"] for b, p in enumerate(plan.blocks)
        ]
        compute = sum(forward + back for forward, back in taken) * self.mode.micro_batches
        if self.mode.kind != "train" or any(g.state == "device" for g in plan.groups):
            return compute
        floor = compute + self._turnaround
        if self.mode.keeps_gradients and self.work.contributions:
            use, updates = self._updates
            passes = self.mode.micro_batches if plan.order == "breadth" else 1
            before = passes * sum(forward for forward, _ in taken[:use])
            floor = max(floor, compute - before + updates)
        return floor

    def nbytes(self, plan: Plan) -> int:
        """Device bytes at the end of a forward of what blocks keep, and of groups that are held."""
        if self.mode.kind in ("evaluate", "update"):
            return 0
        kept = sum(self._kept(b, p) for b, p in enumerate(plan.blocks) if p.saved_on == "device")
        held = sum(
            self.work.groups[g].nbytes
            for g in self._again
            if plan.groups[g].residency == "step" and plan.groups[g].state != "device"
        )
        return kept * (self.mode.micro_batches if plan.order == "breadth" else 1) + held

    def _kept(self, b: int, plan: BlockPlan) -> int:
        """Bytes that a block saves for its backward, its inputs left out."""
        policy = self.work.blocks[b].policy(plan.checkpoint)
        return policy.saved_bytes if policy.recompute is None and policy.backward is not None else 0

    @cached_property
    def _again(self) -> set[int]:
        """Groups that a block's forward and its backward read."""
        return {
            g
            for block in self.work.blocks
            for g in set.intersection(
                *(
                    set(c.forward.groups) & set(c.backward.groups if c.backward else ())
                    for c in block.policies
                )
            )
        }

    @cached_property
    def _blocks(self) -> list[dict[str, tuple[float, float]]]:
        """Per block and checkpoint policy the seconds of a forward, and of a recompute with its backward."""
        if self.mode.kind == "update":
            return [
                dict.fromkeys([c.name for c in b.policies] + ["none"], (0.0, 0.0)) for b in self.work.blocks
            ]
        machine, backward = self.machine, self.mode.kind != "evaluate"
        return [
            {
                c.name: (
                    call_seconds(c.forward, machine),
                    backward * (call_seconds(c.recompute, machine) + call_seconds(c.backward, machine)),
                )
                for c in block.policies
            }
            for block in self.work.blocks
        ]

    @cached_property
    def _turnaround(self) -> float:
        """From the end of the first block's last backward to its next forward."""
        first = self.work.blocks[0]
        wanted = set.intersection(*(set(c.forward.groups) for c in first.policies))
        ways = [
            self._push(nbytes) + self._norm(g) + self._adam(g) + self._fetch(g)
            for g, nbytes in first.grad_groups
            if g in wanted
        ]
        return max(ways, default=0.0)

    @cached_property
    def _updates(self) -> tuple[int, float]:
        """The block that first wants the group updated last; seconds of all updates and of its fetch."""
        last = max(self.work.contributions)
        users = (
            b
            for b, block in enumerate(self.work.blocks)
            if all(last in c.forward.groups for c in block.policies)
        )
        seconds = sum(self._adam(g) for g in self.work.contributions)
        use = next(users, None)  # none, where rows of the group are gathered as the step begins
        return (0, seconds) if use is None else (use, seconds + self._fetch(last))

    def _push(self, nbytes: int) -> float:
        return duration(Op("push_grad", "d2h", nbytes=nbytes, ranks=self.work.ranks), self.machine)

    def _norm(self, group: int) -> float:
        return duration(Op("norm", "host", nbytes=norm_bytes(self.work, self.mode, group)), self.machine)

    def _adam(self, group: int) -> float:
        work = self.work.groups[group]
        op = Op("adam", "host", nbytes=work.update_bytes, flops=work.update_flops)
        return duration(op, self.machine)

    def _fetch(self, group: int) -> float:
        nbytes, ranks = self.work.groups[group].nbytes, self.work.ranks
        return duration(Op("prefetch", "h2d", nbytes=nbytes, ranks=ranks), self.machine)


# ------------------------------------------------------------------------------------------------------------
# Lowest: device bytes that a step holds at some time, whatever else its plan says.
#
# In: a workload and a mode; then, if need be, the checkpoint policies of a plan. Out: bytes, found without
# lowering anything. While a block's function runs, what it reads is on the device beside its own tensors, and
# so is what passes by it: values of earlier blocks that later forwards read, gradients that earlier blocks
# await, leaves of the batch that anything still reads. Only what a block's own backward alone still reads may
# wait elsewhere. So no cuts are weighed that cannot help, and no budget is searched that nothing meets.


_KEPT = 64  # workloads whose bytes are remembered
_COPIES = 4  # of a block's weights at most: its slot, its gradient, and a sum of that in FP32


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
    of a block runs, the values that it reads, or those that it makes, and those that pass by it."""
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
    total = _between(len(reads), [(made[v], b, sizes[v]) for v, b in last.items()])
    for b, values in enumerate(reads):
        total[b] -= sum(sizes[v] for v in values if v in last and made[v] < b < last[v])
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


# ------------------------------------------------------------------------------------------------------------
# The lower bound printed beside a prediction: what a step has to do, however well all of it overlaps.
#
# In: a workload, a mode, a machine, and where a plan has put state. Out: seconds per kind of work, and their
# combination with the name of what binds. The one implementation for plans, programs and benchmarks.


_BACKWARD = 2 / 3  # of a step's model FLOPs


@dataclass(frozen=True)
class Bound:
    """Seconds below which no schedule gets, and the terms it comes of.

    ``memory`` is what copies, norms and updates move through host memory, 0 where they do not share it;
    ``gathers`` and ``sums`` are what several ranks exchange of weights and of gradients, ``drive`` what goes
    over the drive, reads beside writes, ``orthogonal`` what the device does for updates of matrices.
    """

    compute: float
    down: float
    up: float
    adam: float
    memory: float
    seconds: float
    binding: str
    gathers: float = 0.0
    sums: float = 0.0
    drive: float = 0.0
    orthogonal: float = 0.0


def lower_bound(
    work: Workload,
    mode: Mode,
    machine: Machine,
    *,
    model_flops: float | None = None,
    plan: Plan | None = None,
) -> Bound:
    """Model FLOPs at the rates of products and of attention, or its launches; every trained weight down and
    gradient up once, Adam's host bytes; updates of matrices down, made orthogonal, and up.

    Without clipping all of these may overlap. Where updates wait for the end of the backward (clipping,
    accumulation), a step is a backward, whose gradients leave meanwhile, and then a forward, which
    needs weights that were updated after it. Groups whose state ``plan`` keeps on the device do without
    copies over the link and host updates, not without exchanges; what it keeps on a drive is read and written
    once a step, whatever it overlaps. ``model_flops`` are of the whole step; None
    takes those of the least functions of all blocks. Of several ranks the bound is that of one, and of its
    own link and host.
    """
    there = [g for g in work.contributions if plan is None or plan.groups[g].state != "device"]
    trained = [work.groups[g] for g in there]
    size, moved = sum(g.nbytes // g.ranks for g in trained), sum(g.update_bytes for g in trained)
    pushed = sum(g.nbytes if g.ranks == 1 else g.shard_bytes for g in trained)
    normed = sum(norm_bytes(work, mode, g) for g in there)
    m = mode.micro_batches
    flops = m * least_flops(work) if model_flops is None else model_flops
    host = machine.host_bandwidth if machine.shared_memory else float("inf")
    forward = m * _pass_seconds(work, machine, (1 - _BACKWARD) * flops / m, backward=False)
    backward = m * _pass_seconds(work, machine, _BACKWARD * flops / m, backward=True)
    matrices = [g.matrices for g in trained if g.matrices is not None]
    orthogonal = sum(call_seconds(m.call, machine) for m in matrices)
    size += sum(m.nbytes for m in matrices)
    back = 0 if mode.keeps_gradients else sum(m.nbytes for m in matrices)  # else beside what follows
    compute = forward + backward
    memory = (size + pushed + back + moved + normed) / host
    down, up = size / machine.h2d_bandwidth, (pushed + back) / machine.d2h_bandwidth
    adam = moved / machine.host_bandwidth + sum(g.update_flops for g in trained) / machine.host_flops

    gathers, sums = _gathers(work, machine), _sums(work, machine)
    drive = _drive(work, machine, plan)

    def bound(seconds: float, binding: str) -> Bound:
        if drive > seconds:
            seconds, binding = drive, "the drive"
        return Bound(compute, down, up, adam, memory, seconds, binding, gathers, sums, drive, orthogonal)

    if machine.shared_cores:
        return _sharing_cores(bound(0.0, ""), machine)
    if not mode.keeps_gradients:
        every = {"compute": compute + orthogonal, "weights down": down, "gradients up": up, "host Adam": adam,
                 "host memory": memory, "exchange between cards": gathers + sums}  # fmt: skip
        binding = max(every, key=lambda t: every[t])
        return bound(every[binding], binding)
    first = {"backward": backward, "gradients up": up, "host memory": (pushed + normed) / host,
             "sums between cards": sums}  # fmt: skip
    then = {"forward": forward + orthogonal, "host Adam": adam, "weights down": down,
            "host memory": (size + moved) / host, "gathers between cards": gathers}  # fmt: skip
    a, b = max(first, key=lambda t: first[t]), max(then, key=lambda t: then[t])
    return bound(first[a] + then[b], f"{a}, then {b}")


def _drive(work: Workload, machine: Machine, plan: Plan | None) -> float:
    """Seconds of the busier direction: streamed weights are read for a forward, and all of a trained group's
    state that is there is read for its update and written back."""
    states = {g: plan.groups[g].state for g in work.used} if plan is not None else {}
    there = {g: work.groups[g] for g, state in states.items() if state.startswith("nvme")}
    weights = {g: group.nbytes // group.ranks for g, group in there.items() if states[g] == "nvme-all"}
    trained = [g for g in there if g in work.contributions]
    written = sum(there[g].state_bytes + weights.get(g, 0) for g in trained)
    read = written + sum(weights.values())
    return max(read / machine.nvme_read_bandwidth, written / machine.nvme_write_bandwidth)


def _gathers(work: Workload, machine: Machine) -> float:
    return _exchange("all_gather", {g: work.groups[g].nbytes for g in work.contributions}, work, machine)


def _sums(work: Workload, machine: Machine) -> float:
    within = _exchange("reduce", {g: work.groups[g].nbytes for g in work.contributions}, work, machine)
    crossing = {g: work.crossing_bytes(g) for g in work.contributions if work.replicas > 1}
    return within + _exchange("all_reduce", crossing, work, machine)


def _exchange(kind: Kind, nbytes: dict[int, int], work: Workload, machine: Machine) -> float:
    """Seconds of one collective over each trained group, wherever its state is; none of one rank."""
    ops = (Op(kind, "comm", nbytes=n, ranks=work.ranks) for n in nbytes.values() if work.ranks > 1)
    return sum(duration(op, machine) for op in ops)


def _sharing_cores(bound: Bound, machine: Machine) -> Bound:
    """Return the seconds where compute takes all cores, a copy one and an update half of them: their shares
    add up."""
    copy, update = 1 / machine.cores, max(1, machine.cores // 2) / machine.cores
    seconds = bound.compute + bound.orthogonal + copy * (bound.down + bound.up) + update * bound.adam
    seconds = max(seconds, bound.down, bound.up, bound.adam)
    if bound.drive > seconds:
        return bound
    return replace(bound, seconds=seconds, binding="compute, copies and Adam share the cores")


def _pass_seconds(work: Workload, machine: Machine, flops: float, *, backward: bool) -> float:
    """Seconds of all forwards, or of all backwards, of a micro-batch: their FLOPs, or their launches."""
    policies = [[_calls(c, backward) for c in block.policies] for block in work.blocks]
    delay = sum(min(sum(attention_delay(call, machine) for call in calls) for calls in of) for of in policies)
    asking = sum(min(sum(asking_seconds(call, machine) for call in calls) for calls in of) for of in policies)
    return max(flops / machine.flops + delay, asking)


def _calls(policy: CheckpointPolicy, backward: bool) -> list[Call]:
    calls = (policy.recompute, policy.backward) if backward else (policy.forward,)
    return [call for call in calls if call is not None]


def least_flops(work: Workload) -> float:
    """FLOPs of one micro-batch's forward and backward, nothing computed twice."""
    return sum(
        min(sum(call.flops for call in _calls(c, False) + _calls(c, True)) for c in block.policies)
        for block in work.blocks
    )
