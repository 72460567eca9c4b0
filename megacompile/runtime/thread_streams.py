"""Run operations in order on streams: one thread per stream, with events between them.

A task starts when the events that were latest when it was submitted are over. The first exception in a task
keeps the other tasks of its step, and of later ones, from doing anything; tasks of earlier steps still run.
All events fire in any case, so nothing ever hangs, and the exception is raised in the caller at its next
wait.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from typing import Any

import torch

from megacompile.schedule.step import Event

Trace = list[tuple[Event, float, float]]
"""What one step did: (event, start, end) of each operation, in seconds of ``time.perf_counter``."""

EXIT_SECONDS = 30.0
"""How long the end of the process waits for operations that are running."""

Task = tuple[int, Callable[[], object], tuple[threading.Event, ...], threading.Event, Event, Trace]


class Workers:
    """Named threads, each with a queue that it works off in order; None ends it.

    The first exception of an operation is kept until :meth:`raise_failure` hands it to the caller. Other
    operations of its step, and of those begun before the caller knew, do nothing, whenever their turn comes.
    """

    def __init__(self, works: Mapping[str, Callable[[str], None]]) -> None:
        self.step = 0  # the number of the step to which operations are submitted
        self.trace: Trace = []  # of that step; its operations add to it even after the next one has begun
        self._failure: tuple[int, BaseException] | None = None
        self._dead = range(0)  # steps that failed: what they still have in queues is left out
        self._closed = False
        self._pid = os.getpid()
        self._queues: dict[str, SimpleQueue[Any]] = {name: SimpleQueue() for name in works}
        self._threads = [
            threading.Thread(target=work, args=(name,), name=f"megacompile-{name}", daemon=True)
            for name, work in works.items()
        ]
        for thread in self._threads:
            thread.start()
        _alive.add(self)

    def attempt(self, step: int, run: Callable[[], Any], *, always: bool = False) -> Any:
        """Return what an operation of ``step`` returns; None where it fails, or is left out after a
        failure."""
        failure = self._failure
        if not always and (step in self._dead or (failure is not None and step >= failure[0])):
            return None
        try:
            return run()
        except BaseException as error:
            self._failure = self._failure or (step, error)
        return None

    def fail(self, error: BaseException) -> None:
        """Keep all operations that have not begun from doing anything, for a reason from outside."""
        self._failure = self._failure or (0, error)

    def raise_failure(self) -> None:
        """Raise the first exception of an operation, once; the steps after those begun so far run again."""
        failure = self._failure
        if failure is not None:
            self._dead = range(failure[0], self.step + 1)  # before the failure is forgotten
            self._failure = None
            raise failure[1]

    def close(self) -> None:
        """End all threads, after they have finished their queues."""
        if self._closed:
            return
        self._closed = True
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()

    def abandon(self, deadline: float) -> None:
        """End all threads after the operations that they are at; what is queued is left out.

        ``deadline`` is a time of ``time.monotonic``: one that is stuck does not keep the process.
        """
        if os.getpid() != self._pid:
            return  # a forked child has none of the threads
        self._closed = True
        self._dead = range(self.step + 1)
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


_alive: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _abandon_all() -> None:
    """Leave no thread inside torch when the interpreter goes: one that is ended there aborts the process."""
    deadline = time.monotonic() + EXIT_SECONDS
    for workers in list(_alive):
        workers.abandon(deadline)


class Streams(Workers):
    """In-order worker threads by name, and the latest record of every event.

    ``threads`` gives each stream's number of threads inside torch's operators.
    """

    def __init__(self, threads: Mapping[str, int]) -> None:
        self._events: dict[Event, threading.Event] = {}
        super().__init__(dict.fromkeys(threads, self._work))
        self._limit_threads(threads)

    def begin(self, trace: Trace) -> None:
        """Another step, and its trace."""
        self.step += 1
        self.trace = trace
        self.note(("run",), time.perf_counter())

    def _limit_threads(self, threads: Mapping[str, int]) -> None:
        """Set each worker's count inside that worker; torch keeps it per thread."""
        ours = torch.get_num_threads()
        for name, count in threads.items():
            self.submit(name, ("threads",), (), functools.partial(torch.set_num_threads, count))
            self.wait([("threads",)])
        torch.set_num_threads(ours)  # also what threads that start later will take
        self.reached(("threads",))

    def submit(self, stream: str, event: Event, after: Iterable[Event], run: Callable[[], object]) -> None:
        """Queue ``run`` on a stream; ``event`` fires when it is over."""
        needed = tuple(self._events[e] for e in after if e in self._events)
        done = threading.Event()
        self._queues[stream].put((self.step, run, needed, done, event, self.trace))
        self._events[event] = done  # only now: a signal's exception may come at any line

    def wait(self, events: Iterable[Event]) -> None:
        """Block the caller until the latest records of ``events`` are over."""
        for event in events:
            done = self._events.get(event)
            if done is not None:
                done.wait()
        self.raise_failure()

    def reached(self, event: Event) -> None:
        """The caller's own stream passed this point: earlier records no longer hold anyone back."""
        self._events.pop(event, None)

    def note(self, event: Event, start: float) -> None:
        """Put an operation of the caller's own stream, over now, into the step's trace."""
        self.trace.append((event, start, time.perf_counter()))

    def synchronize(self) -> None:
        """Wait until every queued task is over, then raise what went wrong, if anything did."""
        if self._closed:
            self.raise_failure()
            return
        marks = []
        for name in self._queues:
            mark = threading.Event()
            self._queues[name].put((self.step, lambda: None, (), mark, ("synchronize",), []))
            marks.append(mark)
        for mark in marks:
            mark.wait()
        self.raise_failure()

    def clock(self) -> float:
        """Now, for :meth:`note`."""
        return time.perf_counter()

    def _work(self, stream: str) -> None:
        queue = self._queues[stream]
        task: Task | None
        while (task := queue.get()) is not None:
            step, run, needed, done, name, trace = task
            for event in needed:
                event.wait()
            start = time.perf_counter()
            self.attempt(step, run)
            trace.append((name, start, time.perf_counter()))
            del task, run, needed  # drop what the task holds before anyone is told that it is over
            done.set()
            del done
