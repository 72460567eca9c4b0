"""The simulator: bounds that hold for every step and machine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacompile.hardware.contention import shared_times
from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import duration, simulate
from megacompile.passes import lower
from megacompile.schedule.op_table import STREAMS
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step
from megacompile.schedule.workload import Workload
from tests.support.problems import chain, machines, scheduled, uniform

Problem = tuple[Workload, Plan, Mode, Step]
RATES = ["flops", "memory_bandwidth", "h2d_bandwidth", "d2h_bandwidth", "host_bandwidth",
         "nvme_read_bandwidth", "nvme_write_bandwidth"]  # fmt: skip
FREE = Machine(
    "free",
    *[math.inf] * 5,
    nvme_read_bandwidth=math.inf,
    nvme_write_bandwidth=math.inf,
    fabric_bandwidth=math.inf,
)
UNIT = Machine("unit", 1000.0, math.inf, 1000.0, 1000.0, 7000.0)
CLOSE = 1e-9  # relative, for sums of floats taken in different orders


@settings(max_examples=150)
@given(scheduled(), machines(), st.sampled_from(RATES), st.sampled_from([1.1, 2.0, 100.0]))
def test_a_faster_part_never_makes_the_step_slower(
    problem: Problem, machine: Machine, rate: str, factor: float
) -> None:
    step = problem[3]
    before = simulate(step, machine)
    after = simulate(step, replace(machine, **{rate: factor * getattr(machine, rate)}))
    assert after.step_seconds <= before.step_seconds * (1 + CLOSE)
    slack = max(before.ends, default=0.0) * CLOSE
    assert all(a <= b + slack for a, b in zip(after.ends, before.ends, strict=True))


@settings(max_examples=100)
@given(scheduled(), machines())
def test_a_step_takes_at_least_what_each_stream_works(problem: Problem, machine: Machine) -> None:
    step = problem[3]
    line = simulate(step, machine)
    assert set(line.busy) == set(STREAMS)
    for stream in STREAMS:
        assert line.busy[stream] == pytest.approx(sum(duration(op, machine) for op in step.on(stream)))
        assert line.step_seconds >= line.busy[stream] * (1 - CLOSE)


SHARED = st.sampled_from([
    {"shared_memory": True}, {"shared_cores": True, "cores": 2},
    {"shared_memory": True, "adam_beside_h2d": 1.3, "adam_beside_d2h": 1.1},
])  # fmt: skip


@settings(max_examples=100)
@given(scheduled(), machines(), SHARED, st.sampled_from([None, 0.5]))
def test_sharing_only_ever_slows_and_never_gives_more_than_there_is(
    problem: Problem, machine: Machine, shared: dict[str, object], updates: float | None
) -> None:
    machine = replace(machine, memory_bandwidth=machine.host_bandwidth)  # a CPU updates at the latter
    if "shared_memory" in shared:
        machine = replace(machine, adam_bandwidth=updates and updates * machine.host_bandwidth)
    step, crowded = problem[3], replace(machine, **shared)  # type: ignore[arg-type]
    alone, line = simulate(step, machine), simulate(step, crowded)
    slack = max(line.ends, default=0.0) * CLOSE
    assert line.step_seconds >= alone.step_seconds * (1 - CLOSE)
    for op, start, end in zip(step.ops, line.starts, line.ends, strict=True):
        assert end - start >= duration(op, machine) * (1 - CLOSE) - slack
    if crowded.shared_memory:
        moved = sum(op.nbytes for op in step.ops if op.stream != "compute")
        assert line.step_seconds >= moved / machine.host_bandwidth * (1 - CLOSE)
    else:
        for i, op in enumerate(step.ops):
            assert all(line.starts[i] >= line.ends[j] - slack for j in before(step, i, op))


def before(step: Step, index: int, op: Op) -> list[int]:
    """Earlier operations of this step that an operation waits for, and the one before it on its stream."""
    earlier = step.ops[:index]
    found = [j for j, other in enumerate(earlier) if other.stream == op.stream][-1:]
    return found + [
        max(j for j, o in enumerate(earlier) if o.event == e)
        for e in op.waits
        if any(o.event == e for o in earlier)
    ]


def test_two_copies_and_an_update_share_host_memory() -> None:
    """Each alone takes 1 s and draws all of the host's bandwidth: together they take 3 s."""
    machine = Machine("m", 1.0, 1.0, 10.0, 10.0, 10.0, shared_memory=True)
    assert _seconds_together(machine) == pytest.approx([3.0] * 3)


def _seconds_together(machine: Machine) -> list[float]:
    """Seconds of a copy to the device, one from it, and an update, of 10 bytes each, all at once."""
    ops = tuple(Op(k, s, group=i, nbytes=10) for i, (k, s) in enumerate(
        [("prefetch", "h2d"), ("push_grad", "d2h"), ("adam", "host")]))  # type: ignore[arg-type]  # fmt: skip
    line = simulate(Step(ops, {}, 1), machine)
    return [e - s for s, e in zip(line.starts, line.ends, strict=True)]


def test_an_update_has_a_rate_of_its_own() -> None:
    """The host's memory has room for both copies beside an update, which takes what its cores allow."""
    machine = Machine("m", 1.0, 1.0, 10.0, 10.0, 25.0, shared_memory=True, adam_bandwidth=5.0)
    assert _seconds_together(machine) == pytest.approx([1.0, 1.0, 2.0])
    assert _seconds_together(replace(machine, host_bandwidth=20.0))[:2] == pytest.approx([1.25, 1.25])


