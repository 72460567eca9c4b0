"""The arguments of ``megacompile bench``: what parts of megacompile reach on this machine."""

from __future__ import annotations

import argparse
from typing import Any

_KERNELS = """providers: eager, torch.compile, megacompile, Liger if it is installed, and the functions of
each --provider FILE.py, named as the operations and called as their eager forms:

    def rms_norm(x, weight): ...                 def glu(gate, up): ...
    def add_rms_norm(x, residual, weight): ...   def rope(x, cos, sin): ...

Correctness is checked against float64 before anything is timed. Without a GPU nothing is timed: the
ceilings of the compiled kernels are printed instead, and --check compares results on the CPU."""


def add_bench(bench: argparse.ArgumentParser) -> None:
    """Add the parts of ``bench`` to its parser."""
    parts = bench.add_subparsers(dest="part", metavar="PART", required=True, title="parts")
    _add_nvme(parts)
    _add_kernels(parts)


def _add_nvme(commands: Any) -> None:
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


def _add_kernels(commands: Any) -> None:
    kernels = commands.add_parser(
        "kernels",
        help="the fused kernels against eager, torch.compile and Liger",
        epilog=_KERNELS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        description="Time forward, backward and both of each kernel on this machine's GPU.",
    )
    add = kernels.add_argument
    add("--op", action="append", metavar="NAME", help="an operation (all); may be given several times")
    add(
        "--dtype",
        action="append",
        choices=("bfloat16", "float16", "float32"),
        help="bfloat16; may be given several times",
    )
    add("--shape", action="append", metavar="AxB", help="a shape of the one --op, such as 8192x4096")
    add("--provider", action="append", default=[], metavar="FILE", help="a Python file with more functions")
    add("--plan", metavar="JSON", help="the shapes of this plan, and what each kernel is worth in its step")
    add("--compare", metavar="JSON", help="a kernels.json of an earlier run")
    add("--out", metavar="DIR", default="bench-kernels", help="where the tables go (bench-kernels)")
    add("--check", action="store_true", help="check correctness alone")
