"""Page-locked host memory, and copies through a few such buffers where memory cannot be locked in place."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from megacompile.runtime.call_context import failure_of
from megacompile.state.master_layout import is_dense

# ------------------------------------------------------------------------------------------------------------
# Page-locked host memory: of tensors where they lie, and for batches, losses and bounce buffers a process's
# own, used again and never given back.
#
# When torch's page-locked tensors die, it asks the device of the copies that used them. On a device that is
# lost that call throws within a destructor, which ends the process at once. So torch never gets them back: a
# piece that nobody holds any more waits here for the copies that it was used in, and is taken again.


_LEAST_BYTES = 256
_SLAB_BYTES = 1 << 20  # what smaller pieces are cut from
_PIECE_BYTES = 1 << 30  # of a tensor that is not locked as a whole


class PageLocked:
    """Pieces by size, each a power of two. ``record`` gives an event of the stream that pieces are used on;
    on another one only those are that somebody holds until it has run dry."""

    def __init__(self, record: Callable[[], Any]) -> None:
        self._record = record
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._dropped: deque[Tensor] = deque()  # by any thread, whenever a tensor dies
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()  # with an event after their last copy
        self._lock = threading.Lock()
        self._refused = False

    def take(self, nbytes: int) -> Tensor:
        """Bytes (uint8) of any content, a piece's until the tensor and all its views are gone."""
        size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        with self._lock:
            free = self._free[size]
            if not free:
                self._collect()
            if not free:
                free += self._more(size)
            piece = free.pop()
        memory = (ctypes.c_uint8 * max(nbytes, 1)).from_address(piece.data_ptr())
        weakref.finalize(memory, self._dropped.append, piece).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]

    def _collect(self) -> None:
        """Make free what was dropped, as far as its copies are over."""
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        if dropped:
            self._leaving.append((self._record(), dropped))
        while self._leaving and self._leaving[0][0].query():
            for piece in self._leaving.popleft()[1]:
                self._free[piece.nbytes].append(piece)

    def _more(self, size: int) -> tuple[Tensor, ...]:
        slab = self._locked(max(size, _SLAB_BYTES))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(slab))  # it outlives the interpreter
        return slab.split(size)  # type: ignore[no-any-return, no-untyped-call]

    def _locked(self, nbytes: int) -> Tensor:
        """Return page-locked memory; where the system refuses, ordinary memory: copies of it are right, and
        wait."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            if failure_of(torch.device("cuda")):
                raise
            if not self._refused:
                self._refused = True
                print(
                    "megacompile: the system refuses page-locked host memory; batches and losses pass "
                    "through ordinary memory and are slower.",
                    file=sys.stderr,
                )
            return torch.empty(nbytes, dtype=torch.uint8)


def page_lock(tensor: Tensor) -> tuple[list[tuple[int, int]], int]:
    """Page-lock the whole pages that a host tensor lies in, in one piece; where the system refuses that, in
    pieces of 1 GiB up to the first that it refuses: (their addresses from and to, CUDA's error code or 0)."""
    start = first_page(tensor)
    stop = -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(start, stop - start, 1))
    if code == 0:
        return [(start, stop)], 0
    pieces: list[tuple[int, int]] = []
    for first in range(start, stop, _PIECE_BYTES) if stop - start > _PIECE_BYTES else ():
        last = min(first + _PIECE_BYTES, stop)
        if int(runtime.cudaHostRegister(first, last - first, 1)) != 0:
            return pieces, code
        pieces.append((first, last))
    return pieces, 0 if pieces else code


def page_unlock(start: int) -> None:
    """Undo :func:`page_lock` for a piece, by its address."""
    torch.cuda.cudart().cudaHostUnregister(start)  # type: ignore[no-untyped-call]


def first_page(tensor: Tensor) -> int:
    """Address of the page that a host tensor begins in."""
    return tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE


# ------------------------------------------------------------------------------------------------------------
# Copies through a few page-locked buffers, for host memory that the system refuses to page-lock in place.
#
# WSL2 and a low limit of locked memory refuse it. A copy then goes piece by piece: to the device, the issuing
# thread fills a buffer and issues its copy; from the device, copies are issued into the buffers, and what
# they brought moves on to its place when a buffer is wanted again, or in the copy's completion callback.
# Invariant: a buffer is filled again only when its last piece has left it, and memory that a download is
# still on its way to is read by no upload.


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
