"""Train a byte-level Qwen3 in a quarter of the memory that plain PyTorch needs for it.

The text is the source code of Python's own standard library, so nothing is downloaded. Run it with
``make demo``, or ``python examples/demo.py --help`` for the options.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm

import megacompile
from megacompile.blocks.memory_meter import StorageMeter
from megacompile.report.plots import loss_curve, memory_timeline
from megacompile.report.schedule import Schedule
from megacompile.schedule.step import peak_bytes
from megacompile.units import format_bytes

Batch = dict[str, Tensor]
DUMP = "schedule"
BAR = "{desc} {percentage:3.0f}%|{bar}| {n}/{total} [{elapsed}<{remaining}{postfix}]"


@dataclass(frozen=True)
class Settings:
    """What is trained and for how long; the command line sets the first three."""

    steps: int = 240
    budget: str | None = None
    out: Path = Path("runs/demo")
    layers: int = 6
    width: int = 384
    feed_forward: int = 1152
    batch: int = 4
    length: int = 128
    learning_rate: float = 2e-3
    warmup: int = 20
    evaluate_every: int = 40
    held_out_batches: int = 16


@dataclass
class History:
    """What a run measured. ``held_out`` holds (steps taken, loss)."""

    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0  # of training steps alone

    def tokens_per_second(self, settings: Settings) -> float:
        return len(self.losses) * settings.batch * settings.length / self.seconds


def standard_library(root: Path | None = None) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's sources: (training text, every twentieth file held out)."""
    root = root or Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = sorted(p for p in root.rglob("*.py") if not skipped & {*p.relative_to(root).parts})
    train, held_out = bytearray(), bytearray()
    for number, file in enumerate(files):
        (train if number % 20 else held_out).extend(file.read_bytes())
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def random_batch(text: Tensor, settings: Settings, generator: torch.Generator) -> Batch:
    """Windows of the text at random places; the model itself shifts labels by one byte."""
    last = len(text) - settings.length + 1
    starts = torch.randint(0, last, (settings.batch,), generator=generator).tolist()
    ids = torch.stack([text[s : s + settings.length] for s in starts]).long()
    return {"input_ids": ids, "labels": ids}


def byte_model(settings: Settings) -> nn.Module:
    """A Qwen3 of transformers with one token per byte, randomly initialised."""
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=256,
        hidden_size=settings.width,
        intermediate_size=settings.feed_forward,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.width // 64,
        num_key_value_heads=settings.width // 128,
        head_dim=64,
        max_position_embeddings=settings.length,
        use_cache=False,
    )
    return transformers.Qwen3ForCausalLM(config).train()


def plain_need(model: nn.Module, batch: Batch) -> int:
    """Bytes that plain PyTorch takes to train ``model`` on ``batch`` in FP32.

    The meter runs one ordinary forward and backward and reports the peak of activations and gradients
    together; to it come the weights and Adam's two moments, which live all the time: 12 bytes per
    parameter. The optimizer step itself (16 bytes per parameter, no activations) may be the peak.
    """
    meter = StorageMeter()
    parameters = sum(p.numel() for p in model.parameters())
    for parameter in model.parameters():
        meter.ignore(parameter)
    with meter:
        model(**batch).loss.backward()
    model.zero_grad()
    return max(12 * parameters + meter.peak, 16 * parameters)


def cosine(settings: Settings) -> Callable[[int], float]:
    """Factor of the learning rate at a step: linear warm-up, then a cosine down to 2 %."""

    def factor(step: int) -> float:
        if step < settings.warmup:
            return (step + 1) / settings.warmup
        progress = (step - settings.warmup) / max(settings.steps - settings.warmup, 1)
        return 0.02 + 0.49 * (1 + math.cos(math.pi * min(progress, 1.0)))

    return factor


