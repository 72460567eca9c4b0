"""Train a classifier of images, with plain PyTorch in plain_loop.py and with megacompile in ported_loop.py.

A usual loop: autocast, clipping, a schedule, an average of the weights (EMA), evaluation after each epoch,
the best checkpoint. ``diff examples/plain_loop.py examples/ported_loop.py`` shows what the port changes.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import megacompile

EPOCHS, CLASSES = 4, 10


def block(inputs: int, outputs: int) -> nn.Module:
    """Halve the sides of images [N, inputs, H, W]."""
    convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def classifier() -> nn.Module:
    """Build a network that takes images [N, 3, 32, 32] to logits [N, CLASSES]."""
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
    return nn.Sequential(block(3, 16), block(16, 32), block(32, 64), pooled)


def pictures(count: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """Draw noise that is the brighter, the higher the label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = torch.randn(count, 3, 32, 32, generator=generator) + labels.view(-1, 1, 1, 1) / 5
    return DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True, generator=generator)


def accuracy(predict: Callable[[Tensor], Tensor], loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """Return the share of images whose highest logit is at their label."""
    with torch.no_grad():
        right = [(predict(images).argmax(1).cpu() == labels).float() for images, labels in loader]
    return float(torch.cat(right).mean())


def main(folder: Path) -> list[float]:
    """Train, keep the best weights and the average in ``folder``, and return the loss of each step."""
    torch.manual_seed(0)
    train, held_out = pictures(512, seed=1), pictures(128, seed=2)
    losses, best = [], 0.0
    model = classifier()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train))
    program = megacompile.compile(model, "8MB", optimizer=optimizer, max_grad_norm=1, loss_fn=F.cross_entropy)
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in train:
            loss = program.train_step((images, labels)).loss
            scheduler.step()
            average.update_parameters(copy.deepcopy(model))
            losses.append(loss.item())
        model.eval()
        share = accuracy(program.predict, held_out)
        print(f"epoch {epoch}: loss {losses[-1]:.3f}, {share:.0%} of the held-out images are right")
        if share > best:
            best = share
            torch.save(model.state_dict(), folder / "best.pt")
    torch.save(average.module.state_dict(), folder / "average.pt")
    return losses


if __name__ == "__main__":
    main(Path(tempfile.mkdtemp()))
