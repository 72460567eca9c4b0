"""Copy through a few page-locked buffers where the system refuses to page-lock host memory in place.

WSL2 and a low limit of locked memory refuse it. A copy then goes piece by piece: to the device, the issuing
thread fills a buffer and issues its copy; from the device, copies are issued into the buffers, and what
they brought moves on to its place when a buffer is wanted again, or in the copy's completion callback.
Invariant: a buffer is filled again only when its last piece has left it, and memory that a download is
still on its way to is read by no upload.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from megacompile.state.master_layout import is_dense

OnComplete = Callable[[], None]
PIECE_BYTES, PIECES = 32 << 20, 4


class Link(Protocol):
    """The calls that copies are issued with: part of :class:`~megacompile.runtime.cuda_memory.CudaMemory`."""

    def copy(self, target: Tensor, source: Tensor) -> None: ...

    def pinned(self, nbytes: int) -> Tensor: ...

    def event(self) -> Any: ...

    def current(self) -> Any: ...


class _Piece:
    """A page-locked buffer, the event of its last copy, and where what it holds still has to go."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.copied: Any = None
        self._place: Tensor | None = None
        self._lock = threading.Lock()

    def ready(self) -> None:
        """Return when the last copy to or from the buffer is over."""
        if self.copied is not None:
            self.copied.synchronize()

    def holds(self, place: Tensor) -> None:
        """Note that what is being copied into the buffer belongs at ``place``."""
        self._place = place

    def land(self, place: Tensor | None = None) -> None:
        """Bring what the buffer holds to its place (if that is ``place``), unless somebody did already."""
        with self._lock:
            if self._place is None or (place is not None and place is not self._place):
                return
            target, self._place = self._place, None
            self.ready()
            target.copy_(self.buffer[: target.numel()])


class StagingRing:
    """The buffers of one direction; used by the thread that issues its copies, and by their callbacks."""

    def __init__(self, link: Link, piece_bytes: int = PIECE_BYTES, pieces: int = PIECES) -> None:
        self._link = link
        self._pieces = itertools.cycle([_Piece(link.pinned(piece_bytes)) for _ in range(pieces)])
        self._piece_bytes = piece_bytes
        self.nbytes = piece_bytes * pieces

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy host bytes (uint8, flat) to the device."""
        for part, place in zip(self._cut(source), self._cut(target), strict=True):
            piece = next(self._pieces)
            piece.ready()
            buffer = piece.buffer[: part.numel()]
            buffer.copy_(part)
            self._issue(piece, place, buffer)

    def download(self, target: Tensor, source: Tensor) -> OnComplete:
        """Copy device bytes (uint8, flat) to the host; all are there when the callback is over."""
        issued: list[tuple[_Piece, Tensor]] = []

        def on_complete() -> None:
            for piece, place in issued:
                piece.land(place)

        try:
            for part, place in zip(self._cut(source), self._cut(target), strict=True):
                piece = next(self._pieces)
                piece.land()
                self._issue(piece, piece.buffer[: part.numel()], part)
                piece.holds(place)
                issued.append((piece, place))
        except BaseException:
            on_complete()  # else a later download would, over what came there in between
            raise
        return on_complete

    def _cut(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split(self._piece_bytes) if flat.numel() else ()  # type: ignore[no-untyped-call]

    def _issue(self, piece: _Piece, target: Tensor, source: Tensor) -> None:
        self._link.copy(target, source)
        piece.copied = self._link.event()
        piece.copied.record(self._link.current())


class Staging:
    """The two rings of a device, and which host memory needs them."""

    def __init__(self, link: Link, piece_bytes: int = PIECE_BYTES) -> None:
        self._link = link
        self._piece_bytes = piece_bytes
        self._refused: dict[int, int] = {}  # from and to, addresses
        self._rings: tuple[StagingRing, StagingRing] | None = None
        self._coming: dict[int, threading.Event] = {}  # downloads by the address that they end at

    @property
    def nbytes(self) -> int:
        """Page-locked bytes that the rings take."""
        return sum(ring.nbytes for ring in self._rings or ())

    @property
    def staged_bytes(self) -> int:
        """Host bytes whose copies go through the rings."""
        return sum(stop - start for start, stop in self._refused.items())

    def add(self, start: int, stop: int) -> None:
        """Copies to and from host memory between these addresses go through the rings from now on."""
        self._refused[start] = stop
        if self._rings is None:
            self._rings = (
                StagingRing(self._link, self._piece_bytes),
                StagingRing(self._link, self._piece_bytes),
            )

    def remove(self, tensor: Tensor) -> None:
        """Forget host memory that goes away."""
        start = tensor.data_ptr()
        for gone in (self._refused, self._coming):
            for address in [a for a in gone if start <= a < start + tensor.nbytes]:
                del gone[address]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory was added, and can be copied as flat bytes."""
        start = tensor.data_ptr()
        return any(first <= start < last for first, last in self._refused.items()) and is_dense(tensor)

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy a host tensor to the device, once what is on its way to that host tensor is there."""
        assert self._rings is not None
        coming = self._coming.pop(source.data_ptr(), None)
        if coming is not None:
            coming.wait()
        self._rings[0].upload(flat_bytes(target), flat_bytes(source))

    def download(self, target: Tensor, source: Tensor) -> OnComplete:
        """Copy a device tensor to the host; its completion callback finishes it."""
        assert self._rings is not None
        on_complete = self._rings[1].download(flat_bytes(target), flat_bytes(source))
        there = self._coming[target.data_ptr()] = threading.Event()

        def complete() -> None:
            try:
                on_complete()
            finally:
                there.set()

        return complete


def flat_bytes(x: Tensor) -> Tensor:
    """A dense tensor's memory as flat uint8."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
