"""The mesh that compile chooses for ranks on several machines: the faster of those that fit, and the same
again where a run goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megacompile import BudgetError, MegacompileError, Program
from megacompile.api import pipeline
from megacompile.distributed.ranks import find_ranks
from megacompile.hardware.machine import Machine, nominal_cpu
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.workload import Workload
from tests.e2e.test_several_devices import FP32, batches, compiled
from tests.support.ranks import on_host, raising, run_ranks, saved, whole

SLOW, FAST = 1e6, 1e12  # bytes per second that a machine sends
COPIED = "(2, 2), a copy of the state in each machine, for "
SHARED = "(1, 4), one state of all ranks, for "


@contextmanager
def machines(rank: int, network: float) -> Iterator[None]:
    """Two machines of two ranks, and what is between them."""

    def machine(dtype: torch.dtype) -> Machine:
        return replace(nominal_cpu(dtype), network_bandwidth=network)

    place = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    with mock.patch.dict(os.environ, place), mock.patch.object(pipeline, "nominal_cpu", machine):
        yield


def stepped(program: Program, rank: int, *steps: int) -> str:
    """What a program says of its mesh after these steps."""
    for step in steps:
        program.train_step(batches("plain", step, range(rank, 4, 4)))
    said = " ".join(program.source.partition('"""')[2].partition("\n\n")[0].split())
    assert said in " ".join(str(program.schedule).split())
    return said.partition("mesh=")[2]


def two_steps(rank: int, folder: Path) -> str:
    """Weights after each of two steps, where a copy in each machine is chosen; returns what is said of it."""
    with compiled("plain", FP32, seed=rank) as program:
        said = stepped(program, rank, 0)
        program.save(folder / "one step")
        stepped(program, rank, 1)
        program.save(folder / "whole")
        assert program.memory.device_peak_bytes == program.memory.predicted_peak_bytes
    return said


def choosing(rank: int, folder: Path) -> list[str]:
    """Of a run on a slow network, of its second step where the network is fast, and with little memory."""
    with machines(rank, SLOW):
        said = [two_steps(rank, folder)]
        with compiled("plain", FP32 | {"host_budget": "300kB"}) as program:
            said.append(stepped(program, rank, 0))
    with machines(rank, FAST), compiled("plain", FP32) as program:
        program.prepare(batches("plain", 7, range(rank, 4, 4)), checkpoint=folder / "one step")
        program.load(folder / "one step")
        said.append(stepped(program, rank, 1))
        program.save(folder / "resumed")
    return said


@pytest.mark.slow
def test_the_mesh_is_the_faster_one_that_fits_and_that_of_a_checkpoint(tmp_path: Path) -> None:
    first, *others = whole(run_ranks(4, choosing, tmp_path))
    assert others == [first] * 3
    slow, little, resumed = first
    assert slow.startswith(COPIED) and "one state of all ranks takes " in slow
    assert little.startswith(SHARED) and "a copy of the state in each machine takes " in little
    assert little.endswith("kB of a machine's host memory, which gives 300 kB.")
    assert resumed == "(2, 2) as in the checkpoint."
    found, expected = saved(tmp_path / "resumed"), saved(tmp_path / "whole")
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def shared_only(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
    """A planner of one's own, to which a copy is too large."""
    if work.replicas > 1:
        raise BudgetError("A copy is too large.")
    return on_host(work, mode, machine, budget_bytes)


def not_choosing(rank: int, folder: Path) -> list[str]:
    """Of a run on a slow network, of its second step, without a choice left, and of meshes that are given."""
    first = batches("plain", 7, range(rank, 4, 4))
    with machines(rank, SLOW):
        said = [two_steps(rank, folder)]
        with compiled("plain", FP32) as program:
            program.prepare(first)
            program.load(folder / "one step")
            said.append(stepped(program, rank, 1))
            program.save(folder / "again")
        with compiled("plain", FP32 | {"planner": shared_only}) as program:
            said.append(stepped(program, rank, 0))
        with compiled("plain", FP32 | {"mesh": init_device_mesh("cpu", (1, 4))}) as program:
            program.prepare(first)
            program.load(folder / "one step")
            said.append(stepped(program, rank, 1))
            assert program.world.ranks.replicas == 1
    with machines(rank, FAST):
        mesh = init_device_mesh("cpu", (2, 2))
        with compiled("plain", FP32 | {"mesh": mesh}, seed=rank) as program:
            said.append(stepped(program, rank, 0, 1))
            program.save(folder / "given")
        with compiled("plain", FP32) as program:
            said.append(stepped(program, rank, 0))
            words = "a mesh of 2 × 2", "one of 1 × 4", "init_device_mesh(device, (2, 2))"
            with raising(MegacompileError, *words):
                program.load(folder / "one step")
        words = "holds no checkpoint", "Rank 0: " if rank else ""
        with compiled("plain", FP32) as program, raising(MegacompileError, *words):
            program.prepare(first, checkpoint=folder / "nowhere")
    return said


@pytest.mark.slow
def test_a_mesh_that_is_given_or_alone_fits_is_taken_and_a_checkpoint_of_another_named(
    tmp_path: Path,
) -> None:
    first, *others = whole(run_ranks(4, not_choosing, tmp_path))
    assert others == [first] * 3
    slow, again, alone, *given, fast = first
    assert slow == again and slow.startswith(COPIED)
    assert alone.endswith("a copy of the state in each machine does not fit the devices.")
    assert given == ["", ""] and fast.startswith(SHARED)
    expected = saved(tmp_path / "whole")
    for name in ("again", "given"):
        found = saved(tmp_path / name)
        assert [n for n, value in expected.items() if not torch.equal(found[n], value)] == []


@pytest.mark.parametrize(
    ("local", "places", "choice"),
    [
        pytest.param(2, [0, 1, 0, 1], True, id="in order"),
        pytest.param(2, [0, 0, 1, 1], False, id="dealt out to machines in turn"),
        pytest.param(1, [0, 0, 0, 0], False, id="alone on their machines"),
        pytest.param(4, [0, 1, 2, 3], False, id="on one machine"),
        pytest.param(3, [0, 1, 2, 0], False, id="unlike many"),
    ],
)
def test_there_is_a_choice_where_machines_have_as_many_ranks_in_order(
    local: int, places: list[int], choice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    found = []
    for rank, place in enumerate(places):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setenv("LOCAL_RANK", str(place))
        found.append(find_ranks().undecided)
    assert all(found) == choice
