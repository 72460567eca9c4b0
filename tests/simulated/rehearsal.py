"""A rehearsal of ``benchmarks.gpu``: its stages in small, on the simulated device, with numbers.

``python -m tests.simulated.rehearsal --stage NAME --limit SECONDS --out FOLDER``. Beside the small stages
there are three that fail: one raises, one hangs, one loses the device.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import attention_ways, command, correct, features, head, machine, peers
from benchmarks.gpu.__main__ import run_stage
from benchmarks.gpu.campaign import OK, ROOT, WRONG, Stage, drive
from benchmarks.gpu.carry import unpack
from benchmarks.gpu.findings import Recorder
from benchmarks.gpu.page import page
from benchmarks.gpu.stages import stages
from megacompile.bench import kernel_bench
from megacompile.kernels import eager_check
from tests.simulated.device import simulated
from tests.simulated.numbers import Numbers, failures, runtime

FAULTS = ("raises", "hangs", "loses the device")


def rehearsed() -> list[Stage]:
    """The small stages, and among them those that fail."""
    every = stages(small=True)
    at = [s.name for s in every].index("tiny in 1 GB")
    faults = [
        Stage(name, "correct.fault", {"kind": name}, 60 if name == "hangs" else 120, 1) for name in FAULTS
    ]
    return [*every[:at], *faults, *every[at:]]


def fault(to: Recorder, kind: str) -> None:
    """Fail in one of three ways."""
    if kind == "raises":
        raise ValueError("as it was told to")
    if kind == "hangs":
        time.sleep(3600)
    runtime.set(fail_after=1)
    with to.finding("a device that is lost"):
        _ = torch.ones(8, device="cuda") + 1
        torch.cuda.synchronize()
    raise RuntimeError("The device is lost.")


def _with_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        with Numbers():
            return function(*arguments, **named)

    return call


_DRAWN, _GRADIENTS = eager_check.inputs_of, eager_check.gradients_like


def _inputs_of(operation: Any, shape: Any, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Inputs drawn on the host: a generator of the simulated device draws nothing."""
    drawn = _DRAWN(operation, shape, dtype, torch.device("cpu"))
    return [x.detach().to(device).requires_grad_(x.requires_grad) for x in drawn]


def _gradients_like(outputs: Any) -> list[torch.Tensor]:
    drawn = _GRADIENTS([o.detach().cpu() for o in outputs])
    return [x.to(o.device) for x, o in zip(drawn, outputs, strict=True)]


def rehearse(folder: Path, seconds: float, only: Sequence[str] = ()) -> dict[str, str]:
    """Drive the stages as on a machine with a GPU; the status of each."""
    command = (sys.executable, "-m", "tests.simulated.rehearsal")
    return drive(rehearsed(), folder, seconds, only=only, command=command)


def _stage(name: str, folder: Path, until: float) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(correct, "fault", fault, raising=False)
    for module, function in (
        (correct, "_plain"), (correct, "attention"), (correct, "check"), (kernel_bench, "check"),
        (attention_ways, "times"), (head, "times"), (features, "_plain"), (peers, "peer"),
        (machine, "_sum_of_ones"), (machine, "_two_streams"), (machine, "_triton_kernel"),
    ):  # fmt: skip
        patch.setattr(module, function, _with_numbers(getattr(module, function)))
    patch.setattr(command, "device", lambda: "cpu")  # a process of its own has no numbers
    torch.backends.cuda.enable_cudnn_sdp(False)  # it has no numbers here
    for module in (kernel_bench, eager_check):
        patch.setattr(module, "inputs_of", _inputs_of)
        patch.setattr(module, "gradients_like", _gradients_like)
    with simulated(patch, lag_us=0):
        status = run_stage(next(s for s in rehearsed() if s.name == name), folder, until)
        print(*failures[:1], runtime.violations(), flush=True)
        os._exit(status)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage")
    parser.add_argument("--until", type=float)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "rehearsal")
    options = parser.parse_args()
    if options.stage:
        _stage(options.stage, options.out, options.until)
    unpack()
    shutil.rmtree(options.out, ignore_errors=True)
    status = rehearse(options.out, 3600)
    (options.out / "README.md").write_text(page(options.out, rehearsed()))
    print(f"{options.out / 'README.md'}")
    return int(any((text in (OK, WRONG)) == (name in FAULTS) for name, text in status.items()))


if __name__ == "__main__":
    raise SystemExit(main())
