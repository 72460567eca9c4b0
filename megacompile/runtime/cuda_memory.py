"""The memory of one GPU, as :mod:`~megacompile.runtime.cuda` asks for it, and ``torch.cuda`` as the answer.

Torch's caching allocator under a hard limit, copies on the calling thread's stream, and host memory that is
page-locked where it lies.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megacompile.errors import BudgetError
from megacompile.hardware.caching_allocator import PAGE_BYTES, Pages, Request
from megacompile.kernels import torch_sdpa
from megacompile.runtime.cuda_streams import CudaApi
from megacompile.runtime.device_failures import failure_of, first_line
from megacompile.runtime.pinned_memory import PageLocked, first_page, page_lock, page_unlock
from megacompile.runtime.staging import PIECE_BYTES, PIECES
from megacompile.schedule.step import Step
from megacompile.units import format_bytes
from megacompile.user_warning import warn_user

_REGISTERED_FROM = 1 << 20  # bytes; smaller buffers may share pages with others
_ANCHORED_SECONDS = 100.0  # after which the clocks are set anew: CUDA tells of milliseconds in float32
_FLASH_FROM = (8, 0)  # compute capability: torch's flash attention runs on no older one
_HEAD_WIDTHS = 64, 128  # each has kernels of its own
LOOSE_BYTES = 80 << 20  # no plan may use it: cuBLAS's on Hopper, and parts of pages between tensors
_CUBLAS_BYTES = 32 << 20  # what it keeps for a stream on Hopper; elsewhere less
_LEAST_SPARE, _MOST_SPARE, _SPARE_SHARE = 16 << 20, 512 << 20, 100
_FIXED_SHARE = 8  # of a budget, more to spare where segments have fixed sizes
_CONTEXT_BYTES = 1 << 30  # more than a process's context takes that has loaded nothing
_LEAVING_SECONDS = 2.0  # in which an ended process's memory should be free
_STEPS = 3  # that are replayed


class CudaMemory(CudaApi, Protocol):
    """Streams and events, memory and copies of one device."""

    device: torch.device
    growing: bool
    """Whether segments of torch's allocator grow in place."""

    def enter(self) -> None:
        """Set the calling thread's device, because CUDA would give it the first one, with memory there."""

    def current(self) -> Any:
        """The calling thread's stream."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Issue a copy on the calling thread's stream."""

    def pin(self, tensor: Tensor) -> Tensor:
        """A dense host tensor's copy in page-locked memory."""

    def pinned(self, nbytes: int) -> Tensor:
        """Page-locked host bytes (uint8) of any content."""

    def register(self, tensor: Tensor) -> list[int]:
        """Page-lock the memory of a host tensor in place, and return the ends of its pieces, in bytes from
        its begin; the last one lies before the tensor's end if the system refuses the rest."""

    def page_locked_bytes(self) -> int:
        """The bytes that :meth:`register` page-locked."""

    def unregister(self, tensor: Tensor) -> None:
        """Undo :meth:`register` for host memory that goes away; nothing may be under way to or from it."""

    def release(self) -> None:
        """Undo what :meth:`register` and :meth:`limit` did."""

    def limit(self, nbytes: int) -> None:
        """Limit torch's allocator to so many bytes."""

    def context_bytes(self) -> int:
        """The bytes that the process holds on the device besides torch's allocator."""

    def reserved_bytes(self) -> int:
        """The most that torch's allocator held since :meth:`reset`."""

    def allocated_bytes(self) -> int:
        """The most that tensors took since :meth:`reset`."""

    def reset(self) -> None:
        """Start the measurement of peaks anew."""

    def snapshot(self) -> str:
        """Save what the allocator holds in a file; its path."""


