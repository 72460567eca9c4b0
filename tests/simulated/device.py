"""The simulated device as tests use it: with numbers, lags, and an eye on what a real one forbids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from megacompile.kernels import _triton
from megacompile.runtime.cuda import CudaDevice
from megacompile.runtime.gradient_reduction import Fabric
from tests.simulated.numbers import Numbers, failures, runtime


@contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch, **settings: int) -> Iterator[None]:
    """Within, operators have numbers and operations lag; at its end nothing forbidden may have happened."""

    def entered(context: Callable[[CudaDevice], AbstractContextManager[None]]) -> Any:
        @contextmanager
        def with_numbers(self: CudaDevice) -> Iterator[None]:
            with context(self), Numbers():
                yield

        return with_numbers

    def sums(add_up: Callable[..., None]) -> Callable[..., None]:
        def with_numbers(*arguments: object) -> None:
            with Numbers():  # it computes on a thread of its own
                add_up(*arguments)

        return with_numbers

    monkeypatch.setattr(CudaDevice, "computing", entered(CudaDevice.computing))
    monkeypatch.setattr(CudaDevice, "whole", entered(CudaDevice.whole))
    monkeypatch.setattr(Fabric, "reduce", sums(Fabric.reduce))
    monkeypatch.setattr(Fabric, "all_reduce", sums(Fabric.all_reduce))
    monkeypatch.setattr(_triton, "HAS_TRITON", False)  # its launches have no numbers
    monkeypatch.setattr(_triton, "_gave_up", True)
    runtime.forget()
    failures.clear()
    runtime.set(
        **{"lag_us": 100, "copy_us": 0, "total": 8 << 30, "lock_limit": 1 << 60, "fail_after": 0} | settings
    )
    yield
    runtime.set(lag_us=0, copy_us=0, exchange_us=0)
    assert not failures, failures[0]
    assert not runtime.violations()
