"""bf16 training with fused kernels stays as close to training without as other roundings of the start do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.kernel_curve import ALLOWED, Size, distance, train

STEPS, CLASSES = 60, 61
SIZE = Size(width=32, layers=1, rows=4, length=32)


def noisy_walks() -> list[Tensor]:
    """Rows whose next byte follows from the last one nine times out of ten."""
    generator = torch.Generator().manual_seed(0)
    shape = STEPS, SIZE.rows, SIZE.length
    jumps = torch.randint(0, CLASSES, shape, generator=generator)
    follows = torch.rand(shape, generator=generator) < 0.9
    walks = jumps.clone()
    for at in range(1, SIZE.length):
        walks[..., at] = torch.where(follows[..., at], (3 * walks[..., at - 1] + 7) % CLASSES, jumps[..., at])
    return list(walks)


@pytest.mark.slow
def test_loss_with_kernels_is_within_noise() -> None:
    data = noisy_walks()
    plain, fused = (train(SIZE, data, kernels=on) for on in (False, True))
    bound = ALLOWED * distance(train(SIZE, data, noise_seed=1), plain)
    assert distance(fused, plain) <= bound < 1e-2 < 1.0 < plain[0] - plain[-1]
