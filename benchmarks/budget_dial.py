"""One model at every budget: throughput bends as memory shrinks, it never breaks.

    python -m benchmarks.budget_dial [--machine h200 --model qwen2.5-3b --tokens 16384] [--picture FILE]

Predicted for a machine at scale, from the budget that holds everything (or all that the card has) down to the
least one with weights whole; and measured on this machine's CPU backend with a small model, in turn. There
the fastest of the steps counts: what else the machine does only makes a step longer.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megacompile
from benchmarks.gpu.work import batch_of, tiny
from benchmarks.report import interleaved, machine_line
from megacompile.cli.estimator import Study
from megacompile.cli.models import load_model
from megacompile.hardware.catalog import load_machine
from megacompile.planner.device_state_fill import reside, trained_groups
from megacompile.planner.min_feasible_budget import least
from megacompile.planner.plan_evaluator import Planned
from megacompile.planner.search import search
from megacompile.schedule.plan import Mode, Plan

Row = dict[str, Any]


def budgets_between(least: int, most: int, count: int) -> list[int]:
    """``count`` budgets from the least to the most, evenly in ratio."""
    return [int(least * (most / least) ** (i / (count - 1))) for i in range(count)]


def predicted(model: str, machine: str, tokens: int, sequence: int, micro: int, count: int) -> list[Row]:
    """Simulated steps at budgets from the least feasible to what keeps all on the device, or all it has."""
    described, profile = load_model(model), load_machine(machine)
    rates = profile.rates("bf16")
    study = Study(described, "bf16", lambda text: None)
    work = study.captured(tokens // sequence // micro, sequence).assembly.work
    mode = Mode("train", micro)
    low = least(work, mode).nbytes

    known: list[Plan] = []  # of smaller budgets, scored at larger ones too, as a sweep does

    def plan(budget: int) -> Planned:
        found = search(work, mode, rates, budget, residents=trained_groups(work), also=known)
        return reside(found, work, mode, rates, budget, None)

    most = min(plan(1 << 60).peak_bytes, profile.device_bytes or 1 << 60)
    rows = []
    for budget in budgets_between(int(low * 1.001), most, count):
        found = plan(budget)
        known.append(found.plan)
        seconds = found.timeline.step_seconds
        kept = sum(work.groups[g].elements for g in found.step.resident)
        rows.append({
            "budget_gb": budget / 1e9, "seconds": seconds, "tokens_per_second": tokens / seconds,
            "state_on_device": kept / work.parameters, "peak_gb": found.peak_bytes / 1e9,
        })  # fmt: skip
    return rows


def measured(tokens: int, count: int, repeats: int) -> list[Row]:
    """A small model on the CPU backend, all budgets interleaved; the fastest of ``repeats`` steps."""
    batch = batch_of(tokens, 64, 512)

    def program(budget: str) -> megacompile.Program:
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return megacompile.compile(
            model, budget, optimizer=optimizer, compute_dtype=torch.float32, device="cpu", example_batch=batch
        )

    least = least_of(program)
    whole = program("8GB")
    most = whole.memory.predicted_peak_bytes
    whole.close()
    budgets = budgets_between(least, most, count)
    programs = [program(f"{budget}B") for budget in budgets]
    seconds = interleaved(programs, batch, repeats)
    rows = []
    for budget, one, times in zip(budgets, programs, seconds, strict=True):
        assert one.memory.device_peak_bytes <= budget
        quickest = min(times)
        rows.append({"budget_gb": budget / 1e9, "seconds": quickest, "tokens_per_second": tokens / quickest,
                     "peak_gb": one.memory.device_peak_bytes / 1e9})  # fmt: skip
        one.close()
    return rows


def least_of(program: Callable[[str], megacompile.Program]) -> int:
    """The least feasible budget in bytes, which a budget that is too small is told."""
    try:
        program("1kB")
    except megacompile.BudgetError as error:
        assert error.least_bytes is not None
        return error.least_bytes
    raise AssertionError("1 kB is no budget for any model")


def draw(path: Path, panels: list[tuple[str, list[Row]]]) -> None:
    """Speed over budget, in percent of that at the largest one, one panel each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    for index, (title, rows) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        most = rows[-1]
        budgets = [row["budget_gb"] for row in rows]
        speeds = [100 * row["tokens_per_second"] / most["tokens_per_second"] for row in rows]
        axes.fill_between(budgets, speeds, color="#4c78a8", alpha=0.18, linewidth=0)
        axes.plot(budgets, speeds, color="#4c78a8", marker="o", markersize=5, linewidth=2)
        _label(axes, budgets[0], speeds[0], (8, -16), "left")
        _label(axes, budgets[len(rows) // 2], speeds[len(rows) // 2], (0, -22), "center")
        _label(axes, budgets[-1], speeds[-1], (-4, 10), "right")
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets[::3], [_budget(b) for b in budgets[::3]])
        axes.minorticks_off()
        axes.set_ylim(0, 119)
        axes.set_xlabel("device memory that training may use")
        axes.set_ylabel("speed, % of that with the most memory" if index == 0 else "")
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    figure.savefig(path, dpi=150)


def _label(axes: Any, budget: float, speed: float, offset: tuple[int, int], align: str) -> None:
    axes.annotate(f"{_budget(budget)}: {speed:.0f} %", (budget, speed), xytext=offset, ha=align,
                  textcoords="offset points", fontsize=9, fontweight="bold")  # fmt: skip


def _budget(gb: float) -> str:
    return f"{gb:.3g} GB" if gb >= 1 else f"{gb * 1e3:.3g} MB"


def table(title: str, rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [f"\n{title}\n", "| " + " | ".join(rows[0]) + " |", "|--:" * len(rows[0]) + "|"]
    lines += ["| " + " | ".join(f"{v:.4g}" for v in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Print both tables, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen2.5-3b")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--micro-batches", type=int, default=4, help="of the prediction")
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--picture", type=Path, default=Path("docs/images/budget-dial.png"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(machine_line())
    at_scale = predicted(options.model, options.machine, options.tokens, options.sequence,
                         options.micro_batches, options.points)  # fmt: skip
    title = f"{options.model}, {options.tokens} tokens per step, predicted for {options.machine}"
    print(table(title, at_scale))
    small = measured(512, options.points, options.repeats)
    print(table("A small Llama on this CPU, measured", small))
    at = f"{options.model}, {options.tokens:,} tokens per step, predicted for an {options.machine.upper()}"
    draw(options.picture, [(at, at_scale), ("A small Llama on this CPU, measured", small)])


if __name__ == "__main__":
    main()
