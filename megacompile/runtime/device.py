"""What the runtime asks of a backend: memory, streams, copies. Two exist, for the CPU and for CUDA.

The calling thread issues the ``compute`` stream; ``h2d``, ``d2h`` and ``host`` are asynchronous. An
operation on them is submitted with the event that it records and the events that it waits for, always their
latest records in program order. A backend decides nothing else about order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import Slot
from megacompile.runtime.thread_streams import Trace
from megacompile.schedule.op_table import Stream
from megacompile.schedule.step import Event, Step
from megacompile.state.adam import AdamHyper
from megacompile.state.masters import HostState

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
