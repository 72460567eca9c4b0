"""What a token of ``program.generate`` takes: by a program, which computes the whole row, and in a rollout.

    python -m benchmarks.samples [--tokens 24]

Out: two Markdown tables. Predicted: the seconds of a token for an 8B model whose weights are streamed, by the
length of the row, with the loss of every position, which generating does not need; one token alone is what a
cache leaves to compute. Measured on this CPU: a small model's tokens per second of processor time, in a
rollout whose weights come by block, beside plain transformers' ``generate`` with its cache and without.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import megacompile
from benchmarks.report import machine_line
from megacompile.cli.estimator import Study
from megacompile.cli.models import load_model
from megacompile.hardware.catalog import load_machine
from megacompile.planner.search import search
from megacompile.planner.too_small import fitting
from megacompile.schedule.plan import Mode

LENGTHS = (1, 64, 256, 1024, 4096)
MACHINES = {"rtx-4090": 22e9, "h100-pcie": 14e9}  # and a budget that holds less than the weights
PROMPT = 40


def predicted() -> str:
    """Seconds of one forward of a row, by its length."""
    study = Study(load_model("llama-3.1-8b"), "bf16", lambda message: None)
    lines = [
        "| machine, length | budget | " + " | ".join(f"{length:,}" for length in LENGTHS) + " |",
        "|---|--:|" + "--:|" * len(LENGTHS),
    ]
    for name, budget in MACHINES.items():
        machine, cells = load_machine(name).machine, []
        for length in LENGTHS:
            work = study.captured(1, length).assembly.work
            cells.append(f"{fitting(search(work, Mode('evaluate'), machine, int(budget))).seconds:.2f} s")
        lines.append(f"| {name} | {budget / 1e9:.0f} GB | {' | '.join(cells)} |")
    return "\n".join(lines)


def measured(tokens: int) -> str:
    """Tokens of all rows per second of processor time, which other work on the machine changes little."""
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "vocab_size": 4096}
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2)).eval()
    ids = torch.randint(0, 4096, (1, 256))
    weights = sum(p.nbytes for p in model.parameters())
    trained = Qwen3ForCausalLM(model.config)
    adam = torch.optim.AdamW(trained.parameters())
    program = megacompile.compile(
        trained, f"{weights}B", optimizer=adam, device="cpu", compute_dtype=torch.float32
    )
    ways: dict[str, Callable[..., Any]] = {
        "`program.generate`, streamed": program.generate,
        "plain, without a cache": lambda **given: model.generate(**given, use_cache=False),
        "plain, with a cache": model.generate,
    }
    lines = ["| | 1 row | 8 rows |", "|---|--:|--:|"]
    for name, generate in ways.items():
        cells = []
        for rows in (1, 8):
            given = {"input_ids": ids[:, :PROMPT].repeat(rows, 1), "do_sample": False, "pad_token_id": 0}
            generate(**given, max_new_tokens=tokens)  # compiles
            start = time.process_time()
            generate(**given, max_new_tokens=tokens)
            cells.append(f"{rows * tokens / (time.process_time() - start):.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    program.close()
    return "\n".join(lines)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of each row")
    options = parser.parse_args()
    print(f"Llama-3.1-8B, predicted:\n\n{predicted()}\n", flush=True)
    print(f"{machine_line()}; tokens per second of processor time, {options.tokens} after {PROMPT}:\n")
    print(measured(options.tokens))


if __name__ == "__main__":
    main()
