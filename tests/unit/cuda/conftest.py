"""A GPU made of CPU tensors in the place of a real one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megacompile.api import compile
from megacompile.api.pipeline import Compiler
from megacompile.runtime.backends import Backend, open_backend
from megacompile.runtime.cuda import CudaDevice
from tests.support.fake_cuda import FakeCuda


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """compile(device="cuda") runs on this; plans are those of the CPU backend."""
    fake = FakeCuda()
    opened = functools.partial(CudaDevice, fake)
    backend = Backend(fake.device, None, None, lambda budget: budget, opened)

    def choose(device: Any, dtype: torch.dtype) -> Backend:
        return backend if device == "cuda" else open_backend(device, dtype)

    monkeypatch.setattr(compile, "open_backend", choose)
    with monkeypatch.context() as streaming:
        streaming.setattr(Compiler, "_may_reside", lambda *_: ())  # everything streams
        fake.let_state_reside = streaming.undo  # type: ignore[attr-defined]
        yield fake
