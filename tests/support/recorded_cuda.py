"""A stream API that records every call, and what its record proves about the order of operations.

Nothing executes. Each call of a host thread is a point in that thread's order; each launch, record and
wait on a stream is a second point, in the stream's order, after the call that issued it. A wait is
ordered after the record that its event had *when it was issued*, as in CUDA; before any, after nothing.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Hashable
from typing import Any


class Recording:
    """The log of one run as a graph over points; every edge goes forward in the log."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.Lock()
        self.random = random.Random(seed)
        self.before: list[list[int]] = []  # by point: points right before it
        self.last: dict[Hashable, int] = {}  # of each thread and stream
        self.points: dict[Hashable, int] = {}  # of what was launched, by name
        self.flags: dict[int, int] = {}

    def point(self, *before: int, lane: Hashable) -> int:
        earlier = [p for p in before if p >= 0]
        if lane in self.last:
            earlier.append(self.last[lane])
        self.before.append(earlier)
        self.last[lane] = len(self.before) - 1
        return self.last[lane]

    def call(self, *before: int) -> int:
        """A point of the calling thread."""
        return self.point(*before, lane=threading.get_ident())

    def issue(self, stream: Hashable, *before: int) -> int:
        """A point of a stream, after the call that issues it."""
        return self.point(self.call(), *before, lane=("stream", stream))

    def delay(self) -> None:
        with self.lock:
            seconds = self.random.choice((0.0, 0.0, 0.0, 1e-4, 5e-4))
        if seconds:
            time.sleep(seconds)

    def reached_from(self) -> list[int]:
        """By point, the set (as bits) of points that are surely before it, itself included."""
        reached: list[int] = []
        for index, earlier in enumerate(self.before):
            bits = 1 << index
            for other in earlier:
                bits |= reached[other]
            reached.append(bits)
        return reached


class RecordedEvent:
    def __init__(self, log: Recording) -> None:
        self.log = log
        self.at = -1

    def record(self, stream: RecordedStream) -> None:
        self.log.delay()
        with self.log.lock:
            self.at = self.log.issue(stream.name)

    def synchronize(self) -> None:
        self.log.delay()
        with self.log.lock:
            self.log.call(self.at)

    def query(self) -> bool:
        return True


class RecordedStream:
    def __init__(self, log: Recording, name: str) -> None:
        self.log = log
        self.name = name

    def wait_event(self, event: RecordedEvent) -> None:
        self.log.delay()
        with self.log.lock:
            self.log.issue(self.name, event.at)

    def synchronize(self) -> None:
        with self.log.lock:
            self.log.call(self.log.last.get(("stream", self.name), -1))


class RecordedFlag(threading.Event):
    """A host event whose ``set`` comes before the return of every ``wait``."""

    log: Recording

    def set(self) -> None:
        with self.log.lock:
            self.log.flags[id(self)] = self.log.call()
        self.log.delay()
        super().set()

    def wait(self, timeout: float | None = None) -> bool:
        over = super().wait(timeout)
        with self.log.lock:
            self.log.call(self.log.flags[id(self)])
        return over


class RecordedApi:
    """:class:`~megacompile.runtime.cuda_streams.CudaApi` over a recording."""

    def __init__(self, log: Recording) -> None:
        self.log = log
        self.mine = threading.local()

    def stream(self, name: str) -> Any:
        return RecordedStream(self.log, name)

    def event(self) -> Any:
        return RecordedEvent(self.log)

    def use(self, stream: Any) -> None:
        self.mine.stream = stream

    def seconds_between(self, first: Any, second: Any) -> float:
        return 0.0

    def host_seconds(self, event: Any) -> float:
        return 0.0

    def failed(self) -> bool:
        return False

    def launch(self, name: Hashable) -> None:
        """Something on the calling thread's stream."""
        with self.log.lock:
            self.log.points[name] = self.log.issue(self.mine.stream.name)

    def work(self, name: Hashable) -> None:
        """Something that the calling thread does itself."""
        self.log.delay()
        with self.log.lock:
            self.log.points[name] = self.log.call()


def spread(uses: dict[Hashable, list[tuple[int, bool]]]) -> set[tuple[int, int]]:
    """Pairs of points of which one changes what the other touches."""
    pairs = set()
    for touched in uses.values():
        for later in range(len(touched)):
            for earlier in range(later):
                if touched[earlier][1] or touched[later][1]:
                    pairs.add((touched[earlier][0], touched[later][0]))
    return pairs


Uses = defaultdict[Hashable, list[tuple[int, bool]]]
