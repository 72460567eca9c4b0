"""Run a Gluon kernel for Hopper on the CPU, from its own source: numbers, and the order of its partitions.

In: a launch that was recorded on CPU tensors. What the kernel calls of Gluon is replaced by torch, so masks,
bounds and indices are the kernel's own. Partitions of warps take turns at every barrier, copy and product;
who is next, and when a copy arrives, is drawn from a seed. Shared memory that a copy will fill holds NaN from
the moment when the copy is asked for; a product reads its operands as late as it may, when it is waited for.
So a stage that is given back too early, or read too early, shows in the results. A wait that nothing can end
raises :class:`Deadlock`; an arrival too many, a read or write out of a tensor, and what is left over at the
end, raise as well. Layouts, registers and the memory model are the compiler's matter and not checked.
"""

from __future__ import annotations

import itertools
import random
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacompile.kernels._triton import Launch


class Deadlock(AssertionError):
    """All partitions wait, and nothing is under way that could end a wait."""


@dataclass
class Barrier:
    """An mbarrier: its phase ends by ``arrivals`` arrivals and the bytes that were expected."""

    arrivals: int = 0
    phase: int = 0
    pending: int = 0
    nbytes: int = 0

    def arrive(self, count: int, expected: int = 0) -> None:
        assert self.pending >= count, f"a barrier of {self.arrivals} arrivals gets one too many"
        self.pending -= count
        self.nbytes += expected
        self._end_phase()

    def fill(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self._end_phase()

    def _end_phase(self) -> None:
        if self.pending == 0 and self.nbytes == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals


@dataclass(frozen=True)
class Barriers:
    """A row of barriers in shared memory."""

    each: tuple[Barrier, ...]

    def index(self, place: int) -> Barrier:
        return self.each[int(place)]


@dataclass(frozen=True)
class SharedMemory:
    """A tile in shared memory, or a view of one."""

    data: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, place: int) -> SharedMemory:
        return SharedMemory(self.data[int(place)])

    def reshape(self, shape: Sequence[int]) -> SharedMemory:
        return SharedMemory(self.data.view(*shape))

    def permute(self, order: Sequence[int]) -> SharedMemory:
        return SharedMemory(self.data.permute(*order))

    def load(self, layout: object) -> Tensor:
        return self.data.clone()


class Pointer:
    """An address of elements, or a tensor of addresses; ``memory`` is all that may be read and written."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, tensor: Tensor) -> Pointer:
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(tensor.as_strided((last + 1,), (1,)))

    def __add__(self, elements: Any) -> Pointer:
        return Pointer(self.memory, self.offset + elements)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        at, inside = torch.broadcast_tensors(torch.as_tensor(self.offset), torch.as_tensor(mask))
        assert not bool((inside & ((at < 0) | (at >= self.memory.numel()))).any()), "out of a tensor"
        return at, inside


@dataclass
class Product:
    """An asynchronous product: computed when it is waited for."""

    a: Any
    b: SharedMemory
    onto: Any
    result: Tensor | None = None

    def finish(self) -> None:
        if self.result is None:
            a = self.a.data if isinstance(self.a, SharedMemory) else self.a
            onto = self.onto.result if isinstance(self.onto, Product) else self.onto
            self.result = a.float() @ self.b.data.float()
            self.result = self.result if onto is None else self.result + onto


class Partition(threading.Thread):
    """Warps with a role: one thread, which runs while it has the turn."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.waits: Callable[[], bool] = lambda: True
        self.products: list[Product] = []
        self.over = False
        self.fault: BaseException | None = None
        self.go, self.back = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        self.go.acquire()
        try:
            self.work()
        except BaseException as fault:  # raised where the partitions were started
            self.fault = fault
        self.over = True
        self.back.release()

    def step(self) -> None:
        """Give the partition the turn until it gives it back."""
        self.go.release()
        self.back.acquire()
        if self.fault is not None:
            raise self.fault

    def give_turn(self, until: Callable[[], bool] = lambda: True) -> None:
        """Called by the partition itself: go on when it is its turn and ``until`` holds."""
        self.waits = until
        self.back.release()
        self.go.acquire()


