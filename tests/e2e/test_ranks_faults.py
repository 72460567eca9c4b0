"""What ranks do when one of them is unlike the others, asks for what is not there, fails, or is gone."""

from __future__ import annotations

import copy
import gc
import importlib
import math
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import megacompile
from megacompile import MegacompileError, NonFiniteError, Program, ProgramError
from tests.support.models import batch_for, build
from tests.support.ranks import FAULTS, partly_on_devices, raising, run_ranks, told, whole
from tests.support.scripts import Script

collectives = importlib.import_module("megacompile.passes.insert_collectives")  # not the pass of that name


def compiled(rank: int = 0, lr: float = 1e-3, depth: int = 4, **options: Any) -> Program:
    model = build("plain", depth=depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    given: dict[str, Any] = {"compute_dtype": torch.float32, "device": "cpu", "planner": partly_on_devices}
    given |= options
    return megacompile.compile(model, 1, optimizer=optimizer, **given)


def unlike(rank: int) -> list[Any]:
    """What differs is refused on all ranks, in words that name the rank, and training goes on."""
    same, one = batch_for("plain", rank), rank == 1
    program = compiled()
    program.train_step(same)
    with raising(MegacompileError, "Rank 1 brought 2 micro-batches, rank 0 1"):
        program.train_step([same, same] if one else [same])
    with raising(MegacompileError, "Rank 1 brought a batch of (3, 16)", "rank 0 one of (2, 16)"):
        program.train_step(batch_for("plain", rank, size=3 if one else 2))
    with raising(MegacompileError, "holds no tensor", "" if one else "Rank 1: "):
        program.train_step({} if one else same)
    program.optimizer.param_groups[0]["lr"] = 1e-2 if one else 1e-3
    with raising(MegacompileError, "The optimizer of rank 1 has AdamHyper(lr=0.01"):
        program.train_step(same)
    program.optimizer.param_groups[0]["lr"] = 1e-3
    program.model.blocks.eval() if one else None  # type: ignore[union-attr]
    with raising(MegacompileError, "set otherwise than on rank 0"):
        program.train_step(same)
    program.model.blocks.train()  # type: ignore[union-attr]
    return [float(loss) for loss in program.train_step(same).losses]


def unlike_programs(rank: int) -> None:
    version = "2.0" if rank else torch.__version__
    with (
        mock.patch.object(torch, "__version__", version),
        raising(MegacompileError, "Rank 1 runs torch 2.0, and rank 0 torch "),
    ):
        compiled()
    for package in ("megacompile", "transformers", "triton"):
        with (
            mock.patch.object(metadata, "version", lambda name, p=package: f"{rank if name == p else 9}.0"),
            raising(MegacompileError, f"Rank 1 runs {package} 1.0, and rank 0 {package} 0.0"),
        ):
            compiled()
    piece = 1000 if rank else collectives.PIECE_BYTES
    with (
        mock.patch.object(collectives, "PIECE_BYTES", piece),
        raising(MegacompileError, "Rank 1 compiled another program"),
    ):
        compiled().train_step(batch_for("plain", rank))
    with raising(
        MegacompileError, "Rank 1 was compiled with max_grad_norm=2.0", "rank 0 with max_grad_norm=1"
    ):
        compiled(max_grad_norm=1.0 + rank).train_step(batch_for("plain", rank))
    with raising(
        MegacompileError, "The model or the batch is not that of rank 0", "" if rank else "Rank 1: "
    ):
        model = build("plain", depth=2, width=32 + 4 * rank)
        program = megacompile.compile(model, 1, device="cpu", compute_dtype=torch.float32)
        program.train_step(batch_for("plain", rank))
    with pytest.raises(megacompile.BudgetError, match="is too small" if rank == 0 else "Rank 0") as error:
        megacompile.compile(build("plain"), "10kB", device="cpu", compute_dtype=torch.float32).prepare(
            batch_for("plain", rank)
        )
    assert error.value.least_bytes  # on every rank, so that all go on with the same smaller batch
    with raising(megacompile.BudgetError, "host_budget=100 kB is too small"):
        compiled(host_budget="100kB").prepare(batch_for("plain", rank))


def refused(rank: int) -> None:
    missing = f"nowhere-{rank}" if rank else "."
    with raising(
        MegacompileError, f"offload_dir='nowhere-{max(1, rank)}' is no directory", "" if rank else "Rank 1: "
    ):
        compiled(offload_dir=missing)
    program, batch = compiled(), batch_for("plain", rank)
    mixed = [batch, batch_for("plain", size=3 + rank)]
    with raising(MegacompileError, "Rank 1 ", "rank 0"):
        program.train_step(mixed)
    program.train_step(batch)
    with raising(MegacompileError, "Copying a model", "program.sync_to"):
        copy.deepcopy(program.model)


def all_of_them(rank: int) -> list[float]:
    losses = unlike(rank)
    unlike_programs(rank)
    refused(rank)
    return losses


def test_what_is_unlike_or_not_there_is_refused_on_all_ranks_by_name() -> None:
    first, second = whole(run_ranks(2, all_of_them))
    assert first == second and all(map(math.isfinite, first))


def as_alike(program: Program, batch: Any, folder: Path) -> dict[str, Callable[[], object]]:
    """Calls of a program that exchange something, by name."""
    other = build("plain")
    return {
        "state_dict": program.state_dict,
        "load_state_dict": lambda: program.load_state_dict(other.state_dict()),
        "sync_to": lambda: program.sync_to(other),
        "save": lambda: program.save(folder / "state"),
        "load": lambda: program.load(folder / "state"),
        "export": lambda: program.export(folder / "export"),
        "evaluate": lambda: program.evaluate(batch),
        "predict": lambda: program.predict(batch),
        "prepare": lambda: program.prepare(batch),
        "forward_backward": lambda: program.forward_backward(batch),
        "optimizer_step": program.optimizer_step,
    }


def unlike_calls(rank: int, folder: Path) -> list[float]:
    """Each other call against a step, on either rank; then calls that a rank may make alone; then steps."""
    program, batch = compiled(), batch_for("plain", rank)
    program.train_step(batch)
    calls = as_alike(program, batch, folder)
    for name, call in calls.items():
        for other in (0, 1) if name in ("state_dict", "save", "evaluate") else (1,):
            named = ["train_step", name] if other else [name, "train_step"]
            words = [f"Rank 0 called {named[0]} (", f"rank 1 {named[1]} (", f"{__file__}:", "the same calls"]
            with raising(MegacompileError, *words):
                call() if rank == other else program.train_step(batch)
    with raising(MegacompileError, "Rank 0 called train_step (", "rank 1 drop_gradients ("):
        program.drop_gradients() if rank else None
        program.train_step(batch)
    losses: list[float] = []
    for call in (program.synchronize, program.finish_saving, program.vacate, program.drop_gradients):
        call() if rank or call == program.drop_gradients else None
        losses += program.train_step(batch).losses
    return [float(loss) for loss in losses]


def leaving(rank: int) -> None:
    """Rank 1 leaves its program, in each way that does not end the process, and rank 0 steps."""
    batch = batch_for("plain", rank)

    def ended(program: Program, words: str) -> None:
        with raising(ProgramError, words, *([f"{__file__}:"] if "stopped" not in words else [])):
            program.train_step(batch)
        with raising(ProgramError, "Start all ranks again"):
            program.train_step(batch)

    program = compiled(depth=1)
    program.train_step(batch)
    if rank == 0:
        ended(program, "Rank 1 dropped its program after train_step (")
    else:
        del program
        gc.collect()
    program = compiled(depth=1)
    program.train_step(batch)
    ended(program, "and rank 1 close (") if rank == 0 else program.close()
    program = compiled(depth=1)
    if rank == 0:
        program.train_step(batch)
        ended(program, "Rank 1 stopped: ValueError: no such file")
    else:
        with raising(ValueError, "no such file"), program:
            program.train_step(batch)
            raise ValueError("no such file")
    with compiled(depth=1) as program:  # all close it
        program.train_step(batch)
    assert program.state_dict() or rank
    first, second = compiled(depth=1), compiled(depth=1)
    with raising(ProgramError, "Rank ", " called train_step ", " of another program ("):
        (first, second)[rank].train_step(batch)


def all_calls(rank: int, folder: Path) -> list[float]:
    losses = unlike_calls(rank, folder)
    leaving(rank)
    return losses


def test_unlike_calls_and_ranks_that_leave_are_named_with_the_script_s_line(tmp_path: Path) -> None:
    first, second = whole(run_ranks(2, all_calls, tmp_path))
    assert first == second and all(map(math.isfinite, first))


SCRIPT = """
import sys
from datetime import timedelta
import torch.distributed as dist
from tests.e2e.test_ranks_faults import batch_for, compiled

rank, store, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
program, batch = compiled(depth=1), batch_for("plain", rank)
program.train_step(batch)
if way == "raises" and rank == 1:
    raise ValueError("no such file")
for _ in range(2 - rank):
    program.train_step(batch)
"""


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("ends", "ProgramError: Rank 1 ended its script after train_step (<script>:14): "),
        ("raises", "ProgramError: Rank 1 stopped: ValueError: no such file"),
    ],
)
def test_a_rank_whose_script_is_over_is_named_by_the_others(way: str, words: str, tmp_path: Path) -> None:
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    scripts = [Script(SCRIPT, rank, tmp_path / "store", way, environment=environment) for rank in range(2)]
    first, second = (script.finish() for script in scripts)
    assert words in first.stderr
    assert second.returncode == (way == "raises")


