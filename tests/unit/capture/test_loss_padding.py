"""Loss functions that ignore padding, and those that do not or that nothing is known of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile.capture.loss_padding import LossAtLengths, OutputsAtLengths
from megacompile.graph.forward_outputs import Returned, returned

ROWS, LENGTH, CLASSES = 2, 23, 7


class Model(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> None: ...


def outputs() -> Returned:
    shapes = {
        "logits": (ROWS, LENGTH, CLASSES),
        "pooled": (ROWS, CLASSES),
        "scores": (ROWS, 3, LENGTH, LENGTH),
        "router": (ROWS * LENGTH, CLASSES),
        "loss": (),
    }
    found = returned({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    assert found is not None
    return found


def at_lengths(function: Callable[..., Any], kind: type[LossAtLengths] = LossAtLengths) -> LossAtLengths:
    torch.manual_seed(0)
    ids = torch.randint(CLASSES, (ROWS, 11))
    batch = {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == 1, -100),
        "num_items_in_batch": torch.tensor(19.0),
    }
    return kind(function, Model(), outputs(), LENGTH, batch)


def each(out: Any, batch: Any) -> Tensor:
    """The loss at each position."""
    return F.cross_entropy(out["logits"].transpose(1, 2), batch["labels"], reduction="none")


def mean(out: Any, batch: Any) -> Tensor:
    return F.cross_entropy(out["logits"][:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def smoothed(out: Any, batch: Any) -> Tensor:
    return F.cross_entropy(out["logits"].transpose(1, 2), batch["labels"], label_smoothing=0.1)


def per_token(out: Any, batch: Any) -> Tensor:
    return each(out, batch).sum() / batch["num_items_in_batch"]


def per_row(out: Any, batch: Any) -> Tensor:
    real = batch["labels"] != -100
    return (each(out, batch).sum(1) / real.sum(1)).mean()


def by_mask(out: Any, batch: Any) -> Tensor:
    logits, ids = out["logits"], batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids))
    return (F.cross_entropy(logits.transpose(1, 2), ids, reduction="none") * mask).sum() / mask.sum()


def with_weights(out: Any, batch: Any) -> Tensor:
    weight = torch.linspace(0.1, 1, CLASSES)
    return F.cross_entropy(out["logits"].transpose(1, 2), batch["labels"], weight=weight)


def of_the_next_two(out: Any, batch: Any) -> Tensor:
    losses = [
        F.cross_entropy(out["logits"][:, :-k].flatten(0, 1), batch["labels"][:, k:].flatten()) for k in (1, 2)
    ]
    return torch.stack(losses).mean()


IGNORE = [mean, smoothed, per_token, per_row, by_mask, with_weights, of_the_next_two]


def over_all(out: Any, batch: Any) -> Tensor:
    return each(out, batch).mean()


def padding_is_a_class(out: Any, batch: Any) -> Tensor:
    return F.cross_entropy(out["logits"].flatten(0, 1), batch["labels"].clamp(min=0).flatten())


def regularised(out: Any, batch: Any) -> Tensor:
    return mean(out, batch) + 1e-3 * out["logits"].logsumexp(-1).square().mean()


def counting(out: Any, batch: Any) -> Tensor:
    return mean(out, batch) + 1e-3 * (batch["labels"] == -100).sum()


def of_ids(out: Any, batch: Any) -> Tensor:
    return F.cross_entropy(out["logits"].transpose(1, 2), batch["input_ids"])


def of_the_last(out: Any, batch: Any) -> Tensor:
    return F.cross_entropy(out["logits"][:, -1], batch["input_ids"][:, 0])


def without_an_ignored_label(out: Any, batch: Any) -> Tensor:
    return -out["logits"].log_softmax(-1).gather(-1, batch["labels"][..., None]).mean()


def by_place_from_the_end(out: Any, batch: Any) -> Tensor:
    weights = torch.arange(out["logits"].shape[1]).flip(0) + 1.0
    return (each(out, batch) * weights).sum() / batch["num_items_in_batch"]


def dropped(out: Any, batch: Any) -> Tensor:
    return mean({"logits": F.dropout(out["logits"], 0.5)}, batch)


def pooled(out: Any, batch: Any) -> Tensor:
    return mean(out, batch) + out["pooled"].square().mean()


def read_without_gradient(out: Any, batch: Any) -> Tensor:
    return mean(out, batch) * (1 + 1e-3 * out["pooled"].detach().abs().mean())


def of_scores(out: Any, batch: Any) -> Tensor:
    return mean(out, batch) + out["scores"].square().mean()


def of_routers(out: Any, batch: Any) -> Tensor:
    return mean(out, batch) + out["router"].square().mean()


def constant(out: Any, batch: Any) -> Tensor:
    return batch["num_items_in_batch"].clone().requires_grad_()


def pulled_without_a_value(out: Any, batch: Any) -> Tensor:
    return mean(out, batch) + (out["logits"] - out["logits"].detach()).sum()


COUNT = [
    over_all, padding_is_a_class, regularised, counting, of_ids, of_the_last, without_an_ignored_label,
    by_place_from_the_end, dropped, pulled_without_a_value, pooled, read_without_gradient, of_scores,
    of_routers, constant,
]  # fmt: skip


@pytest.mark.parametrize(("function", "ignores"), [(f, True) for f in IGNORE] + [(f, False) for f in COUNT])
def test_a_loss_function_is_known_to_ignore_padding(function: Any, ignores: bool) -> None:
    assert at_lengths(function).ignores_padding() is ignores


def longer_than(length: int) -> Callable[..., Tensor]:
    return lambda out, batch: mean(out, batch) * (2 if out["logits"].shape[1] > length else 1)


def at_least(length: int) -> Callable[..., Tensor]:
    return lambda out, batch: each(out, batch).sum() / max(out["logits"].shape[1], length)


@pytest.mark.parametrize("function", [longer_than(100), at_least(100)])
def test_a_loss_function_that_computes_otherwise_from_some_length_on(function: Any) -> None:
    loss = at_lengths(function)
    assert loss.ignores_padding()  # at lengths of a few positions
    for padded in (False, True):
        assert loss.computes_alike(100, padded=padded)
        assert not loss.computes_alike(101, padded=padded)


@pytest.mark.parametrize("function", IGNORE)
def test_a_loss_function_computes_alike_at_all_lengths(function: Any) -> None:
    loss = at_lengths(function)
    assert all(loss.computes_alike(n, padded=padded) for n in (4, 7, 4096) for padded in (False, True))


def of_each(out: Any, batch: Any) -> dict[str, Tensor]:
    """At each position, and a number that the model computes."""
    chosen = out["logits"].log_softmax(-1).gather(-1, batch["input_ids"][..., None]).squeeze(-1)
    return {"scores": chosen, "best": out["logits"].argmax(-1), "loss": out["loss"]}


def mean_of_labels(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return out["logits"].softmax(-1), mean(out, batch)


def of_the_next(out: Any, batch: Any) -> Tensor:
    chosen = batch["input_ids"][:, 1:, None]
    return out["logits"][:, :-1].log_softmax(-1).gather(-1, chosen).squeeze(-1)


def since_the_start(out: Any, batch: Any) -> Tensor:
    return out["logits"].cumsum(1)


def reversed_by_index(out: Any, batch: Any) -> Tensor:
    return out["logits"][:, torch.arange(out["logits"].shape[1] - 1, -1, -1)]


def less_the_mean(out: Any, batch: Any) -> Tensor:
    return out["logits"] - out["logits"].flatten().mean()


def with_a_mean(out: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return out["logits"], out["logits"].flatten().mean()


def with_the_pooled(out: Any, batch: Any) -> Tensor:
    return out["logits"] + out["pooled"][:, None]


def pooled_alone(out: Any, batch: Any) -> Tensor:
    return out["pooled"]


def at_labels(out: Any, batch: Any) -> Tensor:
    return out["logits"].gather(-1, batch["labels"][..., None])


@pytest.mark.parametrize("function", [of_each, mean_of_labels, of_the_next, since_the_start])
def test_results_at_positions_that_do_not_depend_on_padding(function: Any) -> None:
    found = at_lengths(function, OutputsAtLengths)
    assert found.ignores_padding()
    assert all(found.computes_alike(n, padded=padded) for n in (4, 4096) for padded in (False, True))


@pytest.mark.parametrize(
    "function",
    [reversed_by_index, less_the_mean, with_a_mean, with_the_pooled, pooled_alone, at_labels, over_all],
)
def test_results_that_depend_on_padding(function: Any) -> None:
    assert not at_lengths(function, OutputsAtLengths).ignores_padding()


def test_random_numbers_of_the_user_s_are_not_drawn_from() -> None:
    before = torch.random.get_rng_state()
    assert not at_lengths(dropped).ignores_padding()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_transformers_trainer_computes_itself_ignores_padding() -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is missing: pip install transformers"
    )
    losses = pytest.importorskip("megacompile.integrations.loss_functions")

    def own(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    smoother = transformers.trainer_pt_utils.LabelSmoother(0.1)
    for function in (
        functools.partial(losses.given_loss, own),
        functools.partial(losses.smoothed_loss, smoother, True),
    ):
        loss = at_lengths(function)
        assert loss.ignores_padding()
        assert loss.computes_alike(100, padded=True)
