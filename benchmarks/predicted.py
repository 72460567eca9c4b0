"""Predicted beside measured step times on the CPU backend.

    python -m benchmarks.predicted [--repeats 7] [--kinds]

For each model and budget: ``program.profile()`` times the block functions on this CPU and simulates the
step that the program runs, before it trains and after; the mean is compared with the median step. On a
machine that others use as well, both sides suffer, but not at the same moment: take a quiet run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import megacompile
from benchmarks.report import machine_line
from megacompile.hardware.measured_step import compare, comparison_table
from megacompile.planner.min_feasible_budget import infeasible


def _decoder(kind: str, **fields: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        shape = {"vocab_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False}
        config = transformers.CONFIG_MAPPING[kind](**(shape | fields))
        return transformers.AutoModelForCausalLM.from_config(config).float().train()  # type: ignore[no-any-return]

    return build


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and tokens
    "llama, 12 layers of 512": (
        _decoder("llama", hidden_size=512, intermediate_size=1408, num_hidden_layers=12), 512),
    "qwen3, 6 layers of 768": (
        _decoder("qwen3", hidden_size=768, intermediate_size=2304, num_hidden_layers=6, head_dim=96), 256),
    "llama, 24 layers of 256": (
        _decoder("llama", hidden_size=256, intermediate_size=704, num_hidden_layers=24), 512),
}  # fmt: skip
_PARTS = (0.0, 0.2, 0.5, 1.0)  # of the way from the least budget to what holds everything


def measure(name: str, budget: int, clip: bool, repeats: int) -> tuple[float, float, str]:
    """(predicted seconds, measured seconds, both by kind of operation) of one model and budget."""
    build, batch = _setup(name)
    program = megacompile.compile(
        build(), f"{budget}B", compute_dtype=torch.float32, max_grad_norm=1.0 if clip else None
    )
    program.prepare(batch)
    before = program.profile()
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        program.train_step(batch)
        seconds.append(time.perf_counter() - start)
    measured = program.schedule.measured
    profiled = program.profile()
    rows = compare(profiled.step, profiled.timeline, measured) if measured is not None else []
    program.close()
    predicted = (before.predicted_seconds + profiled.predicted_seconds) / 2
    return predicted, statistics.median(seconds[2:]), comparison_table(rows)


def budgets(name: str) -> list[int]:
    """Budgets from the least, with no weight cut, to one that holds everything."""
    build, batch = _setup(name)
    program = megacompile.compile(build(), "4GB", compute_dtype=torch.float32)
    program.prepare(batch)
    scheduled = program._session.scheduled()
    least = infeasible(scheduled.compiled.assembly.work, scheduled.mode, 1).least_bytes
    assert least is not None
    most = program.schedule.peak_bytes
    program.close()
    return [int(least + part * max(0, most - least)) for part in _PARTS]


def _setup(name: str) -> tuple[Callable[[], nn.Module], dict[str, Any]]:
    build, tokens = MODELS[name]
    torch.manual_seed(0)
    ids = torch.randint(0, 4096, (1, tokens))
    return build, {"input_ids": ids, "labels": ids}


def main() -> None:
    """Print a Markdown table."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kinds", action="store_true", help="both times by kind of operation, to stderr")
    options = parser.parse_args()
    print(f"{machine_line()}\n\n| model | budget | clip | predicted | measured | off |")
    print("|---|--:|---|--:|--:|--:|")
    off = []
    for name in MODELS:
        for number, budget in enumerate(budgets(name)):
            clip = bool(number % 2)
            predicted, measured, by_kind = measure(name, budget, clip, options.repeats)
            off.append(predicted / measured - 1)
            row = [name, f"{budget / 1e6:.0f} MB", "yes" if clip else "no", f"{predicted * 1e3:.0f} ms",
                   f"{measured * 1e3:.0f} ms", f"{off[-1]:+.0%}"]  # fmt: skip
            print(f"| {' | '.join(row)} |", flush=True)
            if options.kinds:
                print(by_kind, file=sys.stderr, flush=True)
    within = sum(abs(x) <= 0.15 for x in off)
    print(
        f"\nwithin 15 %: {within} of {len(off)}; median {statistics.median(map(abs, off)):.0%}, "
        f"worst {max(map(abs, off)):.0%}"
    )


if __name__ == "__main__":
    main()
