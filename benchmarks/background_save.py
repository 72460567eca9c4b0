"""What a checkpoint costs a training loop: written while training stands still, and while it goes on.

In:  numbers of steps and repeats. Out: Markdown tables of seconds that loops took longer than the same
steps without a checkpoint: programs, for immediate and clipped updates, with and without room for copies; and
the Trainer, whose checkpoints hold the model's files as well.

About 100M parameters, FP32: 1.2 GB of state. The three loops of a row take turns; medians are shown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from benchmarks.report import machine_line
from benchmarks.step_overhead import batch_of, build, compiled, plain_need
from megacompile.integrations.transformers import Trainer
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


class Saves(TrainerCallback):
    """Saves after the first step, if ``wait`` says how, and takes the times from then on."""

    trainer: Trainer
    wait: bool | None = None

    @property
    def reads_checkpoints(self) -> bool:
        """The trainer waits for a callback that reads checkpoints."""
        return bool(self.wait)

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """The trainer goes on."""
        self.stood = time.perf_counter() - self.start

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.trainer.program.synchronize()  # type: ignore[union-attr]
            self.start, self.cpu, self.stood = time.perf_counter(), time.process_time(), 0.0
            control.should_save = self.wait is not None
        if state.global_step == state.max_steps:
            float(self.trainer._last.loss)  # type: ignore[union-attr]
            self.trained = time.perf_counter() - self.start

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.written = time.perf_counter() - self.start
        self.cpu = time.process_time() - self.cpu

    @property
    def times(self) -> tuple[float, float, float, float]:
        """Seconds until the last loss, until the checkpoint is on disk, before training went on, of CPUs."""
        return self.trained, self.written, self.stood, self.cpu


def trainer_rows(steps: int, repeats: int, folder: Path) -> Iterator[str]:
    """The Trainer's table: its defaults, so that updates are clipped."""
    saves = Saves()
    arguments = TrainingArguments(
        os.fspath(folder / "trainer"), per_device_train_batch_size=1, max_steps=steps + 1, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True, save_total_limit=1,
    )  # fmt: skip
    rows = [{name: ids[0] for name, ids in batch_of(TOKENS).items()} for _ in range(steps + 1)]
    saves.trainer = trainer = Trainer(
        build(), arguments, train_dataset=rows, callbacks=[saves], hbm_budget=f"{plain_need(TOKENS) // 4}B"
    )
    trainer.remove_callback(PrinterCallback)
    times: dict[bool | None, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    for _ in range(repeats + 1):
        for saves.wait in WAYS:
            trainer.train()
            times[saves.wait].append(saves.times)
    trainer.release()
    yield "| Trainer | training stands still | last loss after | on disk after | CPU time |"
    yield "|---|--:|--:|--:|--:|"
    names = {None: "no checkpoint", True: "waiting", False: "in the background"}
    for way, found in times.items():
        trained, written, stood, cpu = (statistics.median(t) for t in zip(*found[1:], strict=True))
        yield f"| {names[way]} | {stood:.2f} s | {trained:.2f} s | {written:.2f} s | {cpu:.2f} s |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trainer", action="store_true", help="the Trainer's table alone")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    parameters = sum(p.numel() for p in build().parameters())
    print(f"{machine_line()}\n\n{parameters / 1e6:.0f}M parameters, {arguments.steps} steps.\n")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if not arguments.trainer:
            programs(arguments.steps, arguments.repeats, Path(folder))
        print(*trainer_rows(arguments.steps, arguments.repeats, Path(folder)), sep="\n")


def programs(steps: int, repeats: int, folder: Path) -> None:
    print(
        "| updates | room for copies | steps alone | `wait=True` adds | `wait=False` adds | ratio | on disk |"
    )
    print("|---|---|--:|--:|--:|--:|--:|")
    for clipped in (False, True):
        for room in (True, False):
            print(row(clipped, room, steps, repeats, folder), flush=True)


if __name__ == "__main__":
    main()
