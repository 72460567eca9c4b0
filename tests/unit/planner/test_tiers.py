"""State on NVMe as a part of the plan: what is placed fits, and the search trades host bytes against it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.instances import load_workload, shortened
from benchmarks.instances.make import budget_range
from megacompile.blocks.weight_groups import GroupLayout, Parameter, Slot
from megacompile.hardware.catalog import load_machine
from megacompile.planner.nvme_placement import Drive, Tiers
from megacompile.planner.plan_evaluator import Planned
from megacompile.planner.search import follow, search
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.verify import verify
from megacompile.schedule.workload import Workload
from megacompile.state.host_arena import padded
from megacompile.state.host_budget import step_bytes
from megacompile.state.nvme_offload import host_state_bytes, place_groups
from tests.support.problems import chain, uniform

MACHINE = load_machine("rtx-4090").rates("bf16")
TRAIN, CLIP = Mode("train"), Mode("train", deferred=True)


def layouts(sizes: list[int]) -> list[GroupLayout]:
    """Groups of one parameter in bf16 each."""
    slots = [Slot(Parameter(f"p{i}", (n,), (1,), torch.bfloat16, 0), 0) for i, n in enumerate(sizes)]
    return [GroupLayout(i, f"g{i}", torch.bfloat16, True, (slots[i],), sizes[i]) for i in range(len(sizes))]


def in_ram(groups: list[GroupLayout], states: tuple[str, ...], window: int) -> int:
    """Host bytes of the state that is left there, and of the buffers for the rest."""
    places = place_groups(groups, "fp32", states)
    stored = any(p.on_storage for p in places)
    return host_state_bytes(places, window if stored else 0)


def states(plan: Plan) -> tuple[str, ...]:
    return tuple(g.state for g in plan.groups)


@pytest.fixture(scope="module")
def problem() -> tuple[Workload, list[GroupLayout], int, int]:
    """Ten layers of an 8B model, a tight device budget, and the host bytes of all state."""
    work = shortened(load_workload("llama-3.1-8b-1x4096"), 12)
    groups = [replace(g, state_bytes=12 * g.elements - g.nbytes) for g in work.groups]
    found = layouts([g.elements for g in groups])
    low, high = budget_range(work, TRAIN)
    whole = in_ram(found, ("host",) * len(found), 0)
    return replace(work, groups=tuple(groups)), found, low + (high - low) // 5, whole


@given(
    st.lists(st.sampled_from([1 << 12, 1 << 14, 3 << 14]), min_size=1, max_size=6),
    st.floats(0, 1.2),
    st.lists(st.floats(0, 1), min_size=2, max_size=2),
    st.integers(1, 3),
)
def test_a_placement_leaves_what_is_taken_and_stores_no_less_for_more(
    sizes: list[int], part: float, taken: list[float], window: int
) -> None:
    groups = layouts(sizes)
    budget = int(part * in_ram(groups, ("host",) * len(sizes), 0))
    drive = Drive.of(groups, Tiers("fp32", budget, stored=True))
    found = []
    for nbytes in sorted(int(t * max(0, drive.room)) for t in taken):
        plan = drive.place(uniform(chain(len(sizes)), window=window), nbytes)
        assert in_ram(groups, states(plan), plan.window) + nbytes <= budget or drive.room < 0
        stored = sum(p.storage_bytes for p in place_groups(groups, "fp32", states(plan)))
        found.append((abs(plan.window - window), stored))
    assert found[0] <= found[1]


@pytest.mark.slow_cases(r"(0\.9-0\.93-mode1|0\.5-0\.8-mode0)")
@pytest.mark.parametrize("mode", [TRAIN, CLIP])
@pytest.mark.parametrize(("part", "gain"), [(0.9, 0.93), (0.5, 0.8)])
def test_the_search_gives_up_host_bytes_for_less_on_the_drive(
    problem: tuple[Workload, list[GroupLayout], int, int], mode: Mode, part: float, gain: float
) -> None:
    """The fastest step of a small device offloads to the host and defers updates; each byte of that is one of
    state to be read and written.
    """
    work, groups, budget, whole = problem
    host = int(part * whole)
    drive = Drive.of(groups, Tiers("fp32", host, stored=True))
    alone = search(work, mode, MACHINE, budget)
    after = follow(alone.plan, work, mode, MACHINE, budget, drive=drive)
    found = search(work, mode, MACHINE, budget, drive=drive)
    assert found.seconds < gain * after.seconds
    assert step_bytes(found.step, work) < step_bytes(after.step, work)
    for planned in (after, found):
        assert set(states(planned.plan)) & {"nvme", "nvme-all"}
        ram = in_ram(groups, states(planned.plan), planned.plan.window)
        assert ram + step_bytes(planned.step, work) <= host
        verify(planned.step, work, budget_bytes=budget)


def test_no_placement_takes_more_of_the_drive_than_its_budget(
    problem: tuple[Workload, list[GroupLayout], int, int],
) -> None:
    """A step that has less of the drive gives up host bytes, as far as it can."""
    work, groups, budget, whole = problem
    tiers = Tiers("fp32", int(0.8 * whole), stored=True)

    def found(drive: Drive) -> tuple[int, Planned]:
        planned = search(work, TRAIN, MACHINE, budget, drive=drive)
        places = place_groups(groups, "fp32", states(planned.plan))
        spilled = sum(op.nbytes for op in planned.step.ops if op.kind == "write_offloaded")
        return sum(p.storage_bytes for p in places) + spilled, planned

    plenty, _ = found(Drive.of(groups, tiers))
    for share in (0.3, 0.9, 1.0):
        limit = int(share * plenty)
        stored, planned = found(Drive.of(groups, replace(tiers, nvme_budget_bytes=limit)))
        assert 0 < stored <= limit
        fits = in_ram(groups, states(planned.plan), planned.plan.window) + step_bytes(planned.step, work)
        assert (fits <= tiers.host_budget_bytes) == (share > 0.3), share


def test_nothing_wears_the_drive_where_a_plan_does_without(
    problem: tuple[Workload, list[GroupLayout], int, int],
) -> None:
    """Offloaded activations on the host would be faster, over a drive that costs no time."""
    work, groups, budget, whole = problem
    free = replace(MACHINE, nvme_read_bandwidth=1e15, nvme_write_bandwidth=1e15)
    host = whole + 2 * padded(max(g.nbytes for g in groups))
    found = search(work, TRAIN, free, budget, drive=Drive.of(groups, Tiers("fp32", host, stored=True)))
    assert set(states(found.plan)) == {"host"} and step_bytes(found.step, work) <= host - whole
    assert search(work, TRAIN, free, budget).seconds < found.seconds


def test_state_that_is_laid_out_stays_and_the_search_keeps_to_what_it_leaves(
    problem: tuple[Workload, list[GroupLayout], int, int],
) -> None:
    work, groups, budget, whole = problem
    where = ("host",) * 5 + ("nvme",) * (len(groups) - 5)
    tiers = Tiers("fp32", in_ram(groups, where, 2) + 2 * padded(max(g.nbytes for g in groups)), stored=True)

    def planned(host: int) -> Planned:
        drive = Drive.fixed(groups, replace(tiers, host_budget_bytes=host), where, 2)
        return search(work, TRAIN, MACHINE, budget, drive=drive)

    roomy, tight, none = planned(2 * whole), planned(tiers.host_budget_bytes), planned(1)
    assert {states(p.plan) for p in (roomy, tight, none)} == {where} and tight.plan.window == 2
    taken = step_bytes(tight.step, work)
    assert in_ram(groups, where, 2) + taken <= tiers.host_budget_bytes
    assert step_bytes(roomy.step, work) > taken
    assert none.plan == roomy.plan  # for the caller to refuse


def test_a_plan_that_is_given_keeps_its_state_where_it_says_if_that_fits(
    problem: tuple[Workload, list[GroupLayout], int, int],
) -> None:
    work, groups, _, whole = problem
    where = ("nvme",) * len(groups)

    def placed(state: str, drive: Drive) -> tuple[str, ...]:
        return states(follow(uniform(work, state=state), work, TRAIN, MACHINE, 10**15, drive=drive).plan)

    roomy, tight = (Drive.of(groups, Tiers("fp32", host, stored=True)) for host in (2 * whole, whole // 2))
    assert placed("nvme", roomy) == where
    assert placed("host", tight) != ("host",) * len(groups)
    assert placed("device", Drive.fixed(groups, Tiers("fp32", whole, stored=True), where, 2)) == where
