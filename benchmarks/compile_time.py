"""Time and memory of compiling: a 72B Qwen2 shape on meta tensors, and a tiny Llama for each kind of batch.

    python -m benchmarks.compile_time [--layers 80 40 20] [--tokens 4096]
    python -m benchmarks.compile_time --kinds [--layers 6 24] [--against PYTHON]

Each measurement runs in its own process, so that peak RSS is its own; imports are left out. No weight of the
72B shape exists at any time. ``--kinds`` measures the tiny model's first step, and what each later kind of
batch takes beside it. ``--against`` names the interpreter of another installed tree: each measurement is then
made there too, in turns, and its CPU time divided by that of the other.
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


def measure_kinds(layers: int) -> dict[str, float]:
    """CPU seconds of a tiny Llama's first call for each kind of batch, by the kind, compiling included.

    Public names alone are used, as other trees have these too.
    """
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
    clock = _Clock()
    program = megacompile.compile(model, "1GB", device="cpu")
    found = {}
    for name, call, rows, tokens in (
        ("first", program.train_step, 4, 48),
        ("evaluation", program.evaluate, 4, 48),
        ("longer", program.train_step, 4, 96),
        ("shorter", program.train_step, 4, 72),
        ("fewer rows", program.train_step, 3, 96),
    ):
        ids = torch.randint(0, 256, (rows, tokens))
        call({"input_ids": ids, "labels": ids})
        found[name] = clock.read()[1]
        clock = _Clock()
    return found


def _child(python: str, layers: int, tokens: int) -> dict[str, float]:
    """One measurement by an interpreter, far from this tree's folder; no tokens: the tiny model."""
    command = [python, str(Path(__file__).resolve()), "--one"]
    with tempfile.TemporaryDirectory() as elsewhere:
        out = subprocess.run(
            [*command, "--layers", str(layers), "--tokens", str(tokens)],
            check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=elsewhere,
            env=os.environ | {"XDG_CACHE_HOME": elsewhere},  # no plan is known from before
        ).stdout  # fmt: skip
    found: dict[str, float] = json.loads(out.strip().splitlines()[-1])
    return found


def _kinds(sizes: list[int], other: str | None) -> None:
    """Print what each kind of batch of a tiny Llama takes at first, of another tree too."""
    for layers in sizes:
        trees = [sys.executable] + ([other] if other else [])
        turns = [[_child(python, layers, 0) for python in trees] for _ in range(_TURNS)]
        runs = [{kind: min(run[kind] for run in of) for kind in of[0]} for of in zip(*turns, strict=True)]
        names, (here, *there) = list(runs[0]), [list(run.values()) for run in runs]
        rows = {"CPU here": [f"{seconds:.2f} s" for seconds in [*here, sum(here)]]}
        for known in there:
            rows["CPU there"] = [f"{seconds:.2f} s" for seconds in [*known, sum(known)]]
            pairs = zip([*here, sum(here)], [*known, sum(known)], strict=True)
            rows["ratio"] = [f"{mine / theirs:.2f}" for mine, theirs in pairs]
        print(f"| {layers} layers | {' | '.join([*names, 'all'])} |")
        print("|:--" + "|--:" * (len(names) + 1) + "|")
        for name, values in rows.items():
            print(f"| {name} | {' | '.join(values)} |", flush=True)
        print()


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
    """Print Markdown tables of sizes, or of kinds of batches."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--kinds", action="store_true", help="a tiny model, for each kind of batch")
    parser.add_argument(
        "--against", metavar="PYTHON", help="the interpreter of another installed tree, with --kinds"
    )
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.layers or ([6, 24] if options.kinds else [20, 40, 80])
    if options.one:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(sizes[0], options.tokens) if options.tokens else measure_kinds(sizes[0])))
        return
    from benchmarks.report import machine_line  # not from a child, which runs this file alone

    print(f"{machine_line()}\n")
    if options.kinds:
        _kinds(sizes, options.against)
    else:
        _table(sizes, options.tokens)


if __name__ == "__main__":
    main()
