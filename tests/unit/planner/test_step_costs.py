"""The cost models agree with the simulator: none is above a step, and rows add up to what streams work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import simulate
from megacompile.passes import lower
from megacompile.planner.group_state import trained_groups
from megacompile.planner.lower_bound import lower_bound
from megacompile.planner.plan_floor import Floor
from megacompile.planner.step_costs import StepCosts
from megacompile.planner.treatments import Takes, Treatments
from megacompile.schedule.op_table import Stream
from megacompile.schedule.plan import BlockPlan, GroupPlan, Mode, Plan
from megacompile.schedule.step import Step
from megacompile.schedule.workload import Workload
from tests.support.problems import MODES, chain, machines, scheduled

STREAMS: tuple[Stream, ...] = ("compute", "h2d", "d2h", "host")
TRAINING = [mode for mode in MODES if mode.kind == "train"]
Problem = tuple[Workload, Plan, Mode, Step]
problems = scheduled(modes=st.sampled_from(TRAINING), matrices=True)


@settings(max_examples=150)
@given(problems, machines(), st.booleans())
def test_no_floor_or_bound_is_above_a_step(problem: Problem, machine: Machine, shared: bool) -> None:
    work, plan, mode, step = problem
    machine = replace(machine, shared_memory=shared)
    seconds = simulate(step, machine).step_seconds * (1 + 1e-9)
    assert Floor(StepCosts(work, mode, machine)).seconds(plan) <= seconds
    assert lower_bound(work, mode, machine, step).seconds <= seconds


@settings(max_examples=100)
@given(problems, machines())
def test_the_rows_of_a_plan_add_up_to_the_work_of_its_streams(problem: Problem, machine: Machine) -> None:
    """Of plans that fetch each group once and offload nothing."""
    work, plan, mode, _ = problem
    may = trained_groups(work)
    resident = {g for g in may if plan.groups[g].state == "device"}
    groups = tuple(
        GroupPlan("step", state="device" if g in resident else "host") for g in range(len(plan.groups))
    )
    plan = replace(plan, blocks=tuple(BlockPlan(b.checkpoint) for b in plan.blocks), groups=groups)
    _agree(work, plan, mode, machine, resident)


@pytest.mark.parametrize("mode", TRAINING)
def test_the_rows_of_what_is_offloaded_add_up_too(mode: Mode) -> None:
    """Where links are fast, compute waits for none of it; the last blocks have nothing to gain."""
    work, machine = chain(6), Machine("fast links", 10.0, 10.0, 1e6, 1e6, 1e6)
    blocks = (BlockPlan("all", "host"),) * 4 + (BlockPlan("all"),) * 2
    _agree(work, Plan(blocks, (GroupPlan("step"),) * 6), mode, machine, set())


def _agree(work: Workload, plan: Plan, mode: Mode, machine: Machine, resident: set[int]) -> None:
    found = Treatments(StepCosts(work, mode, machine, resident), plan.order, resident)
    takes: list[Takes[float]] = []
    for kind in found.blocks:
        for b in kind.members:
            policy = work.blocks[b].policy(plan.blocks[b].checkpoint)
            takes.append(kind.takes[kind.treatments.index((policy.name, plan.blocks[b].saved_on))])
    for kind in found.groups:  # the last treatment holds a group through the step
        takes += [kind.takes[-1]] * len(kind.members)
    busy = simulate(lower(work, plan, mode), machine).busy
    for row, stream in enumerate(STREAMS):
        assert sum(t.forward[row] + t.backward[row] for t in takes) == pytest.approx(busy[stream])
