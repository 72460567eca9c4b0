"""Page-locked host memory: of tensors where they lie, and the process's own for batches and buffers.

The process's own, for batches, losses and bounce buffers, is used again and never given back. When torch's
page-locked tensors die, it asks the device of the copies that used them. After the loss of a device that call
throws within a destructor, which ends the process at once. So torch never gets them back: a piece that nobody
holds any more waits here for the copies that it was used in, and is taken again.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacompile.runtime.device_failures import failure_of

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
        """Free the dropped tensors whose copies are over."""
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
    """Page-lock the whole pages that a host tensor lies in, in one piece; if the system refuses, in pieces of
    1 GiB up to the first refused one: (their addresses from and to, CUDA's error code or 0)."""
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
