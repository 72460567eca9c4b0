"""Times of fused kernels beside eager torch, Inductor, and what the device reached in this run."""

from __future__ import annotations

import shutil
import subprocess
import sys

import torch

from benchmarks.gpu.campaign import environment
from benchmarks.gpu.findings import Recorder
from megacompile.bench import timing
from megacompile.bench.kernel_bench import Bench
from megacompile.bench.operations import OPERATIONS
from megacompile.bench.providers import OURS, providers
from megacompile.kernels.eager_check import all_results, inputs_of
from megacompile.kernels.registry import SPECS

_CLASSES = 16384  # of a vocabulary where kernels are compiled ahead
_SPEND_MS = 60.0  # on one row, in place of the bench's own 300


def table(to: Recorder, most: int | None = None) -> None:
    """Time each operation: milliseconds and share of the roof by provider and pass; sizes up to ``most``."""
    device = torch.device("cuda")
    timing.SPEND_MS = _SPEND_MS
    timer = timing.CudaTimer(device)
    with to.finding("roof") as finding:
        roof = timing.roofline(timer, device, (torch.bfloat16,))
        finding |= {"GB/s": roof.bandwidth / 1e9, "TFLOP/s": roof.flops[torch.bfloat16] / 1e12}
    to.require("roof")
    bench = Bench(providers([], device), device, timer, roof)
    for name in dearest_first(roof):
        shape = tuple(min(size, most or size) for size in OPERATIONS[name].shapes[0])
        if to.done(f"times of {name}"):
            continue
        with to.finding(f"times of {name}", operation=name, shape="x".join(map(str, shape))) as finding:
            for row in bench.rows(OPERATIONS[name], shape, torch.bfloat16):
                finding[f"{row.provider} {row.mode}"] = (
                    [row.median_ms, row.roofline] if row.median_ms else row.note
                )
                wrong = row.provider == "megacompile" and row.note.startswith(("wrong", "fails"))
                finding["right"] = finding.get("right", True) and not wrong
                print(row, flush=True)


def compile_ahead() -> None:
    """Launch what :func:`table` times once, on fewer rows."""
    device = torch.device("cuda")
    for name, operation in OPERATIONS.items():
        shape = tuple(
            min(size, _CLASSES) if what == "vocabulary" else size
            for what, size in zip(
                operation.form.sizes, operation.form.check_shape(operation.form.shape, device), strict=True
            )
        )
        all_results(OURS[name], inputs_of(operation.form, shape, torch.bfloat16, device))


def dearest_first(roof: timing.Roofline) -> list[str]:
    """Every operation of the registry, by the least time that its passes take at its first shape.

    Recurrences come last: Inductor compiles their eager loops for a minute or longer.
    """

    def place(name: str) -> tuple[bool, float]:
        costs = OPERATIONS[name].costs(OPERATIONS[name].shapes[0], torch.bfloat16.itemsize)
        least = sum(roof.best_seconds(cost.nbytes, cost.flops, torch.bfloat16) for cost in costs)
        recurrent = name in SPECS and SPECS[name].runs_kernels is not None and name != "attention"
        return recurrent, -least

    return sorted(OPERATIONS, key=place)


def slowest(to: Recorder, count: int = 3) -> None:
    """ncu's counters of the kernels that are farthest from the roof."""
    shares: dict[str, float] = {}
    for entry in to.known():
        passes = [entry.get(f"megacompile {mode}") for mode in ("forward", "backward")]
        timed = [p[1] for p in passes if isinstance(p, list)]
        if "operation" in entry and timed:
            shares[entry["operation"]] = min(timed)
    for name in sorted(shares, key=lambda n: shares[n])[:count] or ("rms_norm",):
        with to.finding(f"ncu of {name}", share=shares.get(name)) as finding:
            if shutil.which("ncu") is None:
                finding["not measured"] = "ncu is not installed"
                continue
            ran = subprocess.run(
                ["ncu", "--set", "basic", "--launch-count", "6", "--kernel-name-base", "function",
                 "--kernel-name", _OURS, sys.executable, "-c", _ONCE.format(name=name)],
                capture_output=True, text=True, timeout=60, env=environment(),
            )  # fmt: skip
            finding |= {"right": ran.returncode == 0, "said": ran.stdout[-6000:], "error": ran.stderr[-800:]}


_OURS = "regex:^(accumulate|attention|clamped|decode|gated|glu|gradient|layer|mamba2|qk|rms|rope).*_kernel$"
_ONCE = """
import torch
from megacompile.kernels.eager_check import all_results, inputs_of
from megacompile.kernels.registry import EAGER_FORMS
form = EAGER_FORMS["{name}"]
all_results(form.ours, inputs_of(form, form.shape, torch.bfloat16, torch.device("cuda")))
torch.cuda.synchronize()
"""


def sanitize(to: Recorder, seconds: float) -> None:
    """compute-sanitizer's memcheck over a step of a small model."""
    tool = shutil.which("compute-sanitizer")
    with to.finding("compute-sanitizer") as finding:
        if tool is None:
            finding["not measured"] = "compute-sanitizer is not installed"
            return
        ran = subprocess.run(
            [tool, "--error-exitcode", "9", "--report-api-errors", "no", sys.executable, "-c", _SMALL_STEP],
            capture_output=True, text=True, timeout=seconds, env=environment(),
        )  # fmt: skip
        errors = [line for line in ran.stdout.splitlines() if line.startswith("=========")]
        finding |= {"right": ran.returncode == 0, "said": "\n".join(errors[:40]), "error": ran.stderr[-800:]}


_SMALL_STEP = """
import torch
from pathlib import Path
from benchmarks.gpu import correct
correct._ours(torch.bfloat16, "2GB", 1, {})
"""
