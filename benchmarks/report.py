"""What benchmarks share: steps timed in turn, the machine and the versions, cells of tables."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megacompile.api.program import Program


def interleaved(programs: Sequence[Program], batch: Any, repeats: int) -> list[list[float]]:
    """Seconds of ``repeats`` whole steps of each program, which take turns; one before them warms up."""
    seconds: list[list[float]] = [[] for _ in programs]
    for _ in range(repeats + 1):
        for program, times in zip(programs, seconds, strict=True):
            start = time.perf_counter()
            program.train_step(batch)
            program.synchronize()
            times.append(time.perf_counter() - start)
    return [times[1:] for times in seconds]


def cell(text: str, characters: int) -> str:
    """A text as a cell of a Markdown table, cut to so many characters."""
    line = text.replace("|", "\\|").replace("\n", " ")
    return line if len(line) <= characters else line[: characters - 2] + " …"


def machine_line() -> str:
    """CPU model, cores, memory and versions in one line."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        total = next(
            int(line.split()[1]) * 1024
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemTotal")
        )
    except (OSError, StopIteration):
        total = 0
    return (
        f"{cpu}, {os.cpu_count()} cores, {total / 1e9:.0f} GB, torch {torch.__version__}, "
        f"Python {sys.version.split()[0]}"
    )
