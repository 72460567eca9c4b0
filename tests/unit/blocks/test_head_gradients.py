"""A head may make its gradients with its loss where these are in proportion to that of the block's output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megacompile

TOKENS, WIDTH, VOCABULARY = 36, 16, 300
Total = Callable[[Tensor, Tensor], Tensor]


class Head(nn.Module):
    """A layer and a head; ``total`` makes one number of a loss per token."""

    def __init__(self, total: Total) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.total = total

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(self.head(torch.tanh(self.layer(x))), labels, reduction="none")
        return self.total(losses, labels)


PROPORTIONAL: dict[str, Total] = {
    "mean": lambda losses, labels: losses.mean(),
    "counted": lambda losses, labels: losses.sum() / (labels != -100).sum(),
    "weighed": lambda losses, labels: (losses * (labels % 3)).sum() / 7,
    "in rows": lambda losses, labels: -losses.view(3, 12).mean(1).sum(),
}
OTHERS: dict[str, Total] = {
    "squared": lambda losses, labels: (losses**2).mean(),
    "worst": lambda losses, labels: losses.max(),
    "by itself": lambda losses, labels: (losses * torch.exp(-losses.detach())).sum(),
}


def trained(total: Total, kernels: bool) -> tuple[int, list[float], dict[str, Tensor]]:
    """FLOPs of the backward from what is all kept; losses and weights of three steps of two micro-batches."""
    model = Head(total)
    torch.manual_seed(1)
    batches = [(torch.randn(TOKENS, WIDTH), torch.randint(0, VOCABULARY, (TOKENS,))) for _ in range(6)]
    batches[0][1][:3] = -100
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with megacompile.compile(
        model, "1GB", optimizer=adamw, compute_dtype=torch.float32, kernels=kernels
    ) as program:
        steps = zip(batches[::2], batches[1::2], strict=True)
        losses = [float(program.train_step(list(pair)).loss) for pair in steps]
        assert program.memory.device_peak_bytes == program.memory.predicted_peak_bytes
        *_, last = program.schedule.work.blocks
        backward = last.policy("all").backward
        assert backward is not None
        state = {k: v.clone() for k, v in program.state_dict().items()}
        program.sync_to(model)
        return backward.flops, losses, state


@pytest.mark.parametrize("name", [*PROPORTIONAL, *OTHERS])
def test_gradients_are_made_with_the_loss_where_they_can_be(name: str) -> None:
    total = (PROPORTIONAL | OTHERS)[name]
    flops, losses, state = trained(total, kernels=True)
    assert (flops == 2 * TOKENS * WIDTH * WIDTH) == (name in PROPORTIONAL), "that of the layer alone"
    _, expected, weights = trained(total, kernels=False)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for key, value in state.items():
        torch.testing.assert_close(value, weights[key], rtol=1e-4, atol=1e-5, msg=key)
