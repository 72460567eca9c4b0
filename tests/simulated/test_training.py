"""Training through ``torch.cuda`` is bitwise that of the CPU backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megacompile
from megacompile.api.pipeline import Compiler
from tests.simulated.numbers import runtime
from tests.support.cuda_programs import program
from tests.support.models import batch_for, build

BUDGET = "1GB"


def train(name: str, device: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    trained = program(build(name), device, BUDGET, **options)
    losses = [float(trained.train_step(batch_for(name, i, size=4, length=64)).loss) for i in range(3)]
    state = trained.state_dict()
    trained.close()
    return losses, state


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No state stays on the device, whose AdamW rounds otherwise than the host's."""
    monkeypatch.setattr(Compiler, "_may_reside", lambda *_: ())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"compute_dtype": torch.bfloat16, "max_grad_norm": 0.5}),
        ("llama", {}),
        ("gpt2-dropout", {"compute_dtype": torch.bfloat16}),
        ("plain", {}),
    ],
)
def test_losses_and_state_are_those_of_the_cpu_backend(
    name: str, options: dict[str, Any], streamed: None
) -> None:
    expected, state = train(name, "cpu", **options)
    before = runtime.count("copies")
    losses, ours = train(name, "cuda", **options)
    assert losses == expected
    assert all(torch.equal(ours[n], v) for n, v in state.items())
    assert runtime.count("copies") > before


def test_updates_of_matrices_pass_through_the_device(streamed: None) -> None:
    """Muon's, which it makes orthogonal."""

    def trained(device: str, budget: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = build("llama", layers=2)
        matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "layers" in n]
        chosen = set(map(id, matrices))
        rest = [p for p in model.parameters() if id(p) not in chosen]
        optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest)]
        options: dict[str, Any] = {"optimizer": optimizers, "max_grad_norm": 0.5, "device": device}
        made = megacompile.compile(model, budget, **options)
        for index in range(3):
            made.train_step(batch_for("llama", index))
        assert "orthogonalize" in str(made.schedule)
        state = made.state_dict()
        made.close()
        return state

    expected, ours = trained("cpu", "1GB"), trained("cuda", "1GB")
    assert all(torch.equal(ours[n], v) for n, v in expected.items())


class MakesNumbers(nn.Module):
    """A tensor that an operator makes where no device is named."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(512, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.mix(x) * torch.ops.aten.arange.default(1024)).square().mean()


def test_what_a_forward_makes_is_on_the_device(streamed: None) -> None:
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        trained = program(MakesNumbers(), device, BUDGET)
        found.append([float(trained.train_step(torch.ones(4, 512)).loss) for _ in range(2)])
        trained.close()
    assert found[0] == found[1]


def test_a_loss_outside_of_the_program(streamed: None) -> None:
    """The results are waited for, and gradients by them come back, over two micro-batches."""
    given = [batch_for("gpt2-dropout", i, size=4, length=64) for i in range(2)]

    def loss(number: int, outputs: Any) -> torch.Tensor:
        labels = given[number]["labels"][:, 1:].flatten()
        return torch.nn.functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels)

    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        options = {"max_grad_norm": 0.5, "planner": "double-buffer"}  # one order of micro-batches for both
        trained = program(build("gpt2-dropout"), device, BUDGET, **options)
        outputs = [trained.train_step(given, loss=loss, outputs=logits) for _ in range(3)]
        found.append(([float(out.loss) for out in outputs], trained.state_dict()))
        trained.close()
    (expected, state), (losses, ours) = found
    assert losses == expected
    assert all(torch.equal(ours[n], v) for n, v in state.items())


def logits(outputs: Any, batch: Any) -> dict[str, torch.Tensor]:
    return {"logits": outputs.logits}
