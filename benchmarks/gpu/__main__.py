"""``python -m benchmarks.gpu``: measure everything that is not measured yet, within a time.

    python -m benchmarks.gpu [--parts steps peers] [--only 7b] [--seconds 540] [--results FOLDER]
    python -m benchmarks.gpu --dry-run        # every part in small, on any CPU

Results are kept case by case, so that the command can be given again until all is there. A step's case
takes up to 5 minutes, so where a command may take 10, one part per command gets furthest.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from benchmarks.gpu.cases import PART_SECONDS, PARTS, cases
from benchmarks.gpu.record import Case, call, hardware, markdown, rates, results_of, run_apart, run_case

RESULTS = Path(__file__).parent.parent / "results" / "gpu"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="every part in small, on a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none that might end later")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        task = json.loads(options.case)
        print(json.dumps(call(task["call"], task["settings"])))
        return 0
    return _measure(options)


def _measure(options: argparse.Namespace) -> int:
    folder: Path = options.results
    folder.mkdir(parents=True, exist_ok=True)
    if options.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    about = hardware() if options.dry_run else run_apart(Case("machine", "hardware", "record.hardware", {}))
    about = {k: v for k, v in about.items() if k not in ("settings", "wall_seconds")} | {
        "dry": options.dry_run
    }
    (folder / "hardware.json").write_text(json.dumps(about, indent=1) + "\n")
    wrong = 0
    start = time.monotonic()
    for part in options.parts:
        begun = time.monotonic()
        every = cases(dry=options.dry_run, rates=rates(folder))  # which the part ``machine`` measures
        wanted = [c for c in every if c.part == part and options.only in c.name]
        known = results_of(part, folder)
        for case in sorted(wanted, key=lambda c: c.name in known):  # what failed comes after what is new
            now = time.monotonic()
            over = now - start + case.seconds > options.seconds or now - begun > PART_SECONDS
            if over and "failed" in known.get(case.name, {"failed": "not tried yet"}):
                print(f"{case.part}: {case.name}: left for the next call", flush=True)
                continue
            wrong += _tell(case, run_case(case, folder, apart=not options.dry_run))
            (folder / "README.md").write_text(markdown(folder, PARTS))
    return 1 if wrong else 0


def _tell(case: Case, result: dict[str, object]) -> bool:
    """Print a line; whether the result is wrong or missing without a reason that lies outside."""
    shown = {k: v for k, v in result.items() if k not in ("settings", "log", "table")}
    print(f"{case.part}: {case.name}: {json.dumps(shown)}", flush=True)
    return "failed" in result or result.get("right") is False


if __name__ == "__main__":
    raise SystemExit(main())
