"""Functions that are replaced for a capture or a load stay torch's own for other threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from megacompile.api.pretrained import parameters_on_meta
from megacompile.capture.patches import REFUSED, Patch, replaced
from megacompile.errors import CaptureError

T = TypeVar("T")


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def elsewhere(call: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()


def gradient() -> Tensor:
    x = torch.ones(2, requires_grad=True)
    y = Double.apply(x)
    y.register_hook(lambda grad: 3 * grad)
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def test_hooks_on_gradients_are_refused_to_the_thread_that_captures() -> None:
    with replaced(REFUSED):
        with pytest.raises(CaptureError, match="gradient hook"):
            gradient()
        assert elsewhere(gradient).tolist() == [6, 6]
    assert gradient().tolist() == [6, 6]


class Named(dict[str, int]):
    fromkeys = dict.__dict__["fromkeys"]  # a class method in C, as Function.apply is from torch 2.15 on


def test_a_class_method_in_c_is_given_the_class_that_is_called() -> None:
    def counted(theirs: Any, kind: Any, names: str) -> Any:
        return theirs(kind, names, len(names))

    class Other(Named):
        pass

    with replaced([Patch(Named, "fromkeys", counted, "to see it called")]):
        found = Other.fromkeys("ab")
        assert found == {"a": 2, "b": 2} and type(found) is Other
        assert elsewhere(lambda: Other.fromkeys("ab")) == {"a": None, "b": None}
    assert Other.fromkeys("ab") == {"a": None, "b": None}


def test_modules_that_another_thread_builds_have_values() -> None:
    with parameters_on_meta():
        assert nn.Linear(2, 2).weight.is_meta
        assert not elsewhere(lambda: nn.Linear(2, 2)).weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta
