"""What the runtime asks of a backend: memory, streams, copies. Two exist, for the CPU and for CUDA.

The calling thread issues the ``compute`` stream; ``h2d``, ``d2h`` and ``host`` are asynchronous. An
operation on them is submitted with the event that it records and the events that it waits for, always
their latest records in program order. A backend decides nothing else about order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from megacompile.host.adam import AdamHyper
from megacompile.host.state import HostState
from megacompile.plan.assemble import Slot
from megacompile.runtime.workers import Trace
from megacompile.step.operations import Event, Step, Stream

Tail = Callable[[], None]
"""What is left to do on the host once the copies of an operation are over."""


class Device(Protocol):
    """Device memory and the streams of one program set."""

    torch_device: torch.device
    adam_threads: int
    immediate: bool
    """Whether what the compute stream was given is over when the call returns."""

    @property
    def step(self) -> int:
        """Number of the step to which operations are submitted."""

    # ---- streams
    def submit(
        self, stream: Stream, event: Event, after: Iterable[Event], run: Callable[[], Tail | None]
    ) -> None:
        """Queue ``run`` on a stream; ``event`` fires when what it issues, and its tail, are over."""

    def wait(self, after: Iterable[Event]) -> None:
        """Make the compute stream wait; raises what an operation on another stream raised."""

    def reached(self, event: Event) -> None:
        """The compute stream records ``event`` here."""

    def clock(self) -> Any:
        """This point of the compute stream, for :meth:`note`."""

    def note(self, event: Event, start: Any) -> None:
        """An operation of the compute stream ran from ``start`` to here."""

    def drain(self) -> None:
        """Return when everything that was submitted is over; raises what went wrong, if anything did."""

    def raise_failure(self) -> None:
        """Raise the first exception of an operation, once; later operations run again."""

    def close(self) -> None:
        """End all threads."""

    # ---- memory
    def prepare(self, step: Step, constants: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Make room for a step's slab; what its blocks may take is the budget less all that is fixed.

        Returns the model's buffers and constants as they are on the device.
        """

    def start(self, trace: Trace) -> AbstractContextManager[None]:
        """Run one step inside; what ran when goes into ``trace``, the highest bytes into ``peak_bytes``."""

    def counted(self) -> AbstractContextManager[object]:
        """What is allocated inside lives on the device and counts against the budget."""

    def slot(self, offset: int, nbytes: int) -> Tensor:
        """Bytes of the slab, as uint8."""

    def own(self, tensors: Iterable[Tensor]) -> None:
        """Make transfers to and from these host tensors fast."""

    @property
    def peak_bytes(self) -> int:
        """The most that any step so far held."""

    def host_empty(self, nbytes: int) -> Tensor:
        """Host bytes (uint8) that transfers are fast to and from."""

    # ---- copies
    def load(self, leaf: Tensor) -> Tensor:
        """A leaf of the batch on the device, contiguous, issued on the compute stream."""

    def hold(self, tensor: Tensor) -> None:
        """A device tensor that is counted with the step's constants."""

    def send(self, tensor: Tensor) -> Tensor:
        """A few host bytes on the device, not counted, issued on the compute stream."""

    def read(self, value: Tensor) -> Tensor:
        """A copy of a 0-d device tensor on the host, once :meth:`settle` has returned."""

    def settle(self) -> None:
        """Return when everything that :meth:`read` was asked for is there."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Tail | None:
        """Copy between host and device, inside an operation's ``run``."""

    def update(self, state: HostState, group: int, grad: Tensor, hypers: Sequence[AdamHyper]) -> None:
        """One Adam step of a group whose state is on the device, on the compute stream."""

    def push(
        self, home: Tensor, slots: Sequence[Slot], parts: Sequence[tuple[int, Tensor]], fresh: bool
    ) -> Tail | None:
        """Land gradients of (slot, tensor) in a flat host buffer: set it if ``fresh``, else add to it."""
