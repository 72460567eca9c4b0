"""``megacompile bench nvme``: what a drive gives and how much of it the storage engine reaches."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from megacompile.units import parse_bytes


def add_nvme(commands: Any) -> None:
    """Add ``bench nvme`` to the subparsers of ``bench``."""
    nvme = commands.add_parser(
        "nvme",
        help="what the drive behind a directory gives, and the storage engine's part of it",
        allow_abbrev=False,
        description="Read and write a scratch file past the page cache at several block sizes and queue "
        "depths, then with the engine that offload_dir uses.",
    )
    nvme.add_argument("--dir", required=True, metavar="DIR", help="a directory on the drive")
    nvme.add_argument("--size", default="2GB", metavar="SIZE", help="bytes of the scratch file (2GB)")
    nvme.add_argument("--json", action="store_true", help="print JSON")


def run_nvme(options: argparse.Namespace) -> int:
    """Print the rates; exit code 0."""
    from megacompile.cli.main import write_json
    from megacompile.host.nvme_bench import measure_drive

    report = measure_drive(options.dir, parse_bytes(options.size, what="--size", available=1 << 60))
    if options.json:
        write_json(asdict(report))
    else:
        print(report)
    return 0
