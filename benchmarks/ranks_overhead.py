"""What ranks cost beyond their collectives: two that share the state, beside two that share nothing.

    python -m benchmarks.ranks_overhead [--tokens 512] [--repeats 9]

About 100M parameters, fp32, two processes of one thread each, whole steps with updates, all state on hosts.
First each trains a model of its own. Then they are ranks of one program: with collectives that copy within a
process (numbers are wrong then, all the rest is the step's own work), and with those of gloo.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import megacompile
from benchmarks.ranks_memory import on_host
from benchmarks.report import machine_line
from benchmarks.step_overhead import batch_of, build
from megacompile import Program
from megacompile.distributed.world import World

RANKS = 2


def main() -> None:
    """Print one Markdown row."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=512, help="of each rank (512)")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    print(f"{machine_line()}\n")
    context = mp.get_context("spawn")
    barrier, results = context.Barrier(RANKS), context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, barrier, results, options.tokens, options.repeats)
        mp.spawn(_work, arguments, RANKS)  # type: ignore[no-untyped-call]
    ranks = [results.get() for _ in range(RANKS)]
    alone, copying, exchanging = (max(medians) for medians in zip(*ranks, strict=True))
    print(
        "| tokens of each | two processes | ranks, copying | ratio | ranks, exchanging | of it collectives |"
    )
    print("|--:|--:|--:|--:|--:|--:|")
    print(
        f"| {options.tokens} | {alone:.3f} s | {copying:.3f} s | {copying / alone:.3f} | {exchanging:.3f} s "
        f"| {1 - copying / exchanging:.0%} |"
    )


def _work(rank: int, folder: str, barrier: Any, results: Any, tokens: int, repeats: int) -> None:
    """Medians of a rank's steps: alone, with copies for collectives, with collectives."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    batch = batch_of(tokens)
    with _compiled(batch) as program:
        found = [_median(lambda: _step(program, batch), repeats, barrier)]
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=RANKS
    )
    with _compiled(batch) as program:
        with mock.patch.multiple(World, all_gather=_own_for_all, all_to_all=_own_for_each):
            found.append(_median(lambda: _step(program, batch), repeats, barrier))
        found.append(_median(lambda: _step(program, batch), repeats, barrier))
    results.put(found)


def _compiled(batch: Any) -> Program:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return megacompile.compile(
        model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, device="cpu", example_batch=batch,
        planner=on_host,
    )  # fmt: skip


def _step(program: Program, batch: Any) -> None:
    program.train_step(batch)
    program.synchronize()


def _median(run: Callable[[], None], repeats: int, barrier: Any) -> float:
    """Seconds of a run, both processes beginning together; the first is left out."""
    seconds = []
    for _ in range(repeats + 1):
        barrier.wait()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _own_for_all(world: World, whole: Tensor) -> None:
    """Every shard is this rank's."""
    shards = whole.chunk(world.size)
    for rank, shard in enumerate(shards):
        if rank != world.rank:
            shard.copy_(shards[world.rank])


def _own_for_each(world: World, received: Tensor, sent: Tensor) -> None:
    """Every rank sent what this one did."""
    received.copy_(sent)


if __name__ == "__main__":
    main()
