"""Pause Python's collector of cycles around work that makes none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause the collector of cycles: each of its collections would walk all that the process has, of which
    steps hold no cycles, and a trace of a whole model few."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
