"""Host bytes per parameter, measured: resident memory of a real process over its parameters.

In:  a number of parameters. Out: a Markdown table: per state format, for updates that stream, for a
clipped micro-batch, and for accumulation, what the process grew by while it trained.

Each row is a process of its own: memory of the process after the first steps, less what it had before
the model was made, over the parameters. That counts everything: masters, moments, kept gradients, the
ring, what the allocator rounds up. The emulated device's budget is not host state and is subtracted:
its measured peak stands beside, as the CPU backend keeps both in one memory. "Held" is what remains
when the C library was told to give freed memory back; the rest are freed tensors that it keeps.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from benchmarks.report import machine_line
from megacompile.state.host_arena import resident_bytes, trim_heap
from megacompile.state.moment_formats import StateFormat

WAYS = {"streamed": (None, 1), "clipped": (1.0, 1), "accumulated": (1.0, 2)}
WIDTH = 1024


class Tower(nn.Module):
    """Square layers with little activation: nearly all bytes are state."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def measure(form: StateFormat, way: str, parameters: int) -> dict[str, float]:
    """Train three steps in this process; resident bytes per parameter, and the state's own."""
    import megacompile

    clip, micro = WAYS[way]
    batch = [torch.randn(4, WIDTH).bfloat16() for _ in range(micro)]
    run(Tower(2), batch, clip, form, megacompile)  # what a process needs besides any model
    gc.collect()
    before = resident_bytes()
    program = run(Tower(parameters // WIDTH**2), batch, clip, form, megacompile)
    gc.collect()
    grown = resident_bytes() - before
    trim_heap()
    held = resident_bytes() - before
    count = sum(p.numel() for p in program.model.parameters())
    host = sum(program.memory.host_bytes.values())
    device = program.memory.device_peak_bytes
    return {"grown": grown / count, "held": held / count, "host": host / count, "device": device / count}


def run(
    model: nn.Module,
    batch: list[Tensor],
    clip: float | None,
    form: StateFormat,
    package: Any,
    planner: Any = None,
) -> Any:
    """A program after three steps, its updates done, under the least budget that streams."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    program = package.compile(
        model, "40MB", optimizer=optimizer, max_grad_norm=clip, optimizer_state=form, kernels=None,
        planner=planner,
    )  # fmt: skip
    for _ in range(3):
        program.train_step(batch if len(batch) > 1 else batch[0])
    program.synchronize()
    return program


def in_a_process(form: str, way: str, parameters: int) -> dict[str, float]:
    """The measurement in a fresh process, whose allocator has seen nothing else."""
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-m", "benchmarks.bytes_per_parameter", "--one", form, way]
    command += ["--parameters", str(parameters)]
    environment = {**os.environ, "PYTHONPATH": root}
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure each format and way, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--parameters", type=int, default=64 << 20)
    parser.add_argument("--one", nargs=2, metavar=("FORMAT", "WAY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.one:
        print(json.dumps(measure(*arguments.one, arguments.parameters)))
        return
    print(f"{machine_line()}\n\n{arguments.parameters / 1e6:.0f}M parameters, bf16 compute.\n")
    print(
        "| format | updates | resident growth | held | held, less the device's peak | accounted host bytes |"
    )
    print("|---|---|--:|--:|--:|--:|")
    for form in get_args(StateFormat):
        for way in WAYS:
            found = in_a_process(form, way, arguments.parameters)
            rest = found["held"] - found["device"]
            columns = f"{found['grown']:.2f} | {found['held']:.2f} | {rest:.2f} | {found['host']:.2f}"
            print(f"| {form} | {way} | {columns} |", flush=True)


if __name__ == "__main__":
    main()
