"""Time and memory of compiling: a 72B Qwen2 shape on meta tensors, and a tiny Llama to its first two lengths.

    python -m benchmarks.compile_time [--layers 80 40 20] [--tokens 4096] [--against PYTHON]
    python -m benchmarks.compile_time --lengths [--layers 6 24]

Each measurement runs in its own process, so that peak RSS is its own; imports are left out. No weight of the
72B shape exists at any time. ``--lengths`` measures the tiny model alone. ``--against`` names the interpreter
of another installed tree: each measurement is then made there too, in turns, and its CPU time divided by that
of the other.
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

_TURNS = 2  # of which the fastest counts: other processes on the machine only add time


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

    from megacompile.api.pipeline import Compiler, Frontend
    from megacompile.api.settings import DeviceRoom
    from megacompile.capture.batch import read_batch
    from megacompile.hardware.machine import Machine
    from megacompile.schedule.plan import Mode

    config = Qwen2Config(
        vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=layers,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=32768,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).train()
    machine = Machine("a card", 600e12, 3e12, 50e9, 50e9, 300e9, 20e-6, 10e-6)
    compiler = Compiler(Frontend(model, torch.bfloat16), DeviceRoom(80 * 10**9), machine=machine)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    batch = read_batch({"input_ids": ids, "labels": ids.clone()}, model)
    clock = _Clock()
    compiled = compiler.compile(batch, evaluate=False)
    captured, _ = clock.read()
    scheduled = compiler.schedule(batch, Mode("train", deferred=True))
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


def measure_tiny(layers: int = 6) -> dict[str, float]:
    """Seconds from ``compile`` to the end of a tiny Llama's first step, and of its first longer step."""
    import torch
    import torch._functorch.aot_autograd
    import torch.export._trace  # both imported when torch traces first
    from transformers import LlamaConfig, LlamaForCausalLM

    import megacompile

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    short, long = (torch.randint(0, 256, (2, length)) for length in (32, 48))
    clock = _Clock()
    program = megacompile.compile(model, "1GB", device="cpu")
    program.train_step({"input_ids": short, "labels": short})
    total, cpu = clock.read()
    clock = _Clock()
    program.train_step({"input_ids": long, "labels": long})  # no program fits it: it gets its own
    second, second_cpu = clock.read()
    return {
        "total_seconds": total,
        "cpu_seconds": cpu,
        "second_seconds": second,
        "second_cpu_seconds": second_cpu,
    }


def _child(python: str, layers: int, tokens: int) -> dict[str, float]:
    """One measurement by an interpreter, far from this tree's folder; no tokens: the tiny model."""
    command = [
        python,
        str(Path(__file__).resolve()),
        "--one",
        "--layers",
        str(layers),
        "--tokens",
        str(tokens),
    ]
    with tempfile.TemporaryDirectory() as elsewhere:
        out = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=elsewhere,
            env=os.environ | {"XDG_CACHE_HOME": elsewhere},  # no plan is known from before
        ).stdout  # fmt: skip
    found: dict[str, float] = json.loads(out.strip().splitlines()[-1])
    return found


def _compare(python: str, layers: int, tokens: int) -> None:
    """Print CPU seconds of this tree and another, and their ratio, for the 72B shape and the tiny model."""
    print("| CPU time | here | there | ratio |")
    print("|:--|--:|--:|--:|")
    for rows, size in (
        ({f"72B shape, {layers} layers, to its source": "cpu_seconds"}, (layers, tokens)),
        ({"tiny Llama, first step": "cpu_seconds", "its second length": "second_cpu_seconds"}, (6, 0)),
    ):
        turns = [[_child(p, *size) for p in (sys.executable, python)] for _ in range(_TURNS)]
        for name, key in rows.items():
            here, there = (min(run[key] for run in runs) for runs in zip(*turns, strict=True))
            print(f"| {name} | {here:.2f} s | {there:.2f} s | {here / there:.2f} |", flush=True)


def _lengths(sizes: list[int]) -> None:
    """Print what a tiny Llama's first step takes, and its first step of another length."""
    print("| layers | first length, CPU | second length, CPU | ratio |")
    print("|--:|--:|--:|--:|")
    for layers in sizes:
        runs = [_child(sys.executable, layers, 0) for _ in range(_TURNS)]
        first, second = (min(run[key] for run in runs) for key in ("cpu_seconds", "second_cpu_seconds"))
        print(f"| {layers} | {first:.2f} s | {second:.2f} s | {second / first:.2f} |", flush=True)


def _table(sizes: list[int], tokens: int) -> None:
    """Print the stages of each size, and what a layer adds."""
    print(
        "| layers | parameters | capture to policies | plan to source | total | CPU | peak RSS | operations "
        "| source lines |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    rows = []
    for layers in sizes:
        row = _child(sys.executable, layers, tokens)
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
    """Print a Markdown table of sizes, or of ratios to another tree."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--lengths", action="store_true", help="a tiny model's first and second length")
    parser.add_argument("--against", metavar="PYTHON", help="the interpreter of another installed tree")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.layers or ([6, 24] if options.lengths else [20, 40, 80])
    if options.one:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(sizes[0], options.tokens) if options.tokens else measure_tiny(sizes[0])))
        return
    from benchmarks.report import machine_line  # not from a child, which runs this file alone

    print(f"{machine_line()}\n")
    if options.lengths:
        _lengths(sizes)
    elif options.against:
        _compare(options.against, max(sizes), options.tokens)
    else:
        _table(sizes, options.tokens)


if __name__ == "__main__":
    main()
