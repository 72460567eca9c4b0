"""The host arena: one mapping that holds every long-lived host buffer.

In:  how many bytes the plan needs. Out: tensors that are pieces of one anonymous mapping, sized to the plan
(no rounding to powers of two), zero until written, on huge pages if the system allows them, and spread over
all NUMA nodes.

Large pieces take multiples of 64 KiB: arrays that lie 2^k + 4096 bytes apart share cache sets, which
cost host Adam 25 to 38 % of its speed. Small ones take whole pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import platform
import weakref
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megacompile.errors import BudgetError
from megacompile.units import format_bytes

ALIGNMENT = 1 << 16  # of pieces of at least LARGE bytes
LARGE = 1 << 20
_HUGE_PAGE = 2 << 20
_NODES = Path("/sys/devices/system/node/online")
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_INTERLEAVE = 3
_NO_RESERVE = 0x4000  # the budget decides, not what the system has now: memory may grow as it is used
_COLLECTED_FROM = 1 << 30  # bytes of arenas: a collection takes up to a second in a large process
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _keep_for_good() -> None:
    """Keep a parent's mappings in its fork, also when the interpreter ends there.

    The fork has the objects and not the mappings: unmapping would hit whatever has their addresses since.
    """
    for mapping in _mappings:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_keep_for_good)


def collect_dropped_arenas() -> None:
    """Free the arenas of models that nobody has any more.

    A model and its closed program hold each other, and Python's collector of cycles does not count their
    bytes: it may come long after the next program needs them.
    """
    if sum(map(len, _mappings)) >= _COLLECTED_FROM:
        gc.collect()


class HostArena:
    """One mapping of ``nbytes``, handed out front to back; pieces live as long as their tensors."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        self.used_bytes = 0
        try:
            # a huge page more of addresses, never touched, so that the arena starts on one
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            mapping = mmap.mmap(-1, self.nbytes + _HUGE_PAGE, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise BudgetError(
                f"The system refuses to map {format_bytes(self.nbytes)} of host memory ({error}): "
                "free some memory, or give a smaller host_budget."
            ) from error
        _mappings.add(mapping)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        start = -whole.data_ptr() % _HUGE_PAGE
        self.tensor = whole[start : start + self.nbytes]
        self.address = self.tensor.data_ptr()
        _advise(mapping, "MADV_HUGEPAGE")
        _advise(mapping, "MADV_DONTFORK")  # a child would get other pages than those that are page-locked
        _interleave(self.address, self.nbytes)

    @property
    def free_bytes(self) -> int:
        return self.nbytes - self.used_bytes

    @property
    def rest(self) -> Tensor:
        """Return what has not been taken yet."""
        return self.tensor[self.used_bytes :]

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next piece as a zeroed tensor."""
        elements = prod(shape)
        start = self.used_bytes
        stop = start + elements * dtype.itemsize
        assert stop <= self.nbytes, f"the arena of {self.nbytes} bytes has no {stop - start} bytes left"
        self.used_bytes = start + padded(stop - start)
        return self.tensor[start:stop].view(dtype).view(*shape)


class Room:
    """The bytes of one flat tensor, given out and taken back; what lies free side by side is one."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole
        self._free: list[tuple[int, int]] = []  # from, to
        self._set_free(0, whole.nbytes)

    def holds(self, piece: Tensor) -> bool:
        """Return whether a piece came from here."""
        return 0 <= piece.data_ptr() - self.whole.data_ptr() < self.whole.nbytes

    def take(self, nbytes: int) -> Tensor | None:
        """A piece out of the smallest gap that has room for it, None where there is none."""
        need = padded(nbytes)
        gaps = [(stop - start, start) for start, stop in self._free if stop - start >= need]
        if not gaps:
            return None
        size, start = min(gaps)
        self._free.remove((start, start + size))
        self._set_free(start + need, start + size)
        return self.whole[start : start + nbytes]

    def give(self, piece: Tensor) -> None:
        """Take a piece back that nobody uses any more."""
        start = piece.data_ptr() - self.whole.data_ptr()
        self._set_free(start, start + padded(piece.nbytes))

    def _set_free(self, start: int, stop: int) -> None:
        for gap in [gap for gap in self._free if gap[1] == start or gap[0] == stop]:
            self._free.remove(gap)
            start, stop = min(start, gap[0]), max(stop, gap[1])
        if start < stop:
            self._free.append((start, stop))


def padded(nbytes: int) -> int:
    """Bytes that a piece takes in an arena."""
    unit = ALIGNMENT if nbytes >= LARGE else mmap.PAGESIZE
    return -(-nbytes // unit) * unit


def resident_bytes() -> int:
    """Bytes of this process in RAM now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def resident_peak_bytes() -> int:
    """The most bytes that this process had in RAM at any time."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def trim_heap() -> None:
    """Give freed memory back to the system: glibc keeps blocks below 32 MB, such as a model's parameters."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _advise(mapping: mmap.mmap, advice: str) -> None:
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a Python, that does not know it
        mapping.madvise(getattr(mmap, advice))


def _interleave(address: int, nbytes: int) -> None:
    """Spread pages over all NUMA nodes, as both sockets' cores will read them.

    A system call, since libnuma is rarely there in containers; where it is not allowed, nothing happens.
    """
    nodes = _ranges(_NODES.read_text()) if _NODES.exists() else []
    number = _MBIND.get(platform.machine())
    if len(nodes) < 2 or number is None:
        return
    words = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    bits = 64 * len(words) + 1  # the kernel reads one fewer
    _system_call(number, address, nbytes, _MPOL_INTERLEAVE, ctypes.addressof(words), bits, 0)


def _ranges(text: str) -> list[int]:
    """Numbers of a list such as "0-3,8"."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return [n for first, *last in ends for n in range(int(first), int((last or [first])[0]) + 1)]


def _system_call(*arguments: int) -> int:
    return int(ctypes.CDLL(None).syscall(*map(ctypes.c_long, arguments)))
