"""Frozen parts that torch cannot trace run in eager PyTorch inside of a step, beside eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

import megacompile
from megacompile.errors import BudgetError, CaptureError, MegacompileError

BETAS = {"lr": 1e-2, "weight_decay": 0.1}


class Tower(nn.Module):
    """Branches on what it computes, and calls NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 16), nn.Linear(16, 16)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, pixels: Tensor, *, pool: bool = False) -> BaseModelOutputWithPooling:
        hidden = self.inner(pixels)
        if hidden.abs().max().item() > 0.5:
            hidden = hidden / 2
        ordered = torch.from_numpy(numpy.sort(hidden.detach().cpu().numpy(), -1)).to(hidden)
        states = self.outer(hidden + ordered) * self.scale
        return BaseModelOutputWithPooling(states, states.mean(1) if pool else None)


class Model(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.tower = nn.Embedding(32, 16), tower
        self.project, self.mix, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        tower.requires_grad_(False)

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        seen = self.project(self.tower(pixels, pool=True).pooler_output)
        hidden = torch.tanh(self.mix(self.table(ids) + seen[:, None]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def batch(number: int, length: int = 8) -> dict[str, Tensor]:
    """A batch of which every other takes the other branch of the tower."""
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randn(2, 4, 12, generator=generator) * (0.05 if number % 2 else 3)
    return {"ids": torch.randint(0, 32, (2, length), generator=generator), "pixels": pixels}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **BETAS)


def compiled(model: nn.Module, budget: str = "1MB") -> megacompile.Program:
    return megacompile.compile(
        model, budget, optimizer=adamw(model), compute_dtype=torch.float32, device="cpu"
    )


STEPS: list[Any] = [batch(0), batch(1), [batch(2), batch(3)], batch(5, 12)]


@pytest.mark.slow_cases(r"ample")
@pytest.mark.parametrize("tight", [False, True], ids=["ample", "least"])
def test_trains_as_eager_does(tight: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, eager = Model(Tower()), Model(Tower())
    eager.load_state_dict(model.state_dict())
    budget = "1MB"
    if tight:
        with pytest.raises(BudgetError) as error:
            compiled(copy.deepcopy(model), "1kB").prepare(batch(4, 12))
        budget = f"{error.value.least_bytes}B"
    called = []
    model.tower.register_forward_hook(lambda *_: called.append(1))
    program, optimizer = compiled(model, budget), adamw(eager)
    for number, step in enumerate(STEPS):
        if number == 3:  # resumed: the part is found anew
            program.save(tmp_path / "state")
            program.close()
            program = compiled(Model(Tower()), budget)
            program.prepare(batch(4, 12))
            program.load(tmp_path / "state")
        optimizer.zero_grad()
        micro = step if isinstance(step, list) else [step]
        loss = torch.stack([eager(**each) for each in micro]).mean()
        loss.backward()
        optimizer.step()
        assert float(program.train_step(step).loss) == pytest.approx(loss.item(), rel=1e-6)
    assert "tower is frozen and cannot be traced" in caplog.text
    assert called == [1]  # where the model is traced, not where the part runs
    assert float(program.evaluate(batch(6))) == pytest.approx(eager(**batch(6)).item(), rel=1e-6)
    state = program.state_dict()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=2e-6)
        if name.startswith("tower"):
            assert torch.equal(state[name], value)
    assert program.memory.device_peak_bytes <= program.memory.predicted_peak_bytes


class Below(Tower):
    def forward(self, pixels: Tensor, *, pool: bool = False) -> Any:
        return super().forward(pixels[pixels.sum((1, 2)) > self.scale], pool=pool)


class Counting(Tower):
    def forward(self, pixels: Tensor, *, pool: bool = False) -> Any:
        self.scale += 1
        return super().forward(pixels, pool=pool)


class Leaving(Tower):
    def forward(self, pixels: Tensor, *, pool: bool = False) -> Any:
        output = super().forward(pixels, pool=pool)
        self.last = output.pooler_output
        return output


class Behind(Model):
    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        moved = pixels + self.table.weight.mean()
        return super().forward(ids, moved)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a buffer that it writes": (lambda: Model(Counting()), "writes into its buffers"),
    "an attribute that it leaves": (lambda: Model(Leaving()), "changes last of itself in its forward"),
    "a gradient": (lambda: Behind(Tower()), "is given what has a gradient"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(kind: str) -> None:
    make, said = REFUSED[kind]
    with pytest.raises(CaptureError, match="tower, a frozen") as error:
        compiled(make()).prepare(batch(0))
    assert said in str(error.value)


def test_a_part_that_gives_another_shape_for_other_values_is_stopped() -> None:
    program, given = compiled(Model(Below())), batch(0)
    given["pixels"] = torch.ones(2, 4, 12)
    given["pixels"][0] = -1
    with pytest.raises(MegacompileError, match="tower, a frozen Below, gave or kept something else"):
        program.train_step(given)
