"""What a checkpoint costs a training loop: written while training stands still, and while it goes on.

In:  numbers of steps and repeats. Out: a Markdown table of seconds that loops took longer than the same
steps without a checkpoint, for immediate and clipped updates, with and without room for copies.

About 100M parameters, FP32: 1.2 GB of state. The three loops of a row take turns; medians are shown.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.report import machine_line
from benchmarks.step_overhead import batch_of, build, compiled, plain_need
from megacompile.program import Program

TOKENS = 256
WAYS: tuple[bool | None, ...] = (None, True, False)  # no checkpoint; ``wait``


def loop(program: Program, batch: Any, steps: int, wait: bool | None, folder: Path) -> tuple[float, float]:
    """Seconds until the last step's loss is there, and until the checkpoint is on disk as well."""
    start = time.perf_counter()
    if wait is not None:
        program.save(folder, wait=wait)
    for _ in range(steps):
        output = program.train_step(batch)
    float(output.loss)
    trained = time.perf_counter() - start
    program.synchronize()
    return trained, time.perf_counter() - start


def without_room(budget: int, batch: Any, **options: Any) -> Program:
    """A program whose host budget is what it takes."""
    program = compiled(budget, batch, **options)
    assert program._session.runtime is not None
    nbytes = program._session.runtime.state.arena.nbytes
    program.close()
    return compiled(budget, batch, host_budget=f"{nbytes}B", **options)


def row(clipped: bool, room: bool, steps: int, repeats: int, folder: Path) -> str:
    """One line of the table."""
    batch = batch_of(TOKENS)
    options: dict[str, Any] = {"max_grad_norm": 1.0} if clipped else {}
    make = compiled if room else without_room
    program = make(plain_need(TOKENS) // 4, batch, **options)
    times: dict[bool | None, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(repeats + 1):
        for way in WAYS:
            times[way].append(loop(program, batch, steps, way, folder / "run"))
    program.close()
    # the first round fills caches
    trained = {way: statistics.median(t for t, _ in found[1:]) for way, found in times.items()}
    written = statistics.median(t for _, t in times[False][1:])
    stood, went_on = trained[True] - trained[None], trained[False] - trained[None]
    updates, copies = "clipped" if clipped else "immediate", "yes" if room else "no"
    return (
        f"| {updates} | {copies} | {trained[None]:.2f} s | {stood:.2f} s | {went_on:.2f} s | "
        f"{went_on / stood:.2f} | {written:.2f} s |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    parameters = sum(p.numel() for p in build().parameters())
    print(f"{machine_line()}\n\n{parameters / 1e6:.0f}M parameters, {arguments.steps} steps.\n")
    print(
        "| updates | room for copies | steps alone | `wait=True` adds | `wait=False` adds | ratio | on disk |"
    )
    print("|---|---|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for clipped in (False, True):
            for room in (True, False):
                print(row(clipped, room, arguments.steps, arguments.repeats, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
