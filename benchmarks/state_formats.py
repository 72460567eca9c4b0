"""Loss curves of the state formats: one small real model on real text, once per format and seed.

In:  numbers of steps and seeds. Out: a Markdown table of held-out losses and bytes per parameter, and
a picture of the curves.

A byte-level Qwen3 learns the source code of Python's own standard library (every twentieth file is
held out). Runs of one seed see the same weights and batches, so they differ by the format alone; runs
of different seeds show what difference means nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

import megacompile
from benchmarks.report import machine_line
from megacompile.state.moment_formats import StateFormat

BATCH, LENGTH, RATE, WARMUP, HELD_OUT = 4, 128, 2e-3, 20, 16
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "state_formats.png"


@dataclass
class Run:
    """What one training run measured: every step's loss, the held-out loss at the end, bytes."""

    form: StateFormat
    seed: int
    losses: list[float] = field(default_factory=list)
    held_out: float = 0.0
    bytes_per_parameter: float = 0.0


def standard_library() -> tuple[Tensor, Tensor]:
    """Bytes of the sources: (training text, held-out text)."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = sorted(p for p in root.rglob("*.py") if not skipped & {*p.relative_to(root).parts})
    parts = bytearray(), bytearray()
    for number, file in enumerate(files):
        parts[number % 20 == 0].extend(file.read_bytes())
    train, held_out = (torch.frombuffer(p, dtype=torch.uint8) for p in parts)
    return train, held_out


def batch_of(text: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Windows of the text at random places."""
    starts = torch.randint(0, len(text) - LENGTH, (BATCH,), generator=generator).tolist()
    ids = torch.stack([text[s : s + LENGTH] for s in starts]).long()
    return {"input_ids": ids, "labels": ids}


def byte_model(seed: int) -> nn.Module:
    """A Qwen3 of 2.8M parameters with one token per byte."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).train()


def train(form: StateFormat, seed: int, steps: int, texts: tuple[Tensor, Tensor]) -> Run:
    """One run, with linear warm-up and decay, and clipping."""
    model = byte_model(seed)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    program: Any = megacompile.compile(
        model,
        "1GB",
        optimizer=optimizer,
        compute_dtype=torch.float32,
        max_grad_norm=1.0,
        optimizer_state=form,
    )
    generator = torch.Generator().manual_seed(seed)
    run = Run(form, seed)
    for step in range(steps):
        factor = min((step + 1) / WARMUP, 1.0 - 0.98 * max(0, step - WARMUP) / (steps - WARMUP))
        optimizer.param_groups[0]["lr"] = RATE * factor
        run.losses.append(float(program.train_step(batch_of(texts[0], generator)).loss))
    fixed = torch.Generator().manual_seed(12345)
    losses = [float(program.evaluate(batch_of(texts[1], fixed))) for _ in range(HELD_OUT)]
    run.held_out = statistics.mean(losses)
    host = program.memory.host_bytes
    run.bytes_per_parameter = (host["masters"] + host["moments"]) / parameters
    program.close()
    return run


def table(runs: list[Run], seeds: int) -> str:
    """Markdown: a row per format, held-out losses per seed, and differences to FP32 of the same seed."""
    exact = {r.seed: r.held_out for r in runs if r.form == "fp32"}
    heads = " | ".join(f"seed {s}" for s in range(seeds))
    lines = [f"| `optimizer_state` | state, B per parameter | {heads} | mean difference to fp32 |"]
    lines += ["|---|--:|" + "--:|" * (seeds + 1)]
    for form in get_args(StateFormat):
        mine = sorted((r for r in runs if r.form == form), key=lambda r: r.seed)
        losses = " | ".join(f"{r.held_out:.4f}" for r in mine)
        difference = statistics.mean(r.held_out - exact[r.seed] for r in mine)
        lines.append(f"| {form} | {mine[0].bytes_per_parameter:.2f} | {losses} | {difference:+.4f} |")
    if seeds > 1:
        spread = max(exact.values()) - min(exact.values())
        lines += ["", f"FP32 seeds differ by {spread:.4f} among themselves."]
    return "\n".join(lines)


def draw(runs: list[Run], path: Path) -> None:
    """Training losses of the first seed, smoothed over 10 steps, and how far the formats are from FP32."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1))
    first = {r.form: smooth(r.losses) for r in runs if r.seed == 0}
    other = next((smooth(r.losses) for r in runs if r.form == "fp32" and r.seed == 1), None)
    for (form, losses), colour in zip(first.items(), ("#222222", "#3b5b8c", "#c0672b"), strict=True):
        above.plot(losses, label=form, color=colour, linewidth=1.2)
        below.plot([a - b for a, b in zip(losses, first["fp32"], strict=True)], color=colour, linewidth=1.2)
    if other is not None:
        pairs = zip(other, first["fp32"], strict=True)
        below.plot([a - b for a, b in pairs], color="#bbbbbb", linewidth=0.8, label="fp32, another seed")
        below.legend(frameon=False, fontsize=8)
    above.set_ylabel("training loss (nats per byte)")
    above.legend(frameon=False)
    below.set_ylabel("minus fp32")
    below.set_xlabel("step")
    below.set_ylim(-0.3, 0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def smooth(losses: list[float], width: int = 10) -> list[float]:
    """Means of the last ``width`` values."""
    return [statistics.mean(losses[max(0, i - width + 1) : i + 1]) for i in range(len(losses))]


def main() -> None:
    """Train, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{machine_line()}\n", flush=True)
    texts, runs = standard_library(), []
    for seed in range(arguments.seeds):
        for form in get_args(StateFormat):
            start = time.perf_counter()
            runs.append(train(form, seed, arguments.steps, texts))
            seconds = time.perf_counter() - start
            print(f"{form}, seed {seed}: held out {runs[-1].held_out:.4f}, {seconds:.0f} s", flush=True)
    print(f"\n{arguments.steps} steps of {BATCH} × {LENGTH} bytes, held-out loss in nats per byte.\n")
    print(table(runs, arguments.seeds))
    draw(runs, arguments.picture)


if __name__ == "__main__":
    main()
