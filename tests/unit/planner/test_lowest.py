"""Bytes below which no step stays: what is not lowered or searched would not have been chosen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from megacompile.errors import BudgetError
from megacompile.hardware.machine import Machine
from megacompile.passes import lower_memory
from megacompile.planner import min_feasible_budget, plan_evaluator
from megacompile.planner.lowest_bytes import lowest_bytes
from megacompile.planner.search import search
from megacompile.planner.too_small import fitting
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Step, peak_bytes
from megacompile.schedule.workload import Workload
from tests.support.problems import chain, modes, scheduled, workloads

TRAIN = Mode("train")


@settings(max_examples=150)
@given(scheduled())
def test_no_step_stays_below(found: tuple[Workload, Plan, Mode, Step]) -> None:
    work, plan, mode, step = found
    checkpoints = [block.checkpoint for block in plan.blocks]
    assert lowest_bytes(work, mode) <= lowest_bytes(work, mode, checkpoints) <= peak_bytes(step)


def test_of_a_chain_it_is_all_but_the_transfers() -> None:
    work = chain(4)
    peak = min_feasible_budget.least(work, TRAIN).nbytes
    largest = max(group.nbytes for group in work.groups)
    assert peak - largest <= lowest_bytes(work, TRAIN) <= peak


@settings(max_examples=25)
@given(workloads(5), modes)
def test_the_least_is_that_of_all_small_plans(work: Workload, mode: Mode) -> None:
    found = min_feasible_budget.least(work, mode)
    peaks = [
        peak_bytes(lower_memory(work, small.plan, mode))
        for small in min_feasible_budget.small_plans(work, mode)
    ]
    assert found.nbytes == min(peaks) == peak_bytes(lower_memory(work, found.plan, mode))


def test_nothing_is_searched_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    work, machine = chain(6), Machine("made up", 1000.0, 1000.0, 500.0, 500.0, 2000.0)

    def lowered(*_: object) -> Step:
        raise AssertionError("a plan was lowered for a budget that none meets")

    monkeypatch.setattr(plan_evaluator, "lower_memory", lowered)
    with pytest.raises(BudgetError, match=f"is {min_feasible_budget.least(work, TRAIN).nbytes} bytes"):
        fitting(search(work, TRAIN, machine, lowest_bytes(work, TRAIN) - 1))
