"""Updates through the program: whose hyper-parameters, taken when, counted how."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.state.masters import HostState
from tests.support.models import Plain
from tests.support.reference import EagerTrainer


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(4, n, generator=generator) for k, n in (("x", 16), ("y", 3))}


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.3, "lr": 1e-2},
        {"params": vectors, "weight_decay": 0.0, "betas": (0.5, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=3e-3)


@pytest.mark.parametrize("by_hand", [False, True])
def test_rates_are_those_of_the_call_whatever_happens_while_updates_fly(
    by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates are held back until every setting was changed; they must not see the change."""
    torch.manual_seed(0)
    model = Plain(depth=2)
    eager = copy.deepcopy(model)
    trainer = EagerTrainer(eager, optimizer_of(eager), max_grad_norm=0.5)
    program = megacompile.compile(
        model, "40KB", optimizer=optimizer_of(model), compute_dtype=torch.float32, max_grad_norm=0.5
    )
    changed, begun = threading.Event(), threading.Event()
    update = HostState.update

    def held(self: HostState, *arguments: Any, **options: Any) -> None:
        begun.set()
        assert changed.wait(60)
        update(self, *arguments, **options)

    monkeypatch.setattr(HostState, "update", held)
    for index in range(3):
        changed.clear()
        begun.clear()
        if by_hand:
            program.forward_backward(batch(index))
            program.optimizer_step()
        else:
            program.train_step(batch(index))
        assert begun.wait(60)  # updates are under way
        kept = [dict(group) for group in program.optimizer.param_groups]
        for group in program.optimizer.param_groups:
            group.update(lr=1e3, weight_decay=1e3, betas=(0.0, 0.0), eps=1.0)
        changed.set()
        program.synchronize()
        for group, settings in zip(program.optimizer.param_groups, kept, strict=True):
            group.update(settings)
        trainer.train_step([batch(index)])
    state = program.state_dict()
    assert all(torch.equal(state[n], p) for n, p in eager.named_parameters())
    program.close()


class Layers(nn.Module):
    """A second layer that only some batches use, after a first whose gradient only some let through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor, both: bool = True, cut: bool = False) -> Tensor:
        h = self.first(x)
        if cut:
            h = h.detach()
        if both:
            h = h + self.second(x)
        return nn.functional.mse_loss(self.third(h), y)


def as_eager_trains(model: nn.Module, batches: list[dict[str, Any]], **settings: float) -> None:
    """Hold a program to eager PyTorch over steps whose batches use different parameters."""
    eager = copy.deepcopy(model)
    plain = torch.optim.AdamW(eager.parameters(), lr=1e-2, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)
    program = megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32)
    for values in batches:
        program.train_step(values)
        plain.zero_grad()
        eager(**values).backward()
        plain.step()
    state = program.state_dict()
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-5, atol=1e-6)
    program.close()


def test_a_group_without_gradient_is_not_counted(recwarn: pytest.WarningsRecorder) -> None:
    """Bias correction goes by each group's own updates, as torch counts them by parameter."""
    torch.manual_seed(0)
    uses = (True, False, False, True, False, True)
    as_eager_trains(Layers(), [{**batch(index), "both": both} for index, both in enumerate(uses)])


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_what_the_loss_has_no_gradient_for_does_not_decay() -> None:
    """As in torch, whose optimizers pass over parameters without a gradient; a zero one is something else."""
    torch.manual_seed(0)
    cuts = (False, True, True, False)
    batches = [{**batch(index), "cut": cut} for index, cut in enumerate(cuts)]
    as_eager_trains(Layers(), batches, weight_decay=0.5)


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_a_parameter_that_gets_its_first_gradient_later_trains_from_then_on() -> None:
    torch.manual_seed(0)
    cuts = (True, False, True, False)
    as_eager_trains(Layers(), [{**batch(index), "cut": cut} for index, cut in enumerate(cuts)])
