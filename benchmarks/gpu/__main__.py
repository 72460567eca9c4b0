"""``python -m benchmarks.gpu``: measure what is not measured yet on this machine with a GPU, within a time.

    python -m benchmarks.gpu [--seconds 510] [--stages "8B in 24 GB" …] [--out build/gpu] [--copies FOLDER]
    python -m benchmarks.gpu --small          # every stage in small: says nothing of speed
    python -m benchmarks.gpu --list           # the stages, and where the seconds go

Nothing has to be installed beyond torch, triton and transformers. docs/gpu.md tells what each stage finds.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
from pathlib import Path

from benchmarks.gpu.campaign import OK, ROOT, STATUS_USELESS, STATUS_WRONG, WRONG, Stage, drive
from benchmarks.gpu.carry import unpack
from benchmarks.gpu.page import page, screen, timetable
from benchmarks.gpu.stages import stages


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=510, help="for all stages and the page")
    parser.add_argument("--stages", nargs="+", default=[], help="these alone, also where they are done")
    parser.add_argument("--small", action="store_true", help="every stage in small")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the results")
    parser.add_argument("--copies", type=Path, help="a folder that gets a copy of each file after each stage")
    parser.add_argument("--list", action="store_true", help="print the stages and their seconds")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    every = stages(small=options.small)
    if options.list:
        print(timetable(every))
        return 0
    if options.stage:
        status = run_stage(next(s for s in every if s.name == options.stage), options.out, options.until)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # what the stage started must not keep it
    unpack()
    command = [sys.executable, "-m", "benchmarks.gpu", *(["--small"] if options.small else [])]
    status = drive(
        every, options.out, options.seconds, only=options.stages, copies=options.copies, command=command
    )
    print(screen(options.out))
    for folder in (options.out, *([options.copies] if options.copies else [])):
        (folder / "README.md").write_text(page(options.out, every))
    return int(any(s not in (OK, WRONG) for s in status.values()))


def run_stage(stage: Stage, folder: Path, until: float | None) -> int:
    """Run one stage in this process; its exit status."""
    from benchmarks.gpu.findings import Recorder

    faulthandler.enable()
    module, function = stage.call.split(".")
    to = Recorder(folder, stage.name, until)
    with to.finding("the whole stage") as whole:
        call = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        call(to, **stage.settings)
        whole["right"] = to.all_right
    if to.all_right:
        return 0
    return STATUS_USELESS if "error" in whole or not to.some_right else STATUS_WRONG


if __name__ == "__main__":
    raise SystemExit(main())
