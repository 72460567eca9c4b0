"""Bound a step's seconds from below, beside a prediction: what it has to do, however well all of it overlaps.

In: a workload, a mode, a machine, and where a plan has put state. Out: seconds per kind of work, and their
combination with the name of what binds. The one implementation for plans, programs and benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import asking_seconds, attention_delay, call_seconds, duration
from megacompile.schedule.op_table import Kind
from megacompile.schedule.plan import Mode, Plan, norm_bytes
from megacompile.schedule.step import Op
from megacompile.schedule.workload import Call, CheckpointPolicy, Workload

_BACKWARD_SHARE = 2 / 3  # of a step's model FLOPs


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
    forward = m * _pass_seconds(work, machine, (1 - _BACKWARD_SHARE) * flops / m, backward=False)
    backward = m * _pass_seconds(work, machine, _BACKWARD_SHARE * flops / m, backward=True)
    matrices = [g.matrices for g in trained if g.matrices is not None]
    orthogonal = sum(call_seconds(m.call, machine) for m in matrices)
    size += sum(m.nbytes for m in matrices)
    back = 0 if mode.keeps_gradients else sum(m.nbytes for m in matrices)  # else beside what follows
    compute = forward + backward
    memory = (size + pushed + back + moved + normed) / host
    down, up = size / machine.h2d_bandwidth, (pushed + back) / machine.d2h_bandwidth
    adam = moved / machine.update_bandwidth + sum(g.update_flops for g in trained) / machine.host_flops

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
