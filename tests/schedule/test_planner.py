"""The planner on small instances: it keeps the budget, its errors tell the truth, its choice is good."""

from __future__ import annotations

import re
from itertools import pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megacompile.errors import BudgetError
from megacompile.machine import Machine
from megacompile.passes import lower
from megacompile.plan import Mode, Plan
from megacompile.planner import Planned, search
from megacompile.simulate import simulate
from megacompile.step import Step, peak_bytes
from megacompile.verify import verify
from megacompile.workload import Workload
from tests.schedule.problems import MODES, chain, machines, modes, uniform, workloads

MACHINE = Machine("made up", 1000.0, 1000.0, 500.0, 500.0, 2000.0)
PLENTY = 10**9
TRAIN = Mode("train")


def least_budget(work: Workload, mode: Mode, machine: Machine) -> int:
    """The budget that the planner's refusal of one byte names."""
    with pytest.raises(BudgetError) as caught:
        search(work, mode, machine, 1)
    found = re.search(r"least feasible budget .*? is (\d+) bytes", str(caught.value))
    assert found, str(caught.value)
    return int(found[1])


def uniform_plans(work: Workload, mode: Mode) -> list[Plan]:
    """One decision for all blocks and one for all groups, in every combination."""
    orders = ["depth", "breadth"] if mode.micro_batches > 1 else ["depth"]
    return [
        uniform(work, choice, stash=stash, keep=keep, lead=lead, order=order, grad_lag=lag)
        for choice, stash, keep, (lead, lag), order in product(
            ["all", "some", "none", "least"],
            ["device", "host"],
            ["step", "micro", "stream"],
            [(2, 1), (1, 1), (0, 0)],
            orders,
        )
    ]


def takes(step: Step, machine: Machine) -> float:
    return simulate(step, machine).step_seconds


def budgets(work: Workload, mode: Mode) -> tuple[int, int]:
    """A budget that something fits in, and one that everything does."""
    peaks = [peak_bytes(lower(work, plan, mode)) for plan in uniform_plans(work, mode)]
    return min(peaks), max(peaks)


@settings(max_examples=15)
@given(workloads(4), modes, machines(), st.floats(0, 1))
def test_what_is_found_fits_and_is_what_it_says(
    work: Workload, mode: Mode, machine: Machine, part: float
) -> None:
    low, high = budgets(work, mode)
    budget = low + int(part * (high - low))
    found = search(work, mode, machine, budget)
    assert found.peak_bytes == peak_bytes(found.step) <= budget
    verify(found.step, work, budget_bytes=budget)
    assert lower(work, found.plan, mode) == found.step
    assert found.timeline == simulate(found.step, machine)
    assert Plan.from_json(found.plan.to_json()) == found.plan


@settings(max_examples=8)
@given(workloads(4), modes, machines(), st.floats(0, 1))
def test_the_search_is_deterministic(work: Workload, mode: Mode, machine: Machine, part: float) -> None:
    low, high = budgets(work, mode)
    budget = low + int(part * (high - low))

    def once() -> Planned:
        return search(work, mode, machine, budget)

    assert once() == once()


@settings(max_examples=15)
@given(workloads(4), modes, machines())
def test_the_least_budget_that_an_error_names_works(work: Workload, mode: Mode, machine: Machine) -> None:
    assume(budgets(work, mode)[0] > 1)
    least = least_budget(work, mode, machine)
    assert search(work, mode, machine, least).peak_bytes <= least


@pytest.mark.parametrize("mode", [m for m in MODES if m.kind != "update"])
def test_of_equal_blocks_the_least_budget_is_least(mode: Mode) -> None:
    work = chain(4)
    least = least_budget(work, mode, MACHINE)
    with pytest.raises(BudgetError, match=f"is {least} bytes"):
        search(work, mode, MACHINE, least - 1)
    assert search(work, mode, MACHINE, least).peak_bytes == least


@settings(max_examples=15)
@given(workloads(4), modes, machines(), st.floats(0, 1))
def test_no_uniform_plan_that_fits_is_faster(
    work: Workload, mode: Mode, machine: Machine, part: float
) -> None:
    low, high = budgets(work, mode)
    budget = low + int(part * (high - low))
    found = search(work, mode, machine, budget)
    for plan in uniform_plans(work, mode):
        step = lower(work, plan, mode)
        if peak_bytes(step) <= budget:
            seconds = takes(step, machine)
            assert found.timeline.step_seconds <= seconds * (1 + 1e-6), plan


def test_more_budget_never_costs_time() -> None:
    work = chain(5)
    low, high = budgets(work, TRAIN)
    steps = range(low, high + 500, 500)
    seconds = [search(work, TRAIN, MACHINE, b).timeline.step_seconds for b in steps]
    assert all(b <= a * (1 + 1e-9) for a, b in pairwise(seconds))


def test_with_plenty_nothing_is_streamed_twice_and_nothing_computed_twice() -> None:
    work = chain(5)
    kinds = [op.kind for op in search(work, TRAIN, MACHINE, PLENTY).step.ops]
    assert kinds.count("prefetch") == 5
    assert not {"recompute", "offload", "reload"} & set(kinds)


def test_an_infeasible_budget_tells_what_needs_it() -> None:
    with pytest.raises(BudgetError) as caught:
        search(chain(4), TRAIN, MACHINE, 1500)
    message = str(caught.value)
    assert re.search(r"of layers\.\d, it holds", message), message
    assert "weight slots" in message and "make the batch" in message
