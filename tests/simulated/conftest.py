"""``torch.cuda`` over the simulated runtime, see README.md: only ``make simulated`` runs these tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SIMULATED = "cudasim" in os.environ.get("LD_LIBRARY_PATH", "")
collect_ignore_glob = [] if SIMULATED else ["test_*.py"]

if SIMULATED:
    from megacompile.kernels import _triton
    from megacompile.runtime.cuda import CudaDevice
    from tests.simulated.numbers import Numbers, failures, runtime

    @pytest.fixture(autouse=True)
    def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Operators have numbers, copies are slow, and nothing that a real device forbids has happened."""
        computing = CudaDevice.computing

        @contextmanager
        def with_numbers(self: CudaDevice) -> Iterator[None]:
            with computing(self), Numbers():
                yield

        monkeypatch.setattr(CudaDevice, "computing", with_numbers)
        monkeypatch.setattr(_triton, "HAS_TRITON", False)  # its launches have no numbers
        monkeypatch.setattr(_triton, "_gave_up", True)
        runtime.forget()
        failures.clear()
        runtime.set(lag_us=100, copy_us=0, total=8 << 30, lock_limit=1 << 60, fail_after=0)
        yield
        runtime.set(lag_us=0, copy_us=0)
        assert not failures, failures[0]
        assert not runtime.violations()
