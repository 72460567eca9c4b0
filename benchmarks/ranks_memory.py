"""Host memory of all ranks together, measured: proportional set sizes of their processes over the parameters.

    python -m benchmarks.ranks_memory [--parameters 67108864] [--ranks 1 2]

A model of square layers is trained by each number of ranks, in processes that Python starts for it, bf16
compute, updates that stream, all state on hosts. "Grown" is by how much their PSS (pages that several share
count once) grew from before the model was made until after the steps, when freed memory was given back.
"Accounted" is what ``program.memory`` says of the host; the emulated devices' peaks are no host state, and
are taken off.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.bytes_per_parameter import WIDTH, Tower, run
from benchmarks.report import machine_line
from megacompile.hardware.machine import Machine
from megacompile.planner.search import search
from megacompile.planner.too_small import fitting
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.workload import Workload
from megacompile.state.host_arena import trim_heap


def on_host(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
    """A planner that keeps no state on devices."""
    return fitting(search(work, mode, machine, budget_bytes)).plan


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=int, default=64 << 20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    print(
        f"{machine_line()}\n\n{options.parameters / 1e6:.0f}M parameters, bytes per parameter of all ranks.\n"
    )
    print("| ranks | masters and moments | other host buffers | accounted | grown, less the devices' peaks |")
    print("|--:|--:|--:|--:|--:|")
    for ranks in options.ranks:
        results = mp.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_work, (ranks, folder, results, options.parameters), ranks)  # type: ignore[no-untyped-call]
        of_ranks = [results.get() for _ in range(ranks)]
        state, other, grown = (sum(column) / options.parameters for column in zip(*of_ranks, strict=True))
        print(f"| {ranks} | {state:.2f} | {other:.2f} | {state + other:.2f} | {grown:.2f} |", flush=True)


def _work(rank: int, ranks: int, folder: str, results: Any, parameters: int) -> None:
    """Bytes of one rank: state, other buffers, growth of its process."""
    import megacompile

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    batch = [torch.randn(4, WIDTH).bfloat16()]
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    if ranks > 1:
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    run(Tower(2), batch, None, "fp32", megacompile, on_host).close()  # what a process needs besides any model
    before = _held()
    program = run(Tower(parameters // WIDTH**2), batch, None, "fp32", megacompile, on_host)
    grown = _held() - before
    if ranks > 1:
        dist.barrier()  # none goes while another still counts pages that both share
    held = program.memory.host_bytes
    state = held["masters"] + held["moments"]
    results.put((state, sum(held.values()) - state, grown - program.memory.device_peak_bytes))
    program.close()


def _held() -> int:
    """Bytes of this process in RAM, those of pages that several have divided among them."""
    gc.collect()
    trim_heap()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
