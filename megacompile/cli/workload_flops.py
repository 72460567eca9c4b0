"""FLOPs of a workload: those that a graph could not count, and functions of all blocks changed alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megacompile.schedule.workload import BlockWork, Call, Workload


def complete_flops(work: Workload, forward_flops: float) -> tuple[Workload, float]:
    """The workload with FLOPs that its graph could not count, and the share that was missing.

    Products in a grouped kernel (mixture of experts) may have no FLOP formula; what is missing against
    the closed form is spread over the blocks that have FLOPs, in proportion.
    """
    forward = sum((b.policy("none").forward.flops for b in work.blocks), 0)
    missed = 1 - forward / forward_flops
    if missed < 0.02 or not forward:
        return work, 0.0
    factor = 1 / (1 - missed)
    return map_calls(work, lambda call, _: replace(call, flops=round(call.flops * factor))), missed


def map_calls(work: Workload, change: Callable[[Call, int], Call]) -> Workload:
    """The workload with each function changed; ``change`` is told the bytes of weights' gradients in it."""

    def block(given: BlockWork) -> BlockWork:
        grads = sum(nbytes for _, nbytes in given.grad_groups)
        policies = (
            replace(
                c,
                forward=change(c.forward, 0),
                recompute=c.recompute and change(c.recompute, 0),
                backward=c.backward and change(c.backward, grads),
            )
            for c in given.policies
        )
        return replace(given, policies=tuple(policies))

    return replace(work, blocks=tuple(map(block, work.blocks)))
