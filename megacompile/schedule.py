"""The schedule as people and tools look at it: printed, as JSON, and as a ``torch.fx`` graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import fx

from megacompile.emit import fold
from megacompile.machine import Machine
from megacompile.plan import Plan
from megacompile.planner import describe_peak
from megacompile.simulate import simulate
from megacompile.step import STREAMS, Op, Step
from megacompile.units import format_bytes
from megacompile.workload import Workload

if TYPE_CHECKING:
    from megacompile.compiler import Scheduled


class Schedule:
    """One program's schedule. ``print`` it, or take :attr:`graph` for tools that read fx graphs."""

    def __init__(self, scheduled: Scheduled, machine: Machine, budget_bytes: int) -> None:
        self._scheduled = scheduled
        self._machine = machine
        self._budget_bytes = budget_bytes

    @property
    def step(self) -> Step:
        return self._scheduled.planned.step

    @property
    def graph(self) -> fx.Graph:
        """The step as an fx graph: one node per operation, edges where an operation waits."""
        return to_fx(self.step)

    @property
    def predicted_seconds(self) -> float:
        """Simulated seconds from one step to the next."""
        return simulate(self.step, self._machine).step_seconds

    def __str__(self) -> str:
        planned, work = self._scheduled.planned, self._scheduled.compiled.assembly.work
        timeline = simulate(self.step, self._machine)
        busy = ", ".join(f"{s} {timeline.busy[s]:.3f} s" for s in STREAMS if timeline.busy[s])
        return "\n".join(
            [
                f"{self._scheduled.mode.kind} step, {len(self.step.ops)} operations",
                f"  peak      {format_bytes(planned.peak_bytes)} of {format_bytes(self._budget_bytes)}: "
                f"{describe_peak(self.step, work)}",
                f"  predicted {timeline.step_seconds:.3f} s per step on {self._machine.name} ({busy})",
                f"  {self._scheduled.proof}",
                "",
                plan_table(planned.plan, work),
                "",
                self._scheduled.source,
            ]
        )


def plan_table(plan: Plan, work: Workload) -> str:
    """The plan with equal consecutive blocks and groups folded into one line."""
    blocks = [
        f"{b.name}  keep {p.choice}, stash on {p.stash}"
        for b, p in zip(work.blocks, plan.blocks, strict=True)
    ]
    groups = [
        f"{g.name}  {format_bytes(g.nbytes)}, {p.keep}, prefetch {p.lead} ahead"
        for g, p in zip(work.groups, plan.groups, strict=True)
    ]
    lines = ["blocks", *(f"  {line}" for line in fold(blocks))]
    lines += ["weight groups", *(f"  {line}" for line in fold(groups))]
    lines.append(
        f"order {plan.order} first, gradients leave within {plan.grad_lag} operations, "
        f"{plan.ring} host buffers for streamed gradients"
    )
    return "\n".join(lines)


def to_fx(step: Step) -> fx.Graph:
    """Materialise a light step; every node is a side effect, so no clean-up removes it."""
    graph = fx.Graph()
    latest: dict[tuple[object, ...], fx.Node] = {}
    for op in step.ops:
        waits = tuple(latest[e] for e in op.waits if e in latest)
        node = graph.call_function(_OPERATIONS[op.kind], waits, name="_".join(map(str, op.event)))
        node.meta["op"] = op
        latest[op.event] = node
    graph.output(())
    return graph


def _operation(kind: str) -> Callable[..., Op]:
    def run(*waits: object) -> Op:
        raise AssertionError("operations of a schedule run through the emitted source")

    run.__name__ = run.__qualname__ = kind
    fx.node.has_side_effect(run)
    return run


_KINDS = ("load", "prefetch", "evict", "forward", "recompute", "backward", "offload", "reload",
          "push_grad", "norm", "clip_scale", "adam")  # fmt: skip
_OPERATIONS = {kind: _operation(kind) for kind in _KINDS}
