"""Captures are shared between equal models alone: whatever differs in a model or a call is captured anew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.capture.attempts import Attempts
from megacompile.capture.trace import How, Request
from tests.support import captures
from tests.support.captures import Captures
from tests.support.models import Plain, batch_for, build


class Counted(Captures):
    """Counts captures instead of making them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.made = 0
        monkeypatch.setattr(captures, "capture", self._make)

    def _make(self, _request: Request, how: How) -> Attempts[How, Any]:
        self.made += 1
        attempts: Attempts[How, Any] = Attempts(how)
        attempts.outcome = object()
        return attempts

    def of(self, model: nn.Module, batch: dict[str, Tensor], **options: Any) -> Any:
        forms = {n: (torch.float32, p.stride()) for n, p in model.named_parameters()}
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        given = {"forms": forms, "trained": trained, "loss_fn": None, "evaluate": False} | options
        return self.capture(Request(model, (), batch, **given), How())


@pytest.mark.parametrize("name", ["plain", "llama", "gemma3", "gpt2-dropout"])
def test_equal_models_share_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    first = counted.of(build(name), batch_for(name))
    assert counted.of(build(name, seed=1), batch_for(name, seed=1)) is first
    assert counted.of(copy.deepcopy(build(name)), batch_for(name)) is first
    assert counted.made == 1


def tie(model: nn.Module) -> None:
    model.blocks[1][1].weight = model.blocks[0][1].weight  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.eval(),
        lambda m: m.blocks[2].eval(),
        lambda m: m.first.requires_grad_(False),
        lambda m: m.first.to(torch.float64),
        lambda m: setattr(m, "scale", 2.0),
        lambda m: setattr(m, "forward", lambda x, y: x.sum()),
        lambda m: setattr(m, "table", torch.zeros(3)),
        lambda m: setattr(m.blocks[0][2], "approximate", "tanh"),
        lambda m: m.first.register_forward_hook(lambda *_: None),
        lambda m: m.register_buffer("more", torch.zeros(2)),
        lambda m: m.blocks.append(nn.Identity()),
        tie,
    ],
)
def test_a_model_that_is_set_otherwise_is_captured_anew(
    change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, model = Counted(monkeypatch), Plain()
    counted.of(model, batch_for("plain"))
    change(model)
    counted.of(model, batch_for("plain"))
    assert counted.made == 2


def test_what_capture_is_given_besides_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, batch = Counted(monkeypatch), batch_for("plain")
    counted.of(Plain(), batch)
    counted.of(Plain(), batch_for("plain", size=3))
    counted.of(Plain(), {n: x.double() for n, x in batch.items()})
    counted.of(Plain(), batch, evaluate=True)
    counted.of(Plain(), batch, trained={"first.weight"})
    with torch.no_grad():
        counted.of(Plain(), batch)
    for _ in range(2):
        counted.of(Plain(), batch, loss_fn=lambda out, batch: out)
    assert counted.made == 8


class Own(Plain):
    """A class that is the same in all tests of this module."""


def test_classes_of_a_test_are_told_equal_unless_it_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Plain):
        pass

    counted = Counted(monkeypatch)
    for kind in (Own, Own, Mine, Mine):
        counted.of(kind(), batch_for("plain"))
    assert counted.made == 3
