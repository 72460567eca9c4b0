"""Data that a forward reads from outside its modules: followed between steps, or refused by name."""

from __future__ import annotations

import itertools
import logging
import os
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.capture.snapshot import model_settings
from tests.support.reference import EagerTrainer

BATCH = {"x": torch.linspace(-1, 1, 32).view(4, 8)}
NUMBER, TENSOR = 1.0, torch.tensor(1.0)
TABLE: dict[str, Any] = {"scale": 1.0, "step": 0}
CONFIG = types.SimpleNamespace(scale=1.0, step=0)
COUNTS, KEPT = itertools.count(1), [0.0]


class Settings:
    scale = 1.0

    def doubled(self) -> float:
        return 2 * NUMBER


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Mixed:
    """Data beside what is none."""

    def __init__(self) -> None:
        self.scale, self.steps, self.log, self.layer = 1.0, 0, logging.getLogger("mixed"), nn.Linear(2, 2)


SETTINGS = Settings()


class Given(nn.Module):
    """A layer, what else modules may hold, and a forward of the test's own."""

    listed: ClassVar = [1.0]
    number = 1.0

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.given = nn.Linear(8, 8), forward
        self.queue, self.slots, self.mixed, self.many = deque([1.0]), Slots(), Mixed(), [1.0] * 2000
        self.counts: Iterator[int] = itertools.count(1)

    @property
    def strength(self) -> float:
        return NUMBER

    def forward(self, x: Tensor) -> Tensor:
        return self.given(self, self.a(x)).square().mean()

    def report(self) -> tuple[Any, ...]:
        return NUMBER, TABLE, CONFIG


def helper(x: Tensor) -> Tensor:
    return x * NUMBER


@torch.no_grad()
def wrapped() -> Tensor:
    return torch.ones(8) * NUMBER


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: globals().__setitem__(name, value)


