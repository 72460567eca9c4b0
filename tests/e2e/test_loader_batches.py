"""The README's own loop: a torch DataLoader over (x, y), float32 data, no keyword that says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import megacompile


class Regression(nn.Module):
    """An MLP with its loss inside, which subtracts float32 targets from what it computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x).float(), y)


class Positions(nn.Module):
    """A buffer stays in float32, and what is added to it becomes float32 too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Linear(16, 8), nn.Linear(8, 4)
        self.register_buffer("table", torch.randn(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.embed(x) + self.table).float(), y)


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip


def class_loss(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output.float(), batch[1])


def data(of_images: bool) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    if of_images:
        return TensorDataset(
            torch.randn(6, 3, 8, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator)
        )
    return TensorDataset(torch.randn(6, 16, generator=generator), torch.randn(6, 4, generator=generator))


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "regression": (Regression, None), "buffer": (Positions, None), "classifier": (classifier, class_loss),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loader_of_tuples_trains_as_eager(name: str, dtype: torch.dtype) -> None:
    """In bfloat16 beside autocast, whose operators are others: within a hundredth."""
    make, loss_fn = MODELS[name]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    loader = DataLoader(data(name == "classifier"), batch_size=2)
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    chosen = {} if dtype == torch.bfloat16 else {"compute_dtype": dtype}
    with megacompile.compile(
        model, "8MB", optimizer=mine, loss_fn=loss_fn, device="cpu", **chosen
    ) as program:
        for batch in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = plain(*batch) if loss_fn is None else loss_fn(plain(batch[0]), batch)
            theirs.zero_grad()
            loss.backward()
            theirs.step()
            out = program.train_step(batch)
            expected = loss.item()
            assert float(out.loss) == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-2)
        assert float(program.evaluate(batch)) == float(program.evaluate(tuple(batch)))


def test_a_list_of_lists_is_micro_batches() -> None:
    torch.manual_seed(0)
    first, second = copy.deepcopy(model := Regression()), model
    batches = list(DataLoader(data(False), batch_size=3))
    losses = []
    fp32: dict[str, Any] = {"device": "cpu", "compute_dtype": torch.float32}
    for module, step in ((first, batches), (second, [tuple(b) for b in batches])):
        optimizer = torch.optim.AdamW(module.parameters())
        with megacompile.compile(module, "8MB", optimizer=optimizer, **fp32) as program:
            losses.append(float(program.train_step(step).loss))
    assert losses[0] == losses[1]


def test_a_loader_of_one_tensor_gives_one_batch() -> None:
    model = nn.Linear(16, 4)
    loader = DataLoader(TensorDataset(data(False).tensors[0]), batch_size=3)
    given = {
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loss_fn": lambda out, _: out.square().mean(),
    }
    with megacompile.compile(model, "8MB", **given) as program:
        for batch in loader:
            assert float(program.train_step(batch).loss) > 0


def test_a_parameter_that_is_kept_in_float32_is_not_cast() -> None:
    """A product with it is one in float32."""
    from megacompile.capture.mixed_dtypes import MixedDtypes

    x = torch.randn(2, 4)
    with MixedDtypes():
        assert F.linear(x, torch.randn(3, 4).bfloat16()).dtype == torch.bfloat16
        assert (x @ torch.randn(4, 3).bfloat16()).dtype == torch.bfloat16
        assert F.layer_norm(x, (4,), torch.ones(4).bfloat16()).dtype == torch.float32
        assert F.linear(x, torch.randn(3, 4)).dtype == torch.float32
        assert F.linear(x.bfloat16(), nn.Parameter(torch.randn(3, 4))).dtype == torch.float32
