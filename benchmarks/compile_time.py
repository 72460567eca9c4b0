"""Time and memory of compiling a 72B Qwen2 shape on meta tensors.

    python -m benchmarks.compile_time [--layers 80 40 20] [--tokens 4096]

Each measurement runs in its own process, so that peak RSS is its own; imports are left out. No weight exists
at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path


class _Clock:
    """Seconds of wall and CPU time since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._start[0], time.process_time() - self._start[1]


def measure(layers: int, tokens: int) -> dict[str, float]:
    """Seconds of each stage and peak RSS in bytes for a 72B shape of so many layers."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from megacompile.api.decisions import Decisions
    from megacompile.api.device_budget import DeviceRoom
    from megacompile.api.frontend import Frontend
    from megacompile.api.pipeline import Compiler
    from megacompile.capture.batch import read_batch
    from megacompile.hardware.machine import Machine
    from megacompile.planner.too_small import fitting
    from megacompile.schedule.plan import Mode

    config = Qwen2Config(
        vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=layers,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=32768,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).train()
    machine = Machine("a card", 600e12, 3e12, 50e9, 50e9, 300e9, 20e-6, 10e-6)
    compiler = Compiler(Frontend(model, torch.bfloat16), machine=machine)
    decided, mode = Decisions(DeviceRoom(80 * 10**9)), Mode("train", deferred=True)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    batch = read_batch({"input_ids": ids, "labels": ids.clone()}, model)
    clock = _Clock()
    compiled = compiler.frontend.build(batch)
    captured, _ = clock.read()
    scheduled = fitting(compiler.schedule(decided, batch, mode)).program(batch, mode)
    total, cpu = clock.read()
    return {
        "parameters": compiled.assembly.work.parameters,
        "capture_seconds": captured,
        "plan_seconds": total - captured,
        "total_seconds": total,
        "cpu_seconds": cpu,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "operations": len(scheduled.planned.step.ops),
        "source_lines": scheduled.source.count("\n"),
    }


def _child(layers: int, tokens: int) -> dict[str, float]:
    """One measurement in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one"]
    with tempfile.TemporaryDirectory() as elsewhere:
        out = subprocess.run(
            [*command, "--layers", str(layers), "--tokens", str(tokens)],
            check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=elsewhere,
            env=os.environ | {"XDG_CACHE_HOME": elsewhere},  # no plan is known from before
        ).stdout  # fmt: skip
    found: dict[str, float] = json.loads(out.strip().splitlines()[-1])
    return found


def _table(sizes: list[int], tokens: int) -> None:
    """Print the stages of each size, and what a layer adds."""
    print(
        "| layers | parameters | capture to policies | plan to source | total | CPU | peak RSS | operations "
        "| source lines |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    rows = []
    for layers in sizes:
        row = _child(layers, tokens)
        rows.append(row)
        print(
            f"| {layers} | {row['parameters'] / 1e9:.1f} B | {row['capture_seconds']:.1f} s | "
            f"{row['plan_seconds']:.1f} s | {row['total_seconds']:.1f} s | {row['cpu_seconds']:.1f} s | "
            f"{row['rss_bytes'] / 1e9:.2f} GB | {row['operations']} | {row['source_lines']} |",
            flush=True,
        )
    if len(rows) > 1:
        added = (rows[-1]["total_seconds"] - rows[0]["total_seconds"]) / (sizes[-1] - sizes[0])
        print(f"\nEach added layer takes {added * 1000:.0f} ms.")


def main() -> None:
    """Print a Markdown table of sizes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[20, 40, 80])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(options.layers[0], options.tokens)))
        return
    from benchmarks.report import machine_line  # not from a child, which runs this file alone

    print(f"{machine_line()}\n")
    _table(options.layers, options.tokens)


if __name__ == "__main__":
    main()
