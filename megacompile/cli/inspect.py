"""``megacompile inspect`` and ``megacompile diff``: a dumped schedule as a page, a trace, a comparison."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megacompile.errors import MegacompileError
from megacompile.planner.search import check_fits
from megacompile.report.schedule import Schedule
from megacompile.report.schedule_diff import diff_plans, diff_schedules
from megacompile.schedule.plan import Plan
from megacompile.schedule.plan_text import plan_table
from megacompile.text_files import path_of, read_text
from megacompile.units import format_bytes


def run_inspect(options: argparse.Namespace) -> int:
    """Print the plan of a dump and write its page."""
    schedule = read_schedule(path_of(options.dump))
    page = Path(options.output or path_of(options.dump).stem + ".html")
    print(f"{schedule.title}\n")
    print(
        f"predicted {schedule.predicted_seconds:.4g} s per step on {schedule.machine.name}, "
        f"peak {format_bytes(schedule.peak_bytes)} of {format_bytes(schedule.budget_bytes)}, "
        f"{len(schedule.step.ops):,} operations\n"
    )
    print(plan_table(schedule.plan, schedule.work))
    try:
        print(f"\nThe page is {schedule.to_html(page)}: open it in a browser.")
        if options.trace:
            print(f"The trace is {schedule.to_chrome_trace(options.trace)}: open it at ui.perfetto.dev.")
    except OSError as error:
        raise MegacompileError(f"{error.filename} cannot be written: {error.strerror}.") from error
    return 0


def run_diff(options: argparse.Namespace) -> int:
    """Print what changed; 1 where something did, as ``diff`` has it."""
    a, b = (_read_either(path_of(name)) for name in (options.first, options.second))
    if isinstance(a, Schedule) and isinstance(b, Schedule):
        text = diff_schedules(a, b)
    else:
        plans = [item.plan if isinstance(item, Schedule) else item for item in (a, b)]
        text = "\n".join(diff_plans(plans[0], plans[1])) or "no difference"
    print(text)
    return 0 if text == "no difference" else 1


def read_schedule(path: Path) -> Schedule:
    """The schedule of a dump folder or its schedule.json; of a plan.json with the schedule beside it."""
    found = _read_either(path)
    if isinstance(found, Schedule):
        return found
    beside = path.parent / "schedule.json"
    if not beside.is_file():
        raise MegacompileError(
            f"{path} is a plan, which says nothing about the model: there must be a schedule.json beside "
            "it, as in the folder that --dump wrote."
        )
    schedule = _schedule(beside, read_text(beside))
    try:
        check_fits(found, schedule.work)
    except MegacompileError as error:
        raise MegacompileError(f"{path} does not go with {beside}: {error}") from error
    return replace(schedule, plan=found, measured=None)


def _read_either(path: Path) -> Schedule | Plan:
    if path.is_dir():
        candidates = [path / "schedule.json", *sorted(path.glob("*/schedule.json"))]
        path = next((p for p in candidates if p.is_file()), path / "schedule.json")
    text = read_text(path)
    return _schedule(path, text) if '"digest"' in text[:200] else Plan.from_json(text, str(path))


def _schedule(path: Path, text: str) -> Schedule:
    try:
        return Schedule.from_json(text)
    except MegacompileError as error:
        raise MegacompileError(f"{path}: {error}") from error
