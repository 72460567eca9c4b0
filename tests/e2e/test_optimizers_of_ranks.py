"""Other optimizers than Adam on several ranks: bitwise a plain loop over the batches of all of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import megacompile
from megacompile import Program
from megacompile.state import muon, param_group
from megacompile.state.master_layout import own_part
from megacompile.state.several_optimizers import Several
from tests.e2e import test_any_optimizer as alone
from tests.support.models import Plain
from tests.support.ranks import run_ranks, whole

pytestmark = pytest.mark.slow

STEPS, SAVED = 4, 2
MODULES = {"Lion": "lion_pytorch", "schedule-free": "schedulefree"}
WHOLE = ("Adafactor", "Adafactor of transformers", "the user's own")


def built() -> tuple[nn.Module, Several]:
    """Matrices of blocks have in turn Muon, two Adafactors, a class that keeps a number; all other parameters
    in turn those that step over single elements."""
    model = Plain(width=40, depth=3)
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if p.dim() == 2 and "blocks" in n]
    rest = [p for n, p in named.items() if not (p.dim() == 2 and "blocks" in n)]
    names = [n for n in alone.MAKES if n not in WHOLE and importlib.util.find_spec(MODULES.get(n, "torch"))]
    makes = [torch.optim.Muon, *(alone.MAKES[name] for name in WHOLE)]
    owners = [make([{"params": matrices[i :: len(makes)], "lr": 1e-2}]) for i, make in enumerate(makes)]
    return model, Several([*owners, *(alone.MAKES[n](rest[i :: len(names)]) for i, n in enumerate(names))])


class Run:
    """A program, and how it trains on the batches of some ranks."""

    def __init__(self, ranks: range, seed: int = 0, load: Path | None = None, **options: Any) -> None:
        torch.manual_seed(seed)
        model, optimizer = built()
        options = {"compute_dtype": torch.float32, "device": "cpu"} | options
        self.program: Program = megacompile.compile(model, "1GB", optimizer=optimizer, **options)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.program.optimizer, 0.8)
        self.ranks = ranks
        if load is not None:
            self.program.prepare(alone.batch(0))
            self.program.load(load)
            self.schedule.last_epoch = SAVED

    def train(self, *steps: int) -> None:
        for step in steps:
            self.program.train_step([alone.batch(10 * step + rank) for rank in self.ranks])
            self.schedule.step()

    def values(self) -> dict[str, Tensor]:
        getattr(self.program.optimizer, "eval", lambda: None)()
        with self.program:
            return dict(self.program.state_dict())


def divided(program: Program, rank: int) -> set[bool]:
    """Return of the parameters of which a rank has a part whether they are to be undivided."""
    groups = program._session.runtime.state.groups  # type: ignore[union-attr]
    owned = ((s.parameter, own_part(g, s, rank)[0]) for g in groups for s in g.slots)
    return {p.undivided for p, part in owned if 0 < part.stop - part.start < p.numel}


def on_one_rank(rank: int, size: int, folder: Path) -> tuple[set[bool], list[dict[str, Tensor]]]:
    """Train from the start, saving in the middle, and from the middle where one process saved."""
    own = range(rank, size, size)
    with mock.patch.object(param_group, "CHUNK", 64), mock.patch.object(muon, "CHUNK", 64 * 40):
        run = Run(own, seed=rank)
        run.train(*range(SAVED))
        run.program.save(folder / "ranks")
        run.train(*range(SAVED, STEPS))
        resumed = Run(own, seed=rank, load=folder / "one")
        resumed.train(*range(SAVED, STEPS))
        return divided(run.program, rank), [run.values(), resumed.values()]


def plain(ranks: range) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, optimizer = built()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            (model(**alone.batch(10 * step + rank)) / len(ranks)).backward()
        optimizer.step()
        schedule.step()
    optimizer.eval()
    return dict(model.named_parameters())


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_step_bitwise_as_a_plain_loop_and_any_number_resumes(size: int, tmp_path: Path) -> None:
    """Ranks from the start, ranks from a checkpoint of one process, one process from theirs."""
    everyone = range(size)
    one = Run(everyone)
    one.train(*range(SAVED))
    one.program.save(tmp_path / "one")
    one.program.close()
    answers = whole(run_ranks(size, on_one_rank, size, tmp_path))
    one = Run(everyone, load=tmp_path / "ranks")
    one.train(*range(SAVED, STEPS))
    assert set.union(*(found for found, _ in answers)) == {False}
    expected, results = plain(everyone), [*answers[0][1], one.values()]
    for way, found in zip(("ranks", "resumed by ranks", "resumed by one"), results, strict=True):
        assert [n for n, value in expected.items() if not torch.equal(found[n], value)] == [], way


CASES: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.1},
    "in bf16": {"compute_dtype": torch.bfloat16},
    "NVMe": {"host_budget": "550KB"},
}


def with_options(rank: int, size: int, names: list[str], folder: Path) -> dict[str, Any]:
    """Train with these options on one rank, or, as rank -1, in one process, which is given all batches."""
    results = {}
    for name in names:
        extra = {"offload_dir": folder} if "host_budget" in CASES[name] else {}
        run = Run(range(rank, size, size) if rank >= 0 else range(size), **CASES[name], **extra)
        run.train(*range(STEPS))
        memory, states = run.program.memory, {group.state for group in run.program.plan.groups}
        peaks = memory.device_peak_bytes, memory.predicted_peak_bytes
        results[name] = peaks, states, run.values()
    return results


def test_ranks_train_as_one_process_with_any_options(tmp_path: Path) -> None:
    names = list(CASES)
    one = with_options(-1, 2, names, tmp_path)
    ranks = whole(run_ranks(2, with_options, 2, names, tmp_path))
    assert "nvme" in {state.split("-")[0] for state in ranks[0]["NVMe"][1]}
    for name in names:
        (*_, expected), (_, _, found) = one[name], ranks[0][name]
        peaks = [rank[name][0] for rank in ranks]
        assert max(peak for peak, _ in peaks) == peaks[0][1] == peaks[1][1], name
        if name == "clipped":  # by a norm that is rounded otherwise
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        else:
            assert [n for n, value in expected.items() if not torch.equal(found[n], value)] == [], name


def on_mesh(rank: int, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Train on the batches of four ranks; where there are two, each has those of two."""
    mesh = init_device_mesh("cpu", shape)
    run = Run(range(rank, 4, shape[0] * shape[1]), mesh=mesh)
    run.train(*range(STEPS))
    return run.values()


def test_replicas_of_two_ranks_are_bitwise_two_with_more_micro_batches() -> None:
    two, four = (whole(run_ranks(shape[0] * shape[1], on_mesh, shape))[0] for shape in ((1, 2), (2, 2)))
    assert [name for name, value in two.items() if not torch.equal(four[name], value)] == []
