"""Time calls on a GPU, and what this GPU can do at most.

A call is captured into a CUDA graph and replayed, so that Python's launch gaps are not measured. Where one
cannot be captured, it and all that come after it are timed as they are called. Before each replay the
second-level cache is overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, Protocol

import torch

from megacompile.runtime.device_failures import first_line
from megacompile.user_warning import warn_user

Call = Callable[[], object]
WARMUP, MIN_REPEATS, MAX_REPEATS, SPEND_MS = 3, 10, 200, 300.0
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: the fifth, the half and the four fifths of its distribution."""

    low: float
    median: float
    high: float
    graph: bool = True


@dataclass(frozen=True)
class Roofline:
    """The rates that this device reached in this run: a copy's bytes per second, products' flop per
    second."""

    bandwidth: float
    flops: dict[torch.dtype, float]

    def best_seconds(self, nbytes: int, flops: int, dtype: torch.dtype) -> float:
        """No kernel with this work is faster."""
        return max(nbytes / self.bandwidth, flops / self.flops[dtype])


class Timer(Protocol):
    """Times calls on one device and tells what they hold."""

    def time(self, call: Call) -> Times: ...

    def peak_bytes(self, call: Call) -> int: ...

    def scope(self) -> AbstractContextManager[Any]: ...


class CudaTimer:
    """CUDA events around replayed graphs, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.captures = True  # until one fails
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Everything whose backward is timed must run in here: gradients run on their forward's stream."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.synchronize()

    def time(self, call: Call) -> Times:
        with self.scope():
            for _ in range(WARMUP):
                call()
            replay, graph = self._captured(call)
            repeats = self._repeats(replay)
            spans = [self._once(replay) for _ in range(repeats)]
        low, _, _, high = quantiles([s() for s in spans], n=5)
        median = sorted(s() for s in spans)[repeats // 2]
        return Times(low, median, high, graph)

    def _captured(self, call: Call) -> tuple[Call, bool]:
        self.stream.synchronize()
        if not self.captures:
            return call, False
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                call()
        except RuntimeError as error:  # it synchronises, or allocates what a capture forbids
            torch.cuda.synchronize()
            self.captures = False
            warn_user(f"A CUDA graph cannot be captured ({first_line(error)}): calls are now timed without.")
            self._end_capture(pool)
            return call, False
        return graph.replay, True

    def _end_capture(self, pool: Any) -> None:
        """Undo what torch leaves behind of a capture that failed: its allocator keeps all pages, for the pool
        of the graph, and every random number is an error."""
        index = torch.cuda.current_device()
        with suppress(RuntimeError):  # it ended there
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
        fresh = torch.Generator(self._device).graphsafe_get_state()
        torch.cuda.default_generators[index].graphsafe_set_state(fresh)

    def _repeats(self, replay: Call) -> int:
        once = self._once(replay)
        self.stream.synchronize()
        return min(max(math.ceil(SPEND_MS / max(once(), 1e-3)), MIN_REPEATS), MAX_REPEATS)

    def _once(self, replay: Call) -> Callable[[], float]:
        self.flush.zero_()
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record(self.stream)
        replay()
        end.record(self.stream)
        return lambda: float(start.elapsed_time(end))

    def peak_bytes(self, call: Call) -> int:
        """The most that a call holds beyond what was there before it."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with self.scope():
            kept = call()
        del kept
        return torch.cuda.max_memory_allocated() - before


def roofline(timer: Timer, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Roofline:
    """Measure a copy of 1 GiB and square products of random numbers."""
    return Roofline(_copy_rate(timer, device), {d: _product_rate(timer, device, d) for d in dtypes})


def _copy_rate(timer: Timer, device: torch.device) -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / timer.time(lambda: target.copy_(source)).median * 1e3


def _product_rate(timer: Timer, device: torch.device, dtype: torch.dtype) -> float:
    side = 8192 if dtype != torch.float32 else 4096
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / timer.time(lambda: a @ b).median * 1e3