def nonfinite(rank: int) -> list[float]:
    """A loss that is not finite on one rank keeps all from updating, unless all gradients are finite."""
    batch, bad = batch_for("plain", rank), batch_for("plain", rank)
    bad["y"] = bad["y"] * (math.inf if rank == 1 else 1.0)
    program = compiled()
    program.train_step(batch)
    before = program.state_dict()
    with raising(NonFiniteError, "The losses of the ranks are", "inf"):
        program.train_step(bad)
    after = program.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)
    for number in (math.nan, 0.0):  # a finite gradient is applied
        shift = number if rank == 1 else 0.0
        losses = program.train_step(batch, loss=lambda _, loss, shift=shift: loss + shift).losses
        assert math.isfinite(losses[0]) and math.isnan(losses[1]) == math.isnan(number)
        moved = [not torch.equal(after[n], v) for n, v in program.state_dict().items()]
        assert any(moved) or rank  # which has no values to return
    skipping = compiled(on_nonfinite="skip")
    skipping.train_step(bad)
    skipping.train_step(batch, loss=lambda _, loss: loss + (math.nan if rank == 1 else 0.0))
    fresh = compiled(on_nonfinite="skip")
    fresh.prepare(batch)
    skipped, whole_state = skipping.state_dict(), fresh.state_dict()
    assert all(torch.equal(v, whole_state[n]) for n, v in skipped.items())
    fresh.close()
    raised = compiled(max_grad_norm=1.0)
    raised.train_step(bad)
    with raising(NonFiniteError, "The gradient's norm was"):
        raised.train_step(batch)
    return [float(p.train_step(batch).loss) for p in (program, skipping, raised)]


