"""Optimizers on the host: what each keeps of a parameter, takes for an update, and needs of time.

In:  the size of a square matrix, threads. Out: the Markdown table of docs/how-to/optimizers.md.

Every row is the median of updates of one matrix, through the state of a program: bf16 halves of FP32 masters,
a bf16 gradient. The first update of each is left out, as it makes the state.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megacompile.blocks.weight_groups import GroupLayout, Parameter, Slot
from megacompile.state.masters import HostState
from megacompile.state.moment_formats import group_arrays
from megacompile.state.optimizer import form_of, hypers
from megacompile.state.torch_optimizer import TorchOptimizer

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW, Adam: the C kernel": ("torch.optim.AdamW", {}),
    "SGD": ("torch.optim.SGD", {"lr": 1e-3}),
    "SGD with momentum": ("torch.optim.SGD", {"lr": 1e-3, "momentum": 0.9}),
    "Lion (lion-pytorch)": ("lion_pytorch.Lion", {}),
    "Adagrad": ("torch.optim.Adagrad", {}),
    "RMSprop": ("torch.optim.RMSprop", {}),
    "Adadelta": ("torch.optim.Adadelta", {}),
    "Adamax": ("torch.optim.Adamax", {}),
    "NAdam": ("torch.optim.NAdam", {}),
    "RAdam": ("torch.optim.RAdam", {}),
    "ASGD": ("torch.optim.ASGD", {}),
    "Rprop": ("torch.optim.Rprop", {}),
    "AdamW(amsgrad=True)": ("torch.optim.AdamW", {"amsgrad": True}),
    "AdamWScheduleFree (schedulefree)": ("schedulefree.AdamWScheduleFree", {}),
    "Adafactor": ("torch.optim.Adafactor", {}),
    "Adafactor (transformers)": ("transformers.optimization.Adafactor", {}),
    "Muon": ("torch.optim.Muon", {}),
}


def optimizer_of(path: str, options: dict[str, Any], parameters: Sequence[nn.Parameter]) -> Any:
    """Return an optimizer by its class's path."""
    module, _, name = path.rpartition(".")
    made = getattr(importlib.import_module(module), name)(parameters, **options)
    getattr(made, "train", lambda: None)()
    return made


def measured(path: str, options: dict[str, Any], width: int, threads: int, repeats: int) -> str:
    """Return the cells of one row."""
    optimizer = optimizer_of(path, options, [nn.Parameter(torch.empty(width, width))])
    form = form_of(optimizer, "fp32")
    numel = width * width
    parameter = Parameter("w", (width, width), (width, 1), torch.bfloat16, 0)
    group = GroupLayout(0, "w", torch.bfloat16, True, (Slot(parameter, 0),), numel)
    state = HostState([group], form)
    state.write((0, 0), torch.randn(width, width))
    grad, seconds = torch.randn(numel).bfloat16(), []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        if isinstance(form, TorchOptimizer) and form.matrices(group):  # what comes between is the device's
            state.add_momentum(0, grad, form.settings(), [0], threads=threads)
        state.update(0, grad, hypers(optimizer, form), [0], threads=threads)
        seconds.append(time.perf_counter() - start)
    kept = sum(a.nbytes for a in group_arrays(group, form) if a.kind == "moments") / numel
    nanoseconds = 1e9 * statistics.median(seconds[1:]) / numel
    whole = "–" if isinstance(form, str) else "chunks" if form.param_groups[0].elementwise else "whole"
    return f"{kept:.3g} | {whole} | {state.scratch_bytes / 1e6:,.0f} MB | {nanoseconds:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print("| | state, bytes per parameter | updated in | memory of an update | ns per parameter |")
    print("|---|--:|---|--:|--:|")
    for name, (path, options) in ROWS.items():
        try:
            print(f"| {name} | {measured(path, options, given.width, given.threads, given.repeats)} |")
        except ImportError as error:
            print(f"| {name} | not measured: {error} | | | |")


if __name__ == "__main__":
    main()
