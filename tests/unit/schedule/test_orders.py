"""Lowering against two independent judges: what it makes is safe in every order, and fits."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megacompile.errors import ScheduleError
from megacompile.passes import lower
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Step, peak_bytes
from megacompile.schedule.verify import verify
from megacompile.schedule.workload import Workload
from tests.support.oracle import execute, sees_garbage, unordered
from tests.support.problems import MODES, chain, find, scheduled, uniform, with_op

Problem = tuple[Workload, Plan, Mode, Step]
training = st.sampled_from([m for m in MODES if m.kind == "train"])


def accepted(step: Step, work: Workload) -> bool:
    try:
        verify(step, work)
    except ScheduleError:
        return False
    return True


@settings(max_examples=150)
@given(scheduled() | scheduled(matrices=True))
def test_what_lowering_makes_is_proven(problem: Problem) -> None:
    work, _, _, step = problem
    proof = verify(step, work, budget_bytes=peak_bytes(step))
    assert proof.peak_bytes == peak_bytes(step)


@settings(max_examples=40)
@given(scheduled(4) | scheduled(3, matrices=True))
def test_reachability_finds_every_conflict_of_a_good_step_ordered(problem: Problem) -> None:
    step = problem[3]
    assert unordered(step) == []
    assert not sees_garbage(step)


@settings(max_examples=60)
@given(scheduled(4) | scheduled(3, matrices=True), st.integers(0, 2**32))
def test_random_orders_see_the_same_values_and_stay_below_the_peak(problem: Problem, seed: int) -> None:
    """The bound of ``memory_curve`` holds in every order, and running in order reaches it."""
    step = problem[3]
    assert execute(step, seed) <= peak_bytes(step)


@settings(max_examples=40)
@given(scheduled(4, training) | scheduled(3, training, matrices=True), st.data())
def test_no_wait_is_redundant(problem: Problem, data: st.DataObject) -> None:
    """verify rejects the removal of any single wait, and reachability agrees."""
    work, _, _, step = problem
    waits = [(i, event) for i, op in enumerate(step.ops) for event in op.waits]
    for index, event in waits:
        op = step.ops[index]
        bad = with_op(step, index, op.with_(waits=tuple(e for e in op.waits if e != event)))
        assert not accepted(bad, work), f"{op.event} need not wait for {event}"
    assume(waits)
    index, event = data.draw(st.sampled_from(waits))
    op = step.ops[index]
    assert unordered(with_op(step, index, op.with_(waits=tuple(set(op.waits) - {event}))))


@settings(max_examples=60)
@given(scheduled(4, training), st.data())
def test_verify_agrees_with_reachability_on_waits_taken_away(problem: Problem, data: st.DataObject) -> None:
    work, _, _, step = problem
    waits = [(i, event) for i, op in enumerate(step.ops) for event in op.waits]
    assume(waits)
    removed = data.draw(st.lists(st.sampled_from(waits), max_size=3, unique=True))
    for index, event in removed:
        op = step.ops[index]
        step = with_op(step, index, op.with_(waits=tuple(e for e in op.waits if e != event)))
    assert accepted(step, work) == (unordered(step) == [])


@settings(max_examples=60)
@given(scheduled(4, training), st.data())
def test_verify_agrees_with_execution_on_slots_moved(problem: Problem, data: st.DataObject) -> None:
    work, _, _, step = problem
    prefetches = [i for i, op in enumerate(step.ops) if op.kind == "prefetch"]
    assume(prefetches)
    index = data.draw(st.sampled_from(prefetches))
    op = step.ops[index]
    offset = data.draw(st.integers(0, step.slab_bytes - op.nbytes))
    step = with_op(step, index, op.with_(offset=offset))
    assert accepted(step, work) == (unordered(step) == [] and not sees_garbage(step))


@settings(max_examples=100)
@given(scheduled(4, training), st.data())
def test_what_verify_accepts_of_steps_put_out_of_order_is_safe(problem: Problem, data: st.DataObject) -> None:
    """Neighbours swapped, an operation moved: where verify sees no fault, no order shows one."""
    work, _, _, step = problem
    position = st.integers(0, len(step.ops) - 1)
    ops = list(step.ops)
    ops.insert(data.draw(position), ops.pop(data.draw(position)))
    step = step.with_(ops=tuple(ops))
    if accepted(step, work):
        assert unordered(step) == []
        assert not sees_garbage(step)
        assert execute(step, 0) <= peak_bytes(step)


@settings(max_examples=100)
@given(scheduled() | scheduled(matrices=True))
def test_names_of_events_are_unique_but_for_the_stays_of_a_group(problem: Problem) -> None:
    """So that a wait for the latest record of a name is a wait for the operation that was meant."""
    stays = ("prefetch", "evict", "read_weights")  # weights on NVMe may be read for each stay
    ops = [op for op in problem[3].ops if op.kind not in stays]
    assert len({op.event for op in ops}) == len(ops)


@pytest.mark.parametrize("kind", ["prefetch", "reload", "push_grad"])
def test_the_judges_themselves_find_a_missing_wait(kind: str) -> None:
    """Some of many random orders goes wrong where a copy waits for nothing."""
    work = chain(5)
    step = lower(work, uniform(work, "all", saved_on="host"), Mode("train"))
    index = next(i for i, op in enumerate(step.ops) if op.kind == kind and op.waits)
    step = with_op(step, index, step.ops[index].with_(waits=()))
    assert unordered(step)
    assert any(_goes_wrong(step, seed) for seed in range(50))


def _goes_wrong(step: Step, seed: int) -> bool:
    try:
        return execute(step, seed) > peak_bytes(step)
    except AssertionError:
        return True


def test_a_late_reload_never_adds_to_the_peak() -> None:
    """What a reload takes counts from its place in program order, whenever it really comes."""
    work = chain(6)
    step = lower(work, uniform(work, "all", saved_on="host"), Mode("train"))
    assert find(step, "reload") > 0
    assert {execute(step, seed) for seed in range(30)} == {peak_bytes(step)}