def test_a_loss_that_is_not_finite_on_one_rank_stops_the_update_of_all() -> None:
    first, second = whole(run_ranks(2, nonfinite))
    assert first == second and all(map(math.isfinite, first))


STALL = 30.0  # seconds that the others wait for a rank that stalls, and for rank 0 to plan


def failing_rank(rank: int, how: str, where: str, count: int, **options: Any) -> str:
    program, batch = compiled(max_grad_norm=1.0, **options), batch_for("plain", rank)
    return told(program, lambda: program.train_step(batch), rank, how, where, count, STALL + 30)


@pytest.mark.slow_cases(r"killed-all_(to_all|numbers)|(raises|stalls)")
@pytest.mark.parametrize(
    ("how", "where", "count", "words"),
    [
        *FAULTS,
        ("killed", "all_numbers", 2, "Rank 1 is gone"),
        ("runs out", "_tangent", 5, "Rank 1 stopped: OutOfMemoryError: no room on the card"),
    ],
)
def test_a_rank_that_fails_is_named_by_the_others(how: str, where: str, count: int, words: str) -> None:
    timeout = STALL if how == "stalls" else 600.0
    ranks = 2 if how == "runs out" else 3
    first, failed, *others = run_ranks(ranks, failing_rank, how, where, count, timeout=timeout)
    assert all(words in said for said in (first, *others))
    assert failed is None if how == "killed" else failed
    if how in ("raises", "runs out"):
        assert words.partition("Error: ")[2] in failed
