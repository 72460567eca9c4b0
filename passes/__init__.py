"""Scheduling passes: each takes a step and returns the step with more of its schedule written down.

A pass is ``def name(step, *, work, plan, mode) -> Step``. It decides nothing: the plan has decided, the
pass writes it down. The order below is the only one; what each pass requires and provides is declared
beside it and checked whenever a step is lowered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megacompile.passes.assign_slots import assign_slots
from megacompile.passes.compute_order import compute_order
from megacompile.passes.insert_collectives import insert_collectives
from megacompile.passes.insert_frees import insert_frees
from megacompile.passes.insert_gradients import insert_gradients
from megacompile.passes.insert_offload import insert_offload
from megacompile.passes.insert_offloaded_io import insert_offloaded_io
from megacompile.passes.insert_orthogonalization import insert_orthogonalization
from megacompile.passes.insert_prefetch import insert_prefetch
from megacompile.passes.insert_recompute import insert_recompute
from megacompile.passes.insert_state_io import insert_state_io
from megacompile.passes.keep_state import keep_state
from megacompile.passes.synchronize import synchronize
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Step
from megacompile.schedule.workload import Workload


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass with the properties of a step that it needs and gives."""

    run: Callable[..., Step]
    requires: frozenset[str]
    provides: frozenset[str]

    @property
    def name(self) -> str:
        return self.run.__name__


def _pass(run: Callable[..., Step], requires: str, provides: str) -> Pass:
    return Pass(run, frozenset(requires.split()), frozenset(provides.split()))


_BEFORE_WAITS = (
    _pass(compute_order, "", "order"),
    _pass(insert_recompute, "order", "recompute"),
    _pass(keep_state, "order recompute", "resident"),
    _pass(insert_offload, "order recompute", "offload"),
    _pass(insert_prefetch, "order recompute resident", "prefetch"),
    _pass(insert_gradients, "order prefetch", "gradients"),
    _pass(insert_orthogonalization, "gradients", "orthogonalization"),
    _pass(insert_collectives, "prefetch gradients", "collectives"),
    _pass(insert_state_io, "prefetch gradients orthogonalization", "state_io"),
    _pass(insert_offloaded_io, "offload state_io", "offloaded_io"),
    _pass(insert_frees, "order recompute offload gradients orthogonalization", "frees"),
    _pass(assign_slots, "prefetch gradients collectives", "slots"),
)
_PROVIDED = frozenset[str]().union(*(item.provides for item in _BEFORE_WAITS))
PASSES: tuple[Pass, ...] = (*_BEFORE_WAITS, Pass(synchronize, _PROVIDED, frozenset({"waits"})))


def lower(work: Workload, plan: Plan, mode: Mode) -> Step:
    """Run all passes in order: the scheduled step of one program."""
    return finish(lower_memory(work, plan, mode), work, plan, mode)


def lower_memory(work: Workload, plan: Plan, mode: Mode) -> Step:
    """The step before its waits: all that its peak depends on, at half the cost of the whole."""
    step = Step((), {}, mode.micro_batches, constant_bytes=work.constant_bytes)
    return _run_passes(PASSES[:-1], step, work, plan, mode)


def finish(step: Step, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Add the waits to what :func:`lower_memory` left."""
    return _run_passes(PASSES[-1:], step, work, plan, mode)


def _run_passes(passes: tuple[Pass, ...], step: Step, work: Workload, plan: Plan, mode: Mode) -> Step:
    for item in passes:
        missing = item.requires - step.done
        assert not missing, f"{item.name} runs before {sorted(missing)} are provided"
        step = item.run(step, work=work, plan=plan, mode=mode)
        step = step.with_(done=step.done | item.provides)
    return step
