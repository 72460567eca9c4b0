"""The pace of writers: a share of the machine's processor time, none for those that nobody paces."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from megacompile.state import write_throttle
from megacompile.state.write_throttle import paced, rest


class Clock:
    """Time that passes as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.used = 0.0
        self.rests: list[float] = []
        times = SimpleNamespace(perf_counter=lambda: self.now, thread_time=lambda: self.used)
        monkeypatch.setattr(write_throttle, "time", times)
        monkeypatch.setattr(write_throttle, "_cores", lambda: 10)  # a tenth of one

    def event(self) -> threading.Event:
        event = threading.Event()
        event.wait = self._wait  # type: ignore[method-assign,assignment]
        return event

    def _wait(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds

    def work(self, computed: float, waited: float = 0.0) -> None:
        self.now, self.used = self.now + computed + waited, self.used + computed
        rest()


def test_a_writer_has_its_share_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with paced(clock.event()):
        clock.work(1.0)
        clock.work(2.0, waited=3.0)  # for a drive
        clock.work(0.5, waited=60.0)
        clock.work(1.0)  # what it did not take before is not made up for
    assert clock.rests == pytest.approx([9.0, 15.0, 9.0])
    assert clock.used / (clock.now - 60.5) == pytest.approx(0.1, rel=0.15)


def test_nobody_else_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with paced(clock.event()):
        other = threading.Thread(target=clock.work, args=(1.0,))
        other.start()
        other.join()
    clock.work(1.0)
    assert clock.rests == []
