"""Profile: measure this machine into a :class:`~megacompile.hardware.catalog.MachineProfile`.

With a CUDA device: products of a model's layers after a second of them, attention and launches on it, copies
from and to pinned host memory, each direction alone and both together, host AdamW alone and beside these
copies. Without: what the CPU backend uses in their stead. A drive is measured where a folder on it is given.
All figures and how they came about are in ``sources``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megacompile.blocks.cpu_products import float32_products
from megacompile.hardware.catalog import MachineProfile
from megacompile.hardware.machine import Machine, copy_bandwidth, this_cpu
from megacompile.hardware.product_rates import LLAMA_8B, TOKENS, Weights, measure_products
from megacompile.hardware.update_rates import measure_updates
from megacompile.kernels.sdpa import attention, attention_backward, attention_backward_flops, attention_flops
from megacompile.state.drive_benchmark import measure_drive
from megacompile.units import host_available, usable_cores

_PRODUCT_SIZES = (512, 1024, 2048, 4096, 8192)
_COPY = 256 << 20  # bytes of one copy over a link
_SCRATCH = 1 << 30  # bytes of a file on the drive
_REPEATS = 8
_ADAM = 64 << 20  # parameters of an update: 1 GiB, beyond any cache
_ADAM_FREE = 64  # bytes for each that have to be free: four times what it takes
_LEFT = 6  # cores at the most that host AdamW is tried without, beside a GPU
_ATTENTION = (1, 16, 8192, 128)  # sequences, heads, tokens, columns
_TIMED_LAUNCHES = 2000


def profile(
    nvme: Path | None = None, model: str = "llama-3.1-8b", weights: Weights = LLAMA_8B
) -> MachineProfile:
    """Measure for some seconds; on a GPU products of these weights, those of a layer of ``model``."""
    cuda = torch.cuda.is_available()
    products = measure_products(weights) if cuda else None  # first, while the GPU is cold
    rates = {d: _products(d, "cuda" if cuda else "cpu") for d in (torch.bfloat16, torch.float32)}
    bf16, fp32 = (max(r.values()) for r in rates.values())
    sources = {
        f"{name} rate": ", ".join(f"{size}³: {rate / 1e12:.3g} TFLOP/s" for size, rate in found.items())
        for name, found in zip(("bf16", "fp32"), rates.values(), strict=True)
    }
    if products is not None:
        sources["bf16 rate"] = f"layers of {model}, {TOKENS:,} tokens: {products}; {sources['bf16 rate']}"
        machine = _device(products.hot, sources)
    else:
        machine = replace(this_cpu(torch.bfloat16), flops=bf16)
        sources["link"] = _both_ways(copy_bandwidth)
    threads, cores = torch.get_num_threads(), usable_cores()
    counts = range(max(1, cores - _LEFT), max(2, cores)) if cuda else {1, max(1, threads // 2), threads}
    updates = measure_updates(sorted(counts), min(_ADAM, host_available() // _ADAM_FREE))
    sources["host Adam"] = str(updates)
    if cuda:
        machine = updates.of(machine)
    if nvme is not None:
        read, write = measure_drive(nvme, _SCRATCH).engine
        sources["drive"] = f"read {read / 1e9:.3g} GB/s, written {write / 1e9:.3g} GB/s, in {nvme}"
        machine = replace(machine, nvme_read_bandwidth=read, nvme_write_bandwidth=write)
    device_bytes = torch.cuda.get_device_properties(0).total_memory if cuda else None
    return MachineProfile(
        machine, machine.name, device_bytes=device_bytes, host_bytes=host_available(), fp32_flops=fp32,
        sources={name: f"{text} (measured)" for name, text in sources.items()},
    )  # fmt: skip


def _products(dtype: torch.dtype, device: str) -> dict[int, float]:
    """FLOPs per second of square products by size; on a CPU the sizes that take less than a second."""
    found: dict[int, float] = {}
    for size in _PRODUCT_SIZES:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        with float32_products() if device == "cpu" else nullcontext():
            found[size] = 2 * size**3 / _fastest_seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
        if device == "cpu" and 2 * (2 * size) ** 3 / found[size] > 0.3:
            break
    return found


def _fastest_seconds(run: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Seconds of one run: the fastest of some, after one to warm up."""
    best = float("inf")
    for _ in range(repeats + 1):
        _finish()
        start = time.perf_counter()
        run()
        _finish()
        best = min(best, time.perf_counter() - start)
    return best


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second between page-locked memory and the first CUDA device, and each way of both at once."""

    down: float
    up: float
    together: float

    def __str__(self) -> str:
        return (
            f"to the device {self.down / 1e9:.3g} GB/s, from it {self.up / 1e9:.3g} GB/s, both at once "
            f"{self.together / 1e9:.3g} GB/s each"
        )


def measure_link(hosts: Sequence[torch.Tensor] = (), repeats: int = _REPEATS) -> LinkRates:
    """Time copies from and to two page-locked tensors of bytes [n], by default of 256 MiB."""
    host, other_host = hosts or (torch.empty(_COPY, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    device, other = (torch.empty_like(host, device="cuda") for _ in range(2))
    streams = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            device.copy_(host, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            other_host.copy_(other, non_blocking=True)

    down = host.nbytes / _fastest_seconds(lambda: device.copy_(host, non_blocking=True), repeats)
    up = host.nbytes / _fastest_seconds(lambda: other_host.copy_(other, non_blocking=True), repeats)
    return LinkRates(down, up, host.nbytes / _fastest_seconds(both, repeats))


def _device(flops: float, sources: dict[str, str]) -> Machine:
    """Rates of the first CUDA device and its link."""
    link = measure_link()
    sources["link"] = str(link)
    x, y = (torch.ones(64 << 20, device="cuda") for _ in range(2))
    memory = 3 * x.nbytes / _fastest_seconds(lambda: torch.mul(x, y, out=y))
    sources["device bandwidth"] = f"{memory / 1e9:.4g} GB/s, elementwise"
    launch = _launch_seconds()
    sources["launch"] = f"{launch * 1e6:.3g} µs a kernel"
    forward, backward = _attention()
    sources["attention"] = (
        f"forward {forward / 1e12:.3g} TFLOP/s, deterministic backward {backward / 1e12:.3g} TFLOP/s"
    )
    properties = torch.cuda.get_device_properties(0)
    return Machine(
        torch.cuda.get_device_name(0), flops, memory,
        min(link.down, 1.1 * link.together), min(link.up, 1.1 * link.together),
        memory, launch_seconds=launch, copy_seconds=10e-6, shared_memory=True,
        processors=properties.multi_processor_count,
        chip=10 * properties.major + properties.minor, measured=True,
        attention_forward=forward, attention_backward=backward,
    )  # fmt: skip


def _launch_seconds() -> float:
    """Seconds from one call of an operator to the next, of tensors so small that the device is not busy."""
    x = torch.ones(16, device="cuda")

    def many() -> None:
        for _ in range(_TIMED_LAUNCHES):
            x.neg_()

    return _fastest_seconds(many) / _TIMED_LAUNCHES


def _attention() -> tuple[float, float]:
    """FLOPs per second of the programs' own attention over causal tokens in bf16: forward, backward."""
    q, k, v, grad = (torch.randn(_ATTENTION, device="cuda").bfloat16() for _ in range(4))
    inputs: list[Any] = [q, k, v, None, None, None]
    constants: list[Any] = [_ATTENTION[-1] ** -0.5, True, 0, 0.0, 0.0, 0, False]
    found = attention(*inputs, *constants)
    forward = _fastest_seconds(lambda: attention(*inputs, *constants))
    backward = _fastest_seconds(lambda: attention_backward(grad, *inputs, *found, *constants))
    shapes = [_ATTENTION] * 3
    flops = attention_flops(*shapes, *inputs[3:], *constants)
    of_backward = attention_backward_flops(_ATTENTION, *shapes, *inputs[3:], None, None, *constants)
    return flops / forward, of_backward / backward


def _both_ways(alone: Callable[[], float]) -> str:
    """Copies by one thread, and by two threads at once."""
    one = alone()
    found: list[float] = []
    threads = [threading.Thread(target=lambda: found.append(alone())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return f"one copy {one / 1e9:.3g} GB/s, two at once {min(found) / 1e9:.3g} GB/s each"


def describe(profile: MachineProfile) -> str:
    """The measured figures, one per line."""
    return "\n".join([profile.title, *(f"  {name:<17} {text}" for name, text in profile.sources.items())])
