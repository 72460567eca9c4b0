"""CUDA streams with the order of the light step: who issues, who waits, and for what.

The calling thread issues the compute stream. ``h2d``, ``d2h`` and ``comm`` have a thread each that issues
their copies or collectives, ``host`` and those of NVMe one that works itself, and ``land`` finishes on the
host what a copy to the host began (its completion callback). An operation leaves a :class:`Mark`, and a wait
for it has up to three parts:

- until it is *issued*, on the host: a CUDA stream that waits for an event which is not yet recorded
  waits for nothing. For work on the host, issued means over.
- its CUDA event: device streams wait on the device, host threads on the host.
- *completion callbacks*, where the waiter works on the host. The step orders a host operation after copies by
  events that may imply each other, and callbacks are no part of those: so it waits for the callback of every
  push issued before it in program order. Callbacks run in order; the last one is enough.

On a device errors come late, out of whichever call comes next. All calls of workers are therefore attempted:
a failed operation leaves a failure for the caller, and its mark is issued, so that a waiting thread goes on
to find the failure.

Nothing here knows torch: streams and events come from an ``api`` (see :class:`CudaApi`), in tests one
that records every call.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, Protocol

from megacompile.runtime.thread_streams import Trace, Workers
from megacompile.schedule.step import Event

OnComplete = Callable[[], None]
Run = Callable[[], OnComplete | None]
Flag = threading.Event  # between host threads


class CudaApi(Protocol):
    """Streams and events of one device; ``torch.cuda``'s in :mod:`~megacompile.runtime.cuda_memory`."""

    def stream(self, name: str) -> Any:
        """A new stream with ``wait_event(event)`` and ``synchronize()``."""

    def event(self) -> Any:
        """A new event with ``record(stream)``, ``synchronize()`` (without spinning) and ``query()``."""

    def use(self, stream: Any) -> None:
        """Set the calling thread's stream."""

    def seconds_between(self, first: Any, second: Any) -> float:
        """Device time between two records that are over."""

    def host_seconds(self, event: Any) -> float:
        """``time.perf_counter`` at a record that is over."""

    def failed(self) -> bool:
        """Return whether the device failed, so that every call of it raises."""


class Mark:
    """One operation's completion; see the module's docstring."""

    __slots__ = ("completed", "event", "issued")

    def __init__(self) -> None:
        self.issued = Flag()
        self.event: Any = None
        self.completed: threading.Event | None = None  # the last one up to here


Task = tuple[int, Run, tuple[Mark, ...], Mark | None, Mark, Event, Trace]


