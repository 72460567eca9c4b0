"""Choose how many operations a block's saved activations have to leave the device, and to come back.

Compute need not wait for a copy that neighbours' functions hide. The longer a window, the more saved
activations are on the device at a time, so none is longer than its copy takes.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from megacompile.hardware.simulate import call_seconds, duration
from megacompile.planner.step_costs import StepCosts, seconds_by_part
from megacompile.schedule.plan import LONGEST_WINDOW

_SPARE = 1e-3  # of an operation: a copy that is longer by so little takes no operation more


class Windows(NamedTuple):
    """``reload`` and ``free_after`` of a :class:`~megacompile.schedule.plan.BlockPlan`."""

    reload: int
    free_after: int


SHORTEST, LONGEST = Windows(1, 1), Windows(LONGEST_WINDOW, LONGEST_WINDOW)


class OffloadWindows:
    """The windows of all blocks of a workload on a machine."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._found: dict[tuple[int, str], Windows] = {}

    def of(self, block: int, checkpoint: str, longest: Windows) -> Windows:
        """Return the windows in which equal neighbours hide the copies of what a block saves, as far as those
        up to the ``longest`` do."""
        if (block, checkpoint) not in self._found:
            self._found[block, checkpoint] = self._find(block, checkpoint)
        hidden = self._found[block, checkpoint]
        return Windows(min(hidden.reload, longest.reload), min(hidden.free_after, longest.free_after))

    def _find(self, block: int, checkpoint: str) -> Windows:
        """Weights for neighbours' backwards come over the same link."""
        costs = self._costs
        policy = costs.work.blocks[block].policy(checkpoint)
        moves = costs.offload(block, policy.name)
        if not moves:
            return SHORTEST
        out, back = (duration(op, costs.machine) for op in moves)
        groups = policy.backward.groups if policy.backward else ()
        fetches = [op for g in groups for op in costs.on_host.get(g, ())]
        fetch = seconds_by_part(fetches, costs.machine)["fetch", "h2d"]
        forward = call_seconds(policy.forward, costs.machine)
        backward = sum(call_seconds(call, costs.machine) for call in (policy.recompute, policy.backward))
        return Windows(window(back + fetch, backward), window(out, forward))


def window(copy: float, beside: float) -> int:
    """Return how many operations of ``beside`` seconds hide a copy, as far as any do."""
    if copy >= LONGEST_WINDOW * beside:
        return LONGEST_WINDOW
    return max(1, ceil(copy / beside - _SPARE))
