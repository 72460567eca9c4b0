"""What a checkpoint costs a training loop that goes on while it is written.

    python -m benchmarks.background_save [--rounds 5] [--threads 1] [--trainer]

In:  numbers of rounds, of threads that compute. Out: a Markdown table, a row for programs with immediate and
with clipped updates, with and without room for copies: how long writing took, how much longer the steps took
that were made meanwhile, by the clock and of the CPUs, what the writer took of these for each GB of state,
and how long ``save`` takes where training waits. ``--trainer``: the Trainer's, which writes the model's
files as well.

About 100M parameters, FP32: 1.2 GB of state. Steps with and without a checkpoint take turns; medians are
shown. ``--threads 1`` leaves a core free on a machine of two, as hosts have some where a GPU computes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from benchmarks.report import machine_line
from benchmarks.step_overhead import batch_of, build, compiled, plain_need
from megacompile.api.program import Program
from megacompile.integrations.transformers import Trainer

TOKENS = 256
ALONE = 3  # steps without a checkpoint
WAYS: tuple[bool | None, ...] = (None, True, False)  # no checkpoint; ``wait``


@dataclass(frozen=True)
class Cost:
    """Seconds of a checkpoint: of writing it; of ``steps`` made meanwhile, by the clock and of CPUs; of the
    writer's CPU."""

    written: float
    steps: int
    trained: float
    cpu: float
    writer: float


class Meter:
    """Called by the writer at its end: how long it took, and what of the CPUs."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.start = time.perf_counter()
        self.written = self.writer = 0.0

    def __call__(self, error: BaseException | None) -> None:
        self.written, self.writer = time.perf_counter() - self.start, time.thread_time()
        self.over.set()


def alone(program: Program, batch: Any, steps: int) -> tuple[float, float]:
    """Seconds of a step, by the clock and of CPUs."""
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        program.train_step(batch)
        program._session.synchronize()
    return (time.perf_counter() - start) / steps, (time.process_time() - cpu) / steps


def saving(program: Program, batch: Any, folder: Path) -> Cost:
    """Steps until a checkpoint is written."""
    steps, meter = 0, Meter()
    start, cpu = time.perf_counter(), time.process_time()
    program.save(folder, wait=False, then=meter)
    while not meter.over.is_set():
        program.train_step(batch)
        program._session.synchronize()  # of the step alone
        steps += 1
    seconds, used = time.perf_counter() - start, time.process_time() - cpu
    program.synchronize()
    return Cost(meter.written, steps, seconds, used, meter.writer)


def without_room(budget: int, batch: Any, **options: Any) -> Program:
    """A program whose host budget is what it takes."""
    program = compiled(budget, batch, **options)
    assert program._session.runtime is not None
    nbytes = program._session.runtime.state.arena.nbytes
    program.close()
    return compiled(budget, batch, host_budget=f"{nbytes}B", **options)


def row(clipped: bool, room: bool, rounds: int, folder: Path) -> str:
    """One line of the table."""
    batch = batch_of(TOKENS)
    options: dict[str, Any] = {"max_grad_norm": 1.0} if clipped else {}
    program = (compiled if room else without_room)(plain_need(TOKENS) // 4, batch, **options)
    plain, costs, waits = [], [], []
    for _ in range(rounds + 1):
        plain.append(alone(program, batch, ALONE))
        costs.append(saving(program, batch, folder / "run"))
        start = time.perf_counter()
        program.save(folder / "run")
        waits.append(time.perf_counter() - start)
    program.close()
    nbytes = sum(file.stat().st_size for file in (folder / "run").iterdir())
    # the first round fills caches
    step, cpu = (statistics.median(t) for t in zip(*plain[1:], strict=True))
    found = {
        name: statistics.median(getattr(cost, name) for cost in costs[1:])
        for name in ("written", "steps", "writer")
    }
    slower = statistics.median(c.trained / c.steps for c in costs[1:]) / step - 1
    busier = statistics.median(c.cpu / c.steps for c in costs[1:]) / cpu - 1
    return (
        f"| {'clipped' if clipped else 'immediate'} | {'yes' if room else 'no'} | {step:.2f} s | "
        f"{found['written']:.1f} s | {found['steps']:.0f} | {slower:+.1%} | {busier:+.1%} | "
        f"{found['writer'] / nbytes * 1e9:.2f} s | {statistics.median(waits[1:]):.2f} s |"
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
            float(self.trainer._steps.last.loss)  # type: ignore[union-attr]
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
    parser.add_argument("--steps", type=int, default=8, help="of a training of the Trainer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="that compute")
    parser.add_argument("--trainer", action="store_true", help="the Trainer's table instead")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    parameters = sum(p.numel() for p in build().parameters())
    print(f"{machine_line()}\n\n{parameters / 1e6:.0f}M parameters, {arguments.threads} threads compute.\n")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if arguments.trainer:
            print(*trainer_rows(arguments.steps, arguments.rounds, Path(folder)), sep="\n")
        else:
            programs(arguments.rounds, Path(folder))


def programs(rounds: int, folder: Path) -> None:
    """The table of programs."""
    print(
        "| updates | room for copies | step | written in | steps meanwhile | slower by | CPU time | "
        "writer's CPU time per GB | where training waits |"
    )
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for clipped in (False, True):
        for room in (True, False):
            print(row(clipped, room, rounds, folder), flush=True)


if __name__ == "__main__":
    main()
