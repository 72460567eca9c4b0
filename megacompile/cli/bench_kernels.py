"""``megacompile bench kernels``: the fused kernels against eager, torch.compile and Liger, on this GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megacompile.errors import MegacompileError

_NO_GPU = """megacompile: there is no GPU here, and Triton's interpreter says nothing about time.
Above is how fast the compiled kernels can be at most, by their machine code; --check compares results
on the CPU."""


def run_kernels(options: argparse.Namespace) -> int:
    """Exit code 0, also for ceilings, which are printed without a GPU; 1 if a provider of ours is wrong, or
    ``--plan`` or ``--compare`` need times and there is no GPU."""
    from megacompile.bench.results import ceilings, compare, markdown, read_rows, write

    old = read_rows(Path(options.compare)) if options.compare else None
    work = list(_work(options))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.check:
        print(ceilings())
        print(_NO_GPU, file=sys.stderr)
        return 1 if options.plan or options.compare else 0
    bench, hardware = _bench(options, device)
    rows: list[Any] = []
    for operation, shape, dtype in work:
        rows += _told(bench.rows(operation, shape, dtype))
        written = write(Path(options.out), rows, hardware)  # so far, as a run may be cut short
    print(markdown(rows, hardware))
    if options.plan and bench.timer is not None:
        from megacompile.bench.program_targets import worth

        print(worth(_targets(options.plan), rows))
    if old is not None:
        print(compare(old, rows))
    for path in written:
        print(path)
    ours = [r for r in rows if r.provider == "megacompile" and (r.note.startswith(("wrong", "fails")))]
    return 1 if ours else 0


def _told(rows: Iterator[Any]) -> Iterator[Any]:
    """Progress on stderr: a run takes minutes."""
    for row in rows:
        print(
            f"{row.operation} {row.dtype} {row.shape} {row.provider} {row.mode}: "
            f"{row.note or f'{row.median_ms:.4f} ms'}",
            file=sys.stderr,
        )
        yield row


def _bench(options: argparse.Namespace, device: torch.device) -> tuple[Any, dict[str, Any]]:
    from megacompile.bench.kernel_bench import Bench
    from megacompile.bench.providers import providers
    from megacompile.bench.timing import CudaTimer, roofline

    found = providers(options.provider, device)
    hardware: dict[str, Any] = {"torch": torch.__version__}
    if options.check:
        return Bench(found, device, None, None), {"device": device.type, **hardware}
    timer = CudaTimer(device)
    roof = roofline(timer, device, tuple(_dtypes(options)))
    rates = {f"{str(d).removeprefix('torch.')} TFLOPS": round(f / 1e12, 1) for d, f in roof.flops.items()}
    name, copied = torch.cuda.get_device_name(device), round(roof.bandwidth / 1e9)
    hardware |= {"device": name, "copy GB/s": copied, **rates}
    return Bench(found, device, timer, roof), hardware


def _dtypes(options: argparse.Namespace) -> list[torch.dtype]:
    names = options.dtype or ["bfloat16"]
    if options.plan:
        names = sorted({t.dtype for t in _targets(options.plan)})
    return [getattr(torch, name) for name in names]


def _targets(plan: str) -> list[Any]:
    from megacompile.bench.program_targets import read_calls, targets

    made, _ = targets(read_calls(Path(plan)))
    if not made:
        raise MegacompileError(
            f"--plan {plan}: its program calls no fused kernel: compile with kernels=True."
        )
    return made


def _work(options: argparse.Namespace) -> Iterator[tuple[Any, tuple[int, ...], torch.dtype]]:
    """(operation, shape, dtype) of everything that is asked for."""
    from megacompile.bench.operations import OPERATIONS

    names = options.op or list(OPERATIONS)
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        raise MegacompileError(f"--op {unknown[0]}: choose from {', '.join(OPERATIONS)}.")
    if options.shape and len(names) != 1:
        raise MegacompileError("--shape is a shape of one operation: give one --op with it.")
    if options.plan:
        yield from (
            (OPERATIONS[t.operation], t.shape, getattr(torch, t.dtype))
            for t in _targets(options.plan)
            if t.operation in names
        )
        return
    for name in names:
        operation = OPERATIONS[name]
        given = [_shape(text, operation.form.sizes) for text in options.shape or ()]
        for dtype in _dtypes(options):
            for shape in given or operation.shapes:
                yield operation, shape, dtype


def _shape(text: str, sizes: tuple[str, ...]) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if len(parts) != len(sizes) or not all(p.isdigit() and int(p) for p in parts):
        raise MegacompileError(f"--shape {text}: it takes {'x'.join(sizes)}, such as 8192x4096.")
    return tuple(map(int, parts))
