"""The planner on small instances: it keeps the budget, its errors tell the truth, its choice is good."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megacompile.errors import BudgetError, MegacompileError
from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import Timeline, simulate
from megacompile.passes import lower
from megacompile.planner import plan_evaluator
from megacompile.planner import search as search_module
from megacompile.planner.arrangements import _rounded
from megacompile.planner.plan_evaluator import Planned
from megacompile.planner.search import search
from megacompile.planner.too_small import fitting
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Step, peak_bytes
from megacompile.schedule.verify import verify
from megacompile.schedule.workload import MatrixUpdates, Workload
from megacompile.state.host_arena import padded
from megacompile.state.host_budget import step_bytes
from tests.support.problems import MODES, chain, machines, modes, uniform, workloads

MACHINE = Machine("made up", 1000.0, 1000.0, 500.0, 500.0, 2000.0)
PLENTY = 10**9
TRAIN = Mode("train")


@pytest.fixture(autouse=True, scope="module")
def _searched_anew() -> Iterator[None]:
    """What an earlier test found is not taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "read", lambda path: None)
        yield


def least_budget(work: Workload, mode: Mode, machine: Machine) -> int:
    """The budget that the planner's refusal of one byte names."""
    with pytest.raises(BudgetError) as caught:
        fitting(search(work, mode, machine, 1))
    found = re.search(r"least feasible budget .*? is (\d+) bytes", str(caught.value))
    assert found, str(caught.value)
    return int(found[1])


def uniform_plans(work: Workload, mode: Mode) -> list[Plan]:
    """One decision for all blocks and one for all groups, in every combination."""
    orders = ["depth", "breadth"] if mode.micro_batches > 1 else ["depth"]
    return [
        uniform(
            work,
            checkpoint,
            saved_on=saved_on,
            residency=residency,
            prefetch_depth=prefetch_depth,
            order=order,
            grad_lag=lag,
        )
        for checkpoint, saved_on, residency, (prefetch_depth, lag), order in product(
            ["all", "some", "none", "least"],
            ["device", "host"],
            ["step", "micro", "stream"],
            [(2, 1), (1, 1), (0, 0)],
            orders,
        )
    ]


@functools.lru_cache(maxsize=1)
def uniform_steps(work: Workload, mode: Mode) -> list[Step]:
    """The steps of these plans, which a problem and its test ask for."""
    return [lower(work, plan, mode) for plan in uniform_plans(work, mode)]


def takes(step: Step, machine: Machine) -> float:
    return simulate(step, machine).step_seconds


def budgets(work: Workload, mode: Mode) -> tuple[int, int]:
    """A budget that something fits in, and one that everything does."""
    peaks = [peak_bytes(step) for step in uniform_steps(work, mode)]
    return min(peaks), max(peaks)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Workload, Mode, Machine, int]:
    """A workload, a mode, a machine and a budget that something fits in."""
    work, mode = draw(workloads(4)), draw(modes)
    low, high = budgets(work, mode)
    return work, mode, draw(machines()), low + int(draw(st.floats(0, 1)) * (high - low))


@settings(max_examples=15)
@given(problems())
def test_what_is_found_fits_and_is_what_it_says(problem: tuple[Workload, Mode, Machine, int]) -> None:
    work, mode, machine, budget = problem
    found = search(*problem)
    assert found.peak_bytes == peak_bytes(found.step) <= budget
    verify(found.step, work, budget_bytes=budget)
    assert lower(work, found.plan, mode) == found.step
    assert found.timeline == simulate(found.step, machine)
    assert Plan.from_json(found.plan.to_json()) == found.plan


@settings(max_examples=8)
@given(problems())
def test_the_search_is_deterministic(problem: tuple[Workload, Mode, Machine, int]) -> None:
    assert search(*problem) == search(*problem)


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
        fitting(search(work, mode, MACHINE, least - 1))
    assert search(work, mode, MACHINE, least).peak_bytes == least


@settings(max_examples=15)
@given(problems())
def test_no_uniform_plan_that_fits_is_faster(problem: tuple[Workload, Mode, Machine, int]) -> None:
    work, mode, machine, budget = problem
    found = search(*problem)
    for plan, step in zip(uniform_plans(work, mode), uniform_steps(work, mode), strict=True):
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


def test_counts_are_rounded_to_what_there_is() -> None:
    assert _rounded([0.5, 1.75, 0.75], 3) == [0, 2, 1]
    assert sum(_rounded([0.0, 1e12, 2.0], 3)) == 3  # at once: what a program that counts too far gives


def test_an_infeasible_budget_tells_what_needs_it() -> None:
    with pytest.raises(BudgetError) as caught:
        fitting(search(chain(4), TRAIN, MACHINE, 1500))
    message = str(caught.value)
    assert re.search(r"of layers\.\d, it holds", message), message
    assert "weight slots" in message and "make the batch" in message


