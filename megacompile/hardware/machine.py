"""A machine as rates: what the simulator and the planner know of hardware."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # each function that measures imports it: who reads datasheets need not wait for it
    import torch

HOST_FLOPS = 2e12  # assumed: what 16 cores of a GPU's host multiply beside its other work
CPU_FUNCTION = 50e-6  # seconds of a block function on a CPU beside its work


@dataclass(frozen=True, slots=True)
class Machine:
    """Sustained rates; bytes and floating-point operations per second.

    ``launch_seconds`` is what it takes to ask for one kernel, on a CPU for a block function; ``copy_seconds``
    is the fixed cost of a transfer.
    ``attention_forward`` and ``attention_backward`` are the rates of attention, causal pairs counted once;
    None: that of products.
    ``shared_memory`` says that transfers and updates share ``host_bandwidth``, of which an update alone moves
    ``adam_bandwidth``, None: all of it. ``adam_beside_h2d`` and ``adam_beside_d2h`` say how many times longer
    an update and a copy of that direction then take beside each other, at the least. ``adam_threads`` update
    beside a GPU; None: by the number of cores.
    ``shared_cores`` says that transfers, updates and compute share ``cores`` of a CPU (a copy takes one, an
    update half); ``compute_beside`` says how many times longer compute then takes beside another stream,
    ``others_beside`` how many times longer the other does. ``processors`` are a GPU's multiprocessors, on
    which the scratch memory of its kernels depends; None: not a GPU, or not known. ``chip`` is its compute
    capability (90: 9.0), which decides what attention runs. Our kernels attend as an H100's do
    (:mod:`~megacompile.hardware.kernel_prices`), but where ``chip`` is None, or the machine was ``measured``,
    at attention's rates.
    ``fabric_bandwidth`` is what a device sends to, and gets from, the others of its machine, None where there
    is no such link, or none is known; ``fabric_seconds`` the fixed cost of a collective. The ranks that share
    the weights are on ``nodes`` machines; of all ``replicas`` of them ``beside`` share a machine.
    ``network_bandwidth`` is what a machine sends to, and gets from, all others.
    The drive's rates are those of a fast consumer drive, sustained, until one is measured or given.
    """

    name: str
    flops: float
    memory_bandwidth: float
    h2d_bandwidth: float
    d2h_bandwidth: float
    host_bandwidth: float
    launch_seconds: float = 0.0
    copy_seconds: float = 0.0
    shared_cores: bool = False
    shared_memory: bool = False
    cores: int = 2
    compute_beside: float = 1.0
    others_beside: float = 1.0
    nvme_read_bandwidth: float = 5e9
    nvme_write_bandwidth: float = 2.5e9
    processors: int | None = None
    chip: int | None = None
    measured: bool = False
    attention_forward: float | None = None
    attention_backward: float | None = None
    fabric_bandwidth: float | None = None
    fabric_seconds: float = 20e-6
    nodes: int = 1
    replicas: int = 1
    beside: int = 1
    network_bandwidth: float = 50e9
    adam_bandwidth: float | None = None
    adam_beside_h2d: float = 1.0
    adam_beside_d2h: float = 1.0
    adam_threads: int | None = None

    @property
    def update_bandwidth(self) -> float:
        """Bytes per second of host memory that updates, norms and momenta move where nothing runs beside."""
        return self.host_bandwidth if self.adam_bandwidth is None else self.adam_bandwidth

    @property
    def host_flops(self) -> float:
        """Products of an update on the host; on a CPU it has half of the cores."""
        return self.flops / 2 if self.shared_cores else HOST_FLOPS

    def shared_by(self, ranks: int, shards: int, replicas: int) -> Machine:
        """Return what each of a machine's ``ranks`` has of it: they share host memory and the drive. As many
        as there are ``shards`` share the weights, in each of ``replicas``. Devices without links to each
        other exchange over those to the host."""
        if ranks == shards == replicas == 1:
            return self
        return replace(
            self,
            host_bandwidth=self.host_bandwidth / ranks,
            adam_bandwidth=self.adam_bandwidth and self.adam_bandwidth / ranks,
            nvme_read_bandwidth=self.nvme_read_bandwidth / ranks,
            nvme_write_bandwidth=self.nvme_write_bandwidth / ranks,
            fabric_bandwidth=self.fabric_bandwidth or min(self.h2d_bandwidth, self.d2h_bandwidth),
            nodes=max(1, shards // ranks),
            replicas=replicas,
            beside=max(1, min(replicas, ranks // shards)),
        )


_GLOO, _GLOO_SECONDS = 1e9, 1e-3  # bytes per second between processes or machines, and for each exchange


def nominal_cpu(dtype: torch.dtype) -> Machine:
    """Round figures of a small server CPU: what plans for the CPU backend are scored on.

    Only ratios matter for a choice, and the same model and budget must always give the same plan.
    """
    flops = 400e9 if dtype.itemsize == 2 else 100e9
    return Machine(
        "a nominal CPU", flops, 20e9, 8e9, 8e9, 30e9, CPU_FUNCTION, 20e-6, shared_cores=True,
        fabric_bandwidth=_GLOO, fabric_seconds=_GLOO_SECONDS, network_bandwidth=_GLOO,
    )  # fmt: skip


@cache
def this_cpu(dtype: torch.dtype) -> Machine:
    """Rates of this CPU from a second of measuring, as the CPU backend uses them.

    Products and elementwise operators run on all of torch's threads, copies on one, Adam on half.
    """
    import torch

    with torch.random.fork_rng(devices=[]):  # the user's draws stay as they are
        return _measured_rates(dtype)


def _measured_rates(dtype: torch.dtype) -> Machine:
    import torch

    from megacompile.blocks.cpu_products import float32_products

    cores = torch.get_num_threads()
    size = 1024
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    with float32_products():
        product = _fastest(lambda: a @ b)
    source, target = torch.ones(4 << 20), torch.ones(4 << 20)
    elementwise = _fastest(lambda: source * target)
    copy = copy_bandwidth()
    compute_beside, others_beside = _beside()
    return Machine(
        name="this CPU",
        flops=2 * size**3 / product,
        memory_bandwidth=3 * source.nbytes / elementwise,
        h2d_bandwidth=copy,
        d2h_bandwidth=copy,
        host_bandwidth=adam_bandwidth(max(1, cores // 2)),
        launch_seconds=CPU_FUNCTION,
        copy_seconds=20e-6,
        fabric_bandwidth=_GLOO,
        fabric_seconds=_GLOO_SECONDS,
        network_bandwidth=_GLOO,
        shared_cores=True,
        cores=max(2, cores),
        compute_beside=compute_beside,
        others_beside=others_beside,
    )


def _beside() -> tuple[float, float]:
    """Measure how many times longer products take beside copies, and copies beside products, on this CPU.

    More than their shares of the cores say: a product waits at each barrier for the thread that shares its
    core with the copy.
    """
    import torch

    a, b = torch.randn(512, 512), torch.randn(512, 512)
    product = _mean(lambda: a @ b, 200)
    with copies_beside() as slower:
        products = _mean(lambda: a @ b, 200)
    return max(1.0, products / product), slower()


@contextmanager
def copies_beside() -> Iterator[Callable[[], float]]:
    """Copy on a thread of its own, as a transfer does, all the while.

    Yields a function that says, when the copies are over, how many times longer than alone they took.
    """
    import torch

    source, target = torch.ones(4 << 20), torch.ones(4 << 20)
    alone = source.nbytes / copy_bandwidth()
    threads = torch.get_num_threads()
    times: list[float] = []
    done = threading.Event()

    def work() -> None:
        torch.set_num_threads(1)
        while not (times and done.is_set()):
            times.append(_mean(lambda: target.copy_(source), 1))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield lambda: max(1.0, sum(times) / len(times) / alone)
    finally:
        done.set()
        thread.join()
        torch.set_num_threads(threads)  # the copying thread's count was taken for all that start later


def _mean(run: Callable[[], object], repeats: int) -> float:
    """Seconds of one run; a mean, since what waits for a core waits rarely and long."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def copy_bandwidth(elements: int = 4 << 20) -> float:
    """Bytes per second that one thread copies, as the CPU backend's transfers do."""
    import torch

    source, target = torch.ones(elements), torch.ones(elements)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return source.nbytes / _fastest(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(threads)


def adam_bandwidth(threads: int, elements: int = 4 << 20) -> float:
    """Bytes per second of host memory that an Adam step moves with an FP32 gradient, in its fastest run."""
    import torch

    update = adam_update(elements, torch.float32)
    nbytes = update(threads)  # touches the memory
    return nbytes / _fastest(lambda: update(threads))


def adam_update(elements: int, gradient: torch.dtype) -> Callable[[int], int]:
    """An Adam step of so many parameters, in memory of its kind: called with a number of threads, it returns
    the bytes of host memory that it has moved."""
    import torch

    from megacompile.state.adam import STEP_BYTES, AdamHyper, adamw_step
    from megacompile.state.host_arena import HostArena, padded

    dtypes = torch.bfloat16, torch.int16, torch.float32, torch.float32, gradient
    arena = HostArena(sum(padded(dtype.itemsize * elements) for dtype in dtypes))
    high, low, first, second, grad = (arena.take((elements,), dtype) for dtype in dtypes)
    hyper = AdamHyper(lr=1e-3)

    def update(threads: int) -> int:
        adamw_step((high, low), first, second, grad, hyper, threads)
        return (STEP_BYTES + gradient.itemsize) * elements

    return update


def _fastest(run: Callable[[], object], repeats: int = 8, limit: float = 0.5) -> float:
    """Seconds of the fastest run; once ``limit`` seconds are spent, none is begun: bf16 takes seconds on CPUs
    without instructions for it."""
    times: list[float] = []
    while not times or (len(times) < repeats and sum(times) < limit):
        times.append(_mean(run, 1))
    return min(times)
