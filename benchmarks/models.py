"""Try every architecture and write ``docs/models.md``: what trains, how exactly, what is refused.

    python -m benchmarks.models                        # all, some seconds each; goes on where it stopped
    python -m benchmarks.models --only llama --dtype float32
    python -m benchmarks.models --again                # forget earlier results

Random configurations of them are what ``python -m benchmarks.fuzz_models`` tries (``docs/fuzz.md``).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

from benchmarks.children import BAD, Result, judged
from benchmarks.report import cell

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "build" / "models"
PAGE = ROOT / "docs" / "models.md"
DTYPES = ("float32", "bfloat16")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="an architecture's name; may be given several times")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--again", action="store_true", help="do not use earlier results")
    parser.add_argument("--page", action="store_true", help="write the page from the results there are")
    options = parser.parse_args(arguments)
    from tests.support.zoo import cases

    names = options.only or list(cases())
    unknown = sorted(set(names) - set(cases()))
    if unknown:
        parser.error(f"{unknown[0]} is no architecture that is known here")
    dtypes = [options.dtype] if options.dtype else list(DTYPES)
    if options.page:
        places = [(n, d, _place(n, d)) for d in dtypes for n in names]
        results = [{"name": n, "dtype": d, **json.loads(p.read_text())} for n, d, p in places if p.exists()]
    else:
        results = run(names, dtypes, again=options.again)
    if options.page or not (options.only or options.dtype):
        PAGE.write_text(page(results))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    bad = [r for r in results if r["status"] in BAD]
    for result in bad if not options.only else results:
        print(f"{result['name']} ({result['dtype']}): {result['status']} {result['reason']}")
    return 1 if bad else 0


def run(names: list[str], dtypes: list[str], *, again: bool = False) -> list[Result]:
    """Judge each architecture in each dtype; what was judged before is read from ``build/models``."""
    from tqdm import tqdm

    RESULTS.mkdir(parents=True, exist_ok=True)
    results = []
    with tqdm([(n, d) for d in dtypes for n in names], unit="model") as bar:
        for name, dtype in bar:
            bar.set_postfix_str(f"{name} {dtype}")
            place = _place(name, dtype)
            if again:
                place.unlink(missing_ok=True)
            found = json.loads(place.read_text()) if place.exists() else judged(_judge, (name, dtype), place)
            results.append({"name": name, "dtype": dtype, **found})
    return results


def _place(name: str, dtype: str) -> Path:
    return RESULTS / f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}-{dtype}.json"


def _judge(name: str, dtype: str) -> Result:
    import torch

    from tests.support.judge import judge
    from tests.support.zoo import cases

    return judge(cases()[name], getattr(torch, dtype)).as_dict()


_INTRODUCTION = """# Architectures

