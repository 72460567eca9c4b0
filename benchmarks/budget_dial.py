"""One model at every budget: throughput bends as memory shrinks, it never breaks.

    python -m benchmarks.budget_dial [--machine h200 --model qwen2.5-7b --tokens 16384] [--picture FILE]

Predicted for a machine at scale, from the budget that holds everything down to the least one; and
measured on this machine's CPU backend with a small model, side by side in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import megacompile
from benchmarks.gpu.work import batch_of, tiny
from benchmarks.report import machine_line
from megacompile.cli.plan import Study, find_least
from megacompile.cli.presets import load_model
from megacompile.machine.catalog import load_machine
from megacompile.plan.plan import Mode
from megacompile.search.planner import Planned, search
from megacompile.search.residency import reside

Row = dict[str, Any]


def budgets_between(least: int, most: int, count: int) -> list[int]:
    """``count`` budgets from the least to the most, evenly in ratio."""
    return [int(least * (most / least) ** (i / (count - 1))) for i in range(count)]


def predicted(model: str, machine: str, tokens: int, sequence: int, count: int) -> list[Row]:
    """Simulated steps at budgets from the least feasible to one that keeps all state on the device."""
    described, profile = load_model(model), load_machine(machine)
    rates = profile.rates("bf16")
    compiled, work, _ = Study(described, "bf16", lambda text: None).captured(tokens // sequence, sequence)
    mode = Mode("train")
    least = find_least(compiled, work, 1).device_bytes

    def plan(budget: int) -> Planned:
        return reside(search(work, mode, rates, budget), work, mode, rates, budget, None)

    everything = plan(1 << 60)
    rows = []
    for budget in budgets_between(int(least * 1.001), everything.peak_bytes, count):
        found = plan(budget)
        seconds = found.timeline.step_seconds
        kept = sum(work.groups[g].elements for g in found.step.resident)
        rows.append({
            "budget_gb": budget / 1e9, "seconds": seconds, "tokens_per_second": tokens / seconds,
            "state_on_device": kept / work.parameters, "peak_gb": found.peak_bytes / 1e9,
        })  # fmt: skip
    return rows


def measured(tokens: int, count: int, repeats: int) -> list[Row]:
    """A small model on the CPU backend, all budgets interleaved, medians."""
    batch = batch_of(tokens, 64, 512)

    def program(budget: str) -> megacompile.Program:
        model = tiny("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return megacompile.compile(model, budget, optimizer=optimizer, compute_dtype=torch.float32,
                                   device="cpu", example_batch=batch)  # fmt: skip

    try:
        program("1kB")
    except megacompile.BudgetError as error:
        assert error.least_bytes is not None
        least = error.least_bytes
    whole = program("8GB")
    most = whole.memory.predicted_peak_bytes
    whole.close()
    budgets = budgets_between(least, most, count)
    programs = [program(f"{budget}B") for budget in budgets]
    seconds: list[list[float]] = [[] for _ in budgets]
    for _ in range(repeats + 1):
        for one, times in zip(programs, seconds, strict=True):
            start = time.perf_counter()
            one.train_step(batch)
            one.wait()
            times.append(time.perf_counter() - start)
    rows = []
    for budget, one, times in zip(budgets, programs, seconds, strict=True):
        assert one.memory.device_peak_bytes <= budget
        median = statistics.median(times[1:])
        rows.append({"budget_gb": budget / 1e9, "seconds": median, "tokens_per_second": tokens / median,
                     "peak_gb": one.memory.device_peak_bytes / 1e9})  # fmt: skip
        one.close()
    return rows


def draw(path: Path, panels: list[tuple[str, list[Row]]]) -> None:
    """Throughput over budget, one panel each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    for index, (title, rows) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        axes.plot([r["budget_gb"] for r in rows], [r["tokens_per_second"] for r in rows], marker="o")
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("device budget, GB")
        axes.set_ylabel("tokens per second")
        axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)


def table(title: str, rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [f"\n{title}\n", "| " + " | ".join(rows[0]) + " |", "|--:" * len(rows[0]) + "|"]
    lines += ["| " + " | ".join(f"{v:.4g}" for v in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Print both tables, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--picture", type=Path, default=Path("docs/images/budget-dial.png"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(machine_line())
    at_scale = predicted(options.model, options.machine, options.tokens, options.sequence, options.points)
    title = f"{options.model}, {options.tokens} tokens per step, predicted for {options.machine}"
    print(table(title, at_scale))
    small = measured(512, options.points, options.repeats)
    print(table("A small Llama on this CPU, measured", small))
    draw(options.picture, [(title, at_scale), ("a small Llama on this CPU, measured", small)])


if __name__ == "__main__":
    main()
