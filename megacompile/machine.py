"""A machine as rates: what the simulator and the planner know of hardware."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Machine:
    """Sustained rates; bytes and floating-point operations per second.

    ``launch_seconds`` is the fixed cost of one block function, ``copy_seconds`` that of a transfer.
    ``shared_cores`` says that transfers and updates take time from compute, as on a CPU. The drive's
    rates are those of a fast consumer drive, sustained, until ``megacompile bench nvme`` measured one.
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
    nvme_read_bandwidth: float = 5e9
    nvme_write_bandwidth: float = 2.5e9


def nominal_cpu(dtype: torch.dtype) -> Machine:
    """Round figures of a small server CPU: what plans for the CPU backend are scored on.

    Only ratios matter for a choice, and the same model and budget must always give the same plan.
    """
    flops = 400e9 if dtype == torch.bfloat16 else 100e9
    return Machine("a nominal CPU", flops, 20e9, 8e9, 8e9, 30e9, 50e-6, 20e-6, shared_cores=True)


@cache
def this_cpu(dtype: torch.dtype) -> Machine:
    """Rates of this CPU from half a second of measuring: products, elementwise operators, copies."""
    size = 1024
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    product = _fastest(lambda: a @ b)
    source, target = torch.ones(4 << 20), torch.ones(4 << 20)
    copy = _fastest(lambda: target.copy_(source))
    elementwise = _fastest(lambda: source * target)
    bandwidth = source.nbytes / copy
    return Machine(
        name="this CPU",
        flops=2 * size**3 / product,
        memory_bandwidth=3 * source.nbytes / elementwise,
        h2d_bandwidth=bandwidth,
        d2h_bandwidth=bandwidth,
        host_bandwidth=2 * bandwidth,
        launch_seconds=50e-6,
        copy_seconds=20e-6,
        shared_cores=True,
    )


def _fastest(run: object, repeats: int = 8) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()  # type: ignore[operator]
        best = min(best, time.perf_counter() - start)
    return best
