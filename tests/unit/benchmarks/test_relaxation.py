"""The benchmarks' lower bound: no plan, however odd, on whatever machine, is faster; some are as fast."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.instances import load_instances, shortened
from benchmarks.relaxation import relaxed_seconds
from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import simulate
from megacompile.passes import lower
from megacompile.planner.search import search
from megacompile.schedule.plan import BlockPlan, GroupPlan, Mode, Plan
from megacompile.schedule.step import peak_bytes
from megacompile.schedule.workload import Workload

INSTANCES = load_instances()


def some_machine(draw: random.Random, machine: Machine) -> Machine:
    """The machine with each rate up to four times as high or as low, or a much slower way to the device."""

    def rate(given: float) -> float:
        return given * 2 ** draw.uniform(-2, 2)

    slow, host = draw.choice((1, 0.05)), rate(machine.host_bandwidth)
    return replace(
        machine,
        flops=rate(machine.flops),
        h2d_bandwidth=slow * rate(machine.h2d_bandwidth),
        d2h_bandwidth=rate(machine.d2h_bandwidth),
        host_bandwidth=host,
        adam_bandwidth=draw.choice((None, 0.6 * host)),
        adam_beside_h2d=draw.choice((1.0, 1.3)),
        shared_memory=draw.random() < 0.7,
    )


def some_plan(draw: random.Random, work: Workload, mode: Mode) -> Plan:
    """Any decision anywhere; often the same one everywhere."""
    checkpoints, places, residencies = (
        ("all", "some", "none", "least"),
        ("device", "host"),
        ("stream", "step"),
    )
    spread = draw.random()

    def any_block() -> BlockPlan:
        windows = draw.choice(((0, 1), (1, 1), (2, 3), (4, 4)))
        return BlockPlan(draw.choice(checkpoints), draw.choice(places), *windows)  # type: ignore[arg-type]

    block, residency = any_block(), draw.choice(residencies)

    def any_group() -> GroupPlan:
        kept = draw.choice(residencies) if draw.random() < spread else residency
        return GroupPlan(kept, draw.choice((0, 1, 2, 8)), update=draw.choice(("immediate", "deferred")))  # type: ignore[arg-type]

    blocks = tuple(any_block() if draw.random() < spread else block for _ in work.blocks)
    order = draw.choice(("depth", "breadth")) if mode.micro_batches > 1 else "depth"
    groups = tuple(any_group() for _ in work.groups)
    return Plan(blocks, groups, order, draw.choice((0, 1, 2, 5)), draw.choice((2, 3, 6)))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_faster_than_the_bound(seed: int) -> None:
    draw = random.Random(seed)
    instance = draw.choice(INSTANCES)
    work = shortened(instance.work, draw.choice((3, 4, 6, 10)))
    mode = replace(instance.mode, micro_batches=draw.choice((1, 1, 2, 3)))
    machine = some_machine(draw, instance.rates) if draw.random() < 0.7 else instance.rates
    plan = some_plan(draw, work, mode)
    step = lower(work, plan, mode)
    bound = relaxed_seconds(work, mode, machine, peak_bytes(step))
    assert simulate(step, machine).step_seconds >= bound * (1 - 1e-6), plan


def test_where_everything_fits_the_bound_is_reached() -> None:
    found = next(i for i in INSTANCES if i.machine == "gh200" and i.level == "plenty")
    work = shortened(found.work, 12)
    planned = search(work, found.mode, found.rates, found.budget_bytes)
    assert planned.seconds <= 1.005 * relaxed_seconds(work, found.mode, found.rates, found.budget_bytes)


def test_no_plan_at_all_is_told_by_an_infinite_bound() -> None:
    instance = INSTANCES[0]
    assert relaxed_seconds(shortened(instance.work, 4), instance.mode, instance.rates, 1) == float("inf")
