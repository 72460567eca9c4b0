"""Cases, their results on disk, and the tables made of them."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine_line

Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One measurement: ``call`` names a function of this package, ``settings`` are its arguments."""

    part: str
    name: str
    call: str
    settings: dict[str, Any]
    seconds: int = 120
    """When it is stopped at the latest."""


def hardware() -> Result:
    """What the figures belong to. Asking takes a CUDA context: never in a process that waits for cases,
    whose budgets it would count against."""
    import transformers
    import triton

    found: Result = {
        "machine": machine_line(),
        "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "device": "CPU",
    }
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found |= {"device": card.name, "device_bytes": card.total_memory, "cuda": torch.version.cuda}
        found |= _card()
    return found


def _card() -> Result:
    """Driver, link and limits of the first card, where nvidia-smi tells them."""
    asked = ("driver_version", "pcie.link.gen.max", "pcie.link.width.max", "clocks.max.sm", "power.limit")
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(zip(asked, (x.strip() for x in told.split(",")), strict=False)) if told else {}


def run_case(case: Case, folder: Path, *, apart: bool) -> Result:
    """The case's result, from disk if it is there, otherwise from a run that is kept.

    ``apart`` runs it in a process of its own, which may fail and leaves nothing behind.
    """
    known = results_of(case.part, folder)
    if case.name in known and "failed" not in known[case.name]:
        return known[case.name]
    known[case.name] = run_apart(case) if apart else _here(case)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.part}.json"
    passing = path.with_suffix(".part")
    passing.write_text(json.dumps(known, indent=1) + "\n")
    passing.replace(path)
    return known[case.name]


def results_of(part: str, folder: Path) -> dict[str, Result]:
    """What a part's cases gave so far."""
    path = folder / f"{part}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def rates(folder: Path) -> Result:
    """What the part ``machine`` measured so far; empty before it did."""
    found = results_of("machine", folder).get("rates", {})
    return {} if "failed" in found else {k: v for k, v in found.items() if isinstance(v, float)}


def call(name: str, settings: dict[str, Any]) -> Result:
    """Run a case's function, named as "module.function" of this package."""
    module, function = name.split(".")
    result: Result = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(**settings)
    return result


def _here(case: Case) -> Result:
    try:
        return call(case.call, case.settings) | {"settings": case.settings}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}", "settings": case.settings}


def run_apart(case: Case) -> Result:
    """What a case gives in a process of its own, which is stopped with its children when its time is over."""
    task = json.dumps({"call": case.call, "settings": case.settings})
    command = [sys.executable, "-m", "benchmarks.gpu", "--case", task]
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, error = process.communicate(timeout=case.seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its children
        process.communicate()
        return {"failed": f"not over after {case.seconds} s", "settings": case.settings}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        reason = error.strip().splitlines()[-1] if error.strip() else "no output"
        failed = f"exit status {process.returncode}: {reason}"
        return {"failed": failed, "log": error[-3000:], "settings": case.settings}
    result: Result = json.loads(lines[-1])
    return result | {"settings": case.settings, "wall_seconds": round(time.monotonic() - start, 1)}


def markdown(folder: Path, parts: Sequence[str]) -> str:
    """All results in one page; what was not measured says why."""
    first = folder / "hardware.json"
    about = json.loads(first.read_text()) if first.exists() else {}
    device = about.get("device", "nothing yet")
    lines = [
        f"# Dry run on {device}: nothing is measured" if about.get("dry") else f"# Measured on {device}",
        "",
    ]
    lines += ["Hardware and versions: " + ", ".join(f"{k} {v}" for k, v in about.items() if k != "dry") + "."]
    for part in parts:
        known = results_of(part, folder)
        lines += ["", f"## {part}", *(_tables(known) if known else ["", "Not measured."])]
    return "\n".join(lines) + "\n"


def _tables(known: dict[str, Result]) -> list[str]:
    """A table for all cases that found the same kinds of things; then what was not measured, and why."""
    hidden = ("settings", "log", "failed", "not measured", "table")
    alike: dict[tuple[str, ...], list[str]] = {}
    missing = []
    for name, result in known.items():
        columns = tuple(k for k in result if k not in hidden)
        why = result.get("not measured") or result.get("failed")
        if why:
            missing.append(f"- {name}: not measured: {why}")
            continue
        cells = " | ".join(_shown(result[c]) for c in columns)
        alike.setdefault(columns, []).append(f"| {name} | {cells} |")
    lines = []
    for columns, rows in alike.items():
        lines += ["", "| case | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|", *rows]
    lines += ["", *missing] if missing else []
    return lines + [f"\n{result['table'].strip()}" for result in known.values() if "table" in result]


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
