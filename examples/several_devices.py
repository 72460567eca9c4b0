"""Train one model with several processes, which share its state: ``torchrun --nproc-per-node 2`` this file.

Each process holds a half of the FP32 masters and moments, brings its own batches, and sees the loss of all.
On the CPU backend, in half a minute on a laptop; the same file with plain ``python`` trains alone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import megacompile

WIDTH, DEPTH, CLASSES = 256, 4, 10


class Classifier(nn.Module):
    """Residual blocks over dense features; the forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return functional.cross_entropy(self.head(x), y)


def batch(rank: int, step: int) -> dict[str, torch.Tensor]:
    """A rank's batch in a step: which rank brings which is the script's own business."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, WIDTH, generator=generator)
    return {"x": x, "y": x[:, :CLASSES].argmax(1)}


def main() -> None:
    """Train for some steps and save a checkpoint, from which any number of processes can go on."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program = megacompile.compile(
        model,
        hbm_budget="20MB",
        optimizer=optimizer,
        compute_dtype=torch.float32,
        max_grad_norm=1.0,
        device="cpu",
    )
    started = torch.distributed.is_initialized()  # by torchrun, or by compile, which found what torchrun says
    rank = torch.distributed.get_rank() if started else 0
    for step in range(20):
        out = program.train_step(batch(rank, step))
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {float(out.loss):.3f} over {len(out.losses)} batches")
    held = program.memory.host_bytes
    print(f"rank {rank} holds {(held['masters'] + held['moments']) / 1e6:.1f} MB of masters and moments")
    folder = Path(tempfile.gettempdir()) / "megacompile-several-devices"
    program.save(folder)
    if rank == 0:
        print(f"saved to {folder}")
    program.close()


if __name__ == "__main__":
    main()
