"""The machine: versions, memory that can be had, what the CUDA backend stands on, and rates."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import subprocess
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import Recorder, memory

_CARD = (
    "name,driver_version,memory.total,memory.reserved,memory.used,pcie.link.gen.max,pcie.link.width.max,"
    "clocks.max.sm,power.limit"
)
_ASKED = {
    "card": f"nvidia-smi --query-gpu={_CARD} --format=csv,noheader",
    "cpu": "lscpu | grep -E 'Model name|^CPU.s.|Thread|L3|NUMA node.s.'",
    "memory": "free -m | head -2",
    "huge pages": "cat /sys/kernel/mm/transparent_hugepage/{enabled,defrag}",
    "memlock": "ulimit -l",
    "kernel": "uname -r",
    "compiler": "cc --version | head -1",
    "disk": "df -h . /tmp | tail -2",
    "variables": "env | grep -E '^(TRITON|TORCH|CUDA|NCCL|OMP|HF_|XDG)'",
}
_PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "numpy", "setuptools")
_TOUCH_THREADS = 4
_QWEN_3B = (
    *[(2048, 2048), (256, 2048), (11008, 2048)] * 2,
    (2048, 11008),
)  # the weights of one of its layers


def where(to: Recorder) -> None:
    """Record versions and hardware, without a CUDA context, and whether Triton takes the carried kernels."""
    for name, command in _ASKED.items():
        with contextlib.suppress(subprocess.TimeoutExpired):
            ran = subprocess.run(
                command, shell=True, capture_output=True, text=True, timeout=10, executable="/bin/bash"
            )
            to.note(name, said=ran.stdout.strip())
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    to.note("versions", **versions)
    with to.finding("Triton's cache") as finding:
        from benchmarks.gpu.carry import carried_key, triton_key

        finding["own"], finding["carried"] = triton_key(), carried_key()
        finding["used"] = finding["own"] == finding["carried"]


def touch_memory(to: Recorder, piece: int, pieces: int) -> None:
    """Touch memory as far as it goes, and time each piece; the system may end this process for it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    areas = []
    for number in range(pieces):
        with to.finding("memory touched") as finding:
            area = mmap.mmap(-1, piece, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            area.madvise(mmap.MADV_HUGEPAGE)
            areas.append(area)
            begin = ctypes.addressof(ctypes.c_char.from_buffer(area))
            part = piece // _TOUCH_THREADS
            start = time.perf_counter()
            threads = [
                threading.Thread(target=ctypes.memset, args=(begin + i * part, 1, part))
                for i in range(_TOUCH_THREADS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds = time.perf_counter() - start
            finding |= {"bytes": (number + 1) * piece, "s per GiB": seconds / (piece / 2**30), **memory()}


def touched_bytes(to: Recorder) -> int:
    """Bytes of RAM that :func:`touch_memory` has had: where RAM grows by use, more than is free at first."""
    return max(
        (e["bytes"] for e in to.known() if e.get("what") == "memory touched" and "bytes" in e), default=0
    )


def primitives(to: Recorder, nbytes: int) -> None:
    """Try what the CUDA backend stands on, from the simplest: the first that fails is the diagnosis."""
    import torch

    def rung(name: str, call: Callable[[], Any]) -> None:
        with to.finding(name) as finding:
            finding["value"] = call()
            torch.cuda.synchronize()

    rung("device", lambda: torch.cuda.get_device_properties(0).name)
    rung("allocation and a sum", _sum_of_ones)
    rung("page-locked by torch", lambda: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).is_pinned())
    rung("page-locked in place", lambda: _page_lock_in_place(nbytes))
    before = memory().get("used", 0)
    rung("two streams, blocking events", _two_streams)
    rung("a thread of its own", _in_a_thread)
    rung("megacompile opens the device", _open)
    rung("a segment that grows", lambda: torch.empty(2 * nbytes, dtype=torch.uint8, device="cuda").nbytes)
    rung("a Triton kernel on a stream", _triton_kernel)
    to.note("what the driver took meanwhile", bytes=memory().get("used", 0) - before)
    to.require("allocation and a sum", "megacompile opens the device")


def _sum_of_ones() -> float:
    import torch

    total = float(torch.ones(8, device="cuda").sum())
    if total != 8:
        raise ArithmeticError(f"eight ones add up to {total}")
    return total


def _page_lock_in_place(nbytes: int) -> dict[str, Any]:
    import torch

    from megacompile.runtime.pinned_memory import page_lock, page_unlock
    from megacompile.state.host_arena import HostArena

    arena = HostArena(4 * nbytes)
    arena.tensor.fill_(1)
    start = time.perf_counter()
    pieces, code = page_lock(arena.tensor)
    seconds = time.perf_counter() - start
    if code:
        raise RuntimeError(f"cudaHostRegister of {4 * nbytes} bytes ends with CUDA error {code}")
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    start = time.perf_counter()
    target.copy_(arena.tensor[:nbytes], non_blocking=True)
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    for first, _ in pieces:
        page_unlock(first)
    return {
        "pieces": len(pieces), "s per GB": seconds / (4 * nbytes / 1e9), "GB/s": nbytes / whole / 1e9,
        "issued before it was over": issued < whole / 4,
    }  # fmt: skip


def _two_streams() -> dict[str, Any]:
    import torch

    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    begin, middle, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(3))
    x = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        begin.record()
        for _ in range(20):
            y = x @ x
        middle.record()
    second.wait_event(middle)
    with torch.cuda.stream(second):
        on_host = y.cpu()
        end.record()
    end.synchronize()
    if not torch.isfinite(on_host).all():
        raise ArithmeticError("a product that another stream made is not finite")
    return {"ms of products": begin.elapsed_time(middle), "ms of the copy": middle.elapsed_time(end)}


def _in_a_thread() -> float:
    import torch

    sums: list[float] = []

    def work() -> None:
        torch.cuda.set_device(0)
        with torch.cuda.stream(torch.cuda.Stream()):
            sums.append(_sum_of_ones())

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(20)
    return sums[0]


def _open() -> dict[str, int]:
    import torch

    from megacompile.runtime.backends import open_backend

    budget = int(0.3 * torch.cuda.get_device_properties(0).total_memory)
    return {"budget": budget, "left to plans": open_backend("cuda", torch.bfloat16).plan_bytes(budget)}


def _triton_kernel() -> float:
    import torch

    from megacompile import kernels

    with torch.cuda.stream(torch.cuda.Stream()):
        x, weight = torch.randn(64, 256, device="cuda"), torch.ones(256, device="cuda")
        y = kernels.rms_norm(x, weight, 1e-6)
        exact = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        torch.cuda.current_stream().synchronize()
    error = float((y - exact).abs().max())
    if not error < 1e-5:
        raise ArithmeticError(f"rms_norm is off by {error}")
    return error


def rates(to: Recorder, nbytes: int, copied: int, updated: int) -> None:
    """Measure the profile, and keep it where plans take it from; then what it leaves out: ``nbytes`` of host
    memory at their first touch, products of a second model, int8 moments of ``updated`` parameters, and the
    link by copies of ``copied`` bytes."""
    import torch

    from megacompile.hardware.kept_profile import keep_profile
    from megacompile.hardware.measure import describe, profile
    from megacompile.hardware.product_rates import measure_products
    from megacompile.state.host_arena import HostArena

    threads = torch.get_num_threads()
    with to.finding("first touch of host memory, s per GiB") as finding:
        for count in sorted({1, 8, threads}):
            torch.set_num_threads(count)
            arena = HostArena(nbytes)
            start = time.perf_counter()
            arena.tensor.fill_(1)
            finding[f"{count} threads"] = (time.perf_counter() - start) / (nbytes / 2**30)
            del arena
        torch.set_num_threads(threads)
    with to.finding("profile") as finding:
        measured = profile()
        finding["text"] = describe(measured)
        if torch.cuda.is_available():
            finding["kept"] = str(keep_profile(measured))
            threads = measured.machine.adam_threads or threads
    if torch.cuda.is_available():
        with to.finding("products of Qwen2.5-3B's layers, FLOPs per s") as finding:
            found = measure_products(_QWEN_3B)
            finding["value"] = {"at first": found.cold, "after a second": found.hot}
        with to.finding("the link by large copies, bytes per s") as finding:
            finding["value"] = _large_copies(copied)
    with to.finding("AdamW with int8 moments, parameters per s") as finding:
        finding["value"] = {f"{threads} threads": _coded_update(updated, threads)}


def _large_copies(nbytes: int) -> dict[str, float]:
    """Bytes per second each way, alone and both at once, of copies as large as what a layer saves."""
    import torch

    from megacompile.hardware.measure import measure_link
    from megacompile.runtime.pinned_memory import page_lock, page_unlock
    from megacompile.state.host_arena import HostArena, padded

    arena = HostArena(2 * padded(nbytes))
    hosts = [arena.take((nbytes,), torch.uint8) for _ in range(2)]
    pieces, code = page_lock(arena.tensor)
    if code:
        raise RuntimeError(f"cudaHostRegister of {arena.nbytes} bytes ends with CUDA error {code}")
    try:
        link = measure_link(hosts, repeats=1)
    finally:
        for first, _ in pieces:
            page_unlock(first)
    return {"down": link.down, "up": link.up, "both at once, each": link.together}


def _coded_update(elements: int, threads: int) -> float:
    """Parameters per second of host AdamW with bf16 gradients and moments of 8 bits."""
    import torch

    from megacompile.state.adam import AdamHyper
    from megacompile.state.coded_adam import Coded, coded_adamw_step
    from megacompile.state.host_arena import HostArena, padded
    from megacompile.state.moment_formats import CODINGS

    coding = CODINGS["int8"]
    codes, scales = coding.code_bytes(elements), coding.blocks(elements)
    sizes = [2 * elements, 2 * elements, 2 * elements, codes, codes, 4 * scales, 4 * scales]
    arena = HostArena(sum(map(padded, sizes)))
    high, grad = (arena.take((elements,), torch.bfloat16) for _ in range(2))
    low = arena.take((elements,), torch.int16)
    moments = [
        Coded(arena.take((codes,), torch.uint8), arena.take((scales,), torch.float32)) for _ in range(2)
    ]

    def step() -> None:
        coded_adamw_step((high, low), *moments, grad, AdamHyper(lr=1e-3), coding, threads)

    step()  # builds the kernel, and touches the memory
    start = time.perf_counter()
    step()
    return elements / (time.perf_counter() - start)