class CudaStreams(Workers):
    """The streams of a step on one device; one is for collectives where ``comm`` says so. ``threads``
    prepares a worker, by the stream's name."""

    def __init__(self, api: CudaApi, threads: Callable[[str], None], *, comm: bool = False) -> None:
        self.api = api
        self.compute = api.stream("compute")
        self._prepare_worker = threads
        self._marks: dict[Event, Mark] = {}
        self._pushed: Mark | None = None  # the last operation submitted that may have a callback
        self._waited: frozenset[Event] = frozenset()
        self._lost = False
        self._timed: deque[tuple[Trace, Event, Any, Any]] = deque()  # what the device has yet to time
        self._copies = {name: api.stream(name) for name in ("h2d", "d2h", *(("comm",) if comm else ()))}
        works = dict.fromkeys(self._copies, self._issue) | {
            "host": self._work, "nvme_read": self._work, "nvme_write": self._work, "land": self._land
        }  # fmt: skip
        super().__init__(works)  # callbacks come last

    def begin(self, trace: Trace, waited: frozenset[Event]) -> None:
        """Another step: its trace, and the events of the compute stream that anything waits for."""
        self.step += 1
        self.trace = trace
        self._waited = waited
        self._read_times()

    def submit(self, stream: str, event: Event, after: Iterable[Event], run: Run) -> None:
        """Queue an operation; what it waits for are the latest marks of ``after`` now."""
        needed = tuple(self._marks[e] for e in after if e in self._marks)
        mark, pushed = Mark(), self._pushed if stream in ("host", "nvme_write") else None
        self._queues[stream].put((self.step, run, needed, pushed, mark, event, self.trace))
        self._marks[event] = mark
        if stream == "d2h":
            self._pushed = mark

    def wait(self, after: Iterable[Event]) -> None:
        """Queue a wait on the compute stream; the calling thread waits only until there is something to wait
        for."""
        for event in after:
            mark = self._marks.get(event)
            if mark is not None:
                self._follow(self.compute, mark)
        self.raise_failure()

    def reached(self, event: Event) -> None:
        """Record an event of the compute stream, if anything waits for it."""
        if event not in self._waited:
            self._marks.pop(event, None)
            return
        mark = Mark()
        mark.event = self.clock()
        mark.issued.set()
        self._marks[event] = mark

    def clock(self) -> Any:
        """An event recorded here on the compute stream."""
        return self._record(self.compute)

    def _record(self, stream: Any) -> Any:
        event = self.api.event()
        event.record(stream)
        return event

    def note(self, event: Event, start: Any) -> None:
        """An operation ran on the compute stream from ``start`` to here."""
        self._timed.append((self.trace, event, start, self.clock()))

    def synchronize(self) -> None:
        """Wait until all that was submitted is over, then raise what went wrong, if anything did. A device
        that failed is waited for once: nothing is under way there any more."""
        try:
            if not self._closed:
                for queue in self._queues.values():
                    over = Flag()
                    queue.put(over)
                    over.wait()
                if not self._lost:
                    self._await_device()
        finally:
            self.raise_failure()  # the first one says more than what follows from it

    def _await_device(self) -> None:
        try:
            for stream in (self.compute, *self._copies.values()):
                stream.synchronize()
            self._read_times()
        except RuntimeError:
            self._lost = self.api.failed()
            raise

    def _read_times(self) -> None:
        """Put what the device has finished into the traces."""
        for _ in range(len(self._timed)):
            trace, event, start, end = self._timed.popleft()
            if end.query():
                begun = self.api.host_seconds(start)
                trace.append((event, begun, begun + self.api.seconds_between(start, end)))
            else:
                self._timed.append((trace, event, start, end))

    def _begin(self, name: str) -> None:
        self.attempt(self.step, functools.partial(self._prepare_worker, name), always=True)

    def _issue(self, name: str) -> None:
        """Issue the copies or the collectives of one stream."""
        stream, queue = self._copies[name], self._queues[name]
        latest: threading.Event | None = None  # callback of this stream; it implies those before
        self._begin(name)
        self.attempt(self.step, functools.partial(self.api.use, stream), always=True)
        while (task := _next(queue)) is not None:
            step, run, needed, _, mark, event, trace = task
            start = self.attempt(step, functools.partial(self._start, stream, needed), always=True)
            on_complete = self.attempt(step, run) if start is not None else None
            mark.event = self.attempt(step, functools.partial(self._record, stream), always=True)
            if on_complete is not None:
                latest = Flag()
                self._queues["land"].put((step, on_complete, mark.event, latest))
            mark.completed = latest
            if start is not None and mark.event is not None:
                self._timed.append((trace, event, start, mark.event))
            del task, run, needed, on_complete  # drop tensors before anyone is told that they were read
            mark.issued.set()

    def _start(self, stream: Any, needed: Iterable[Mark]) -> Any:
        """An event recorded once the stream has followed what an operation needs."""
        for mark in needed:
            self._follow(stream, mark)
        return self._record(stream)

    def _follow(self, stream: Any, mark: Mark) -> None:
        """Queue a wait for an operation on a device stream."""
        mark.issued.wait()
        if mark.event is not None:
            stream.wait_event(mark.event)

    def _work(self, name: str) -> None:
        """Run operations of the host stream."""
        queue = self._queues[name]
        self._begin(name)
        while (task := _next(queue)) is not None:
            step, run, needed, pushed, mark, event, trace = task
            ready = self.attempt(step, functools.partial(self._await, needed, pushed), always=True)
            start = time.perf_counter()
            if ready:
                self.attempt(step, run)
            trace.append((event, start, time.perf_counter()))
            del task, run, needed, pushed
            mark.issued.set()

    def _await(self, needed: Iterable[Mark], pushed: Mark | None) -> bool:
        """True once what a host operation needs is over."""
        for mark in needed:
            mark.issued.wait()
            if mark.event is not None:
                mark.event.synchronize()
        self._await_callbacks(pushed)
        return True

    def _await_callbacks(self, pushed: Mark | None) -> None:
        """Until the last callback that was submitted before this operation is over, if there is one."""
        if pushed is not None:
            pushed.issued.wait()
            if pushed.completed is not None:
                pushed.completed.wait()

    def _land(self, name: str) -> None:
        """Run callbacks in the order of their copies; also after a failure, for they give buffers back."""
        queue = self._queues[name]
        self._begin(name)
        while (task := _next(queue)) is not None:
            step, on_complete, event, over = task
            if event is not None:
                self.attempt(step, event.synchronize, always=True)
            self.attempt(step, on_complete, always=True)
            del task, on_complete
            over.set()


def _next(queue: SimpleQueue[Any]) -> Any:
    """A worker's next task, None at the end; who waits for what came before is told on the way."""
    while isinstance(task := queue.get(), Flag):
        task.set()
    return task
