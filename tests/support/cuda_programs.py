"""Programs over the GPU of ``conftest.py``, and calls that must not hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import megacompile


def program(model: nn.Module, device: str, budget: str = "3MB", **options: Any) -> megacompile.Program:
    options.setdefault("compute_dtype", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return megacompile.compile(model, budget, optimizer=optimizer, device=device, **options)


def within(seconds: float, call: Callable[[], object]) -> BaseException | None:
    """What a call raises, None where it returns; a call that takes longer fails the test."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert raised, "the call hangs"
    return raised[0]


def check_fault_is_told(trained: megacompile.Program, batch: Any, owner: object, name: str) -> None:
    """Of three steps in which that function raises, one does."""

    def broken(*args: Any, **options: Any) -> None:
        raise OSError("planted fault")

    with mock.patch.object(owner, name, broken), pytest.raises(OSError, match="planted fault"):
        for _ in range(3):
            trained.train_step(batch)
