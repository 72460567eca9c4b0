"""A forward is traced in the ways of the table, in its order, and in no more of them than it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.capture import attempts
from megacompile.capture.trace import How, Request
from megacompile.errors import UntraceableError


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().sum()


class Scaled(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx, self.linear = index, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.layer_idx


class ByIndex(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Scaled, range(3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return super().forward(x)


class ReadsMask(Plain):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        return super().forward(input_ids[..., None].float().expand(2, 3, 4)) * attention_mask.sum()


class Notes(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = True
        return super().forward(x)


class Branches(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(-x if x.max().item() > 1 else x)


class BranchesInFrozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.tower(x))


class Tower(Plain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return -x if x.max().item() > 1 else x


class BranchesOnTrained(BranchesInFrozen):
    def __init__(self) -> None:
        super().__init__()
        self.tower.requires_grad_(True)


FIRST, VALUES = "equal layers once", "values of the batch on the host"
_X = {"x": torch.ones(2, 4)}
_IDS = torch.ones(2, 3, dtype=torch.long)
_PADDED = {"input_ids": _IDS, "attention_mask": _IDS, "labels": _IDS}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str]]] = {
    "plain": (Plain, _X, [FIRST]),
    "layers that differ": (ByIndex, _X, [FIRST, "each layer"]),
    "a mask that is read": (ReadsMask, _PADDED, [FIRST, "without the proof of padding"]),
    "an attribute": (Notes, _X, [FIRST, "a second forward"]),
    "a branch on the batch": (Branches, _X, [FIRST, VALUES]),
    "a branch in a frozen part": (BranchesInFrozen, _X, [FIRST, VALUES, "a frozen part in eager PyTorch"]),
}


def made(model: nn.Module, batch: dict[str, Any], patch: pytest.MonkeyPatch) -> tuple[list[str], Any]:
    """The names of the attempts that a capture makes, and what came of them."""
    names: list[str] = []

    def recorded(attempt: attempts.Attempt) -> attempts.Attempt:
        def way(how: Any, reason: Any) -> Any:
            further = attempt.way(how, reason)
            names.extend([attempt.name] * (further is not None))
            return further

        return replace(attempt, way=way)

    patch.setattr(attempts, "ATTEMPTS", tuple(map(recorded, attempts.ATTEMPTS)))
    forms = {name: (p.dtype, p.stride()) for name, p in model.named_parameters()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    request = Request(model, (), batch, forms, trained, padded_right="attention_mask" in batch)
    return names, attempts.capture(request, How())


@pytest.mark.parametrize("name", CASES)
def test_no_more_ways_are_tried_than_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, expected = CASES[name]
    names, found = made(model(), batch, monkeypatch)
    assert names == expected
    assert found.get().trainable >= {"linear.weight"}


def test_what_nothing_helps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names, found = made(BranchesOnTrained(), _X, monkeypatch)
    assert names == [FIRST, VALUES]
    with pytest.raises(UntraceableError, match=r"test_attempts\.py.* of tower"):
        found.get()
