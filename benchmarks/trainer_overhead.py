"""What the Trainer's progress and logging take of a step, beside the same program in a bare loop.

    python -m benchmarks.trainer_overhead [--steps 60] [--rounds 3] [--logging_steps 10]

In:  numbers of steps and rounds. Out: medians in milliseconds: a step of the bare loop, one of the Trainer,
and the CPU time of that which callbacks, progress and logs take in the mean.
There is a progress bar.

Both train by one program, in turns; both read the loss and the norm of each step.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback, TrainingArguments

from benchmarks.report import machine_line
from megacompile.integrations.transformers import Trainer


class Clock(TrainerCallback):
    """Times of steps, and the CPU time of this thread in callbacks, progress and logs."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.parts: list[float] = []
        self._part, self._depth, self._last = 0.0, 0, 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, whose time counts once where one calls another."""

        def called(*args: Any, **kwargs: Any) -> Any:
            start, self._depth = time.thread_time(), self._depth + 1
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._part += time.thread_time() - start

        return called

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        if self._last:
            self.steps.append(now - self._last)
            self.parts.append(self._part)
        self._last, self._part = now, 0.0

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._last = 0.0


def model() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, use_cache=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def made(folder: str, steps: int, tokens: int, every: int, clock: Clock) -> Trainer:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=1, max_steps=steps, logging_steps=every, save_strategy="no",
        report_to="none", use_cpu=True, include_num_input_tokens_seen="all",
    )  # fmt: skip
    ids = torch.randint(0, 2048, (steps, tokens))
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model(), arguments, train_dataset=data, callbacks=[clock], hbm_budget="60MB")
    trainer.log = clock.timed(trainer.log)
    trainer._steps.progress.count = clock.timed(trainer._steps.progress.count)  # type: ignore[method-assign]
    handler: Any = trainer.callback_handler
    handler.call_event = clock.timed(handler.call_event)
    return trainer


def bare(trainer: Trainer, steps: int) -> Iterator[float]:
    """Times of steps of the same program."""
    rows: Any = trainer.train_dataset
    program: Any = trainer.program
    for row in rows[:steps]:
        start = time.perf_counter()
        batch = {name: ids[None] for name, ids in row.items()}
        count = torch.tensor(float(row["labels"].numel() - 1))
        output = program.train_step([batch | {"num_items_in_batch": count}], weights=[1.0])
        float(output.loss), float(output.grad_norm)
        yield time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logging_steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    clock, alone = Clock(), []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        trainer = made(folder, arguments.steps, arguments.tokens, arguments.logging_steps, clock)
        stack.callback(trainer.release)
        trainer.train()  # compiles
        clock.steps.clear(), clock.parts.clear()
        for _ in range(arguments.rounds):
            alone += bare(trainer, arguments.steps)
            trainer.train()
        programs = len(trainer.program._session.decided.programs)  # type: ignore[union-attr]
    step, trained = (1e3 * statistics.median(found) for found in (alone, clock.steps))
    part = 1e3 * statistics.mean(clock.parts)
    print(f"{machine_line()}; medians of {len(alone)} and {len(clock.steps)} steps, {programs} program\n")
    print("| bare loop | Trainer | progress, callbacks, logs | of a step of 50 ms |\n|--:|--:|--:|--:|")
    print(f"| {step:.1f} ms | {trained:.1f} ms | {part:.2f} ms | {part / 50:.2%} |")


if __name__ == "__main__":
    main()
