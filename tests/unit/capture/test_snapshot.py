"""What is changed at a model between steps: followed as eager PyTorch would, or refused by name."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.capture.fingerprint import model_settings
from megacompile.errors import ProgramError
from tests.support.reference import EagerTrainer, assert_equal

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
        model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, planner="full-recompute"
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
    with pytest.warns(UserWarning, match="attributes of the model's modules changed") as said:
        for count, change in enumerate(changes, 2):
            change(model)
            change(eager)
            assert float(program.train_step(BATCH).loss) == trainer.train_step([BATCH])
            assert len(program._session.decided.programs) == count
    assert len(said) == 1
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


@dataclass(slots=True)
class Scale:
    by: float = 1.0


class Data:
    def __init__(self) -> None:
        self.scale = Scale()


class Held(nn.Module):
    """Computes with what modules hold besides parameters, buffers and plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.config, self.table, self.many = Data(), {"scales": [1.0, 1.0]}, [1.0] * 2000
        self.fixed, self.listed = torch.ones(8), [torch.ones(8)]
        self.activation = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        scale = self.config.scale.by * self.table["scales"][0] * self.many[7]
        return (self.activation(self.layer(x)) * scale * self.fixed + self.listed[0]).square().mean()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.config.scale, "by", 3.0),
        lambda m: m.table["scales"].__setitem__(0, 3.0),
        lambda m: m.many.__setitem__(7, 3.0),
        lambda m: setattr(m, "table", {"scales": [2.0]}),
        lambda m: setattr(m, "fixed", torch.full((8,), 2.0)),
        lambda m: m.fixed.fill_(2.0),
        lambda m: m.listed.__setitem__(0, torch.full((8,), 2.0)),
        lambda m: m.listed[0].fill_(2.0),
        lambda m: setattr(m, "activation", torch.sigmoid),
        lambda m: m.layer.register_forward_hook(lambda module, args, out: 3 * out),
        lambda m: m.layer.register_forward_pre_hook(lambda module, args: (3 * args[0],)),
        lambda m: setattr(m, "forward", MethodType(lambda self, x: 2 * Held.forward(self, x), m)),
    ],
)
def test_what_modules_hold_is_followed(change: Callable[[Held], Any]) -> None:
    torch.manual_seed(0)
    model = Held()
    eager = copy.deepcopy(model)
    program = megacompile.compile(
        model,
        "1GB",
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        compute_dtype=torch.float32,
        planner="full-recompute",
    )
    trainer = EagerTrainer(eager, torch.optim.AdamW(eager.parameters(), lr=1e-2))
    assert float(program.train_step(BATCH).loss) == trainer.train_step([BATCH])
    before = trainer.loss(BATCH)
    change(model)
    change(eager)
    assert before != trainer.loss(BATCH)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Compiling another program")
        for _ in range(2):
            assert float(program.train_step(BATCH).loss) == trainer.train_step([BATCH])
    program.close()


@pytest.mark.parametrize(
    "register",
    [
        lambda m: m.layers[0].weight.register_hook(lambda gradient: 0 * gradient),
        lambda m: m.layers[0].weight.register_post_accumulate_grad_hook(lambda parameter: None),
        lambda m: m.layers.register_full_backward_hook(lambda module, given, out: None),
        lambda m: nn.modules.module.register_module_full_backward_hook(lambda module, given, out: None),
    ],
)
def test_gradient_hooks_are_refused_whenever_they_come(register: Callable[[Scaled], Any]) -> None:
    program, model = start()
    program.train_step(BATCH)
    other = Scaled()
    handles = [register(model), register(other)]
    with pytest.raises(megacompile.MegacompileError, match="hook"):
        program.train_step(BATCH)
    with pytest.raises(megacompile.MegacompileError, match="hook"):
        megacompile.compile(other, "1GB", optimizer=torch.optim.AdamW(other.parameters()))
    for handle in handles:
        handle.remove()
    program.train_step(BATCH)
    program.close()


def test_parametrizations_after_compilation_are_refused_by_name() -> None:
    program, model = start()
    nn.utils.parametrize.register_parametrization(model.layers[0], "bias", nn.Tanh())
    with pytest.raises(megacompile.MegacompileError, match="parameter"):
        program.train_step(BATCH)
    program.close()


def test_objects_that_are_no_data_are_looked_at_by_identity() -> None:
    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.steps = model, 0

    model: Any = Scaled()
    model.trainer, model.optimizer = Trainer(model), torch.optim.AdamW(model.parameters())
    before = model_settings(model, evaluate=False)
    model.trainer.steps = 1
    model.optimizer.param_groups[0]["lr"] = 1.0
    assert model_settings(model, evaluate=False) == before
    model.trainer = Trainer(model)
    assert model_settings(model, evaluate=False) != before


class Counting(Scaled):
    """Computes with an iterator that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.counts)


def test_a_forward_that_advances_an_iterator_is_refused_by_name() -> None:
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters())
    program = megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32)
    with pytest.raises(megacompile.CaptureError, match=r"The forward changes counts, .*pass what changes"):
        program.train_step(BATCH)


def test_outputs_that_hooks_keep_do_not_compile_again() -> None:
    program, model = start()
    outputs: dict[str, Tensor] = {}
    model.layers[0].register_forward_hook(lambda module, args, out: outputs.update(a=out))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program.train_step(BATCH)
        program.train_step(BATCH)
    assert outputs
    program.close()


GLOBAL = 1.0


class Outside(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * GLOBAL


def test_recompile_looks_anew_at_what_code_reads_outside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Outside()
    eager = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager))
    program = megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32)
    trainer = EagerTrainer(eager, theirs)
    assert float(program.train_step(BATCH).loss) == trainer.train_step([BATCH])
    frozen = float(program.evaluate(BATCH))
    monkeypatch.setitem(globals(), "GLOBAL", 3.0)
    assert float(program.evaluate(BATCH)) == frozen
    program.recompile()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was asked for
        for _ in range(2):
            assert float(program.train_step(BATCH).loss) == trainer.train_step([BATCH])
    assert_equal(program, trainer)
    program.close()


class Repeats(torch.autograd.Function):
    """Repeat columns as often as a global says, by what cannot be traced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(numpy.tile(x.numpy(), (1, int(GLOBAL))))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(grad.numpy().reshape(len(grad), int(GLOBAL), -1).sum(1))


class Repeated(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = Repeats.apply(self.layers(x))
        return hidden.square().mean(0).sum()


def test_recompile_looks_anew_at_functions_that_run_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Repeated()
    eager = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    program = megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32)
    assert float(program.evaluate(BATCH)) == eager(**BATCH).item()
    monkeypatch.setitem(globals(), "GLOBAL", 3.0)
    program.recompile()
    assert float(program.evaluate(BATCH)) == eager(**BATCH).item()
    program.close()


@pytest.mark.slow_cases(r"1\.0")
@pytest.mark.parametrize("clip", [None, 1.0])
def test_recompile_changes_no_bit_where_nothing_changed(clip: float | None) -> None:
    states = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Scaled()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        program = megacompile.compile(
            model, "1GB", optimizer=optimizer, max_grad_norm=clip, compute_dtype=torch.float32
        )
        if again:
            program.recompile()  # before anything is compiled
        for _ in range(2):
            program.train_step(BATCH)
            if again:
                program.recompile()
        program.forward_backward(BATCH)
        if again:
            with pytest.raises(ProgramError, match="Gradients are waiting"):
                program.recompile()
        program.optimizer_step()
        states.append(program.state_dict())
        program.close()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