def test_an_update_and_a_copy_slow_each_other_as_measured() -> None:
    machine = Machine("m", 1.0, 1.0, 10.0, 10.0, 40.0, shared_memory=True, adam_bandwidth=10.0)
    assert _seconds_together(replace(machine, adam_beside_h2d=1.25)) == pytest.approx([1.25, 1.0, 1.25])
    assert _seconds_together(replace(machine, adam_beside_d2h=1.5)) == pytest.approx([1.0, 1.5, 1.5])


@settings(max_examples=60)
@given(scheduled(), machines())
def test_with_room_for_all_sharing_changes_nothing(problem: Problem, machine: Machine) -> None:
    step = problem[3]
    seconds = [duration(op, machine) for op in step.ops]
    starts, ends = shared_times(step.ops, seconds, machine, 2)
    line = simulate(step, machine)
    count = len(step.ops)
    assert starts[count:] == pytest.approx(line.starts)
    assert ends[count:] == pytest.approx(line.ends)


@settings(max_examples=100)
@given(scheduled(), machines())
def test_streams_are_in_order_and_waits_are_kept(problem: Problem, machine: Machine) -> None:
    step = problem[3]
    line = simulate(step, machine)
    free = dict.fromkeys(STREAMS, 0.0)
    ended: dict[object, float] = {}
    for op, start, end in zip(step.ops, line.starts, line.ends, strict=True):
        assert start >= free[op.stream]
        assert all(start >= ended[e] for e in op.waits if e in ended)
        assert end == start + duration(op, machine)
        free[op.stream] = ended[op.event] = end


@settings(max_examples=50)
@given(scheduled())
def test_a_machine_without_cost_takes_no_time(problem: Problem) -> None:
    line = simulate(problem[3], FREE)
    assert line.step_seconds == 0
    assert set(line.ends) <= {0.0}


def test_a_chain_that_computes_all_the_time() -> None:
    """With weights that stay and links that keep up, the step is its compute and nothing else."""
    work = chain(4)
    step = lower(work, uniform(work, "all", residency="step"), Mode("train"))
    line = simulate(step, replace(UNIT, h2d_bandwidth=math.inf, d2h_bandwidth=math.inf))
    assert line.busy["compute"] == 4 * 1.0 + 4 * 2.0
    assert line.busy["host"] == 4 * 1.0
    assert line.step_seconds == pytest.approx(12.0 + 1.0)  # the first forward waits for its adam


def test_a_link_that_is_the_roof() -> None:
    """Every block fetched twice over a link ten times slower: the step is the time on the link."""
    work = chain(6)
    step = lower(work, uniform(work, prefetch_depth=1), Mode("train"))
    line = simulate(step, replace(UNIT, h2d_bandwidth=100.0, host_bandwidth=math.inf))
    fetches = sum(op.kind == "prefetch" for op in step.ops)
    assert line.busy["h2d"] == fetches * 10.0
    assert line.step_seconds >= line.busy["h2d"]


def test_durations_by_kind() -> None:
    machine = Machine("m", 10.0, 20.0, 30.0, 40.0, 50.0, launch_seconds=1.0, copy_seconds=2.0,
                      nvme_read_bandwidth=60.0, nvme_write_bandwidth=70.0)  # fmt: skip
    assert duration(Op("forward", "compute", flops=20, moved_bytes=40, launches=3), machine) == 2 + 2
    assert duration(Op("forward", "compute", flops=20, moved_bytes=40, launches=5), machine) == 5
    cpu = replace(machine, shared_cores=True)  # where what asks for an operator computes it
    assert duration(Op("forward", "compute", flops=20, moved_bytes=40, launches=3), cpu) == 1 + 2 + 2
    grouped = Op("forward", "compute", flops=20, moved_bytes=40)  # products that wait for memory, or do not
    assert duration(grouped.with_(grouped=(10, 60)), machine) == 2 + 2 + (3 - 1)
    assert duration(grouped.with_(grouped=(10, 20)), machine) == 2 + 2
    slow = replace(machine, attention_forward=5.0, attention_backward=2.0)
    assert duration(Op("backward", "compute", flops=40, attention_flops=(10, 20)), slow) == 1 + 2 + 10
    assert duration(Op("backward", "compute", flops=40, attention_flops=(10, 20)), machine) == 4
    assert duration(Op("prefetch", "h2d", nbytes=60), machine) == 2 + 2
    assert duration(Op("reload", "h2d", nbytes=60), machine) == 2 + 2
    assert duration(Op("offload", "d2h", nbytes=80), machine) == 2 + 2
    assert duration(Op("push_grad", "d2h", nbytes=80), machine) == 2 + 2
    assert duration(Op("adam", "host", nbytes=100), machine) == 2
    there = Op("adam", "compute", nbytes=100)
    assert duration(there, machine) == 5
    assert duration(there, replace(machine, shared_cores=True)) == 2  # a CPU runs the host's kernel
    assert duration(Op("read_state", "nvme_read", nbytes=120), machine) == 2
    assert duration(Op("write", "nvme_write", nbytes=140), machine) == 2
    assert duration(Op("evict", "compute", nbytes=100), machine) == 0


@settings(max_examples=50)
@given(scheduled(), st.integers(1, 20))
def test_a_step_takes_no_less_with_more_launches(problem: Problem, more: int) -> None:
    step, machine = problem[3], replace(UNIT, launch_seconds=1.0)
    asked = replace(step, ops=tuple(op.with_(launches=op.launches * more) for op in step.ops))
    assert simulate(asked, machine).step_seconds >= simulate(step, machine).step_seconds
    assert simulate(step, machine).step_seconds >= simulate(step, UNIT).step_seconds
