"""Step time beside eager PyTorch doing the same work: same operators, same checkpointing, same Adam.

    python -m benchmarks.step_overhead [--tokens 128 1024] [--repeats 7] [--inductor | --bf16]

About 100M parameters, fp32, on this CPU. Programs and eager models run interleaved in one process,
medians are compared. Eager checkpoints a layer where the plan recomputes it, and updates after the
backward with the very function that the program uses. ``--inductor`` compares the program with itself,
its blocks compiled by Inductor, ``--bf16`` with itself in bfloat16. A CPU with bf16 products computes as one
without where ``ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2`` are set.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

import megacompile
from benchmarks.report import interleaved, machine_line
from megacompile.api.program import Program
from megacompile.blocks.cpu_products import has_bf16_products
from megacompile.blocks.memory_meter import StorageMeter
from megacompile.capture.patches import our_operators
from megacompile.state.adam import adamw_step
from megacompile.state.optimizer import hypers

_BF16 = {"compute_dtype": torch.bfloat16}


def build() -> nn.Module:
    """A Qwen3-shaped model of about 100M parameters with seeded weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=768, intermediate_size=2304, num_hidden_layers=12,
        num_attention_heads=12, num_key_value_heads=6, head_dim=64, tie_word_embeddings=False,
        max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).train()


def batch_of(tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 8192, (max(1, tokens // 512), min(tokens, 512)))
    return {"input_ids": ids, "labels": ids}


class Eager:
    """Plain PyTorch with our operators and our Adam; ``recompute`` lists the layers to checkpoint."""

    def __init__(self, recompute: set[int]) -> None:
        self.model = build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.state = {p: (torch.zeros(p.numel()), torch.zeros(p.numel())) for p in self.model.parameters()}
        self.steps = 0
        for index in recompute:
            layer: Any = self.model.model.layers[index]
            layer.forward = _checkpointed(layer.forward)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        with our_operators(self.model, torch.zeros(2, dtype=torch.long)):
            loss = self.model(**batch).loss
            loss.backward()
        rate = replace(hypers(self.optimizer)[0], step=self.steps + 1)
        for parameter, (first, second) in self.state.items():
            assert parameter.grad is not None
            adamw_step(parameter.data.view(-1), first, second, parameter.grad.view(-1), rate)
            parameter.grad = None
        self.steps += 1
        return float(loss)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def plain_need(tokens: int) -> int:
    """Bytes that plain training takes: 16 per parameter and what a forward and backward add at most."""
    model = build()
    parameters = sum(p.numel() for p in model.parameters())
    meter = StorageMeter()
    for parameter in model.parameters():
        meter.ignore(parameter)
    with our_operators(model, torch.zeros(2, dtype=torch.long)), meter:
        model(**batch_of(tokens)).loss.backward()
    gradients = parameters * 4  # inside the meter's peak already
    return parameters * 16 + meter.peak - gradients


def compiled(
    budget: int, batch: dict[str, torch.Tensor], compute_dtype: torch.dtype = torch.float32, **options: Any
) -> Program:
    model = build()
    return megacompile.compile(
        model, f"{budget}B", optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        compute_dtype=compute_dtype, example_batch=batch, **options,
    )  # fmt: skip


def recomputed_layers(program: Program) -> set[int]:
    """Layers whose forward the plan runs twice."""
    blocks = program.schedule.step.ops
    return {op.block - 1 for op in blocks if op.kind == "recompute" and 1 <= op.block <= 12}


def compare(tokens: int, fraction: float, repeats: int, need: int) -> dict[str, Any]:
    """Medians of program and eager steps, interleaved, the first of each left out."""
    batch = batch_of(tokens)
    program = compiled(int(need * fraction), batch)
    layers = recomputed_layers(program)
    eager = Eager(layers)
    ours: list[float] = []
    theirs: list[float] = []
    losses = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        loss = float(program.train_step(batch).loss)
        ours.append(time.perf_counter() - start)
        program.synchronize()  # the tail of the update belongs to the step, and must not slow eager down
        ours[-1] = time.perf_counter() - start
        start = time.perf_counter()
        losses.append((loss, eager.step(batch)))
        theirs.append(time.perf_counter() - start)
    assert all(a == b for a, b in losses), losses
    memory = program.memory
    predicted = program.profile().predicted_seconds
    program.close()
    mine, other = statistics.median(ours[1:]), statistics.median(theirs[1:])
    return {"tokens": tokens, "fraction": fraction, "recomputed": len(layers), "ours": mine, "eager": other,
            "ratio": mine / other, "peak": memory.device_peak_bytes,
            "predicted_peak": memory.predicted_peak_bytes, "budget": memory.budget_bytes,
            "predicted": predicted}  # fmt: skip


def compare_programs(tokens: int, fraction: float, repeats: int, need: int, other: dict[str, Any]) -> str:
    """A row: medians of a program in FP32 and of the one with other options, interleaved."""
    batch, budget = batch_of(tokens), int(need * fraction)
    programs = [compiled(budget, batch, **options) for options in ({}, other)]
    plain, fused = map(statistics.median, interleaved(programs, batch, repeats))
    peaks = [program.memory.device_peak_bytes / 1e6 for program in programs]
    for program in programs:
        program.close()
    return (
        f"| {tokens} | {budget / 1e6:.0f} MB | {plain:.3f} s | {fused:.3f} s | {fused / plain:.3f} "
        f"| {peaks[0]:.1f} / {peaks[1]:.1f} MB |"
    )


def main() -> None:
    """Print one Markdown row per batch size and budget."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--fractions", type=float, nargs="+", default=[1.1, 0.25])
    parser.add_argument("--repeats", type=int, default=7)
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--inductor", action="store_true", help="blocks by Inductor beside plain ones")
    others.add_argument("--bf16", action="store_true", help="in bfloat16 beside FP32")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{machine_line()}\n")
    if options.inductor or options.bf16:
        name, other = ("by Inductor", {"inductor": True}) if options.inductor else ("bf16", _BF16)
        if options.bf16:
            print(f"bf16 products in this CPU: {has_bf16_products()}\n")
        print(f"| tokens | budget | plain | {name} | ratio | peak, plain / {name} |")
        print("|--:|--:|--:|--:|--:|--:|")
        for tokens in options.tokens:
            need = plain_need(tokens)
            for fraction in options.fractions:
                print(compare_programs(tokens, fraction, options.repeats, need, other), flush=True)
        return
    print(
        "| tokens | budget | of plain need | layers recomputed | program | eager, same work | ratio "
        "| peak measured / predicted | step predicted |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for tokens in options.tokens:
        need = plain_need(tokens)
        for fraction in options.fractions:
            row = compare(tokens, fraction, options.repeats, need)
            print(
                f"| {tokens} | {row['budget'] / 1e6:.0f} MB | {fraction:.0%} "
                f"| {row['recomputed']} of 12 | "
                f"{row['ours']:.3f} s | {row['eager']:.3f} s | {row['ratio']:.3f} | "
                f"{row['peak'] / 1e6:.1f} / {row['predicted_peak'] / 1e6:.1f} MB "
                f"| {row['predicted']:.3f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