FOLLOWED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], Any]]] = {
    "number": (lambda m, x: x * NUMBER, put("NUMBER", 3.0)),
    "through a function": (lambda m, x: helper(x), put("NUMBER", 3.0)),
    "through a wrapped function": (lambda m, x: x * wrapped(), put("NUMBER", 3.0)),
    "through a property": (lambda m, x: x * m.strength, put("NUMBER", 3.0)),
    "through a method of an object": (lambda m, x: x * SETTINGS.doubled(), put("NUMBER", 3.0)),
    "inside a comprehension": (lambda m, x: x * sum([NUMBER for _ in range(2)]), put("NUMBER", 3.0)),
    "tensor": (lambda m, x: x * TENSOR, put("TENSOR", torch.tensor(3.0))),
    "entry": (lambda m, x: x * TABLE["scale"], lambda m: TABLE.update(scale=3.0)),
    "table": (lambda m, x: x * TABLE.get("scale", 1.0), lambda m: TABLE.update(scale=3.0)),
    "config": (lambda m, x: x * CONFIG.scale, lambda m: setattr(CONFIG, "scale", 3.0)),
    "class": (lambda m, x: x * Settings.scale, lambda m: setattr(Settings, "scale", 3.0)),
    "list on the class": (lambda m, x: x * m.listed[0], lambda m: m.listed.__setitem__(0, 3.0)),
    "environ": (lambda m, x: x * float(os.environ["SCALE"]), lambda m: os.environ.update(SCALE="3.0")),
    "getenv": (lambda m, x: x * float(os.getenv("SCALE", "1")), lambda m: os.environ.update(SCALE="3.0")),
    "deque": (lambda m, x: x * m.queue[0], lambda m: m.queue.__setitem__(0, 3.0)),
    "slots": (lambda m, x: x * m.slots.scale, lambda m: setattr(m.slots, "scale", 3.0)),
    "beside a module": (lambda m, x: x * m.mixed.scale, lambda m: setattr(m.mixed, "scale", 3.0)),
    "long list": (lambda m, x: x * m.many[7], lambda m: m.many.__setitem__(7, 3.0)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves this module as it was."""
    monkeypatch.setenv("SCALE", "1.0")
    monkeypatch.setattr(Settings, "scale", 1.0)
    monkeypatch.setattr(Given, "listed", [1.0])
    monkeypatch.setattr(Given, "number", 1.0)
    for name in ("NUMBER", "TENSOR"):
        monkeypatch.setitem(globals(), name, globals()[name])
    yield
    TABLE.update(scale=1.0, step=0)
    CONFIG.scale, CONFIG.step = 1.0, 0
    KEPT[:] = [0.0]


def compiled(model: nn.Module) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32)


def trainer_of(forward: Callable[[Any, Tensor], Tensor]) -> tuple[Given, EagerTrainer]:
    torch.manual_seed(0)
    eager = Given(forward)
    return eager, EagerTrainer(eager, torch.optim.AdamW(eager.parameters(), lr=1e-2))


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_code_reads_is_followed(name: str) -> None:
    forward, change = FOLLOWED[name]
    eager, trainer = trainer_of(forward)
    torch.manual_seed(0)
    model = Given(forward)
    program = compiled(model)
    assert float(program.train_step(BATCH).loss) == pytest.approx(trainer.train_step([BATCH]), rel=1e-6)
    before = trainer.loss(BATCH)
    change(model)
    change(eager)
    assert before != trainer.loss(BATCH)
    with pytest.warns(UserWarning, match="Compiling another program"):
        loss = float(program.train_step(BATCH).loss)
    assert loss == pytest.approx(trainer.train_step([BATCH]), rel=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program.train_step(BATCH)
    program.close()


def test_what_the_forward_does_not_read_changes_nothing() -> None:
    model = Given(lambda m, x: x * TABLE["scale"] * CONFIG.scale * m.mixed.scale)
    before = model_settings(model, evaluate=False)
    put("NUMBER", 3.0)(model)  # ``report`` reads it, which no forward calls
    TABLE["step"], CONFIG.step, model.mixed.steps = 1, 1, 1
    model.mixed.log.setLevel(logging.ERROR)
    assert model_settings(model, evaluate=False) == before
    CONFIG.scale = 2.0
    assert model_settings(model, evaluate=False) != before


def counted(m: Any, x: Tensor) -> Tensor:
    global NUMBER
    NUMBER += 1
    return x * NUMBER


def kept(m: Any, x: Tensor) -> Tensor:
    KEPT.append(1.0)
    return x * len(KEPT)


def in_config(m: Any, x: Tensor) -> Tensor:
    CONFIG.step += 1
    return x * CONFIG.step


def on_class(m: Any, x: Tensor) -> Tensor:
    type(m).number += 1
    return x * m.number


@pytest.mark.parametrize(
    ("forward", "named"),
    [
        (counted, "NUMBER"),
        (kept, "KEPT"),
        (in_config, r"CONFIG\.step"),
        (on_class, r"Given\.number"),
        (lambda m, x: x * next(m.counts), "counts"),
        (lambda m, x: x * next(COUNTS), "COUNTS"),
    ],
)
def test_a_forward_that_advances_what_it_reads_is_refused_by_name(
    forward: Callable[[Any, Tensor], Tensor], named: str
) -> None:
    with pytest.raises(megacompile.CaptureError, match=f"The forward changes {named}, .*pass what changes"):
        compiled(Given(forward)).train_step(BATCH)


def test_outputs_that_hooks_keep_do_not_compile_again_and_again() -> None:
    outputs: dict[str, Tensor] = {}
    model = Given(lambda m, x: x)
    model.a.register_forward_hook(lambda module, args, out: outputs.update(a=out))
    program = compiled(model)
    with pytest.warns(UserWarning, match="Compiling another program"):
        program.train_step(BATCH)
        program.train_step(BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program.train_step(BATCH)
    program.close()