def train(
    program: megacompile.Program, text: Tensor, held_out: Sequence[Batch], settings: Settings
) -> History:
    """The training loop, as with any PyTorch model; the progress bar tells how it goes."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(program.optimizer, cosine(settings))
    generator = torch.Generator().manual_seed(0)
    history = History(held_out=[(0, evaluate(program, held_out))])
    bar = tqdm(range(1, settings.steps + 1), desc="training", ncols=100, bar_format=BAR)
    for step in bar:
        start = time.perf_counter()
        out = program.train_step(random_batch(text, settings, generator))
        scheduler.step()
        history.losses.append(float(out.loss))
        pause = step % settings.evaluate_every == 0 or step == settings.steps
        if pause:
            program.synchronize()  # the last update is part of training, not of evaluating
        history.seconds += time.perf_counter() - start
        if pause:
            history.held_out.append((step, evaluate(program, held_out)))
        bar.set_postfix_str(
            f"loss {history.losses[-1]:.2f}, {history.tokens_per_second(settings):,.0f} tokens/s, "
            f"device {format_bytes(program.memory.device_peak_bytes)}"
        )
    return history


def evaluate(program: megacompile.Program, batches: Sequence[Batch]) -> float:
    """Mean loss of fixed batches, in nats per byte, under the same budget."""
    return sum(float(program.evaluate(batch)) for batch in batches) / len(batches)


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Two aligned columns, ruled above and below."""
    left = max(len(name) for name, _ in rows)
    lines = [f" {name:<{left}}   {value}" for name, value in rows]
    rule = "─" * (max(map(len, lines)) + 1)
    return "\n".join([rule, *lines, rule])


def report(
    program: megacompile.Program, schedule: Schedule, history: History, need: int, settings: Settings
) -> None:
    """Print what the run showed, and write the schedule and the two pictures."""
    budget, measured = program.memory.budget_bytes, program.memory.device_peak_bytes
    predicted = peak_bytes(schedule.step)
    first, last = history.held_out[0][1], history.held_out[-1][1]
    rows = [
        ("plain PyTorch needs", f"{format_bytes(need)}: weights, gradients, Adam, activations, FP32"),
        ("budget", f"{format_bytes(budget)}, {budget / need:.1%} of that"),
        ("measured peak", format_bytes(measured)),
        ("predicted peak", format_bytes(predicted)),
        ("held-out loss", f"{first:.3f} → {last:.3f} nats per byte"),
        ("speed", f"{history.tokens_per_second(settings):,.0f} tokens/s"),
    ]
    print(table(rows))
    plain = f"plain PyTorch needs {format_bytes(need)}"
    listing = settings.out / "schedule.txt"
    listing.write_text(f"{schedule}\n")
    loss = loss_curve(
        list(enumerate(history.losses)), history.held_out, settings.out / "loss.png", unit="nats per byte",
        subtitle=f"a byte-level Qwen3 trained in {format_bytes(budget)}; {plain}",
    )  # fmt: skip
    memory = memory_timeline(
        schedule.step,
        settings.out / "memory.png",
        budget_bytes=budget,
        subtitle=f"peak {format_bytes(predicted)} predicted, {format_bytes(measured)} measured; {plain}",
    )
    written = [
        (str(listing), "the schedule that ran, as readable Python"),
        (f"{settings.out / DUMP}/", "every stage of the compiler, in order"),
        (str(loss), "the loss curve"),
        (str(memory), "device memory over one step"),
    ]
    width = max(len(path) for path, _ in written)
    for path, what in written:
        print(f" {path:<{width}}   {what}")


def main(settings: Settings) -> None:
    model = byte_model(settings)
    text, other_text = standard_library()
    generator = torch.Generator().manual_seed(1)
    held_out = [random_batch(other_text, settings, generator) for _ in range(settings.held_out_batches)]
    need = plain_need(model, held_out[0])
    budget = settings.budget or f"{need // 4 // 10**6}MB"
    print(
        f"A Qwen3 of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, on "
        f"{len(text) / 1e6:.1f} MB of Python sources. Plain PyTorch needs {format_bytes(need)}; "
        f"hbm_budget={budget!r}. Compiling …",
        flush=True,
    )
    shutil.rmtree(settings.out / DUMP, ignore_errors=True)
    program = megacompile.compile(
        model,
        hbm_budget=budget,
        optimizer=torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95)),
        max_grad_norm=1.0,
        compute_dtype=torch.float32,
        example_batch=held_out[0],
        dump=settings.out / DUMP,
    )
    schedule = program.schedule  # of training: evaluate makes a program of its own
    history = train(program, text, held_out, settings)
    program.close()
    report(program, schedule, history, need, settings)


def read_arguments(arguments: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=Settings.steps, help="training steps (%(default)s)")
    parser.add_argument("--budget", help="device memory, as '60MB' (a quarter of what plain PyTorch needs)")
    parser.add_argument("--out", type=Path, default=Settings.out, help="output folder (%(default)s)")
    read = parser.parse_args(arguments)
    if read.steps < 1:
        parser.error("--steps must be at least 1")
    return Settings(steps=read.steps, budget=read.budget, out=read.out)


if __name__ == "__main__":
    try:
        main(read_arguments())
    except megacompile.MegacompileError as error:
        sys.exit(f"demo: {error}")
