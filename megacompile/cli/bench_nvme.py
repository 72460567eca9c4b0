"""``megacompile bench nvme``: what a drive gives and how much of it the storage engine reaches."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from megacompile.cli.output import write_json
from megacompile.state.drive_benchmark import measure_drive
from megacompile.units import parse_bytes


def run_nvme(options: argparse.Namespace) -> int:
    """Print the rates; exit code 0."""
    report = measure_drive(options.dir, parse_bytes(options.size, what="--size", available=1 << 60))
    if options.json:
        write_json(asdict(report))
    else:
        print(report)
    return 0
