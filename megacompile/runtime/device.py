"""The interface of a backend (memory, streams, copies), and in-order streams on threads."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import Slot
from megacompile.schedule.op_table import Stream
from megacompile.schedule.step import Event, Step
from megacompile.state.adam import AdamHyper
from megacompile.state.masters import HostState

# ------------------------------------------------------------------------------------------------------------
# Streams for the CPU backend: one thread per stream, in order, with events between them.
#
# A task starts when the events that were latest when it was submitted are over. The first exception in a task
# keeps the other tasks of its step, and of later ones, from doing anything; tasks of earlier steps still run.
# All events fire in any case, so nothing ever hangs, and the exception is raised in the caller at its next
# wait.


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
        """Let all threads finish their queues and end."""
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


# ------------------------------------------------------------------------------------------------------------
# What the runtime asks of a backend: memory, streams, copies. Two exist, for the CPU and for CUDA.
#
# The calling thread issues the ``compute`` stream; ``h2d``, ``d2h`` and ``host`` are asynchronous. An
# operation on them is submitted with the event that it records and the events that it waits for, always their
# latest records in program order. A backend decides nothing else about order.


OnComplete = Callable[[], None]
"""What is left to do on the host once the copies of an operation are over."""


class StepStreams(Protocol):
    """The streams of a backend, as :class:`Device` passes operations on to them."""

    step: int

    def submit(
        self, stream: Stream, event: Event, after: Iterable[Event], run: Callable[[], OnComplete | None]
    ) -> None: ...

    def wait(self, after: Iterable[Event]) -> None: ...

    def reached(self, event: Event) -> None: ...

    def clock(self) -> Any: ...

    def note(self, event: Event, start: Any) -> None: ...

    def synchronize(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def raise_failure(self) -> None: ...

    def close(self) -> None: ...


class Device(ABC):
    """Device memory and the streams of one program set."""

    torch_device: torch.device
    adam_threads: int
    immediate: bool
    """Whether what the compute stream was given is over when the call returns."""
    peak_bytes: int
    """The most that any step so far held."""
    unsettled = 0
    """How many of the next steps load what takes memory of the device that no plan has."""

    def __init__(self, streams: StepStreams) -> None:
        self._streams = streams
        self.peak_bytes = 0

    # ---- streams
    @property
    def step(self) -> int:
        """Number of the step to which operations are submitted."""
        return self._streams.step

    def submit(
        self, stream: Stream, event: Event, after: Iterable[Event], run: Callable[[], OnComplete | None]
    ) -> None:
        """Queue ``run`` on a stream; ``event`` fires when what it issues, and its completion callback, are
        over."""
        self._streams.submit(stream, event, after, run)

    def wait(self, after: Iterable[Event]) -> None:
        """Make the compute stream wait; raises what an operation on another stream raised."""
        self._streams.wait(after)

    def reached(self, event: Event) -> None:
        """The compute stream records ``event`` here."""
        self._streams.reached(event)

    def clock(self) -> Any:
        """This point of the compute stream, for :meth:`note`."""
        return self._streams.clock()

    def note(self, event: Event, start: Any) -> None:
        """An operation of the compute stream ran from ``start`` to here."""
        self._streams.note(event, start)

    def synchronize(self) -> None:
        """Return when everything that was submitted is over; raises what went wrong, if anything did."""
        self._streams.synchronize()

    def fail(self, error: BaseException) -> None:
        """Let no operation begin any more until ``error`` was raised in the caller; from any thread."""
        self._streams.fail(error)

    def raise_failure(self) -> None:
        """Raise the first exception of an operation, once; later operations run again."""
        self._streams.raise_failure()

    def close(self) -> None:
        """End all threads."""
        self._streams.close()

    def computing(self) -> AbstractContextManager[None]:
        """Order what the calling thread gives the device inside into the compute stream, after what it gave
        the device before and before what it gives it later."""
        return nullcontext()

    # ---- memory
    def host_bytes(self) -> dict[str, int]:
        """Host bytes that the backend itself holds, by kind."""
        return {}

    def page_locked_bytes(self) -> int:
        """Host bytes that are page-locked where they lie."""
        return 0

    def staged_bytes(self) -> int:
        """Host bytes whose copies pass through buffers, as the system refused to page-lock them."""
        return 0

    @abstractmethod
    def prepare(
        self, step: Step, constants: Mapping[str, Tensor], changed: Collection[str] = ()
    ) -> Mapping[str, Tensor]:
        """Make room for a step's slab; what its blocks may take is the budget less all that is fixed.

        Returns the model's buffers and constants as they are on the device. The model's own stay as they are,
        also those ``changed`` by the step, until :meth:`store`.
        """

    @abstractmethod
    def store(self, buffers: Iterable[Tensor]) -> None:
        """Copy buffers that the last step changed back into the model's own, which are given; while
        :meth:`computing`."""

    @abstractmethod
    def vacate(self) -> None:
        """Give back all memory of the device that steps leave there, until :meth:`prepare`; at rest."""

    @abstractmethod
    def whole(self) -> AbstractContextManager[None]:
        """Count what is allocated inside against the whole budget, after :meth:`vacate`, and the highest
        bytes into ``peak_bytes``."""

    @abstractmethod
    def start(self, trace: Trace) -> AbstractContextManager[None]:
        """Run one step inside, while :meth:`computing`; what ran when goes into ``trace``, the highest bytes
        into ``peak_bytes``."""

    @abstractmethod
    def counted(self) -> AbstractContextManager[object]:
        """Count what is allocated inside against the budget: it lives on the device."""

    def products(self) -> AbstractContextManager[object]:
        """Compute products of bf16 tensors inside as the device can; entered before :meth:`counted`."""
        return nullcontext()

    @abstractmethod
    def slot(self, offset: int, nbytes: int) -> Tensor:
        """Bytes of the slab, as uint8."""

    @abstractmethod
    def own(self, tensors: Iterable[Tensor]) -> None:
        """Make transfers to and from these host tensors fast."""

    @abstractmethod
    def host_empty(self, nbytes: int) -> Tensor:
        """Host bytes (uint8) that transfers are fast to and from."""

    @abstractmethod
    def host_free(self, buffer: Tensor) -> None:
        """Give back what :meth:`host_empty` gave; nothing may be under way to or from it."""

    # ---- copies
    @abstractmethod
    def load(self, leaf: Tensor) -> Tensor:
        """A leaf of the batch (on the host) on the device, contiguous, issued on the compute stream."""

    @abstractmethod
    def load_filled(
        self, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], None]
    ) -> Tensor:
        """Return on the device what ``fill`` writes into a contiguous host tensor; issued on the compute
        stream."""

    @abstractmethod
    def hold(self, tensor: Tensor) -> None:
        """A device tensor that is counted with the step's constants."""

    @abstractmethod
    def send(self, tensor: Tensor) -> Tensor:
        """A few host bytes on the device, not counted, issued on the compute stream."""

    @abstractmethod
    def read(self, value: Tensor) -> Tensor:
        """A copy of a device tensor on the host, once :meth:`await_reads` has returned."""

    @abstractmethod
    def await_reads(self) -> None:
        """Return when everything that :meth:`read` was asked for is there."""

    @abstractmethod
    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> OnComplete | None:
        """Copy between host and device, inside an operation's ``run``."""

    @abstractmethod
    def update(
        self,
        state: HostState,
        group: int,
        grad: Tensor,
        hypers: Sequence[AdamHyper],
        slots: Collection[int],
    ) -> None:
        """One Adam step of parameters of a group whose state is on the device, on the compute stream."""

    @abstractmethod
    def land(self, tensors: Sequence[Tensor], use: Callable[[list[Tensor]], None]) -> OnComplete | None:
        """Hand device tensors to ``use`` on the host, inside an operation's ``run``."""

    @abstractmethod
    def push(
        self,
        home: Tensor,
        slots: Sequence[Slot],
        parts: Sequence[tuple[int, Tensor]],
        fresh: Collection[int],
    ) -> OnComplete | None:
        """Land gradients of (slot, tensor) in a flat host buffer: set those of the ``fresh`` slots, add the
        others."""
