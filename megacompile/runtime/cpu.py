"""The CPU backend: emulates an accelerator with ``hbm_budget`` bytes on ordinary memory.

Compute runs in the calling thread; transfers are real copies and updates real passes over host memory
on worker threads. Weights live in one slab; every tensor that blocks create is counted by a meter that
refuses to exceed the budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megacompile.differentiate.meter import StorageMeter
from megacompile.host.adam import AdamHyper
from megacompile.host.state import HostState, add_gradients
from megacompile.plan.assemble import Slot
from megacompile.runtime.workers import Streams, Trace
from megacompile.step.operations import Event, Step, Stream


class CpuDevice:
    """A slab, a meter, and worker threads as streams; see :class:`~megacompile.runtime.device.Device`."""

    immediate = True

    def __init__(self, budget_bytes: int) -> None:
        self.torch_device = torch.device("cpu")
        self.budget_bytes = budget_bytes
        cores = torch.get_num_threads()
        # one thread each for copies; norms take as many as eager does, to round as eager does
        self.streams = Streams({"h2d": 1, "d2h": 1, "host": cores, "nvme_read": 1, "nvme_write": 1})
        self.adam_threads = max(1, cores // 2)  # the rest computes at the same time
        self.peak_bytes = 0
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._fixed = 0
        self._meter = StorageMeter()

    # ---- streams ---------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.streams.step

    def submit(self, stream: Stream, event: Event, after: Iterable[Event], run: Callable[[], object]) -> None:
        self.streams.submit(stream, event, after, run)

    def wait(self, after: Iterable[Event]) -> None:
        self.streams.wait(after)

    def reached(self, event: Event) -> None:
        self.streams.reached(event)

    def clock(self) -> float:
        return time.perf_counter()

    def note(self, event: Event, start: float) -> None:
        self.streams.note(event, start)

    def drain(self) -> None:
        self.streams.drain()

    def raise_failure(self) -> None:
        self.streams.raise_failure()

    def close(self) -> None:
        self.streams.close()

    # ---- memory ----------------------------------------------------------------------------------

    def prepare(self, step: Step, constants: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self._slab.nbytes != step.slab_bytes and (step.slab_bytes or step.resident):
            self.drain()
            self._slab = torch.empty(0, dtype=torch.uint8)
            self._slab = torch.empty(step.slab_bytes, dtype=torch.uint8)
            self._meter.ignore(self._slab)
        for constant in constants.values():
            self._meter.ignore(constant)
        self._fixed = self._slab.nbytes + step.constant_bytes
        self._meter.limit = self.budget_bytes - step.slab_bytes - step.constant_bytes
        return constants

    @contextmanager
    def start(self, trace: Trace) -> Iterator[None]:
        self.streams.step += 1
        self.streams.trace = trace
        self.streams.note(("run",), time.perf_counter())
        self._meter.peak = self._meter.live
        yield
        self.peak_bytes = max(self.peak_bytes, self._fixed + self._meter.peak)

    def counted(self) -> StorageMeter:
        return self._meter

    def slot(self, offset: int, nbytes: int) -> Tensor:
        return self._slab[offset : offset + nbytes]

    def own(self, tensors: Iterable[Tensor]) -> None:
        pass  # any memory will do

    def host_empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    # ---- copies ----------------------------------------------------------------------------------

    def load(self, leaf: Tensor) -> Tensor:
        with self._meter:
            return leaf.clone(memory_format=torch.contiguous_format)

    def hold(self, tensor: Tensor) -> None:
        self._meter.ignore(tensor)

    def send(self, tensor: Tensor) -> Tensor:
        self._meter.ignore(tensor)
        return tensor

    def read(self, value: Tensor) -> Tensor:
        return value.clone()

    def settle(self) -> None:
        pass

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            _copy(target, source)

    def push(
        self, home: Tensor, slots: Sequence[Slot], parts: Sequence[tuple[int, Tensor]], fresh: bool
    ) -> None:
        add_gradients(home, slots, parts, fresh)

    def update(self, state: HostState, group: int, grad: Tensor, hypers: Sequence[AdamHyper]) -> None:
        state.update(group, grad, hypers, threads=torch.get_num_threads())


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
