"""Floor: seconds and bytes that no step with a plan's choices can do without, without lowering the plan.

In: what the parts of a step cost; then plans. Out, as seconds, the larger of two sums. All compute, with what
lies between the last gradient of a step and the next forward: that gradient's way out, the update that needs
it, the fetch of the updated weights. And, if updates wait for the end of the backward, all updates with all
compute behind the first use of the group with the last update. As bytes, what blocks keep and what groups are
held. All hold however well everything else overlaps, so no plan is lowered whose floor is above the best step
or above the budget.
"""

from __future__ import annotations

from functools import cached_property

from megacompile.hardware.simulate import call_seconds, duration
from megacompile.planner.step_costs import StepCosts, seconds_by_part
from megacompile.schedule.op_table import STREAMS
from megacompile.schedule.plan import BlockPlan, Plan


class Floor:
    """Floors of plans over one workload, mode and machine."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.work, self.mode, self.machine = costs.work, costs.mode, costs.machine

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
            for g in self.again
            if plan.groups[g].residency == "step" and plan.groups[g].state != "device"
        )
        return kept * (self.mode.micro_batches if plan.order == "breadth" else 1) + held

    def _kept(self, b: int, plan: BlockPlan) -> int:
        """Bytes that a block saves for its backward, its inputs left out."""
        policy = self.work.blocks[b].policy(plan.checkpoint)
        return policy.saved_bytes if policy.recompute is None and policy.backward is not None else 0

    @cached_property
    def again(self) -> set[int]:
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
        first, last = self.work.blocks[0], self.mode.micro_batches - 1
        wanted = set.intersection(*(set(c.forward.groups) for c in first.policies))
        ways = [
            [op for op in self.costs.on_host[g] if op.block < 0 or (op.block, op.micro) == (0, last)]
            for g, _ in first.grad_groups
            if g in wanted
        ]
        return max((sum(duration(op, self.machine) for op in way) for way in ways), default=0.0)

    @cached_property
    def _updates(self) -> tuple[int, float]:
        """The block that first wants the group updated last; seconds of all updates and of its fetch."""
        last = max(self.work.contributions)
        users = (
            b
            for b, block in enumerate(self.work.blocks)
            if all(last in c.forward.groups for c in block.policies)
        )
        found = {g: seconds_by_part(self.costs.on_host[g], self.machine) for g in self.work.contributions}
        seconds = sum(parts["update", "host"] for parts in found.values())
        use = next(users, None)  # none, where rows of the group are gathered as the step begins
        fetch = sum(found[last]["fetch", stream] for stream in STREAMS)
        return (0, seconds) if use is None else (use, seconds + fetch)
