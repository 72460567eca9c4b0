"""Try random configurations of transformers' models, trained in random ways, beside eager PyTorch.

    python -m benchmarks.fuzz_models --minutes 60
    python -m benchmarks.fuzz_models --seed 1234 --trials 1     # the one that was drawn from seed 1234

Trial i is drawn from seed + i alone and printed on a line of its own. Results are kept in ``build/fuzz``;
``--page`` writes those that are there to ``docs/fuzz.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.children import BAD, Result, judged
from benchmarks.report import cell

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "build" / "fuzz"
PAGE = ROOT / "docs" / "fuzz.md"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz_models", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, help="how many; otherwise as many as there is time for")
    parser.add_argument("--page", action="store_true", help="write the page from the results there are")
    options = parser.parse_args(arguments)
    if options.page:
        PAGE.write_text(page([json.loads(path.read_text()) for path in RESULTS.glob("*.json")]))
        print(f"wrote {PAGE.relative_to(ROOT)}")
        return 0
    RESULTS.mkdir(parents=True, exist_ok=True)
    end, results, seed = time.monotonic() + 60 * options.minutes, [], options.seed
    while len(results) < options.trials if options.trials else time.monotonic() < end:
        result = try_one(seed)
        results.append(result)
        print(f"seed {seed}: {result['status']}, {result['name']} {result['reason']}", flush=True)
        if result["status"] in BAD or options.trials == 1:
            print(f"  {result['trial']}", flush=True)
        seed += 1
    print(summary(results))
    return 1 if any(r["status"] in BAD for r in results) else 0


def try_one(seed: int) -> Result:
    """Judge what is drawn from a seed; the result holds the trial, so that it can be read."""
    from tests.support.fuzz import draw

    part = RESULTS / f"{seed}.part"
    part.unlink(missing_ok=True)
    trial = draw(seed)
    name = f"{trial.model} {trial.dtype}"
    found = {**judged(_judge, (seed,), part), "name": name, "seed": seed, "trial": repr(trial)}
    part.with_suffix(".json").write_text(json.dumps(found, indent=1))
    part.unlink()
    return found


def _judge(seed: int) -> Result:
    import torch

    from megacompile.graph import tile_cuts
    from megacompile.planner import tiling
    from tests.support.fuzz import case, draw
    from tests.support.judge import judge

    trial = draw(seed)
    if trial.piece_bytes:
        for module in (tile_cuts, tiling):
            module.LEAST_PIECE = trial.piece_bytes
    return judge(case(trial), getattr(torch, trial.dtype)).as_dict()


_INTRODUCTION = """# Random configurations

Drawn and tried by `python -m benchmarks.fuzz_models`: a type of model that transformers has, a small random
configuration of it, random batches (lengths, masks, packing, several per step) and ways to train (param
groups, clipping, accumulation, frozen parts, LoRA, evaluation in between, weights in pieces), each in one
dtype at three budgets, judged beside eager PyTorch as on [the page of architectures](models.md).
`python -m benchmarks.fuzz_models --seed SEED --trials 1` repeats one; its seed stands behind the model.
"""


def page(results: list[Result]) -> str:
    """All trials in Markdown: those that are right as lists of seeds, the others by what happened."""
    results = sorted(results, key=lambda r: r["seed"])
    counts = Counter(r["status"] for r in results).most_common()
    tally = f"{len(results)} trials: " + ", ".join(f"{n} {status}" for status, n in counts) + "."
    right: dict[str, dict[str, list[str]]] = {}
    rest: dict[tuple[str, str], list[str]] = {}
    for result in results:
        model, _, dtype = result["name"].rpartition(" ")
        if result["status"] == "right":
            right.setdefault(dtype, {}).setdefault(model, []).append(str(result["seed"]))
        else:
            verdict = (result["status"], cell(result["reason"], 160))
            rest.setdefault(verdict, []).append(f"{result['name']} {result['seed']}")
    parts = [_INTRODUCTION, tally, "", "## Right", ""]
    for dtype, models in right.items():
        rows = (f"{model} {' '.join(seeds)}" for model, seeds in sorted(models.items()))
        parts.append(f"- {dtype}: {', '.join(rows)}.")
    parts += ["", "## All others", "", "| verdict | why | models and seeds |", "|---|---|---|"]
    parts += [f"| {status} | {why} | {', '.join(who)} |" for (status, why), who in sorted(rest.items())]
    return "\n".join(parts) + "\n"


def summary(results: list[Result]) -> str:
    """How many of each verdict, and why things were refused."""
    counts = Counter(r["status"] for r in results)
    refused = Counter(" ".join(r["reason"].split()[:12]) for r in results if r["status"] == "refused")
    lines = [f"{len(results)} trials: " + ", ".join(f"{n} {s}" for s, n in counts.most_common())]
    return "\n".join(lines + [f"  refused {n} times: {reason} …" for reason, n in refused.most_common(20)])


if __name__ == "__main__":
    sys.exit(main())
