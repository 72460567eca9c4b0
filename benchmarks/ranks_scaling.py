"""Predicted steps from 1 to 64 GPUs, on paper: what a step takes, what binds, what a machine's host holds.

    python -m benchmarks.ranks_scaling [--models llama-3.1-8b] [--machine h100-sxm]

Steps with clipping, planned as ``megacompile plan --gpus --nodes`` plans them: up to 8 GPUs in a machine, the
batch of each GPU fixed, nothing measured. A host takes what the state needs; the table says how much that is,
and of several machines whether each has a copy of the state or all share one. "Efficiency" is tokens per
second and GPU beside those of one GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from megacompile.cli.estimator import Study
from megacompile.cli.models import load_model
from megacompile.cli.plan_answer import Prediction, Question
from megacompile.cli.splits_and_meshes import best_mesh
from megacompile.hardware.catalog import PROFILES, MachineProfile
from megacompile.units import format_bytes, format_seconds

SEQUENCES = {"llama-3.1-8b": 4, "llama-3.1-70b": 4, "llama-3.1-405b": 2}  # of each GPU
TOKENS = 4096  # of each sequence
GPUS = (1, 2, 4, 8, 16, 32, 64)
PER_MACHINE = 8


def predictions(model: str, profile: MachineProfile) -> Iterator[tuple[int, Prediction | None]]:
    """By number of GPUs, the step with clipping; None where a GPU is too small."""
    study = Study(load_model(model), "bf16", lambda text: None)
    for ranks in GPUS:
        gpus = min(ranks, PER_MACHINE)
        assert profile.device_bytes is not None
        budget = profile.device_bytes * 9 // 10
        asked = Question(profile, SEQUENCES[model], TOKENS, budget, gpus=gpus, nodes=ranks // gpus)
        if ranks > gpus:
            yield ranks, best_mesh(study, asked, clip=True)[0].prediction(True)
        else:
            yield ranks, study.answer(asked, both=False, clip=True).prediction(True)


def _state(question: Question) -> str:
    """Who has one: all GPUs together, or each machine."""
    return "of each machine" if question.replicated else "of all"


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(SEQUENCES), default=list(SEQUENCES))
    parser.add_argument("--machine", choices=list(PROFILES), default="h100-sxm")
    options = parser.parse_args()
    print(
        "| model, tokens of each GPU | GPUs | state | host memory of each machine | step | tokens/s "
        "| TFLOP/s of each GPU | efficiency | lower bound |"
    )
    print("|---|--:|---|--:|--:|--:|--:|--:|---|")
    for model in options.models:
        alone = 0.0
        for ranks, found in predictions(model, PROFILES[options.machine]):
            start = f"| {model}, {SEQUENCES[model] * TOKENS // 1024}k | {ranks} |"
            if found is None:
                print(f"{start} | does not fit | | | | | |", flush=True)
                continue
            each = found.tokens_per_second / ranks
            alone = alone or each
            print(
                f"{start} {_state(found.question)} | {format_bytes(found.host.total)} "
                f"| {format_seconds(found.seconds)} "
                f"| {found.tokens_per_second:,.0f} | {found.model_flops_per_second / 1e12:.0f} "
                f"| {each / alone:.0%} | {format_seconds(found.bound.seconds)}: {found.bound.binding} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
