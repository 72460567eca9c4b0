"""Bound a step's seconds from below, beside a prediction: what it has to do, however well all of it overlaps.

In: a workload, a mode, a machine, and a step. Out: seconds per kind of work, and their combination with the
name of what binds. The one implementation for plans, programs and benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import asking_seconds, attention_delay, host_memory_bytes
from megacompile.planner.step_costs import seconds_by_part
from megacompile.schedule.op_table import SPECS, Part
from megacompile.schedule.plan import Mode
from megacompile.schedule.step import Step
from megacompile.schedule.workload import Call, CheckpointPolicy, Workload


@dataclass(frozen=True)
class Bound:
    """Seconds below which no schedule gets, and the terms it comes of.

    ``memory`` is what copies, norms and updates move through host memory, 0 where they do not share it;
    ``gathers`` and ``sums`` are what several ranks exchange of weights and of gradients, ``drive`` what goes
    over the drive, reads beside writes, ``updates`` what the device does for gradients and updates.
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
    updates: float = 0.0


def lower_bound(
    work: Workload, mode: Mode, machine: Machine, step: Step, *, model_flops: float | None = None
) -> Bound:
    """Bound the seconds of a step from below: model FLOPs at the rates of products and of attention, or its
    launches; and each operation of a trained group in ``step``, once: its weights down, its gradient up, its
    norm and its update.

    Without clipping all of these may overlap. If updates wait for the end of the backward (clipping,
    accumulation), a step is a backward, whose gradients leave meanwhile, and then a forward on updated
    weights, except for rows of tables that no micro-batch names. Only the place of the groups' state is taken
    from the step: groups on the device do without copies over the link and host updates, not without
    exchanges; what is on a drive is read and written once a step. ``model_flops`` are of the whole step; None
    takes those of the least functions of all blocks. For several ranks the bound is that of one, with its own
    link and host.
    """
    m = mode.micro_batches
    ahead, back = m * least_flops(work, backward=False), m * least_flops(work, backward=True)
    scale = 1.0 if model_flops is None else model_flops / max(1.0, ahead + back)
    forward = m * _pass_seconds(work, machine, scale * ahead / m, backward=False)
    backward = m * _pass_seconds(work, machine, scale * back / m, backward=True)
    once = {(op.kind, op.group): op for op in step.ops if op.group >= 0}
    trained = [op for (_, group), op in once.items() if group in work.contributions]
    seconds = seconds_by_part(trained, machine)
    host = machine.host_bandwidth if machine.shared_memory else float("inf")

    def moved(*parts: Part) -> float:
        return host_memory_bytes(op for op in trained if SPECS[op.kind].part in parts) / host

    compute, updates = forward + backward, sum(t for (_, stream), t in seconds.items() if stream == "compute")
    down = seconds["fetch", "h2d"] + seconds["update", "h2d"]
    up = seconds["gradient", "d2h"] + (0 if mode.keeps_gradients else seconds["update", "d2h"])
    adam = seconds["update", "host"] + seconds["rest", "host"]
    memory = moved("fetch", "gradient", "norm", "update", "rest")
    gathers, sums = seconds["fetch", "comm"], seconds["gradient", "comm"]
    stored = seconds_by_part(once.values(), machine)
    drive = max(
        sum(t for (_, stream), t in stored.items() if stream == way) for way in ("nvme_read", "nvme_write")
    )

    def bound(seconds: float, binding: str) -> Bound:
        if drive > seconds:
            seconds, binding = drive, "the drive"
        return Bound(compute, down, up, adam, memory, seconds, binding, gathers, sums, drive, updates)

    if machine.shared_cores:
        return _sharing_cores(bound(0.0, ""), machine)
    if not mode.keeps_gradients:
        every = {"compute": compute + updates, "weights down": down, "gradients up": up, "host Adam": adam,
                 "host memory": memory, "exchange between cards": gathers + sums}  # fmt: skip
        binding = max(every, key=lambda t: every[t])
        return bound(every[binding], binding)
    first = {"backward": backward + seconds["gradient", "compute"], "gradients up": up,
             "host memory": moved("gradient", "norm"), "sums between cards": sums}  # fmt: skip
    then = {"forward": forward + seconds["update", "compute"], "host Adam": seconds["update", "host"],
            "weights down": down, "host memory": moved("fetch", "update"),
            "gathers between cards": gathers}  # fmt: skip
    a, b = max(first, key=lambda t: first[t]), max(then, key=lambda t: then[t])
    every = {f"{a}, then {b}": first[a] + then[b], "host Adam": adam, "host memory": memory}
    binding = max(every, key=lambda t: every[t])
    return bound(every[binding], binding)


def _sharing_cores(bound: Bound, machine: Machine) -> Bound:
    """Return the seconds where compute takes all cores, a copy one and an update half of them: their shares
    add up."""
    copy, update = 1 / machine.cores, max(1, machine.cores // 2) / machine.cores
    seconds = bound.compute + bound.updates + copy * (bound.down + bound.up) + update * bound.adam
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


def least_flops(work: Workload, *, backward: bool) -> float:
    """FLOPs of one micro-batch's forward, or of its backward, nothing computed twice."""
    return sum(
        min(sum(call.flops for call in _calls(policy, backward)) for policy in block.policies)
        for block in work.blocks
    )
