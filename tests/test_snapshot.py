"""What is changed at a model between steps: followed as eager PyTorch would, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.capture.snapshot import model_settings
from tests.reference import EagerTrainer

BATCH = {"x": torch.linspace(-1, 1, 16).view(2, 8)}


class Scaled(nn.Module):
    scale: float
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        self.scale = 1.0
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) * self.scale + self.shift).square().mean()


def start() -> tuple[megacompile.Program, Scaled]:
    torch.manual_seed(0)
    model = Scaled()
    optimizer = torch.optim.AdamW(model.layers[0].parameters(), lr=1e-2)
    program = megacompile.compile(
        model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, policy="full-recompute"
    )
    return program, model


def test_attributes_and_buffers_are_followed() -> None:
    program, model = start()
    eager = copy.deepcopy(model)
    trainer = EagerTrainer(eager, torch.optim.AdamW(eager.layers[0].parameters(), lr=1e-2))
    assert float(program.train_step(BATCH).loss) == trainer.train_step([BATCH])
    changes: list[Callable[[Scaled], Any]] = [
        lambda m: setattr(m, "scale", 3.0),
        lambda m: setattr(m, "shift", torch.full((8,), 2.0)),
        lambda m: setattr(m.layers[1], "p", 0.0),
    ]
    for change in changes:
        change(model)
        change(eager)
        with pytest.warns(UserWarning, match="attributes of the model's modules changed"):
            loss = float(program.train_step(BATCH).loss)
        assert loss == trainer.train_step([BATCH])
    program.close()


def test_what_cannot_be_followed_is_refused_by_name() -> None:
    program, model = start()
    weight = model.layers[0].weight
    for compiled in (False, True):  # before the first batch, and after it
        weight.requires_grad_(False)
        with pytest.raises(megacompile.MegacompileError, match=r"requires_grad of layers\.0\.weight"):
            program.train_step(BATCH)
        weight.requires_grad_(True)
        model.layers[0].weight = nn.Parameter(torch.ones(8, 8))
        with pytest.raises(megacompile.MegacompileError, match=r"layers\.0\.weight was assigned"):
            program.train_step(BATCH)
        model.layers[0].weight = weight
        if not compiled:
            program.train_step(BATCH)
    program.close()
    program, model = start()
    program.optimizer.add_param_group({"params": list(model.layers[2].parameters())})
    with pytest.raises(megacompile.MegacompileError, match="param groups changed"):
        program.train_step(BATCH)


def test_settings_tell_values_apart_that_are_equal() -> None:
    model = Scaled()
    seen = set()
    for value in (1, 1.0, True, "1", None, 0.0, -0.0):
        model.scale = value  # type: ignore[assignment]
        seen.add(model_settings(model, evaluate=False))
        assert model_settings(model, evaluate=False) in seen
    assert len(seen) == 7
    model.eval()
    assert model_settings(model, evaluate=False) not in seen
    assert model_settings(model, evaluate=True) == model_settings(model.train(), evaluate=True)
