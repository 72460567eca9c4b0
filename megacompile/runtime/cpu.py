"""The CPU backend: emulates an accelerator with ``hbm_budget`` bytes on ordinary memory.

Compute runs in the calling thread; transfers are real copies and updates real passes over host memory
on worker threads. Weights live in one slab. In the first step of each program, every tensor that blocks
create is counted by a meter that refuses to exceed the budget. Later steps make tensors of the same sizes.
Where functions of the user's allocate inside of a step, every one is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from megacompile.blocks.cpu_products import float32_products, withdraw_products
from megacompile.blocks.memory_meter import StorageMeter
from megacompile.blocks.weight_groups import Slot
from megacompile.distributed.world import World
from megacompile.runtime.device import Device
from megacompile.runtime.thread_streams import Streams, Trace
from megacompile.schedule.step import Step
from megacompile.state.adam import AdamHyper
from megacompile.state.master_layout import add_gradients
from megacompile.state.masters import HostState


class CpuDevice(Device):
    """A slab, a meter, and worker threads as streams."""

    immediate = True
    streams: Streams

    def __init__(self, budget_bytes: int, world: World | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.budget_bytes = budget_bytes
        cores = torch.get_num_threads()
        # one thread each for copies; norms take as many as eager does, to round as eager does
        threads = {"h2d": 1, "d2h": 1, "host": cores, "nvme_read": 1, "nvme_write": 1}
        self.streams = Streams(threads | ({"comm": 1} if world is not None and world.size > 1 else {}))
        super().__init__(self.streams)
        self.adam_threads = max(1, cores // 2)  # the rest computes at the same time
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._fixed = 0
        self._changed: dict[int, Tensor] = {}  # copies of the model's buffers
        self._meter = StorageMeter()
        self._counted: WeakValueDictionary[int, Step] = WeakValueDictionary()  # steps whose peak is known
        self._step: Step  # that is prepared, and whether it is counted
        self._counts = True
        self._whole = StorageMeter(budget_bytes)  # while no step has a part of the budget

    def prepare(
        self, step: Step, constants: Mapping[str, Tensor], changed: Collection[str] = ()
    ) -> Mapping[str, Tensor]:
        if self._slab.nbytes != step.slab_bytes and (step.slab_bytes or step.resident):
            self.streams.synchronize()
            self._slab = torch.empty(0, dtype=torch.uint8)
            self._slab = torch.empty(step.slab_bytes, dtype=torch.uint8)
            self._meter.ignore(self._slab)
        here = {name: t.clone() if name in changed else t for name, t in constants.items()}
        self._changed = {id(constants[name]): here[name] for name in changed}
        for constant in here.values():
            self._meter.ignore(constant)
        self._fixed = self._slab.nbytes + step.constant_bytes
        self._meter.stop_above(self.budget_bytes - step.slab_bytes - step.constant_bytes)
        self._step, self._counts = step, self._counted.get(id(step)) is not step
        return here

    def store(self, buffers: Iterable[Tensor]) -> None:
        for buffer in buffers:
            buffer.copy_(self._changed[id(buffer)])

    def vacate(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._whole = StorageMeter(self.budget_bytes)  # forgets what a failed call still holds

    @contextmanager
    def whole(self) -> Iterator[None]:
        try:
            with self._whole:
                yield
        finally:
            self.peak_bytes = max(self.peak_bytes, min(self._whole.peak, self.budget_bytes))

    @contextmanager
    def start(self, trace: Trace) -> Iterator[None]:
        self.streams.begin(trace)
        self._meter.forget_peak()
        self._meter.varies = False
        try:
            yield
        except BaseException:
            self._meter.withdraw()
            withdraw_products()
            raise
        if self._counts:
            self.peak_bytes = max(self.peak_bytes, self._fixed + self._meter.peak)
            if not self._meter.varies:
                self._counted[id(self._step)] = self._step

    def counted(self) -> AbstractContextManager[object]:
        return self._meter if self._counts else nullcontext()

    def products(self) -> AbstractContextManager[object]:
        return float32_products()

    def slot(self, offset: int, nbytes: int) -> Tensor:
        return self._slab[offset : offset + nbytes]

    def load(self, leaf: Tensor) -> Tensor:
        with self.counted():
            return leaf.clone(memory_format=torch.contiguous_format)

    def load_filled(
        self, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], None]
    ) -> Tensor:
        with self.counted():
            target = torch.empty(shape, dtype=dtype)
        fill(target)
        return target

    def hold(self, tensor: Tensor) -> None:
        self._meter.ignore(tensor)

    def send(self, tensor: Tensor) -> Tensor:
        self._meter.ignore(tensor)
        return tensor

    def read(self, value: Tensor) -> Tensor:
        return value.clone()

    def await_reads(self) -> None:
        pass

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            _copy(target, source)

    def land(self, tensors: Sequence[Tensor], use: Callable[[list[Tensor]], None]) -> None:
        use(list(tensors))

    def push(
        self,
        home: Tensor,
        slots: Sequence[Slot],
        parts: Sequence[tuple[int, Tensor]],
        fresh: Collection[int],
    ) -> None:
        add_gradients(home, slots, parts, fresh)

    def update(
        self,
        state: HostState,
        group: int,
        grad: Tensor,
        hypers: Sequence[AdamHyper],
        slots: Collection[int],
    ) -> None:
        state.update(group, grad, hypers, slots, threads=torch.get_num_threads())


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