def spare_bytes(budget_bytes: int, growing: bool = True) -> int:
    """Return the bytes of a budget that are left for kernels' scratch outside of any replay, and for the
    driver's allocations after the plan: modules of kernels, and local memory of kernels that spill. If
    segments do not grow (see :func:`set_allocator`), free pieces of segments that are too small count too."""
    driver = max(_LEAST_SPARE, min(budget_bytes // _SPARE_SHARE, _MOST_SPARE))
    return driver if growing else driver + budget_bytes // _FIXED_SHARE


def plan_bytes(api: CudaMemory, budget_bytes: int) -> int:
    """Return what plans may use of a budget: not the driver's context and libraries, nor what is beside
    plans."""
    context = api.context_bytes()
    beside = context + LOOSE_BYTES + spare_bytes(budget_bytes, api.growing)
    if budget_bytes <= beside:
        raise BudgetError(
            f"hbm_budget={format_bytes(budget_bytes)} is too small: the CUDA context, loaded kernels, other "
            f"processes on this GPU ({format_bytes(context)} now) and the libraries' workspaces take "
            f"{format_bytes(beside)} of it. Raise the budget."
        )
    return budget_bytes - beside


def lacking_bytes(allowed: int, step: Step, requests: Sequence[Request]) -> int:
    """By how much torch's allocator would need more than ``allowed`` bytes for a step; 0 where they do."""
    return replayed(allowed, step, requests).lacking


def replayed(allowed: int, step: Step, requests: Sequence[Request]) -> Pages:
    """The allocator's pages after some steps: what one leaves lies in the way of the next."""
    pages = Pages(allowed - PAGE_BYTES)  # a segment's last page may go beyond what was asked for
    for number, nbytes in enumerate((step.constant_bytes, step.slab_bytes, _CUBLAS_BYTES)):
        if nbytes:
            pages.take(-1 - number, nbytes)
    for _ in range(_STEPS):
        pages.replay(requests)
    return pages


class _Limits:
    """What the process may take of each device, as its programs limit it: the last that is open counts,
    and after all of them what was before the first, in whatever order they close."""

    def __init__(self) -> None:
        self._before: dict[torch.device, float] = {}
        self._open: dict[torch.device, dict[int, float]] = defaultdict(dict)  # by who asked, in their order

    def set(self, by: TorchCuda, fraction: float) -> None:
        """Limit the process for a program, which may do so again."""
        device, others = by.device, self._open[by.device]
        if not others:
            self._before[device] = torch.cuda.get_per_process_memory_fraction(device)
        others.pop(id(by), None)
        others[id(by)] = fraction
        torch.cuda.set_per_process_memory_fraction(fraction, device)

    def lift(self, by: TorchCuda) -> None:
        """A program has closed."""
        device, others = by.device, self._open[by.device]
        if others.pop(id(by), None) is not None:
            last = next(reversed(others.values()), self._before[device])
            torch.cuda.set_per_process_memory_fraction(last, device)


_LIMITS = _Limits()


class TorchCuda:
    """``torch.cuda`` as :class:`CudaMemory`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.enter()
        _await_leaving(device)
        self.growing = set_allocator(device)
        _warm_up(device, self.stream("compute"))
        self._anchor()
        self._refused = False
        self._registered: dict[int, int] = {}  # page-locked pieces, from and to
        self._probe = torch.zeros(1, device=device)

    def stream(self, name: str) -> Any:
        """The stream of that name, one for all programs: libraries keep a workspace for each they saw."""
        return _stream(self.device, name)

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]

    def use(self, stream: Any) -> None:
        torch.cuda.set_stream(stream)

    def enter(self) -> None:
        torch.cuda.set_device(self.device)

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def seconds_between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3

    def host_seconds(self, event: Any) -> float:
        if self.seconds_between(self._base, event) > _ANCHORED_SECONDS:
            self._anchor()
        return self._base_seconds + self.seconds_between(self._base, event)

    def _anchor(self) -> None:
        """Set the device's clock by the host's, on a stream that has no work to wait for."""
        self._base = self.event()
        self._base.record(self.stream("clock"))
        self._base.synchronize()
        self._base_seconds = time.perf_counter()

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def pin(self, tensor: Tensor) -> Tensor:
        return self.pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def pinned(self, nbytes: int) -> Tensor:
        return _page_locked(self.device).take(nbytes)

    def register(self, tensor: Tensor) -> list[int]:
        """A refusal is said once; small buffers are left as they are."""
        if tensor.nbytes < _REGISTERED_FROM or tensor.is_pinned():
            return [tensor.nbytes]
        pieces, code = page_lock(tensor)
        self._registered |= pieces
        if code or len(pieces) > 1:
            self._clear_error()
        if code and not self._refused:
            self._refused = True
            print(
                f"megacompile: the system refuses to page-lock {format_bytes(tensor.nbytes)} of host memory "
                f"beside {format_bytes(self.page_locked_bytes())} that are (CUDA error {code}). What it "
                f"refuses passes through {format_bytes(2 * PIECES * PIECE_BYTES)} of page-locked buffers, "
                "more slowly; program.memory says how much that is. Raise the limit of locked memory "
                "(ulimit -l unlimited).",
                file=sys.stderr,
            )
        start = tensor.data_ptr()
        return [min(stop - start, tensor.nbytes) for _, stop in pieces]

    def page_locked_bytes(self) -> int:
        return sum(stop - start for start, stop in self._registered.items())

    def _clear_error(self) -> None:
        """A refusal stays CUDA's last error until a launch is checked: of this one, not of a block's."""
        with contextlib.suppress(RuntimeError):
            self._probe.neg_()

    def unregister(self, tensor: Tensor) -> None:
        first, last = first_page(tensor), tensor.data_ptr() + tensor.nbytes
        for start in [start for start in self._registered if first <= start < last]:
            page_unlock(start)
            del self._registered[start]

    def failed(self) -> bool:
        return bool(failure_of(self.device))

    def release(self) -> None:
        if self.failed():
            self._registered.clear()  # the process's end gives it back, and nothing else
            return
        torch.cuda.synchronize(self.device)
        for start in self._registered:
            page_unlock(start)
        self._registered.clear()
        _drop_workspaces()
        _LIMITS.lift(self)

    def limit(self, nbytes: int) -> None:
        torch.cuda.empty_cache()
        if nbytes <= 0:
            raise BudgetError(
                f"hbm_budget leaves torch's allocator nothing: the CUDA context, loaded kernels and other "
                f"processes on this GPU hold {format_bytes(self.context_bytes())} of it. Raise the budget."
            )
        total = torch.cuda.get_device_properties(self.device).total_memory
        _LIMITS.set(self, min(1.0, nbytes / total))

    def context_bytes(self) -> int:
        """Measured; other processes on the same GPU count into it."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def reserved_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)

    def allocated_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def snapshot(self) -> str:
        handle, path = tempfile.mkstemp(".pickle", "megacompile-memory-")
        os.close(handle)
        torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
        return path


@functools.cache
def _stream(device: torch.device, name: str) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache
def _page_locked(device: torch.device) -> PageLocked:
    """One for all programs, which use it on their compute stream."""

    def record() -> Any:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(_stream(device, "compute"))
        return event

    return PageLocked(record)


@functools.cache
def set_allocator(device: torch.device) -> bool:
    """Set torch's allocator to grow segments in place, so that no byte of the budget is lost to blocks that
    do not fit any more. Returns whether the driver can: some virtual machines' cannot.

    cuBLAS keeps its workspaces, too; from torch 2.15 on (PR 194311) each product would take and give back
    its own, unless the process has made one before.
    """
    os.environ.setdefault("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    pages = f"large_segment_size_mb:{PAGE_BYTES >> 20}"
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:True,{pages}")
    torch.cuda.empty_cache()  # so that the next allocation is a new segment
    try:
        torch.empty(PAGE_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if failure_of(device):
            raise
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:False,{pages}")
        warn_user(
            f"The driver gives torch's allocator no segments that grow ({first_line(error)}). Plans leave an "
            f"eighth of hbm_budget to segments of fixed sizes."
        )
        return False
    return True


@functools.cache
def _await_leaving(device: torch.device) -> None:
    """Give the memory of a process that has just ended a moment to be free."""

    def used() -> int:
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)

    until = time.monotonic() + _LEAVING_SECONDS
    while used() > _CONTEXT_BYTES and time.monotonic() < until:
        time.sleep(0.05)


def _drop_workspaces() -> None:
    """Give back what cuBLAS keeps for each stream and thread."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _warm_up(device: torch.device, compute: Any) -> None:
    """Load the libraries that a step uses, so that what they hold is known before anything is planned."""
    try:
        with torch.cuda.stream(compute):
            for dtype in (torch.bfloat16, torch.float32):
                matrix = torch.ones(256, 256, dtype=dtype, device=device)
                torch.mm(matrix, matrix)
            if torch.cuda.get_device_capability(device) >= _FLASH_FROM:
                for width in _HEAD_WIDTHS:
                    heads = torch.ones(1, 4, 128, width, dtype=torch.bfloat16, device=device)
                    out, lse = torch_sdpa.forward(heads, heads, heads, None, True, 1.0)
                    torch_sdpa.backward(out, heads, heads, heads, out, lse, None, True, 1.0)
        torch.cuda.synchronize(device)
    finally:
        _drop_workspaces()
