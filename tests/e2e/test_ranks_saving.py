"""Checkpoints of several ranks: each writes its part, while training goes on too; any number reads them."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megacompile import MegacompileError, Program, ProgramError
from megacompile.errors import DiskError
from megacompile.state import checkpoint, model_export
from tests.e2e.test_ranks_faults import compiled
from tests.support.models import batch_for
from tests.support.ranks import raising, run_ranks, saved, whole

WRITE = checkpoint.save_shard


def trained(rank: int, steps: int = 1, **options: Any) -> Program:
    program = compiled(**options)
    for step in range(steps):
        program.train_step(batch_for("plain", 10 * step + rank))
    return program


def differing(found: Path, expected: Path) -> list[str]:
    ours, theirs = saved(found), saved(expected)
    assert ours.keys() == theirs.keys()
    return [name for name, value in theirs.items() if not torch.equal(ours[name], value)]


def while_training(rank: int, folder: Path) -> int:
    """A checkpoint at once, and one of the same moment whose writers begin after two more updates."""
    go, write = threading.Event(), checkpoint._write_own

    def late(*arguments: Any) -> Any:
        assert go.wait(60)
        return write(*arguments)

    program = trained(rank)
    program.save(folder / "at once")
    with mock.patch.object(checkpoint, "_write_own", late):
        program.save(folder / "meanwhile", wait=False)
        for step in range(2):
            program.train_step(batch_for("plain", 30 + 10 * step + rank))
        program._session.synchronize()  # updates, not the checkpoint
        assert not (folder / "meanwhile").exists()
        go.set()
        program.finish_saving()
    return sum(path.stat().st_size for path in (folder / "at once").glob(f"state-{rank:05d}-*"))


def full_disk(rank: int, folder: Path) -> list[float]:
    """The second rank's disk is full, in the foreground and in the background, and the first one's as it
    exports: no rank has a checkpoint."""

    def full(path: Path, tensors: dict[str, Tensor], *metadata: Any) -> dict[str, int]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    program = trained(rank, 2)
    words = "The checkpoint was not written to", "No space left on device", "" if rank else "Rank 1: "
    with mock.patch.object(checkpoint, "save_shard", full if rank == 1 else WRITE):
        with raising(ProgramError, *words):
            program.save(folder / "at once")
        program.save(folder / "at once", wait=False)
        program.train_step(batch_for("plain", rank))
        with raising(ProgramError, *words):
            program.finish_saving()
    with (
        mock.patch.object(model_export, "save_shard", full),
        raising(DiskError, "not exported", "Rank 0" * rank),
    ):
        program.export(folder / "model")
    with raising(MegacompileError, "holds no checkpoint", "" if rank else "Rank 1: "):
        program.load(folder / ("at once" if rank == 0 else "nowhere"))
    return [float(loss) for loss in program.train_step(batch_for("plain", rank)).losses]


def saving(rank: int, folder: Path) -> tuple[int, list[float]]:
    return while_training(rank, folder), full_disk(rank, folder)


def test_ranks_write_what_each_has_while_training_goes_on(tmp_path: Path) -> None:
    """And a disk that does not take one rank's part, or an export, is an error of all, who then train on."""
    (first, losses), (second, others) = whole(run_ranks(2, saving, tmp_path))
    assert first == pytest.approx(second, rel=0.1)
    assert losses == others
    assert differing(tmp_path / "meanwhile", tmp_path / "at once") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["at once", "meanwhile"]


def dying(rank: int, folder: Path, wait: bool) -> str:
    """The second rank is killed as it writes its part of the second checkpoint."""

    def die(*arguments: Any) -> dict[str, int]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    program = trained(rank)
    program.save(folder)
    program.train_step(batch_for("plain", rank))
    with mock.patch.object(checkpoint, "save_shard", die if rank == 1 else WRITE):
        try:
            program.save(folder, wait=wait)
            program.finish_saving()
        except ProgramError as error:
            return str(error)
    return "saved"


def loads(rank: int, folder: Path) -> list[float]:
    program = trained(rank)
    program.load(folder)
    return [float(loss) for loss in program.train_step(batch_for("plain", rank)).losses]


@pytest.mark.slow_cases(r"True")
@pytest.mark.parametrize("wait", [False, True])
def test_a_rank_that_dies_as_it_saves_leaves_the_checkpoint_before_it(wait: bool, tmp_path: Path) -> None:
    first, second = run_ranks(2, dying, tmp_path / "run", wait)
    assert isinstance(first, str) and "Rank 1 is gone." in first and second is None
    losses = whole(run_ranks(2, loads, tmp_path / "run"))
    assert losses[0] == losses[1]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # a new save removes what is left of the old


SMALL = {"fp32": "650kB", "int8": "450kB", "int4": "435kB"}  # host budgets of which state goes to a drive


def wide(rank: int, form: str, nvme: Path | None) -> Program:
    """A program whose state is in RAM, or a part of it on a drive."""
    from tests.e2e.test_several_devices import compiled as of

    options: dict[str, Any] = {"compute_dtype": torch.float32, "optimizer_state": form}
    if nvme is not None:
        options |= {"offload_dir": nvme, "host_budget": SMALL[form]}
    program = of("wide", options, seed=rank)
    program.prepare(batch_for("plain"))
    assert (program.memory.storage_bytes > 0) == (nvme is not None)
    return program


def writes(rank: int, folder: Path, form: str) -> None:
    program = wide(rank, form, None)
    for step in range(2):
        program.train_step(batch_for("plain", 10 * step + rank))
    program.save(folder)


def goes_on(rank: int, source: Path, target: Path, form: str, nvme: Path | None) -> None:
    program = wide(rank, form, nvme)
    program.load(source)
    program.save(target)
    if rank == 0:
        assert differing(target, source) == []


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp32", "int8", "int4"])
def test_any_number_of_ranks_reads_what_four_have_written(form: str, tmp_path: Path) -> None:
    """Masters and moments bitwise, from and into RAM and a drive."""
    whole(run_ranks(4, writes, tmp_path / "4", form))
    source = tmp_path / "4"
    for size, stored in ((3, False), (2, True), (1, False), (2, False), (1, True)):
        target = tmp_path / f"{size} {stored}"
        whole(run_ranks(size, goes_on, source, target, form, tmp_path if stored else None))
        source = target
