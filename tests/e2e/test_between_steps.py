"""What lies between steps: faults of earlier ones, other kinds of batch, verdicts that come late.

The proof of a schedule covers one program that repeats; these are the transitions that it does not cover.
"""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.runtime.step_results import NonFiniteError
from megacompile.state.masters import HostState
from tests.support.reference import EagerTrainer, Trace


class Branches(nn.Module):
    """``y`` goes through a layer of its own; a batch without it leaves that layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.a(x)
        if y is not None:
            h = h + 100 * self.b(y)
        return self.c(h).square().mean()


class Rooted(nn.Module):
    """A loss that is finite and has a gradient that is not, where ``z`` is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        first: Any = self.layers[0]
        return (self.layers(x) + torch.sqrt((first.bias * z).square())).square().mean()


X = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))
BOTH, ONE = {"x": X, "y": X}, {"x": X}
GOOD, FAULTY = ({"x": X, "z": torch.tensor(z)} for z in (1.0, 0.0))


def pair(make: type[nn.Module], **options: Any) -> tuple[megacompile.Program, EagerTrainer]:
    torch.manual_seed(0)
    model = make()
    eager = copy.deepcopy(model)
    rates = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    trainer = EagerTrainer(eager, rates, max_grad_norm=options.get("max_grad_norm"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    program = megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, **options)
    return program, trainer


ON_HOST = {"planner": "zero3-like"}  # as a model has it whose state does not fit the device


def nap(program: megacompile.Program, seconds: float = 0.3) -> None:
    """Keep the host's stream busy, so that what is submitted next has not run when the call returns."""
    runtime = program._session.runtime
    assert runtime is not None
    runtime.device.streams.submit("host", ("nap",), (), lambda: time.sleep(seconds))


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_clipping_forgets_the_norms_of_a_branch_that_is_left_out() -> None:
    program, trainer = pair(Branches, max_grad_norm=1.0)
    program.train_step(BOTH)
    trainer.train_step([BOTH])
    ours, trace = program.train_step(ONE).grad_norm, Trace()
    trainer.train_step([ONE], trace)
    assert ours is not None and [float(ours)] == trace.norms
    program.close()


@pytest.mark.filterwarnings("ignore:Compiling another program")
@pytest.mark.parametrize("place", [{}, ON_HOST], ids=["device", "host"])
@pytest.mark.parametrize(("by_hand", "clip"), [(False, 1.0), (True, 1.0), (True, None)])
def test_gradients_of_every_kind_of_batch_are_applied(
    by_hand: bool, clip: float | None, place: dict[str, Any]
) -> None:
    program, trainer = pair(Branches, max_grad_norm=clip, **place)
    norms, trace = [], Trace()
    for _ in range(2):
        if by_hand:
            for batch in (BOTH, ONE):
                program.forward_backward(batch, weight=0.5)
            norms.append(program.optimizer_step().grad_norm)
        else:
            norms.append(program.train_step([BOTH, ONE]).grad_norm)
        trainer.train_step([BOTH, ONE], trace)
    if clip is not None:
        assert [float(norm) for norm in norms if norm is not None] == pytest.approx(trace.norms, rel=1e-6)
    program.train_step(BOTH)  # nothing waits any more
    trainer.train_step([BOTH])
    state = program.state_dict()
    for name, value in trainer.model.named_parameters():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7)
    program.close()


def test_the_step_after_a_skipped_update_counts_right_at_once() -> None:
    states = []
    for wait in (True, False):
        program, _ = pair(Rooted, on_nonfinite="skip", **ON_HOST)
        program.train_step(GOOD)
        nap(program)
        for batch in (FAULTY, GOOD):
            program.train_step(batch)
            if wait:
                program.synchronize()
        states.append(program.state_dict())
        program.close()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_what_a_failed_step_left_in_queues_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = pair(Branches, **ON_HOST)
    program.train_step(BOTH)
    before = program.state_dict()
    runtime = program._session.runtime
    assert runtime is not None
    steps = copy.deepcopy(runtime.state.steps)
    nap(program)
    with monkeypatch.context() as patch:
        patch.setattr(runtime.device, "push", planted)
        with pytest.raises(OSError, match="planted"):
            program.train_step(BOTH)
            program.synchronize()
    program.synchronize()
    assert runtime.state.steps == steps
    after = program.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not runtime.inconsistent
    program.train_step(BOTH)
    program.synchronize()
    assert runtime.state.steps == [[n + 1 for n in of_group] for of_group in steps]
    program.close()


def planted(*arguments: Any) -> None:
    raise OSError("planted")


def test_a_norm_is_there_before_the_updates_that_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = pair(Branches, max_grad_norm=1.0, **ON_HOST)
    read, update = threading.Event(), HostState.update

    def held(self: HostState, *arguments: Any, **options: Any) -> None:
        assert read.wait(60), "nobody could read the norm while updates had not run"
        update(self, *arguments, **options)

    monkeypatch.setattr(HostState, "update", held)
    norm = program.train_step(BOTH).grad_norm
    read.set()
    assert norm is not None and float(norm) > 0
    program.close()


@pytest.mark.parametrize("mode", [{"on_nonfinite": "raise"}, {"max_grad_norm": 1.0}])
def test_closing_tells_of_a_last_step_that_was_not_applied(mode: dict[str, Any]) -> None:
    program, _ = pair(Rooted, **mode)
    program.train_step(FAULTY)
    with pytest.raises(NonFiniteError, match="was not applied"):
        program.close()


def test_modules_whose_names_print_alike_keep_their_own_functions() -> None:
    class Tanh(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.l(x))

    class Sigmoid(Tanh):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.l(x))

    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ModuleList([nn.ModuleList([Tanh(), Tanh()]) for _ in range(2)])  # a.0.0
            self.a_0 = nn.ModuleList([Sigmoid(), Sigmoid()])  # a_0.0

        def forward(self, x: Tensor) -> Tensor:
            for one in (*self.a[0], *self.a[1], *self.a_0):  # type: ignore[misc]
                x = one(x)
            return x.square().mean()

    program, trainer = pair(Alike)
    assert float(program.train_step({"x": X}).loss) == trainer.train_step([{"x": X}])
    program.close()
