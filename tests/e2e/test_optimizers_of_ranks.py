"""Other optimizers than Adam on several ranks: bitwise a plain loop over the batches of all of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile import Program
from megacompile.state import torch_optimizer
from megacompile.state.master_layout import own_part
from megacompile.state.torch_optimizer import Several
from tests.e2e import test_any_optimizer as alone
from tests.support.models import Plain
from tests.support.ranks import run_ranks, whole

STEPS, SAVED = 5, 3
MODULES = {"Lion": "lion_pytorch", "schedule-free": "schedulefree"}
WHOLE = ("Adafactor", "Adafactor of transformers", "the user's own")


def by_elements(model: nn.Module) -> Several:
    """Each parameter has one of the optimizers that step over single elements, in turn."""
    names = [n for n in alone.MAKES if n not in WHOLE and importlib.util.find_spec(MODULES.get(n, "torch"))]
    parameters = list(model.parameters())
    return Several([alone.MAKES[n](parameters[i :: len(names)]) for i, n in enumerate(names)])


OPTIMIZERS: dict[str, Callable[[nn.Module], Several]] = {"by elements": by_elements}


class Run:
    """A program, and how it trains on the batches of some ranks."""

    def __init__(self, name: str, ranks: range, seed: int = 0, load: Path | None = None) -> None:
        torch.manual_seed(seed)
        model, self.ranks = Plain(width=40, depth=4), ranks
        options: dict[str, Any] = {"compute_dtype": torch.float32, "device": "cpu"}
        self.program: Program = megacompile.compile(
            model, "1GB", optimizer=OPTIMIZERS[name](model), **options
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.program.optimizer, 0.8)
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


def crossing(program: Program, rank: int) -> bool:
    """Return whether a rank has a part of some parameter, and another rank the rest."""
    groups = program._session.runtime.state.groups  # type: ignore[union-attr]
    owned = ((s.parameter.numel, own_part(g, s, rank)[0]) for g in groups for s in g.slots)
    return any(0 < part.stop - part.start < numel for numel, part in owned)


def on_one_rank(rank: int, size: int, names: list[str], folder: Path) -> dict[str, list[Any]]:
    """Train from the start, saving in the middle, and from the middle where one process saved."""
    results, own = {}, range(rank, size, size)
    for name in names:
        with mock.patch.object(torch_optimizer, "CHUNK", 64):
            run = Run(name, own, seed=rank)
            run.train(*range(SAVED))
            run.program.save(folder / "ranks" / name)
            assert crossing(run.program, rank) == (name == "by elements")
            run.train(*range(SAVED, STEPS))
            resumed = Run(name, own, seed=rank, load=folder / "one" / name)
            resumed.train(*range(SAVED, STEPS))
            results[name] = [run.values(), resumed.values()]
    return results


def plain(name: str, ranks: range) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Plain(width=40, depth=4)
    optimizer = OPTIMIZERS[name](model)
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
def test_each_steps_its_shard_bitwise_and_any_number_resumes(size: int, tmp_path: Path) -> None:
    """Ranks from the start, ranks from a checkpoint of one process, one process from theirs."""
    everyone = range(size)
    for name in OPTIMIZERS:
        one = Run(name, everyone)
        one.train(*range(SAVED))
        one.program.save(tmp_path / "one" / name)
        one.program.close()
    first, *_ = whole(run_ranks(size, on_one_rank, size, list(OPTIMIZERS), tmp_path))
    for name in OPTIMIZERS:
        one = Run(name, everyone, load=tmp_path / "ranks" / name)
        one.train(*range(SAVED, STEPS))
        expected, results = plain(name, everyone), [*first[name], one.values()]
        for way, found in zip(("ranks", "resumed by ranks", "resumed by one"), results, strict=True):
            different = [n for n, value in expected.items() if not torch.equal(found[n], value)]
            assert different == [], (name, way)
