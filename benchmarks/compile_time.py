"""Time and memory from capture to emitted source for a 72B Qwen2 shape on meta tensors.

    python -m benchmarks.compile_time [--layers 80 40 20] [--tokens 4096]

Each size runs in its own process, so that peak RSS is its own. No weight exists at any time.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings

import torch

from benchmarks.report import machine_line


def measure(layers: int, tokens: int) -> dict[str, float]:
    """Seconds of each stage and peak RSS in bytes for one model size."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    from megacompile.capture.batch import read_batch
    from megacompile.compiler import Compiler
    from megacompile.frontend import Frontend
    from megacompile.machine.rates import Machine
    from megacompile.plan.plan import Mode

    logging.set_verbosity_error()
    config = Qwen2Config(
        vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=layers,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=32768,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).train()
    machine = Machine("a card", 600e12, 3e12, 50e9, 50e9, 300e9, 20e-6, 10e-6)
    compiler = Compiler(Frontend(model, torch.bfloat16), 80 * 10**9, machine=machine)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    batch = read_batch({"input_ids": ids, "labels": ids.clone()}, model)
    start = time.perf_counter()
    compiled = compiler.compile(batch, evaluate=False)
    middle = time.perf_counter()
    scheduled = compiler.schedule(batch, Mode("train", deferred=True))
    end = time.perf_counter()
    return {
        "layers": layers,
        "parameters": compiled.assembly.work.parameters,
        "capture_seconds": middle - start,
        "plan_seconds": end - middle,
        "total_seconds": end - start,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "operations": len(scheduled.planned.step.ops),
        "source_lines": scheduled.source.count("\n"),
        "peak_bytes": scheduled.planned.peak_bytes,
    }


def main() -> None:
    """Run each size in a process of its own and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[20, 40, 80])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(options.layers[0], options.tokens)))
        return
    print(f"{machine_line()}\n")
    print("| layers | parameters | capture to options | plan to source | total | peak RSS | operations "
          "| source lines |")  # fmt: skip
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    rows = []
    for layers in options.layers:
        command = [sys.executable, "-m", "benchmarks.compile_time", "--one",
                   "--layers", str(layers), "--tokens", str(options.tokens)]  # fmt: skip
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row = json.loads(out.strip().splitlines()[-1])
        rows.append(row)
        print(
            f"| {layers} | {row['parameters'] / 1e9:.1f} B | {row['capture_seconds']:.1f} s | "
            f"{row['plan_seconds']:.1f} s | {row['total_seconds']:.1f} s | "
            f"{row['rss_bytes'] / 1e9:.2f} GB | {row['operations']} | {row['source_lines']} |",
            flush=True,
        )
    if len(rows) > 1:
        added = (rows[-1]["total_seconds"] - rows[0]["total_seconds"]) / (
            rows[-1]["layers"] - rows[0]["layers"]
        )
        print(f"\nEach added layer takes {added * 1000:.0f} ms.")


if __name__ == "__main__":
    main()
