"""Pace threads that write while others compute: a small share of the machine until somebody waits.

In: an event that says that somebody waits. Out: :func:`rest`, which writers call between their blocks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar

SHARE = 0.01  # of the processor time of all cores: one of 100 cores, a 50th of one where there are two


class Pace:
    """The pace of one thread: how long it rests. Time in which it waits for a drive counts as rest."""

    def __init__(self, hurried: threading.Event) -> None:
        self._hurried = hurried
        self._cores = SHARE * _cores()
        self._used, self._since = time.thread_time(), time.perf_counter()

    def rest(self) -> None:
        """Return when the thread has had no more than its share since the last call, or is hurried."""
        due = self._since + (time.thread_time() - self._used) / self._cores
        pause = due - time.perf_counter()
        if pause > 0 and threading.main_thread().is_alive():  # else the process ends, and waits for this
            self._hurried.wait(pause)
        self._used, self._since = time.thread_time(), time.perf_counter()


_PACE: ContextVar[Pace | None] = ContextVar("pace", default=None)


@contextlib.contextmanager
def paced(hurried: threading.Event) -> Iterator[None]:
    """This thread rests, inside, where it calls :func:`rest`, until ``hurried`` is set."""
    token = _PACE.set(Pace(hurried))
    try:
        yield
    finally:
        _PACE.reset(token)


def rest() -> None:
    """A point at which a thread that has a pace may rest."""
    pace = _PACE.get()
    if pace is not None:
        pace.rest()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
