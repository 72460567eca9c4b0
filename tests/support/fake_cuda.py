"""A GPU made of CPU tensors: copy streams are threads that lag at random, compute runs where it is issued.

Waits and records mean what they mean in CUDA: a stream that waits for an event waits for the record
that the event had when the wait was issued, and for nothing if it had none.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor


class FakeEvent:
    def __init__(self) -> None:
        self.over: threading.Event | None = None
        self.seconds = 0.0

    def record(self, stream: FakeStream) -> None:
        over = self.over = threading.Event()

        def reach() -> None:
            self.seconds = time.perf_counter()
            over.set()

        stream.enqueue(reach)

    def synchronize(self) -> None:
        if self.over is not None:
            self.over.wait()

    def query(self) -> bool:
        return self.over is None or self.over.is_set()


class FakeStream:
    """Runs what it is given at once (``lag`` None), or in order on a thread, sometime later."""

    def __init__(self, lag: random.Random | None) -> None:
        self.lag = lag
        self.queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        if lag is not None:
            threading.Thread(target=self._work, daemon=True).start()

    def enqueue(self, run: Callable[[], object]) -> None:
        if self.lag is None:
            run()
        else:
            self.queue.put(run)

    def wait_event(self, event: FakeEvent) -> None:
        over = event.over
        if over is not None:
            self.enqueue(lambda: over.wait())

    def synchronize(self) -> None:
        event = FakeEvent()
        event.record(self)
        event.synchronize()

    def _work(self) -> None:
        assert self.lag is not None
        while True:
            run = self.queue.get()
            time.sleep(self.lag.choice((0.0, 0.0, 2e-4, 1e-3)))
            run()


class FakeCuda:
    """:class:`~megacompile.runtime.cuda_memory.CudaMemory` for tests; ``copies`` counts what crossed the
    link.

    With ``refuses`` the system page-locks nothing in place; ``through`` then counts copies that pass
    through buffers that are page-locked from the start. With ``piece_bytes`` it locks pieces of so many, and
    with ``half`` only those of a tensor's first half.
    """

    def __init__(self, seed: int = 0, context_bytes: int = 1000, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.piece_bytes, self.half = 1 << 62, False
        self._borders: set[int] = set()
        self.through = 0
        self._buffers: list[Tensor] = []
        self.device = torch.device("cpu")
        self.growing = True
        self.seed = seed
        self.computes: list[FakeStream] = []
        self.copies = 0
        self.registered = 0
        self.released = False
        self.limited = 0
        self.reserved = 0
        self._context = context_bytes
        self._mine = threading.local()
        self._default = FakeStream(None)

    def stream(self, name: str) -> Any:
        if name == "compute":
            self.computes.append(FakeStream(None))
            return self.computes[-1]
        return FakeStream(random.Random(f"{name} {self.seed}"))

    def event(self) -> Any:
        return FakeEvent()

    def use(self, stream: Any) -> None:
        self._mine.stream = stream

    def enter(self) -> None:
        pass

    def current(self) -> Any:
        return getattr(self._mine, "stream", self._default)

    def seconds_between(self, first: Any, second: Any) -> float:
        return float(second.seconds - first.seconds)

    def host_seconds(self, event: Any) -> float:
        return float(event.seconds)

    def failed(self) -> bool:
        return False

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.dtype == source.dtype, "a copy over the link never casts"
        assert target.stride() == source.stride() or target.numel() < 2, "nor changes the layout"
        self.copies += 1
        spans = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in (target, source)]
        assert not any(a < border < b for a, b in spans for border in self._borders), "over two pieces"
        storages = {target.untyped_storage().data_ptr(), source.untyped_storage().data_ptr()}
        self.through += any(b.untyped_storage().data_ptr() in storages for b in self._buffers)
        self.current().enqueue(lambda: target.copy_(source))

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def pinned(self, nbytes: int) -> Tensor:
        self._buffers.append(torch.full((nbytes,), 255, dtype=torch.uint8))
        return self._buffers[-1]

    def register(self, tensor: Tensor) -> list[int]:
        if self.refuses:
            return []
        ends = [*range(self.piece_bytes, tensor.nbytes, self.piece_bytes), tensor.nbytes]
        if self.half:
            ends = ends[: len(ends) // 2]
        self._borders |= {tensor.data_ptr() + end for end in ends if end < tensor.nbytes}
        self.registered += ends[-1] if ends else 0
        self.released = False
        return ends

    def page_locked_bytes(self) -> int:
        return self.registered

    def unregister(self, tensor: Tensor) -> None:
        start = tensor.data_ptr()
        self._borders = {border for border in self._borders if not start < border < start + tensor.nbytes}

    def release(self) -> None:
        self.released = True

    def limit(self, nbytes: int) -> None:
        self.limited = nbytes

    def context_bytes(self) -> int:
        return self._context

    def reserved_bytes(self) -> int:
        return self.reserved

    def allocated_bytes(self) -> int:
        return self.reserved

    def reset(self) -> None:
        pass

    def snapshot(self) -> str:
        return "nowhere"
