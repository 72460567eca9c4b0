"""Training with and without fused kernels: loss curves of a small bf16 Llama, against noise, as a picture.

    python -m benchmarks.kernel_curve [--steps 200] [--plot docs/images/kernel_curve.png]

A byte-level model learns this repository's licence, a text that stays as it is. Every run sees the same
batches. Noise is what changes without kernels: masters that start half a bfloat16 rounding away (five seeds;
another number of threads changes nothing). The bound: averaged over 10 steps, the run with kernels is
nowhere farther from the plain run than twice the farthest of the noise runs. On a CPU the kernels run as
their torch references.
``tests/unit/benchmarks/test_kernel_curve.py`` holds a smaller model to the same bound.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import megacompile

TEXT = Path(__file__).parent.parent / "LICENSE"
WINDOW, ALLOWED = 10, 2.0


@dataclass(frozen=True)
class Size:
    """What is trained on what: ``rows`` windows of ``length`` bytes per step."""

    width: int = 96
    layers: int = 3
    rows: int = 8
    length: int = 64


def model(size: Size, noise_seed: int | None) -> nn.Module:
    """The same weights each time; with a seed, each one moved by up to half a bfloat16 rounding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=size.width, intermediate_size=size.width * 8 // 3,
            num_hidden_layers=size.layers, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=size.length,
        )
    )  # fmt: skip
    if noise_seed is not None:
        generator = torch.Generator().manual_seed(noise_seed)
        with torch.no_grad():
            for weight in made.parameters():
                weight *= 1 + (torch.rand(weight.shape, generator=generator) - 0.5) * 2**-8
    return made.train()


def batches(size: Size, steps: int) -> list[Tensor]:
    """Random windows of the licence, as bytes."""
    data = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(data) - size.length, (steps, size.rows), generator=generator)
    return [torch.stack([data[s : s + size.length] for s in row.tolist()]) for row in starts]


def train(
    size: Size, data: Sequence[Tensor], *, kernels: bool = False, noise_seed: int | None = None
) -> Tensor:
    """The loss of each step; a step takes one of ``data``, int64 [rows, length]."""
    made = model(size, noise_seed)
    program = megacompile.compile(
        made, "200MB", optimizer=torch.optim.AdamW(made.parameters(), lr=1e-3), max_grad_norm=1.0,
        compute_dtype=torch.bfloat16, kernels=kernels,
    )  # fmt: skip
    losses = [program.train_step({"input_ids": b, "labels": b}).loss for b in data]
    placed = bool(program.fusions.placements)
    program.close()
    assert placed == kernels
    return torch.tensor([float(loss) for loss in losses])


def smooth(losses: Tensor) -> Tensor:
    """Means of WINDOW steps."""
    return losses.unfold(0, WINDOW, 1).mean(-1)


def distance(losses: Tensor, plain: Tensor) -> float:
    """The largest difference of the smoothed curves."""
    return float((smooth(losses) - smooth(plain)).abs().max())


def plot(path: Path, curves: dict[str, Tensor], noise: dict[str, Tensor]) -> None:
    """Losses above, distances from the plain run below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for name, losses in curves.items():
        upper.plot(losses, label=name, linewidth=1)
    upper.set_ylabel("loss")
    upper.legend()
    plain = smooth(curves["without kernels"])
    for losses in noise.values():
        lower.plot((smooth(losses) - plain).abs(), color="0.6", linewidth=1)
    lower.plot([], [], color="0.6", label="noise: other roundings of the start")
    lower.plot((smooth(curves["with kernels"]) - plain).abs(), color="C1", label="with kernels")
    lower.set_ylabel(f"|difference|, mean of {WINDOW} steps")
    lower.set_xlabel("step")
    lower.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Print each run's distance from the plain one; exit code 1 where the bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runs = {"plain": {}, "with kernels": {"kernels": True}} | {
        f"start {seed}": {"noise_seed": seed} for seed in range(1, 6)
    }
    data = batches(Size(), options.steps)
    curves = {}
    for name, how in runs.items():
        start = time.monotonic()
        curves[name] = train(Size(), data, **how)
        print(f"{name}: {options.steps} steps in {time.monotonic() - start:.0f} s", flush=True)
    plain, fused = curves.pop("plain"), curves.pop("with kernels")
    print(f"\nloss {plain[0]:.4f} -> {smooth(plain)[-1]:.4f}, with kernels {smooth(fused)[-1]:.4f}\n")
    print(f"| run | largest difference of the loss, mean of {WINDOW} steps |\n|---|--:|")
    far = {name: distance(losses, plain) for name, losses in curves.items()}
    ours = distance(fused, plain)
    for name, found in (far | {"with kernels": ours}).items():
        print(f"| {name} | {found:.5f} |")
    bound = ALLOWED * max(far.values())
    print(f"\nbound {bound:.5f}: {'held' if ours <= bound else 'MISSED'}")
    if options.plot:
        plot(options.plot, {"without kernels": plain, "with kernels": fused}, curves)
    return 0 if ours <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
