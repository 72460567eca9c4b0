"""Any optimizer: its own class steps on the host, bitwise as in a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.host import foreign
from tests.support.models import Plain

Make = Callable[[Any], torch.optim.Optimizer]


def lion(groups: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = pytest.importorskip("lion_pytorch").Lion(groups, weight_decay=0.1)
    return made


def schedule_free(groups: Any) -> torch.optim.Optimizer:
    made = pytest.importorskip("schedulefree").AdamWScheduleFree(groups, warmup_steps=3)
    made.train()
    assert isinstance(made, torch.optim.Optimizer)
    return made


def transformers_adafactor(groups: Any) -> torch.optim.Optimizer:
    made = pytest.importorskip("transformers.optimization").Adafactor(groups, relative_step=False)
    assert isinstance(made, torch.optim.Optimizer)
    return made


class Heavy(torch.optim.SGD):
    """A class of the user's own, which keeps a number of each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["largest"] = max(state.get("largest", 0.0), float(p.grad.abs().max()))
                    state["mean"] = p.grad + state["mean"] * 0.5 if "mean" in state else p.grad.clone()
                    p.add_(state["mean"] / (state["largest"] + 1.0), alpha=-group["lr"])


MAKES: dict[str, Make] = {
    "SGD": lambda g: torch.optim.SGD(g, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, plain": torch.optim.SGD,
    "AMSGrad": lambda g: torch.optim.Adam(g, amsgrad=True),
    "Adagrad": lambda g: torch.optim.Adagrad(g, initial_accumulator_value=0.1),
    "RMSprop": lambda g: torch.optim.RMSprop(g, centered=True, momentum=0.5),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": lambda g: torch.optim.ASGD(g, t0=2),
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
    "Adafactor of transformers": transformers_adafactor,
    "Lion": lion,
    "schedule-free": schedule_free,
    "the user's own": Heavy,
}


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(4, n, generator=generator) for k, n in (("x", 16), ("y", 3))}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "lr": 1e-2}, {"params": vectors, "lr": 3e-3}]


class Pair:
    """A program, and the plain loop that it is to equal."""

    def __init__(
        self, make: Make, model: nn.Module, groups: Callable[[nn.Module], Any] = groups_of, **options: Any
    ) -> None:
        self.eager, self.options, self.groups, self.make = copy.deepcopy(model), options, groups, make
        self.plain = make(groups(self.eager))
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.plain, 0.8)
        self.compile(model)

    def compile(self, model: nn.Module) -> None:
        options = {"hbm_budget": "1GB", "compute_dtype": torch.float32, "max_grad_norm": 0.5} | self.options
        self.program = megacompile.compile(model, optimizer=self.make(self.groups(model)), **options)
        self.ours = torch.optim.lr_scheduler.ExponentialLR(self.program.optimizer, 0.8)

    def step(self, *batches: dict[str, Any]) -> None:
        self.program.train_step(list(batches))
        self.plain.zero_grad()
        for one in batches:
            (self.eager(**one) / len(batches)).backward()
        if self.options.get("max_grad_norm", 0.5) is not None:
            nn.utils.clip_grad_norm_(self.eager.parameters(), 0.5)
        self.plain.step()
        self.schedule.step()
        self.ours.step()

    def check(self) -> None:
        state = self.program.state_dict()
        for name, value in self.eager.named_parameters():
            assert torch.equal(state[name], value), name


@pytest.mark.parametrize("name", MAKES)
def test_trains_bitwise_as_a_plain_loop_and_resumes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two param groups, a schedule, clipping, micro-batches, chunks, and a checkpoint in the middle."""
    monkeypatch.setattr(foreign, "CHUNK", 64)
    torch.manual_seed(0)
    model = Plain(depth=2)
    fresh = copy.deepcopy(model)
    pair = Pair(MAKES[name], model)
    for index in range(3):
        pair.step(batch(index), batch(index + 10))
    pair.program.save(tmp_path / "saved")
    before = pair.ours.state_dict()
    pair.program.close()
    pair.compile(fresh)
    pair.program.prepare(batch(0))
    pair.program.load(tmp_path / "saved")
    pair.ours.load_state_dict(before)
    for index in range(3, 6):
        pair.step(batch(index), batch(index + 10))
    pair.check()
    pair.program.close()


class Layers(nn.Module):
    """A second layer that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor, both: bool = True) -> Tensor:
        h = self.first(x)
        return nn.functional.mse_loss(self.third(h + self.second(x) if both else h), y)


@pytest.mark.parametrize("name", ["RAdam", "Adafactor", "schedule-free"])
def test_what_has_no_gradient_in_a_step_is_left_alone(name: str) -> None:
    torch.manual_seed(0)
    pair = Pair(MAKES[name], Layers(), max_grad_norm=None)
    for index, both in enumerate((False, True, False, False, True)):
        pair.step({**batch(index), "both": both})
    pair.check()
    pair.program.close()


@pytest.mark.parametrize("name", ["SGD", "Adafactor"])
def test_masters_of_bfloat16_weights_are_stepped_in_fp32(name: str) -> None:
    """Halves are joined and split bit for bit: one step by gradients that are given."""
    torch.manual_seed(0)
    model = Plain(depth=1)
    eager = copy.deepcopy(model)
    plain = MAKES[name](groups_of(eager))
    program = megacompile.compile(
        model, "1GB", optimizer=MAKES[name](groups_of(model)), example_batch=batch(0)
    )
    state = program._session.runtime.state  # type: ignore[union-attr]
    named = dict(eager.named_parameters())
    for step in range(3):
        for group in state.groups:
            if not group.trainable:
                continue
            grad = torch.zeros(group.elements)
            for slot in group.slots:
                p = named[slot.parameter.name]
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
                grad[slot.offset :][: p.numel()] = p.grad.reshape(-1)
            form = state.form
            assert isinstance(form, foreign.Foreign)
            state.update(group.index, grad, form.settings(), range(len(group.slots)), threads=1)
        plain.step()
    values = program.state_dict()
    assert all(torch.equal(values[name], p) for name, p in named.items())
    program.close()


def test_a_setting_that_asks_for_state_that_is_not_there_is_refused() -> None:
    torch.manual_seed(0)
    pair = Pair(MAKES["SGD, plain"], Plain(depth=1))
    pair.step(batch(0))
    pair.program.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(megacompile.MegacompileError, match=r"SGD keeps momentum_buffer .* compile the model"):
        pair.program.train_step(batch(1))
    pair.program.optimizer.param_groups[0]["momentum"] = 0
    pair.check()
    pair.step(batch(1))
    pair.check()
    pair.program.close()


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pair = Pair(MAKES["SGD"], Plain(depth=1))
    pair.step(batch(0))
    pair.program.save(tmp_path / "saved")
    pair.program.close()
    other = Pair(MAKES["RAdam"], Plain(depth=1))
    other.program.prepare(batch(0))
    with pytest.raises(
        megacompile.MegacompileError, match=r"state of torch\.optim\.sgd\.SGD and this .*\.RAdam"
    ):
        other.program.load(tmp_path / "saved")
    other.program.close()
