"""A mesh of ranks: R replicas of S ranks compute, bit for bit, what S ranks do with R micro-batches each."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megacompile import MegacompileError
from megacompile.api import rank_agreement
from tests.e2e.test_ranks_faults import failing_rank
from tests.e2e.test_several_devices import CASES, FP32, batches, compiled, train
from tests.support.ranks import raising, run_ranks, saved, whole

NAMES = ["some on devices", "clipped", "in small pieces"]
MORE = [*NAMES, "dropout in bf16"]


def refused(rank: int, mesh: DeviceMesh) -> None:
    """Meshes that are not of all ranks in their order, and one that another rank has not."""
    with raising(MegacompileError, "mesh=[0, 1, 2, 3] is not of all 4 ranks in their order"):
        compiled("plain", {"mesh": init_device_mesh("cpu", (4,))})
    with raising(MegacompileError, "mesh=[[0, 2], [1, 3]] is not of all 4 ranks in their order"):
        compiled("plain", {"mesh": DeviceMesh("cpu", [[0, 2], [1, 3]])})
    with raising(MegacompileError, "leaves each rank all of the weights"):
        compiled("plain", {"mesh": init_device_mesh("cpu", (4, 1))})
    with raising(MegacompileError, "Rank 3 has a mesh of 1 × 4, and rank 0 of 2 × 2"):
        compiled("plain", {"mesh": None if rank == 3 else mesh})
    with (
        mock.patch.object(rank_agreement, "backend", lambda kernel: "torch" if rank == 3 else "c"),
        raising(MegacompileError, "Rank 3 updates by torch on the host, and no GPU, rank 0 by the C kernel"),
    ):
        compiled("plain", FP32 | {"mesh": mesh}).train_step(batches("plain", 0, range(rank, 4, 4)))


def on_mesh(rank: int, shape: tuple[int, int], names: list[str], folder: Path, micro: int) -> dict[str, Any]:
    """What meshes are refused, steps on one, and a checkpoint of it read and written again."""
    mesh, size = init_device_mesh("cpu", shape), shape[0] * shape[1]
    if shape == (2, 2):
        refused(rank, mesh)
    found = train(rank, size, names, folder, micro, mesh=mesh)
    with compiled("plain", CASES["clipped"][1] | {"mesh": mesh}, seed=3 + rank) as program:
        program.prepare(batches("plain", 7, range(rank, size, size))[0])
        program.load(folder / "clipped")
        program.save(folder / "again", wait=False)
        program.finish_saving()
        return found | {"values": program.state_dict()}


@pytest.mark.slow_cases(r"(?!2-2-1)")
@pytest.mark.parametrize(
    ("replicas", "shards", "micro", "names"), [(2, 2, 1, NAMES), (3, 2, 1, MORE), (2, 3, 2, MORE)]
)
def test_replicas_are_bitwise_micro_batches(
    replicas: int, shards: int, micro: int, names: list[str], tmp_path: Path
) -> None:
    """Clipped too, as the squares of shards are added in one order. With several micro-batches on each rank
    the order of sums is another, and so is the rounding."""
    rounding = {"rtol": 0.0, "atol": 0.0} if micro == 1 else {"rtol": 1e-4, "atol": 1e-5}
    mesh, alone = tmp_path / "mesh", tmp_path / "ranks"
    ours = whole(run_ranks(replicas * shards, on_mesh, (replicas, shards), names, mesh, micro))
    theirs = whole(run_ranks(shards, train, shards, names, alone, replicas * micro))
    for name in names:
        found, expected = saved(mesh / name), saved(alone / name)
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found, expected, **rounding)
        for rank in ours:
            assert "rt.all_reduce(" in rank[name]["source"]
            assert rank[name]["peak"] == rank[name]["predicted"], name
            torch.testing.assert_close(rank[name]["losses"], theirs[0][name]["losses"], **rounding)
        assert {rank[name]["host"] for rank in ours} == {rank[name]["host"] for rank in theirs}
    norms = [rank["clipped"]["norms"] for rank in ours]
    assert all(all(map(torch.equal, of_rank, norms[0])) for of_rank in norms)
    again = saved(mesh / "again")
    assert all(torch.equal(again[array], value) for array, value in saved(mesh / "clipped").items())
    assert [bool(rank["values"]) for rank in ours] == [True] + [False] * (len(ours) - 1)
    for name, value in ours[0]["values"].items():
        assert torch.equal(again[f"{name}/weights"], value.reshape(-1))


def told_on_mesh(rank: int, how: str, where: str, count: int) -> str:
    return failing_rank(rank, how, where, count, mesh=init_device_mesh("cpu", (2, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "where", "count"), [("killed", "all_to_all", 4), ("raises", "all_gather", 8)]
)
def test_a_rank_that_fails_is_named_in_all_replicas(how: str, where: str, count: int) -> None:
    """Of rank 3 too, which meets it in sums alone, and rank 2, which never does."""
    first, failed, *others = run_ranks(4, told_on_mesh, how, where, count)
    words = "Rank 1 is gone." if how == "killed" else "Rank 1 stopped: ValueError: the card fell out"
    assert all(words in said for said in (first, *others))
    assert failed == (None if how == "killed" else "the card fell out")
