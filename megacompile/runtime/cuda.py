"""The CUDA backend: streams, a slab, torch's caching allocator under a hard limit, registered host memory.

Weights live in a slab that is allocated once per program. What blocks create comes from torch's allocator
on the compute stream, and is freed by the compute stream after it waited for whoever else read it, so
stream order alone makes its reuse safe. The allocator may never hold more than the budget less what the
driver takes: going over raises.

Gradients leave in the dtype in which the device has them. Where the host buffer is that very dtype and is
set, they land in it directly; otherwise (kept gradients, sums) they pass through a small ring, and the host
casts and adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import Slot
from megacompile.distributed.world import World
from megacompile.errors import BudgetExceededError, DeviceFullError, ProgramError
from megacompile.hardware.caching_allocator import PAGE_BYTES
from megacompile.kernels.adamw import adamw_
from megacompile.runtime.bounce_buffers import BOUNCE_BUFFERS, BounceBuffer
from megacompile.runtime.cuda_host_memory import CudaHostMemory
from megacompile.runtime.cuda_memory import CudaMemory
from megacompile.runtime.cuda_streams import CudaStreams, OnComplete
from megacompile.runtime.device import Device
from megacompile.runtime.exact_convolutions import exact_convolutions
from megacompile.runtime.thread_streams import Trace
from megacompile.schedule.step import Event, Step
from megacompile.state.adam import AdamHyper
from megacompile.state.master_layout import add_gradients, slot_view
from megacompile.state.masters import HostState
from megacompile.units import update_threads, usable_cores

_CHANGED = -1  # a version that no tensor has
_UNSETTLED = 2  # steps before which the driver's share of the budget may have grown


class CudaDevice(Device):
    """One GPU under a budget in bytes.

    What the driver takes of it is measured anew before the first step, when host memory is page-locked, and
    before the second, when kernels are loaded: torch's allocator may hold the rest.
    """

    immediate = False
    streams: CudaStreams
    host: CudaHostMemory

    def __init__(
        self,
        api: CudaMemory,
        budget_bytes: int,
        world: World | None = None,
        adam_threads: int | None = None,
    ) -> None:
        """``adam_threads`` update where the machine has one rank, None: as many as the cores allow."""
        self.api = api
        self.torch_device = api.device
        self._budget = budget_bytes
        self._limit()
        self.unsettled = _UNSETTLED
        world = world or World()
        cores, threads = usable_cores() // world.local, torch.get_num_threads()
        known = adam_threads if world.local == 1 else None  # measured for the whole machine
        self.adam_threads = update_threads(cores) if known is None else min(known, cores)
        share = {"h2d": 1, "d2h": 1, "comm": 1, "host": self.adam_threads, "land": max(1, cores // 4),
                 "nvme_read": 1, "nvme_write": 1}  # fmt: skip

        def begin(worker: str) -> None:
            api.enter()
            torch.set_num_threads(share[worker])

        self.streams = CudaStreams(api, begin, comm=world.size > 1)
        self.streams.synchronize()  # by now every worker has set its own count
        torch.set_num_threads(threads)  # also what threads that start later will take
        self.host = CudaHostMemory(api)
        super().__init__(self.streams, self.host)
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._constants: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._bounce_buffers = [BounceBuffer() for _ in range(BOUNCE_BUFFERS)]
        self._bounces = 0
        self._read: Any = None
        self._waited: frozenset[Event] = frozenset()

    def close(self) -> None:
        super().close()
        self.api.release()

    def prepare(
        self, step: Step, constants: Mapping[str, Tensor], changed: Collection[str] = ()
    ) -> dict[str, Tensor]:
        if self._slab.nbytes != step.slab_bytes and (step.slab_bytes or step.resident):
            self.streams.synchronize()
            self._slab = torch.empty(0, dtype=torch.uint8)
            self._slab = torch.empty(step.slab_bytes, dtype=torch.uint8, device=self.torch_device)
        self._waited = step.waited
        here = {name: self._constant(tensor) for name, tensor in constants.items()}
        for name in changed:
            self._constants[id(constants[name])] = (constants[name], _CHANGED, here[name])
        return here

    def store(self, buffers: Iterable[Tensor]) -> None:
        for buffer in buffers:
            here = self._constants[id(buffer)][2]
            buffer.copy_(here)
            self._constants[id(buffer)] = (buffer, buffer._version, here)

    def vacate(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._constants.clear()
        self._limit()  # which has the allocator give back what it keeps

    @contextmanager
    def whole(self) -> Iterator[None]:
        self.api.reset()
        try:
            with self._on_compute():
                yield
        finally:
            self.peak_bytes = max(self.peak_bytes, self.api.allocated_bytes())

    def _constant(self, tensor: Tensor) -> Tensor:
        """A buffer of the model on the device, brought up to date where the model's has changed."""
        known = self._constants.get(id(tensor))
        if known is None:
            known = (tensor, tensor._version, tensor.to(self.torch_device, copy=True))
        elif known[1] != tensor._version:
            known = (tensor, tensor._version, known[2].copy_(tensor))
        self._constants[id(tensor)] = known
        return known[2]

    @contextmanager
    def computing(self) -> Iterator[None]:
        with self._on_compute(), self._showing_what_is_held():
            yield

    @contextmanager
    def _on_compute(self) -> Iterator[None]:
        caller, compute = self.api.current(), self.streams.compute
        _follow(self.api, compute, caller)
        self.api.use(compute)
        try:
            with exact_convolutions():
                yield
        finally:
            _follow(self.api, caller, compute)
            self.api.use(caller)

    @contextmanager
    def _showing_what_is_held(self) -> Iterator[None]:
        """Take a snapshot of the allocator where it finds no room, while the step's tensors are alive."""
        try:
            yield
        except (torch.OutOfMemoryError, BudgetExceededError) as error:
            ran_out = isinstance(error.__cause__ or error, torch.OutOfMemoryError)
            if not ran_out or isinstance(error, DeviceFullError):
                raise
            raise DeviceFullError(str(error).split(". Of the allocated")[0], self.api.snapshot()) from error

    def _limit(self) -> None:
        self._allowed = self._budget - self.api.context_bytes()
        self.api.limit(self._allowed - PAGE_BYTES)  # a segment's last page may go beyond what was asked for

    @contextmanager
    def start(self, trace: Trace) -> Iterator[None]:
        if self.unsettled:
            self.unsettled -= 1
            self._limit()
        self.streams.begin(trace, self._waited)
        self.api.reset()
        with self._showing_what_is_held():
            yield
        self.peak_bytes = max(self.peak_bytes, self.api.allocated_bytes())
        held = self.api.reserved_bytes()
        if held > self._allowed:
            raise BudgetExceededError(
                f"The device held {held} bytes where the budget leaves {self._allowed}: please report this."
            )

    def counted(self) -> AbstractContextManager[object]:
        return nullcontext()

    def slot(self, offset: int, nbytes: int) -> Tensor:
        return self._slab[offset : offset + nbytes]

    def load(self, leaf: Tensor) -> Tensor:
        return self.send(leaf)

    def load_filled(
        self, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], None]
    ) -> Tensor:
        host = self.api.pinned(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        fill(host)
        target = torch.empty(shape, dtype=dtype, device=self.torch_device)
        self.api.copy(target, host)
        return target

    def hold(self, tensor: Tensor) -> None:
        pass  # torch's allocator counts all

    def send(self, tensor: Tensor) -> Tensor:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.torch_device)
        self.api.copy(target, self.api.pin(tensor.contiguous()))
        return target

    def read(self, value: Tensor) -> Tensor:
        target = self.api.pinned(value.numel() * value.itemsize).view(value.dtype).view(value.shape)
        self.api.copy(target, value.detach())
        self._read = self.streams.clock()
        return target

    def await_reads(self) -> None:
        if self._read is not None:
            self._read.synchronize()

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> OnComplete | None:
        return self.host.copy(targets, sources)

    def push(
        self,
        home: Tensor,
        slots: Sequence[Slot],
        parts: Sequence[tuple[int, Tensor]],
        fresh: Collection[int],
    ) -> OnComplete | None:
        places = [slot_view(home, slots[index]) for index, _ in parts]
        grads = [grad for _, grad in parts]
        alike = all(
            p.dtype == g.dtype and p.stride() == g.stride() for p, g in zip(places, grads, strict=True)
        )
        indices = [index for index, _ in parts]
        if alike and all(index in fresh for index in indices):
            return self.copy(places, grads)

        def use(landed: list[Tensor]) -> None:
            add_gradients(home, slots, list(zip(indices, landed, strict=True)), fresh)

        return self.land(grads, use)

    def land(self, tensors: Sequence[Tensor], use: Callable[[list[Tensor]], None]) -> OnComplete | None:
        bounce = self._bounce_buffers[self._bounces % BOUNCE_BUFFERS]
        self._bounces += 1
        bounce.take()
        try:
            landed = bounce.like(tensors, self.host)
            staged = self.copy(landed, tensors)
        except BaseException:
            bounce.free.set()  # no callback will
            raise

        def on_complete() -> None:
            try:
                if staged is not None:
                    staged()
                use(landed)
            finally:
                bounce.free.set()

        return on_complete

    def update(
        self,
        state: HostState,
        group: int,
        grad: Tensor,
        hypers: Sequence[AdamHyper],
        slots: Collection[int],
    ) -> None:
        """By the kernel, or its reference in plain torch where triton is missing."""
        for weights, low, first, second, part, hyper in state.plain_runs(group, grad, hypers, slots):
            if hyper.maximize or (hyper.weight_decay and not hyper.decoupled):
                raise ProgramError(
                    "The optimizer's weight_decay or maximize was changed to what the device's AdamW cannot "
                    "do: set it before compile."
                )
            scale = None
            if hyper.grad_scale != 1.0:
                scale = self.send(torch.tensor([hyper.grad_scale], dtype=torch.float32))
            adamw_(weights, low, first, second, part, hyper.lr, hyper.beta1, hyper.beta2, hyper.eps,
                   hyper.weight_decay, hyper.step, scale)  # fmt: skip


def _follow(api: CudaMemory, later: Any, earlier: Any) -> None:
    event = api.event()
    event.record(earlier)
    later.wait_event(event)
