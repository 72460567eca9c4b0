"""``train_step(loss=...)``: a loss computed outside of the program, from what the forward returns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megacompile
from megacompile.runtime.step_results import NonFiniteError
from tests.support.models import batch_for, build


def compiled(model: nn.Module, budget: str = "1GB", **options: Any) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"compute_dtype": torch.float32, "max_grad_norm": 1.0} | options
    return megacompile.compile(model, budget, optimizer=optimizer, **options)


class Many(nn.Module):
    """Returns what it goes on with, views, integers and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.a(x))
        last, own = self.b(hidden), self.c(hidden)
        best = last.argmax(-1)
        return {"hidden": hidden, "both": (last, last), "turned": last.t(), "own": own, "best": best, "n": 3}


def of_many(number: int, outputs: dict[str, Any]) -> Tensor:
    first, second = outputs["both"]
    outputs["own"].div_(outputs["n"])  # in place, as code may
    picked = first.gather(1, outputs["best"][:, None]).mean() - second.logsumexp(-1).mean()
    return (
        (number + 1) * picked
        + outputs["hidden"].square().mean()
        + (outputs["turned"].abs().mean() * outputs["own"]).mean()
    )


@pytest.mark.filterwarnings("ignore:Compiling another program")
@pytest.mark.parametrize("sizes", [(4,), (4, 4), (4, 2)])
def test_trains_as_eager_does_on_whatever_a_forward_returns(sizes: tuple[int, ...]) -> None:
    """One micro-batch, several, and several of unlike sizes."""
    model = Many()
    eager = copy.deepcopy(model)
    program, optimizer = compiled(model), torch.optim.AdamW(eager.parameters(), lr=1e-2)
    for step in range(3):
        given = [torch.randn(n, 8, generator=torch.Generator().manual_seed(step * 9 + n)) for n in sizes]
        losses = [of_many(i, eager(x)) for i, x in enumerate(given)]
        (torch.stack(losses).sum() * 0.5).backward()
        norm = nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        output = program.train_step([(x,) for x in given], weights=[0.5] * len(given), loss=of_many)
        torch.testing.assert_close(torch.stack(output.losses), torch.stack(losses).detach())
        torch.testing.assert_close(output.grad_norm, norm)
    for name, value in program.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[name], rtol=1e-6, atol=1e-6)


def logits_alone(outputs: Any, batch: Any) -> Tensor:
    logits: Tensor = outputs.logits
    return logits


def next_tokens(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def trained_losses(given: list[Any], budget: str, *, outside: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses and weights of two steps of GPT-2, which has dropout."""
    options: dict[str, Any] = {}
    if not outside:
        options["loss_fn"] = lambda outputs, batch: next_tokens(outputs.logits, batch)
    program, inputs = compiled(build("gpt2", layers=2), budget, **options), {}
    if outside:
        inputs = {"loss": lambda i, logits: next_tokens(logits, given[i]), "outputs": logits_alone}
    losses = [torch.stack(program.train_step(given, **inputs).losses) for _ in range(2)]
    return torch.stack(losses), program.state_dict()


def test_equals_the_same_loss_inside_of_the_program() -> None:
    """With the same random numbers; under the least budget too, where activations are computed again."""
    given = [batch_for("gpt2", seed=i) for i in range(2)]
    with pytest.raises(megacompile.BudgetError) as refused:
        trained_losses(given, "1kB", outside=True)
    inside, weights = trained_losses(given, "1GB", outside=False)
    assert not torch.equal(inside[0], inside[1])
    for budget in ("1GB", f"{refused.value.least_bytes}B"):
        found, others = trained_losses(given, budget, outside=True)
        torch.testing.assert_close(found, inside, rtol=1e-6, atol=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(value, others[name], rtol=1e-5, atol=1e-5)


def test_gradients_gathered_by_hand_and_a_prepared_program() -> None:
    """``prepare`` lays the state out for the same program, so no other is compiled."""
    given, found = [batch_for("llama", seed=i) for i in range(2)], []
    for by_hand in (False, True):
        program = compiled(build("llama", layers=1))
        inputs = {"loss": lambda i, logits: next_tokens(logits, given[i]), "outputs": logits_alone}
        program.prepare(given, outputs=logits_alone)
        if by_hand:
            for batch in given:
                inputs["loss"] = lambda i, logits, batch=batch: next_tokens(logits, batch)
                program.forward_backward(batch, weight=0.5, **inputs)
            program.optimizer_step()
        else:
            program.train_step(given, **inputs)
            assert len(program._session.decided.programs) == 1
        found.append(program.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-6, atol=1e-6)


def test_bf16_outputs_have_bf16_gradients() -> None:
    """As autograd gives them; a loss in float32 casts."""
    given = [batch_for("llama")]
    program = compiled(build("llama", layers=1), compute_dtype=torch.bfloat16)
    seen = []

    def loss(number: int, logits: Tensor) -> Tensor:
        seen.append((logits.dtype, logits.requires_grad, logits.device.type))
        return next_tokens(logits.float(), given[0])

    losses = [float(program.train_step(given, loss=loss, outputs=logits_alone).loss) for _ in range(4)]
    assert seen[0] == (torch.bfloat16, True, "cpu")
    assert losses[-1] < losses[0] - 0.1


def test_what_goes_wrong_in_the_loss_leaves_the_state_as_it_was() -> None:
    batch = {"x": torch.randn(4, 8)}
    program = compiled(Many(), max_grad_norm=None)
    program.train_step(batch, loss=of_many)
    before = {name: value.clone() for name, value in program.state_dict().items()}

    def fails(number: int, outputs: Any) -> Tensor:
        raise KeyError("mine")

    for loss, error, words in (
        (fails, KeyError, "mine"),
        (lambda i, outputs: outputs["hidden"], megacompile.MegacompileError, "must return one number"),
        (
            lambda i, outputs: torch.ones(()),
            megacompile.MegacompileError,
            "without a gradient by the outputs",
        ),
        (lambda i, outputs: outputs["hidden"].sum() * torch.inf, NonFiniteError, "no parameter was changed"),
        (
            lambda i, outputs: program.evaluate(batch),
            megacompile.ProgramError,
            "evaluate was called while a step",
        ),
    ):
        with pytest.raises(error, match=words):
            program.train_step(batch, loss=loss)
    after = program.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    program.train_step(batch, loss=of_many)
    assert not torch.equal(program.state_dict()["a.weight"], before["a.weight"])


def test_outputs_without_a_loss_are_refused() -> None:
    with pytest.raises(megacompile.MegacompileError, match="give both"):
        compiled(build("llama", layers=1)).train_step(batch_for("llama"), outputs=logits_alone)
