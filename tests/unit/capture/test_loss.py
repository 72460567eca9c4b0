"""``loss_fn``: what the forward takes of a batch, what is left for the loss, and what is refused by name."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import megacompile
from megacompile.errors import CaptureError
from tests.support.reference import EagerTrainer

X, Y = torch.linspace(-1, 1, 48).view(6, 8), torch.tensor([0, 1, 2, 3, 4, 5])
SOFT = torch.linspace(0, 1, 36).view(6, 6)
SCALES = [1.0]


class Predicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Rebuilds(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)


class Masked(Predicts):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layers(x if mask is None else x * mask)


def of_target(prediction: Tensor, target: Tensor) -> Tensor:
    return torch.sum(-target * torch.log_softmax(prediction, -1), -1).mean()


def of_its_entries(prediction: Any, labels: Any) -> Tensor:
    """Works on a whole batch, too, and on other numbers."""
    return sum((p - y).square().sum() for p, y in zip(prediction, labels, strict=False)) / len(labels)


class OfWhole(nn.Module):
    def forward(self, out: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(out, batch[1])


class OfTarget(nn.Module):
    def forward(self, out: Tensor, of: Tensor) -> Tensor:
        return F.cross_entropy(out, of)


def annotated(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().mean()


def weighted(out: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    return (F.cross_entropy(out, y, reduction="none") * weights).mean()


def compiled(model: nn.Module, loss_fn: Callable[..., Tensor] | None) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return megacompile.compile(
        model,
        "1GB",
        optimizer=optimizer,
        compute_dtype=torch.float32,
        planner="full-recompute",
        loss_fn=loss_fn,
    )


@pytest.mark.slow_cases(r"Predicts-\S+-batch(2|4|9)-")
@pytest.mark.parametrize(
    ("model", "loss_fn", "batch", "plain"),
    [
        (Predicts, nn.CrossEntropyLoss(), (X, Y), lambda m: F.cross_entropy(m(X), Y)),
        (
            Predicts,
            lambda out, batch: F.cross_entropy(out, batch[1]),
            (X, Y),
            lambda m: F.cross_entropy(m(X), Y),
        ),
        (Predicts, F.cross_entropy, (X, Y), lambda m: F.cross_entropy(m(X), Y)),
        (
            Predicts,
            functools.partial(F.cross_entropy, label_smoothing=0.1),
            {"x": X, "y": Y},
            lambda m: F.cross_entropy(m(X), Y, label_smoothing=0.1),
        ),
        (Predicts, nn.CrossEntropyLoss(), {"x": X, "y": Y}, lambda m: F.cross_entropy(m(X), Y)),
        (
            Predicts,
            nn.CrossEntropyLoss(weight=torch.linspace(0.1, 1, 6)),
            (X, Y),
            lambda m: F.cross_entropy(m(X), Y, weight=torch.linspace(0.1, 1, 6)),
        ),
        (
            Masked,
            lambda out, batch: F.cross_entropy(out, batch["y"]),
            {"x": X, "y": Y, "mask": X > 0},
            lambda m: F.cross_entropy(m(X * (X > 0)), Y),
        ),
        (
            Predicts,
            nn.TripletMarginLoss(),
            (X, torch.ones(6, 6), torch.zeros(6, 6)),
            lambda m: F.triplet_margin_loss(m(X), torch.ones(6, 6), torch.zeros(6, 6)),
        ),
        (Predicts, of_target, (X, SOFT), lambda m: of_target(m(X), SOFT)),
        (Predicts, of_target, {"x": X, "y": SOFT}, lambda m: of_target(m(X), SOFT)),
        (
            Predicts,
            functools.partial(weighted, weights=SOFT[0]),
            (X, Y),
            lambda m: weighted(m(X), Y, SOFT[0]),
        ),
        (Predicts, annotated, (X, SOFT), lambda m: annotated(m(X), SOFT)),
        (Predicts, weighted, (X, Y, SOFT[0]), lambda m: weighted(m(X), Y, SOFT[0])),
        (Predicts, weighted, {"weights": SOFT[0], "x": X, "y": Y}, lambda m: weighted(m(X), Y, SOFT[0])),
        (Predicts, of_its_entries, (X, SOFT), lambda m: of_its_entries(m(X), SOFT)),
        (Predicts, OfWhole(), (X, Y), lambda m: F.cross_entropy(m(X), Y)),
        (Predicts, OfTarget(), (X, Y), lambda m: F.cross_entropy(m(X), Y)),
        (Predicts, of_target, {"x": X, "target": SOFT, "id": Y}, lambda m: of_target(m(X), SOFT)),
        (
            Predicts,
            lambda out, *, y: F.cross_entropy(out, y),
            {"x": X, "y": Y},
            lambda m: F.cross_entropy(m(X), Y),
        ),
        (Rebuilds, of_target, X, lambda m: of_target(m(X), X)),
    ],
)
def test_a_model_that_predicts_trains_as_in_a_plain_loop(
    model: type[nn.Module], loss_fn: Any, batch: Any, plain: Callable[[nn.Module], Tensor]
) -> None:
    torch.manual_seed(0)
    ours = model()
    eager = copy.deepcopy(ours)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    program = compiled(ours, loss_fn)
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain(eager)
        loss.backward()
        optimizer.step()
        assert float(program.train_step(batch).loss) == pytest.approx(loss.item(), rel=1e-5)
    assert float(program.evaluate(batch)) == pytest.approx(plain(eager).item(), rel=1e-5)
    program.close()


def test_pairs_of_a_data_loader_train() -> None:
    torch.manual_seed(0)
    program = compiled(Predicts(), nn.CrossEntropyLoss())
    loader = DataLoader(TensorDataset(X, Y), batch_size=3)
    losses = [float(program.train_step((x, y)).loss) for _ in range(10) for x, y in loader]
    assert losses[-1] < losses[0]
    program.close()


@pytest.mark.parametrize(
    ("model", "loss_fn", "batch", "named"),
    [
        (Predicts, None, (X, Y), "too many positional arguments.* loss_fn"),
        (Predicts, None, {"x": X, "y": Y}, "takes no y: .* loss_fn"),
        (Predicts, None, {"x": X}, "no scalar loss .* loss_fn"),
        (Masked, nn.CrossEntropyLoss(), (X, Y), "could take mask .* pass a dict"),
        (Predicts, nn.CrossEntropyLoss(), X, "the forward takes all"),
        (
            Predicts,
            nn.CrossEntropyLoss(reduction="none"),
            (X, Y),
            r"loss_fn returned a tensor of shape \(6,\)",
        ),
        (Predicts, lambda out, batch: 1.0, (X, Y), "loss_fn returned a float"),
        (Predicts, lambda out, batch: out.argmax(), (X, Y), r"loss is torch\.int64"),
        (Predicts, lambda out, batch: torch.fft.fft(out).sum(), (X, Y), r"loss is torch\.complex64"),
        (Predicts, lambda out, batch: out.detach().mean(), (X, Y), "no gradient for any parameter"),
        (Predicts, lambda out, batch: out.argmax(-1).float().mean(), (X, Y), "no gradient for any parameter"),
        (Predicts, lambda out, batch: out.mean(), {"y": Y}, "missing a required argument: 'x'"),
        (
            Predicts,
            lambda a, b: (a - b).mean(),
            (X, SOFT),
            r"^loss_fn fails at test_loss.*TypeError.* the batch, a tuple of 2: .*second parameter target",
        ),
        (Predicts, lambda out, batch: F.cross_entropy(out, batch[2]), (X, Y), "IndexError.* a tuple of 2"),
        (
            Predicts,
            lambda out, target: out.sub(target[9]).mean(),
            (X, SOFT),
            "IndexError.* leaves of the batch, a tensor of shape .*name its second parameter batch",
        ),
        (Predicts, lambda out, batch: out.mean() + batch["z"].mean(), {"x": X, "y": Y}, "KeyError.* a dict"),
        (
            Predicts,
            of_target,
            (X, X),
            r"^loss_fn cannot be captured .* a tensor of shape \(6, 8\): name its second parameter batch",
        ),
        (Predicts, of_target, (X, SOFT, Y), "loss_fn takes target beside .* leaves 2 of the batch's entries"),
        (Predicts, nn.MSELoss(), (X, SOFT, SOFT), "^loss_fn fails.* 4 were given.* leaves of the batch"),
        (
            Predicts,
            lambda out, up, down: F.mse_loss(out, up) - F.mse_loss(out, down),
            {"x": X, "y": SOFT, "z": SOFT},
            "loss_fn takes up, down beside the outputs, and the forward leaves 2",
        ),
    ],
)
def test_refused_by_name(model: type[nn.Module], loss_fn: Any, batch: Any, named: str) -> None:
    with pytest.raises(megacompile.MegacompileError, match=named) as refused:
        compiled(model(), loss_fn).train_step(batch)
    assert "\n" not in str(refused.value)
    if isinstance(refused.value, CaptureError):  # no frames of ours but the call's
        assert len(refused.traceback) == 2


def closing_over(scales: list[float]) -> Callable[..., Tensor]:
    return lambda out, batch: (out * scales[0]).square().mean()


class Scaled(nn.Module):
    scale = 1.0

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return (out * self.scale).square().mean()


SCALED = Scaled()


@pytest.mark.parametrize(
    ("loss_fn", "change", "followed"),
    [
        (closing_over(SCALES), lambda value: SCALES.__setitem__(0, value), False),
        (
            lambda out, batch: (out * SCALES[0]).square().mean(),
            lambda value: SCALES.__setitem__(0, value),
            False,
        ),
        (SCALED, lambda value: setattr(SCALED, "scale", value), True),
    ],
)
def test_a_loss_is_followed_in_its_attributes_and_by_recompile_elsewhere(
    loss_fn: Any, change: Callable[[float], None], followed: bool
) -> None:
    torch.manual_seed(0)
    model = Predicts()
    eager = copy.deepcopy(model)
    trainer = EagerTrainer(eager, torch.optim.AdamW(eager.parameters(), lr=1e-2), loss_fn=loss_fn)
    program = compiled(model, loss_fn)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Compiling another program")
        for value in (1.0, 3.0, 1.0):
            change(value)
            if not followed:
                program.recompile()
            assert float(program.train_step((X, Y)).loss) == trainer.train_step([(X, Y)])
    program.close()
