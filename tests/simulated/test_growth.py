"""What the driver takes of the device after a plan: planned again within less, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megacompile
from megacompile.api.bound_programs import Bindings
from megacompile.api.pipeline import Compiler
from tests.simulated.numbers import runtime
from tests.simulated.test_budgets import CONTEXT, batch, compiled, least_budget, llama, small_context

assert small_context  # a fixture
LENGTH, STEPS, MIB = 256, 3, 1 << 20


@pytest.fixture(autouse=True)
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW of state on the device rounds otherwise."""
    monkeypatch.setattr(Compiler, "_may_reside", lambda *_: ())


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return llama()


def train(program: megacompile.Program, first: int = 0, last: int = STEPS) -> list[float]:
    return [float(program.train_step(batch(i, LENGTH)).loss) for i in range(first, last)]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return train(compiled(model(), LENGTH, "cpu", 1 << 30))


def grown(nbytes: int) -> None:
    runtime.set(context=CONTEXT + nbytes)


def test_kernels_that_take_more_than_is_left_to_them_are_planned_for(
    expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are loaded after the plan, and before the model is taken over."""
    ready = Bindings.make_ready

    def load(self: Bindings, *args: Any) -> None:
        ready(self, *args)
        grown(48 * MIB)

    budget = least_budget(model(), LENGTH) + 64 * MIB
    monkeypatch.setattr(Bindings, "make_ready", load)
    program = compiled(model(), LENGTH, "cuda", budget)
    assert program.memory.budget_bytes < budget - CONTEXT - 48 * MIB
    assert train(program) == expected
    program.close()
    grown(0)
    untouched = model()
    with pytest.raises(megacompile.BudgetError, match="CUDA context"):
        compiled(untouched, LENGTH, "cuda", budget - 32 * MIB)
    assert all(bool(p.isfinite().all()) for p in untouched.parameters())


@pytest.mark.parametrize("nbytes", [16 * MIB, 48 * MIB])
def test_what_the_first_step_loads_is_planned_for_before_the_second(
    expected: list[float], nbytes: int
) -> None:
    program = compiled(model(), LENGTH, "cuda", least_budget(model(), LENGTH) + 64 * MIB)
    before = program.memory.budget_bytes
    losses = train(program, 0, 1)
    grown(nbytes)
    assert losses + train(program, 1) == expected
    assert before - program.memory.budget_bytes == (nbytes if nbytes > 16 * MIB else 0)
    program.close()


@pytest.mark.parametrize("nbytes", [48 * MIB, 1 << 30])
def test_where_too_little_is_left_the_step_is_refused(nbytes: int) -> None:
    """Before it begins: the state is whole, and can be read."""
    program = compiled(model(), LENGTH, "cuda", least_budget(model(), LENGTH))
    train(program, 0, 1)
    state = program.state_dict()
    grown(nbytes)
    with pytest.raises(megacompile.BudgetError, match="CUDA context"):
        train(program, 1, 2)
    assert all(torch.equal(state[name], value) for name, value in program.state_dict().items())
    program.close()
