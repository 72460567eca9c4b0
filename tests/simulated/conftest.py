"""``torch.cuda`` over the simulated runtime, see README.md: only ``make simulated`` runs these tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

SIMULATED = "cudasim" in os.environ.get("LD_LIBRARY_PATH", "")
collect_ignore_glob = [] if SIMULATED else ["test_*.py"]

if SIMULATED:
    from tests.simulated.device import simulated

    @pytest.fixture(autouse=True)
    def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Operators have numbers, copies are slow, and nothing that a real device forbids has happened."""
        if torch.cuda.is_initialized():  # programs whose device is lost leave their limit
            torch.cuda.set_per_process_memory_fraction(1.0)
        with simulated(monkeypatch):
            yield