class Program:
    """One program of a launch: what its partitions share, and Gluon's functions for them."""

    def __init__(self, launch: Launch, place: Sequence[int], chance: random.Random) -> None:
        self.launch, self.place, self.chance = launch, (*place, 0, 0), chance
        self.barriers: list[Barrier] = []
        self.copies: list[Callable[[], None]] = []
        self.partitions: list[Partition] = []
        self.functions: dict[int, Callable[..., Any]] = {}
        self.names = {
            "gl": self.language(),
            "tl": self.language(),
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=lambda: Barrier,
                init=self.init,
                wait=self.wait,
                expect=self.expect,
                arrive=self.arrive,
            ),
            "load_tile": self.load_tile,
            "fence_async_shared": lambda: None,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.finish,
        }

    def run(self) -> None:
        """Run the program, and look at what it leaves."""
        given = [self.argument(x) for x in self.launch.args]
        self.function(self.launch.kernel)(*given, **self.launch.constants)
        assert not self.copies, "a copy that nothing waits for"
        assert all(b.pending == b.arrivals and not b.nbytes for b in self.barriers), "a phase without an end"
        assert not any(x.result is None for p in self.partitions for x in p.products), "a product unread"

    @staticmethod
    def argument(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Pointer.to(value)
        if not hasattr(value, "block_shape"):
            return value
        size = torch.Size(value.block_shape).numel() * value.base.element_size()
        return types.SimpleNamespace(
            base=value.base.as_strided(tuple(value.shape), tuple(value.strides)), dtype=value.base.dtype,
            layout=value.layout, block_shape=value.block_shape, block_type=types.SimpleNamespace(nbytes=size),
        )  # fmt: skip

    def function(self, jitted: Any) -> Callable[..., Any]:
        """Return a kernel's function as Python runs it, with the emulated names around it."""
        if id(jitted) not in self.functions:
            source = jitted.fn
            around = dict(source.__globals__) | self.names
            self.functions[id(jitted)] = made = types.FunctionType(source.__code__, around, source.__name__)
            for name in source.__code__.co_names:
                if hasattr(around.get(name), "arg_names"):
                    around[name] = self.function(around[name])
            made.__kwdefaults__ = source.__kwdefaults__
        return self.functions[id(jitted)]

    def language(self) -> types.SimpleNamespace:
        """Gluon's own functions and those that it shares with Triton."""
        grid = (*self.launch.grid, 1, 1)
        layouts = dict.fromkeys(
            ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout"),
            lambda *_, **__: None,
        )
        return types.SimpleNamespace(
            **layouts,
            constexpr=object, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16,
            program_id=lambda axis: torch.tensor(self.place[axis]),
            num_programs=lambda axis: torch.tensor(grid[axis]),
            static_range=range,
            arange=lambda start, end, layout=None: torch.arange(start, end),
            full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
            zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
            where=torch.where, exp2=torch.exp2, log2=torch.log2,
            minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
            maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
            max=lambda x, axis: x.amax(axis), min=lambda x, axis: x.amin(axis),
            sum=lambda x, axis: x.sum(axis),
            expand_dims=lambda x, axis: x.unsqueeze(axis),
            convert_layout=lambda x, layout: x,
            load=self.load, store=self.store,
            allocate_shared_memory=self.allocate, warp_specialize=self.specialize,
        )  # fmt: skip

    @staticmethod
    def load(pointer: Pointer, mask: Any = True, other: float = 0.0) -> Tensor:
        at, inside = pointer.places(mask)
        found = pointer.memory[at.where(inside, 0)]
        return found.where(inside, torch.tensor(other).to(found.dtype))

    @staticmethod
    def store(pointer: Pointer, value: Tensor, mask: Any = True) -> None:
        at, inside = pointer.places(mask)
        pointer.memory[at[inside]] = value.broadcast_to(at.shape)[inside].to(pointer.memory.dtype)

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
        if layout is Barrier:
            made = tuple(Barrier() for _ in range(shape[0]))
            self.barriers.extend(made)
            return Barriers(made)
        return SharedMemory(torch.full(tuple(shape), torch.nan, dtype=dtype))

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.arrivals = barrier.pending = count

    def me(self) -> Partition:
        return next(p for p in self.partitions if p is threading.current_thread())

    def wait(self, barrier: Barrier, phase: int) -> None:
        self.me().give_turn(lambda: barrier.phase & 1 != int(phase))

    def expect(self, barrier: Barrier, nbytes: int) -> None:
        barrier.arrive(1, nbytes)

    def arrive(self, barrier: Barrier, count: int) -> None:
        self.me().give_turn()
        barrier.arrive(count)

    def load_tile(self, desc: Any, start: Sequence[Any], barrier: Barrier, smem: SharedMemory) -> None:
        """Ask for a copy; what lies outside of the tensor is zero."""
        shape = torch.Size(desc.block_shape)
        smem.data.fill_(torch.nan)
        assert smem.data.shape == shape

        def copy() -> None:
            tile = torch.zeros(shape, dtype=desc.dtype)
            ends = [
                max(0, min(int(at) + n, size) - int(at))
                for at, n, size in zip(start, shape, desc.base.shape, strict=True)
            ]
            source = tuple(slice(int(at), int(at) + n) for at, n in zip(start, ends, strict=True))
            tile[tuple(slice(0, n) for n in ends)] = desc.base[source]
            smem.data.copy_(tile)
            barrier.fill(desc.block_type.nbytes)

        self.copies.append(copy)
        self.me().give_turn()

    def multiply(
        self, a: Any, b: SharedMemory, onto: Any, *, use_acc: bool = True, is_async: bool
    ) -> Product:
        made = Product(a, b, onto if use_acc else None)
        self.me().products.append(made)
        self.me().give_turn()
        return made

    def finish(self, pending: int, deps: Sequence[Product]) -> Any:
        self.me().give_turn()
        issued = self.me().products
        for product in issued[: len(issued) - pending]:
            product.finish()
        self.me().products = issued[len(issued) - pending :]
        found = tuple(x if x.result is None else x.result for x in deps)
        return found[0] if len(found) == 1 else found

    def specialize(self, roles: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
        """Run all partitions, one at a time, in an order by chance."""

        def work(jitted: Callable[..., Any], given: tuple[Any, ...]) -> Callable[[], None]:
            return lambda: jitted(*given)

        self.partitions = [Partition(work(*role)) for role in roles]
        for partition in self.partitions:
            partition.start()
        while not all(p.over for p in self.partitions):
            ready: list[Any] = [p.step for p in self.partitions if not p.over and p.waits()]
            ready += self.copies
            if not ready:
                waiting = [i for i, p in enumerate(self.partitions) if not p.over]
                raise Deadlock(f"partitions {waiting} wait for what nothing ends")
            chosen = self.chance.choice(ready)
            if chosen in self.copies:
                self.copies.remove(chosen)
            chosen()


def emulate(launch: Launch, seed: int = 0) -> None:
    """Run a recorded launch on the CPU tensors that it was given, one program after the other."""
    chance = random.Random(seed)
    for place in itertools.product(*map(range, launch.grid)):
        Program(launch, place, chance).run()
