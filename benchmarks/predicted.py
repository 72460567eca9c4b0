"""Predicted beside measured step times on the CPU backend.

    python -m benchmarks.predicted [--repeats 7]

For each model and budget: block functions are timed once (:mod:`megacompile.bench.calibrate`), the step
that the program runs is simulated on this CPU as measured just now, and then the program trains. Medians; the
models run in turn. On a machine that others use as well, both sides suffer, but not at the same moment:
take the ratios of a quiet run.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import megacompile
from benchmarks.report import machine_line
from megacompile.bench.calibrate import calibrated
from megacompile.machine.rates import this_cpu
from megacompile.machine.simulate import simulate
from megacompile.passes import lower


def _decoder(kind: str, **fields: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        shape = {"vocab_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False}
        config = transformers.CONFIG_MAPPING[kind](**(shape | fields))
        return transformers.AutoModelForCausalLM.from_config(config).float().train()  # type: ignore[no-any-return]

    return build


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and tokens
    "llama, 12 layers of 512": (
        _decoder("llama", hidden_size=512, intermediate_size=1408, num_hidden_layers=12), 512),
    "qwen3, 6 layers of 768": (
        _decoder("qwen3", hidden_size=768, intermediate_size=2304, num_hidden_layers=6, head_dim=96), 256),
    "llama, 24 layers of 256": (
        _decoder("llama", hidden_size=256, intermediate_size=704, num_hidden_layers=24), 512),
}  # fmt: skip
BUDGETS = (0.0, 0.2, 0.5, 1.0)  # between the least and what holds everything


def measure(name: str, part: float, clip: bool, repeats: int) -> tuple[int, float, float]:
    """(budget, predicted seconds, measured seconds) of one model and budget."""
    build, tokens = MODELS[name]
    torch.manual_seed(0)
    ids = torch.randint(0, 4096, (1, tokens))
    batch = {"input_ids": ids, "labels": ids}
    budget = _budget(build, batch, part)
    program = megacompile.compile(
        build(), f"{budget}B", compute_dtype=torch.float32, max_grad_norm=1.0 if clip else None
    )
    program.prepare(batch)
    scheduled = program._scheduled()
    work = calibrated(scheduled.compiled)
    step = lower(work, program.plan, scheduled.mode)
    predicted = simulate(step, this_cpu(torch.float32)).step_seconds
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        program.train_step(batch)
        seconds.append(time.perf_counter() - start)
    program.close()
    return budget, predicted, statistics.median(seconds[2:])


def _budget(build: Callable[[], nn.Module], batch: dict[str, Any], part: float) -> int:
    with torch.device("meta"):
        model = build()
    try:
        megacompile.compile(model, "1B", compute_dtype=torch.float32, example_batch=batch)
    except megacompile.BudgetError as error:
        assert error.least_bytes is not None
        weights = sum(p.nbytes for p in model.parameters())
        return int(error.least_bytes + part * 2.5 * weights)
    raise AssertionError("a step fits in one byte")


def main() -> None:
    """Print a Markdown table."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    print(f"{machine_line()}\n\n| model | budget | clip | predicted | measured | off |")
    print("|---|--:|---|--:|--:|--:|")
    off = []
    for name in MODELS:
        for number, part in enumerate(BUDGETS):
            clip = bool(number % 2)
            budget, predicted, measured = measure(name, part, clip, options.repeats)
            off.append(predicted / measured - 1)
            row = [name, f"{budget / 1e6:.0f} MB", "yes" if clip else "no", f"{predicted * 1e3:.0f} ms",
                   f"{measured * 1e3:.0f} ms", f"{off[-1]:+.0%}"]  # fmt: skip
            print(f"| {' | '.join(row)} |", flush=True)
    within = sum(abs(x) <= 0.15 for x in off)
    print(f"\nwithin 15 %: {within} of {len(off)}; median {statistics.median(map(abs, off)):.0%}, "
          f"worst {max(map(abs, off)):.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
