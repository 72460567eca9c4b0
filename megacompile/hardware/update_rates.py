"""Measure host AdamW as steps run it: with a bf16 gradient, on some thread counts, alone and beside copies.

In: thread counts, parameters of an update. Out: :class:`UpdateRates`, and a machine with them. All are means:
a step sees no best run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megacompile.hardware.machine import Machine, adam_update

Way = Literal["h2d", "d2h"]
ALONE: tuple[Way, ...] = ()
BOTH: tuple[Way, ...] = ("h2d", "d2h")
WAYS: tuple[tuple[Way, ...], ...] = (ALONE, ("h2d",), ("d2h",), BOTH)
_TRIED, _MEASURED = 0.1, 0.4  # seconds of each thread count, and of each way with the best of them
_AS_FAST = (
    0.98  # of the fastest: fewer threads, which leave cores to who loads data and issues work, do as well
)
_COPY, _CPU_COPY = 256 << 20, 32 << 20  # bytes


class Together(NamedTuple):
    """Bytes per second of host memory that updates move, and those that the copies beside them do."""

    updates: float
    copies: float


@dataclass(frozen=True)
class UpdateRates:
    """``tried`` says by thread count what updates move alone, and beside copies both ways; ``together`` what
    updates on ``threads`` move beside copies of these ways."""

    threads: int
    tried: dict[int, tuple[float, float]]
    together: dict[tuple[Way, ...], Together]

    def __str__(self) -> str:
        ways = {ALONE: "alone", ("h2d",): "beside copies down", ("d2h",): "up", BOTH: "both ways"}
        of_ways = [
            f"{name} {found.updates / 1e9:.3g} GB/s" + (f" ({found.copies / 1e9:.3g})" if way else "")
            for way, name in ways.items()
            for found in [self.together[way]]
        ]
        tried = [f"{n}: {one / 1e9:.3g} ({both / 1e9:.3g})" for n, (one, both) in self.tried.items()]
        return (
            f"{self.threads} threads, bf16 gradients: {', '.join(of_ways)}; "
            f"by threads alone (and beside both): {', '.join(tried)}"
        )

    def of(self, machine: Machine) -> Machine:
        """The machine with these rates, and as its host's the most that updates and copies moved together."""

        def slower(way: Way, bandwidth: float) -> float:
            return max(1.0, (self.together[ALONE].updates + bandwidth) / sum(self.together[way,]))

        return replace(
            machine,
            host_bandwidth=max(sum(found) for found in self.together.values()),
            adam_bandwidth=self.together[ALONE].updates,
            adam_beside_h2d=slower("h2d", machine.h2d_bandwidth),
            adam_beside_d2h=slower("d2h", machine.d2h_bandwidth),
            adam_threads=self.threads,
        )


def measure_updates(counts: Iterable[int], elements: int) -> UpdateRates:
    """Try each number of threads on an update of so many parameters, and measure the best one each way.

    Copies are those of the first CUDA device; without one each is a thread's that copies memory.
    """
    update, copier = adam_update(elements, torch.bfloat16), _Copier()

    def together(threads: int, ways: Sequence[Way], seconds: float) -> Together:
        with copier.copying(ways) as copied:
            update(threads)  # which starts them, and touches the memory at first
            start, before, moved, passed = time.perf_counter(), copied(), 0, 0.0
            while passed < seconds:
                moved += update(threads)
                passed = time.perf_counter() - start
            return Together(moved / passed, (copied() - before) / passed)

    return rates_of(counts, together)


def rates_of(
    counts: Iterable[int], together: Callable[[int, tuple[Way, ...], float], Together]
) -> UpdateRates:
    """The rates of the fewest threads that are as fast as any beside copies both ways, where ``together``
    measures a thread count beside copies for so many seconds."""
    tried = {n: (together(n, ALONE, _TRIED).updates, together(n, BOTH, _TRIED).updates) for n in counts}
    fastest = max(beside for _, beside in tried.values())
    threads = min(n for n, (_, beside) in tried.items() if beside >= _AS_FAST * fastest)
    return UpdateRates(threads, tried, {ways: together(threads, ways, _MEASURED) for ways in WAYS})


class _Copier:
    """Copies to and from the first CUDA device, or within the host's memory, without a pause."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        nbytes = _COPY if self.cuda else _CPU_COPY
        self.buffers = {way: self._buffers(way, nbytes) for way in BOTH}

    def _buffers(self, way: Way, nbytes: int) -> tuple[Tensor, Tensor]:
        """Return what a copy reads, and what it writes."""
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.cuda)
        there = torch.empty(nbytes, dtype=torch.uint8, device="cuda" if self.cuda else "cpu")
        return (host, there) if way == "h2d" else (there, host)

    @contextmanager
    def copying(self, ways: Sequence[Way]) -> Iterator[Callable[[], int]]:
        """Copy these ways, each on a thread of its own; yields a function that tells how many bytes are over.

        Raises what a copy did.
        """
        moved: dict[Way, int] = dict.fromkeys(ways, 0)
        done, threads = threading.Event(), torch.get_num_threads()
        copy = self._on_gpu if self.cuda else self._on_cpu
        with ThreadPoolExecutor(len(BOTH)) as pool:
            copies = [pool.submit(copy, way, moved, done) for way in ways]
            try:
                while not all(moved.values()) and not any(c.done() for c in copies):
                    time.sleep(1e-3)
                yield lambda: sum(moved.values())
            finally:
                done.set()
                for finished in copies:
                    finished.result()
                torch.set_num_threads(threads)  # a copying thread's count was taken for all that start later

    def _on_gpu(self, way: Way, moved: dict[Way, int], done: threading.Event) -> None:
        """One copy is always queued behind the one that runs; who waits leaves its core to others."""
        source, target = self.buffers[way]
        events = [torch.cuda.Event(blocking=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        stream, issued = torch.cuda.Stream(), 0  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            while not done.is_set():
                event = events[issued % 2]
                if issued > 1:
                    event.synchronize()
                    moved[way] += source.nbytes
                target.copy_(source, non_blocking=True)
                event.record()
                issued += 1
        stream.synchronize()

    def _on_cpu(self, way: Way, moved: dict[Way, int], done: threading.Event) -> None:
        source, target = self.buffers[way]
        torch.set_num_threads(1)
        while not done.is_set():
            target.copy_(source)
            moved[way] += source.nbytes
