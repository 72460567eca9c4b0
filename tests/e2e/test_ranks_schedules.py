"""On several ranks, too, the schedule changes and the numbers do not: random plans under random delays."""

from __future__ import annotations

import hashlib
import random
import time
from typing import Any
from unittest import mock

import pytest
import torch

from megacompile.distributed.world import World
from megacompile.hardware.machine import Machine
from megacompile.planner.arrangements import with_state_at
from megacompile.planner.baselines import Planner
from megacompile.planner.group_state import trained_groups
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.workload import Workload
from tests.e2e.test_schedules import STEPS, Setup, any_plan, start
from tests.support.ranks import run_ranks, whole

RANKS = 3
SETUPS = [
    Setup(("plain", "gated"), tied=False, again=False, skip=True, micro=1, clip=None),
    Setup(("attention", "dropout"), tied=False, again=False, skip=False, micro=1, clip=1e9),
    Setup(("gated", "attention", "plain"), tied=False, again=False, skip=False, micro=1, clip=None),
]
"""Each gradient has one contribution of each rank, and none is clipped: bitwise those of one process."""


def trained(setup: Setup, rank: int, **options: Any) -> str:
    """A digest of losses and weights after some steps; ``rank`` -1 brings all ranks' batches."""
    program = start(setup, **options)
    generator = torch.Generator().manual_seed(1)
    digest = hashlib.sha256()
    for ids in torch.randint(0, 12, (STEPS, RANKS, 2, 5), generator=generator):
        batches = [{"ids": i, "labels": i.flip(1)} for i in ids]
        out = program.train_step(batches if rank < 0 else batches[rank])
        digest.update(torch.stack(list(out.losses)).numpy().tobytes())
    for value in program.state_dict().values():
        digest.update(value.numpy().tobytes())
    memory = program.memory
    assert memory.device_peak_bytes <= memory.predicted_peak_bytes
    program.close()
    return digest.hexdigest()


def any_plan_of_ranks(seed: int) -> Planner:
    """Any plan, with the state of any groups on the devices."""

    def plan(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
        groups = [g for g in trained_groups(work) if random.Random(f"{seed} {g}").random() < 0.5]
        return with_state_at(any_plan(seed)(work, mode, machine, budget_bytes), groups, "device")

    return plan


def with_delays(rank: int, plans: int) -> list[list[str]]:
    """Every setup by so many plans, each rank late at moments of its own."""
    delay, collective = random.Random(rank), World._collective

    def late(world: World, run: Any) -> None:
        time.sleep(delay.choice((0.0, 0.0, 2e-3 * delay.random())))
        collective(world, run)

    with mock.patch.object(World, "_collective", late):
        return [[trained(s, rank, planner=any_plan_of_ranks(seed)) for seed in range(plans)] for s in SETUPS]


@pytest.mark.slow_cases(r"2")
@pytest.mark.parametrize("plans", [2, pytest.param(67, marks=pytest.mark.nightly)])
def test_plans_and_delays_change_no_bit(plans: int) -> None:
    """67 plans of three models are 200."""
    ranks = whole(run_ranks(RANKS, with_delays, plans))
    for number, setup in enumerate(SETUPS):
        assert set(ranks[0][number]) == {trained(setup, -1)}