Look for your model in [what trains](#what-trains) and [what is refused](#what-is-refused). Every causal
language model of the installed transformers ({version}) is tried, with a few of each other kind;
[vision-language models](vision-language.md) and [random configurations](fuzz.md) are tried apart.
`python -m benchmarks.models` makes this page. It keeps results from run to run, so they may be older than
the code: `--again` makes all of them anew.

Each is a small model on the CPU backend. It trains for three steps with clipping and AdamW beside eager
PyTorch, at three budgets: enough for everything (100 %), 40 % of that (or the least feasible, if that is
more), and the least feasible.
{peaks}

- The first distance is to eager PyTorch with the same operators for attention, dropout, the gated delta rule
  and Mamba-2's scan; other tests compare these with the model's own. "bitwise": losses, norms and all weights
  after three steps are equal bit for bit (in bf16, where eager has no FP32 masters, all gradients of the
  first step). A number is the largest distance of a gradient over the three budgets, in parts of its
  tensor's scale.
- The second distance is the same with `kernels=True` and [the kernels that it
  places](#which-kernels-are-placed).
- The rule: fp32 stays within 1e-5 (or is no farther from fp64 than fp32 eager is, plus 1e-5). bf16 is no
  farther from fp32 than plain bf16 eager is, plus 1e-2. Fused kernels may add 5e-4 (fp32) and 1e-2 (bf16).
  One run of bf16 eager does not suffice to judge the models marked ~. For them, six runs from weights rounded
  otherwise say it too, by their largest error, or their mean and four standard deviations.

In all, pairs of a model and a dtype:
"""


_TITLES = {
    "refused": "What is refused",
    "eager fails": "What plain PyTorch does not train in this form",
    "WRONG": "What trains wrong",
    "crashed": "What crashes",
    "too slow": "What took too long",
}


def page(results: list[Result]) -> str:
    """The whole page in Markdown: a row for each model, with both dtypes."""
    import transformers

    from tests.support.zoo import cases

    counts = Counter((r["status"], r["dtype"]) for r in results)
    summary = [
        f"- {dtype}: " + ", ".join(f"{n} {s}" for (s, d), n in sorted(counts.items()) if d == dtype)
        for dtype in DTYPES
    ]
    models: dict[str, dict[str, Result]] = {}
    for result in results:
        models.setdefault(result["name"], {})[result["dtype"]] = result
    right = [r for r in results if r["status"] == "right"]
    intro = _INTRODUCTION.format(version=transformers.__version__, peaks=_peaks(right))
    parts = [intro, *summary, "", "## What trains"]
    missing = 2 * len(cases()) - len(results)
    if missing:
        parts.insert(1, f"Not tried yet: {missing} of {2 * len(cases())} pairs of architecture and dtype.\n")
    parts += _trained(models) + _placed(models)
    for status, title in _TITLES.items():
        rows = _reasons([r for r in results if r["status"] == status])
        if rows:
            parts += ["", f"## {title}", "", "| architecture | dtype | why |", "|---|---|---|", *rows]
    return "\n".join(parts) + "\n"


def _peaks(right: list[Result]) -> str:
    """The sentence on measured and predicted peaks."""
    inexact = []
    for result in right:
        worst = max(abs(1 - b["peak_bytes"] / b["predicted_bytes"]) for b in result["budgets"].values())
        if worst:
            inexact.append(f"{result['name']} in {result['dtype']} ({max(worst, 0.001):.1%} at most)")
    but = f", except for {', '.join(inexact)}" if inexact else ""
    return f"The measured peak is the predicted one to the byte{but}."


def _trained(models: dict[str, dict[str, Result]]) -> list[str]:
    """The tables of distances: causal language models, then all other kinds."""
    kinds = {n: r["kind"] for n, dtypes in models.items() for r in dtypes.values() if r["status"] == "right"}
    causal = [n for n, kind in kinds.items() if kind == "causal LM"]
    columns = "".join(f" {d}{what} |" for what in ("", " with kernels") for d in DTYPES)
    return [
        *("", "### Causal language models", "", f"| architecture |{columns}", "|---|--:|--:|--:|--:|"),
        *(f"| {n} | {_distances(models[n])} |" for n in causal),
        *("", "### Others", "", f"| architecture | kind |{columns}", "|---|---|--:|--:|--:|--:|"),
        *(f"| {n} | {kinds[n]} | {_distances(models[n])} |" for n in kinds if n not in causal),
    ]


def _distances(dtypes: dict[str, Result]) -> str:
    """The cells of a model: each dtype's distance, then each dtype's with kernels."""
    alone, fused = [], []
    for dtype in DTYPES:
        result = dtypes.get(dtype, {"status": "not tried"})
        if result["status"] != "right":
            alone.append(result["status"])
            fused.append("–")
            continue
        alone.append(_distance(max(b["distance"] for b in result["budgets"].values())))
        fused.append(_distance(result["fused_distance"]) + (" ~" if result.get("by_chance") else ""))
    return " | ".join(alone + fused)


def _placed(models: dict[str, dict[str, Result]]) -> list[str]:
    """The table of kernels: which models have which, by dtype only if the dtypes differ."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, dtypes in models.items():
        placed = {d: tuple(sorted(r["placed"])) for d, r in dtypes.items() if r["status"] == "right"}
        for kernels in dict.fromkeys(placed.values()):
            own = [d for d in placed if placed[d] == kernels]
            groups.setdefault(kernels, []).append(
                name if len(own) == len(placed) else f"{name} ({', '.join(own)})"
            )
    rows = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [
        *("", "## Which kernels are placed", "", "| kernels | architectures |", "|---|---|"),
        *(f"| {', '.join(kernels) or 'none'} | {'; '.join(names)} |" for kernels, names in rows),
    ]


def _reasons(rest: list[Result]) -> list[str]:
    """The rows of models that do not train: one for both dtypes if the reason is the same."""
    dtypes: dict[tuple[str, str], list[str]] = {}
    for result in rest:
        dtypes.setdefault((result["name"], cell(result["reason"], 400)), []).append(result["dtype"])
    return [f"| {name} | {', '.join(own)} | {reason} |" for (name, reason), own in dtypes.items()]


def _distance(value: float | None) -> str:
    return "–" if value is None else "bitwise" if value == 0 else f"{value:.0e}"


if __name__ == "__main__":
    sys.exit(main())
