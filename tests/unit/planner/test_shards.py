"""State on the devices of several ranks: planned where it is faster and fits, counted by shards, bounded."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megacompile.hardware.machine import Machine
from megacompile.passes import lower
from megacompile.planner.group_state import trained_groups
from megacompile.planner.lower_bound import lower_bound
from megacompile.planner.search import search
from megacompile.schedule.plan import Mode
from megacompile.schedule.step import peak_bytes
from megacompile.schedule.verify import verify
from tests.support.problems import chain, uniform
from tests.unit.schedule.test_collectives import shared

WORK = shared(chain(6), 4)
MACHINE = Machine(
    "a slow host", 1e3, 1e4, 1e3, 1e3, 200.0, fabric_bandwidth=1e4, fabric_seconds=0.0, shared_memory=True
)
ROOMY, TIGHT = 20_000, 11_000
MODES = [Mode("train"), Mode("train", deferred=True)]


@pytest.mark.parametrize("mode", MODES)
def test_ranks_keep_state_on_their_devices_where_that_is_faster(mode: Mode) -> None:
    groups = trained_groups(WORK)
    streamed = search(WORK, mode, MACHINE, ROOMY)
    found = search(WORK, mode, MACHINE, ROOMY, residents=groups)
    assert len(found.step.resident) >= len(groups) - 1 and streamed.step.resident == ()
    assert found.seconds < 0.5 * streamed.seconds
    assert verify(found.step, WORK, mode=mode, budget_bytes=ROOMY).peak_bytes == found.peak_bytes
    tight = search(WORK, mode, MACHINE, TIGHT, residents=groups)
    assert 0 < len(tight.step.resident) < len(groups), "some of it fits"
    assert verify(tight.step, WORK, mode=mode, budget_bytes=TIGHT).peak_bytes <= TIGHT


@pytest.mark.parametrize("mode", MODES)
def test_the_bound_of_shards_on_devices_is_of_compute_and_exchanges(mode: Mode) -> None:
    here, there = (uniform(WORK, state=state) for state in ("device", "host"))
    steps = [lower(WORK, plan, mode) for plan in (here, there)]
    bound, of_host = (lower_bound(WORK, mode, MACHINE, step) for step in steps)
    assert (bound.down, bound.up, bound.adam, bound.memory) == (0, 0, 0, 0)
    assert bound.updates > 0 == of_host.updates
    still = replace(
        MACHINE, memory_bandwidth=math.inf
    )  # what is copied and added on the device takes no time
    bound, of_host = (lower_bound(WORK, mode, still, step) for step in steps)
    assert (bound.gathers, bound.sums) == (of_host.gathers, of_host.sums) and bound.gathers > 0
    slow = replace(MACHINE, fabric_bandwidth=1.0)
    assert "between cards" in lower_bound(WORK, mode, slow, steps[0]).binding


def test_a_rank_takes_its_shards_of_what_is_on_the_device() -> None:
    """Weights and state, and the gradient, which waits there; one rank alone has a buffer that it passes."""
    mode, plan = Mode("train"), uniform(WORK, state="device")
    group = WORK.groups[0]
    assert group.resident_bytes == 1000 // 4 + 2000 // 4
    step = lower(WORK, plan, mode)
    buffers = sum(step.shards) + 2 * step.exchange_bytes
    assert step.constant_bytes == 6 * (group.resident_bytes + group.gradient_bytes) + buffers
    assert peak_bytes(step) < peak_bytes(lower(chain(6), plan, mode))
