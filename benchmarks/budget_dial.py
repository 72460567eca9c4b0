"""One model at several budgets, as measured on a GPU: throughput bends as memory shrinks, it never breaks.

    python -m benchmarks.budget_dial [--picture FILE]

Reads the steps that ``benchmarks.gpu`` timed (``benchmarks/results``), each with what was predicted for it
before it ran, prints them and draws them. For any other machine and model, ``megacompile plan --sweep
hbm-budget --plot`` predicts such a curve.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
RUNS = ("h100-sxm", "h100-sxm-2")  # of a budget that both measured, the later counts
CARD = "an H100"
MODELS = {"qwen2.5-3b": ("Qwen2.5-3B", 16_384), "llama-3.1-8b": ("Llama-3.1-8B", 32_768)}
_OTHERWISE = ("clipped", "Muon")  # stages whose step is another one


class Step(NamedTuple):
    """A step within ``budget`` GB: tokens per second as measured, and as predicted before."""

    budget: int
    measured: float
    predicted: float


def steps(model: str, tokens: int) -> list[Step]:
    """The steps of a model with so many tokens, by their budgets."""
    found: dict[int, Step] = {}
    for run in RUNS:
        for line in (RESULTS / run / "results.jsonl").read_text().splitlines():
            row: dict[str, Any] = json.loads(line)
            if not str(row.get("what", "")).startswith("step:") or any(o in row["stage"] for o in _OTHERWISE):
                continue
            if (row["model"], row["tokens"]) == (model, tokens):
                budget = int(row["budget"].removesuffix("GB"))
                found[budget] = Step(budget, tokens / row["step s"], tokens / row["predicted s"])
    return [found[budget] for budget in sorted(found)]


def draw(path: Path, of: dict[str, list[Step]]) -> None:
    """Tokens per second over the budget: measured, and predicted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.add_subplot()
    budgets = sorted({step.budget for found in of.values() for step in found})
    for colour, (name, found) in zip(("#4c78a8", "#e07b39"), of.items(), strict=True):
        places = [step.budget for step in found]
        speeds = [step.measured for step in found]
        axes.plot(places, speeds, color=colour, marker="o", linewidth=2, label=f"{name}, measured")
        axes.plot(places, [step.predicted for step in found], color=colour, marker="_", markersize=9,
                  linestyle=":", linewidth=1.4, label="predicted before")  # fmt: skip
        for step in found:
            share = 100 * step.measured / found[-1].measured
            axes.annotate(f"{share:.0f} %", (step.budget, step.measured), xytext=(0, -17), ha="center",
                          textcoords="offset points", fontsize=9, fontweight="bold")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget} GB" for budget in budgets])
    axes.minorticks_off()
    axes.set_xlim(budgets[0] / 1.2, budgets[-1] * 1.2)
    axes.set_ylim(0, 26_000)
    axes.set_xlabel(f"memory of {CARD} that training may use; % of the speed in 80 GB")
    axes.set_ylabel("tokens per second")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--picture", type=Path, default=Path("docs/images/budget-dial.png"))
    options = parser.parse_args()
    of = {
        f"{name}, {tokens:,} tokens a step": steps(model, tokens) for model, (name, tokens) in MODELS.items()
    }
    print(f"On {CARD}\n\n| model | budget | tokens/s | predicted before |\n|---|--:|--:|--:|")
    for name, found in of.items():
        for step in found:
            print(f"| {name} | {step.budget} GB | {step.measured:,.0f} | {step.predicted:,.0f} |")
    draw(options.picture, of)


if __name__ == "__main__":
    main()