@pytest.mark.slow
@settings(max_examples=10)
@given(workloads(4), modes, machines(), st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_a_sweep_that_hands_on_its_winners_never_gets_slower(
    work: Workload, mode: Mode, machine: Machine, parts: list[float]
) -> None:
    low, high = budgets(work, mode)
    seconds: list[float] = []
    plans: list[Plan] = []
    for part in sorted(parts):
        found = search(work, mode, machine, low + int(part * (high - low)), also=plans)
        plans.append(found.plan)
        seconds.append(found.seconds)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(seconds))


def test_a_host_budget_is_kept_where_a_plan_can() -> None:
    """Offloaded activations and deferred updates cost host bytes; with room for the ring alone there are
    none."""
    work = chain(6)
    low, _ = budgets(work, TRAIN)
    slow = replace(MACHINE, host_bandwidth=100.0)
    free = search(work, TRAIN, slow, low + 500)
    ring = 2 * padded(1000)
    tight = search(work, TRAIN, slow, low + 500, host_budget=ring)
    assert step_bytes(free.step, work) > ring >= step_bytes(tight.step, work)
    assert free.seconds <= tight.seconds


def test_where_no_plan_meets_the_host_budget_it_is_as_if_not_given() -> None:
    work = chain(4)
    assert search(work, TRAIN, MACHINE, PLENTY, host_budget=1) == search(work, TRAIN, MACHINE, PLENTY)


def test_an_interrupt_leaves_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    work = chain(6)
    calls = 0

    def interrupted(step: Step, machine: Machine, seconds: list[float]) -> Timeline:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return simulate(step, machine, seconds)

    monkeypatch.setattr(plan_evaluator, "simulate", interrupted)
    found = search(work, TRAIN, MACHINE, PLENTY)
    assert calls == 2 and found.peak_bytes <= PLENTY
    monkeypatch.setattr(plan_evaluator, "simulate", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        search(work, TRAIN, MACHINE, PLENTY)


def test_slower_starts_with_state_on_the_device_are_improved_each_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only other start is the plan of the least bytes; of local search only what it is given counts."""
    for start in ("mixtures", "few_blocks", "fixed", "all_resident"):
        monkeypatch.setattr(search_module, start, lambda found: None)
    given: list[Planned] = []
    monkeypatch.setattr(search_module, "_improve", lambda found: given.append(found.best))
    work, slow = chain(12), replace(MACHINE, host_bandwidth=500.0)
    found = search(work, TRAIN, slow, PLENTY, residents=range(12))
    there = [sum(g.state == "device" for g in start.plan.groups) for start in given]
    assert there[0] == 0 and there[1:] and all(count >= 4 for count in there[1:]), there
    assert len({start.plan for start in given}) == len(given)
    assert found.seconds == min(start.seconds for start in given) < given[0].seconds
    alone = search(work, TRAIN, slow, PLENTY)
    assert len(given) == len(there) + 1 and found.evaluations > alone.evaluations


def test_deferred_updates_help_where_the_host_is_the_roof() -> None:
    """In the order of the backward the first layer's update comes last, and the next step waits for it."""
    work, slow = chain(8), replace(MACHINE, host_bandwidth=1000.0)
    found = search(work, TRAIN, slow, PLENTY)
    deferred = {g.update for g in found.plan.groups}
    early = replace(
        found.plan, workload="", groups=tuple(replace(g, update="immediate") for g in found.plan.groups)
    )
    assert "deferred" in deferred
    assert found.seconds < 0.9 * takes(lower(work, early, TRAIN), slow)


@settings(max_examples=40)
@given(workloads(5))
def test_a_workload_file_is_exact_and_its_digest_tells_workloads_apart(work: Workload) -> None:
    again = Workload.from_json(work.to_json())
    assert again == work and again.digest == work.digest
    matrices = MatrixUpdates(((2, 3),), 5, 7)
    changed = replace(work, groups=(replace(work.groups[0], matrices=matrices), *work.groups[1:]))
    assert Workload.from_json(changed.to_json()) == changed and changed.digest == work.digest
    other = replace(work, constant_bytes=work.constant_bytes + 1)
    assert other.digest != work.digest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 1, "work": 3}',
        '{"version": 1, "work": [[], [], [], NaN]}',
        '{"version": 1, "work": [[], [], [], true, 0]}',
        '{"version": 1, "work": [[[1]], [], [], 0]}',
        "[" * 100000,
    ],
)
def test_a_wrong_workload_file_is_refused(text: str) -> None:
    with pytest.raises(MegacompileError, match="workload file"):
        Workload.from_json(text)


def test_a_truncated_workload_file_is_refused() -> None:
    text = chain(2).to_json()
    for length in range(0, len(text), 7):
        with pytest.raises(MegacompileError, match="workload file"):
            Workload.from_json(text[:length])
