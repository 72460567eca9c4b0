"""What benchmarks print besides their figures: the machine and the versions, cells of tables."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import torch


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
