"""What the machine sustains: products, device memory, the link both ways, host Adam, registration."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.record import Result
from benchmarks.gpu.work import device
from megacompile.host.adam import AdamHyper, adamw_step
from megacompile.host.arena import HostArena


def rates(megabytes: int, size: int, repeats: int) -> Result:
    """All rates with random data; copies on their own streams, also both ways at once."""
    where = torch.device(device())
    count = megabytes << 20
    arenas = [HostArena(count) for _ in range(2)]
    found: Result = {"registration_gbps": _register([a.tensor for a in arenas])}
    sent, kept = (torch.empty(count, dtype=torch.uint8, device=where) for _ in range(2))
    for arena in arenas:
        arena.tensor.random_()
    down, up = _streams(where)

    def h2d() -> None:
        with _on(down):
            sent.copy_(arenas[0].tensor[:count], non_blocking=True)

    def d2h() -> None:
        with _on(up):
            arenas[1].tensor[:count].copy_(kept, non_blocking=True)

    def both() -> None:
        h2d()
        d2h()

    for name, run in (("h2d_gbps", h2d), ("d2h_gbps", d2h), ("both_ways_each_gbps", both)):
        found[name] = count / _median(run, repeats) / 1e9
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=where) for _ in range(2))
    found["gemm_tflops"] = 2 * size**3 / _median(lambda: torch.mm(a, b), repeats) / 1e12
    found["device_copy_gbps"] = 2 * count / _median(lambda: kept.copy_(sent), repeats) / 1e9
    return found | _host_adam(megabytes << 17, repeats)


def _register(tensors: list[torch.Tensor]) -> float | None:
    """GB/s at which host memory is page-locked; it must be resident, as a state is."""
    if not torch.cuda.is_available():
        return None
    from megacompile.runtime.cuda_memory import TorchCuda

    api = TorchCuda(torch.device("cuda", 0))
    for tensor in tensors:
        tensor.fill_(1)
    start = time.perf_counter()
    for tensor in tensors:
        api.register(tensor)
    return sum(t.nbytes for t in tensors) / (time.perf_counter() - start) / 1e9


def _host_adam(elements: int, repeats: int) -> Result:
    """26 bytes per parameter (split masters, bf16 gradient) at several thread counts."""
    state = [torch.randn(elements) for _ in range(2)]
    state[1].abs_()
    hi, lo = torch.randn(elements).bfloat16(), torch.zeros(elements, dtype=torch.int16)
    grad = torch.randn(elements).bfloat16()
    cores = os.cpu_count() or 1
    found: Result = {}
    for threads in sorted({max(1, cores // 2), max(1, cores - 4), cores}):

        def run(threads: int = threads) -> None:
            adamw_step((hi, lo), state[0], state[1], grad, AdamHyper(1e-4), threads)

        found[f"host_adam_{threads}_threads_gbps"] = 26 * elements / _median(run, repeats) / 1e9
    return found


def _median(run: Callable[[], object], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        _synchronize()
        start = time.perf_counter()
        run()
        _synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _streams(where: torch.device) -> tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]:
    if where.type != "cuda":
        return None, None
    return torch.cuda.Stream(where), torch.cuda.Stream(where)


def _on(stream: torch.cuda.Stream | None) -> torch.cuda.StreamContext:
    return torch.cuda.stream(stream)  # of None: nothing


def kernels(operation: str, dry: bool) -> Result:
    """The table of ``megacompile bench kernels``: it checks a kernel before it times it."""
    command = [sys.executable, "-m", "megacompile", "bench", "kernels", "--op", operation]
    small = ["--check", "--shape", "9x33", "--dtype", "float32"]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--out", folder, *(small if dry else ())]
        done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        lines = done.stderr.strip().splitlines()
        return {"failed": lines[-1] if lines else "megacompile bench kernels said nothing"}
    table = "\n".join(line for line in done.stdout.splitlines() if not line.startswith(folder))
    return {"table": table, "right": done.returncode == 0}
