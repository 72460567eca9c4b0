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
from megacompile.runtime.host_memory import HostMemory
from megacompile.runtime.thread_streams import Trace
from megacompile.schedule.op_table import Stream
from megacompile.schedule.step import Event, Step
from megacompile.state.adam import AdamHyper
from megacompile.state.masters import HostState

OnComplete = Callable[[], None]
"""What is left to do on the host once the copies of an operation are over."""


class StepStreams(Protocol):
    """The streams of a backend; ``step`` is the number of the step to which operations are submitted."""

    step: int

    def submit(
        self, stream: Stream, event: Event, after: Iterable[Event], run: Callable[[], OnComplete | None]
    ) -> None:
        """Queue ``run`` on a stream; ``event`` fires when what it issues, and its completion callback, are
        over."""

    def wait(self, after: Iterable[Event]) -> None:
        """Wait for events on the compute stream; raise what an operation on another stream raised."""

    def reached(self, event: Event) -> None:
        """Record ``event`` on the compute stream here."""

    def clock(self) -> Any:
        """Return this point of the compute stream, for :meth:`note`."""

    def note(self, event: Event, start: Any) -> None:
        """Note that an operation of the compute stream ran from ``start`` to here."""

    def synchronize(self) -> None:
        """Return when everything that was submitted is over; raises what went wrong, if anything did."""

    def fail(self, error: BaseException) -> None:
        """Keep operations from beginning until ``error`` was raised in the caller; from any thread."""

    def raise_failure(self) -> None:
        """Raise the first exception of an operation, once; later operations run again."""

    def close(self) -> None:
        """End all threads."""


class Device(ABC):
    """Device memory of one program set, its streams, and the host memory that it copies to and from."""

    streams: StepStreams
    host: HostMemory
    torch_device: torch.device
    adam_threads: int
    immediate: bool
    """Whether what the compute stream was given is over when the call returns."""
    peak_bytes: int
    """The most that any step so far held."""
    unsettled = 0
    """Number of coming steps that may still load kernels or libraries, whose memory is in no plan."""

    def __init__(self, streams: StepStreams, host: HostMemory | None = None) -> None:
        self.streams, self.host = streams, host or HostMemory()
        self.peak_bytes = 0

    def close(self) -> None:
        """End all threads."""
        self.streams.close()

    def computing(self) -> AbstractContextManager[None]:
        """Order what the calling thread gives the device inside into the compute stream, after what it gave
        the device before and before what it gives it later."""
        return nullcontext()

    @abstractmethod
    def prepare(
        self, step: Step, constants: Mapping[str, Tensor], changed: Collection[str] = ()
    ) -> Mapping[str, Tensor]:
        """Allocate a step's slab; what its blocks may take is the budget less all that is fixed.

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
