"""Losses that are not finite: with a finite gradient, as of a mean over nothing, and with one that is not."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.api.pipeline import Compiler

KINDS = ("one", "two", "two kinds", "by hand")


class Tokens(nn.Module):
    """Labels of -100 are ignored: of them alone the loss is NaN, and all gradients are zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, ids: Tensor, labels: Tensor, factor: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.table(ids)), labels) * factor


def batch(length: int = 4, *, ignored: bool = False, factor: float = 1.0) -> dict[str, Tensor]:
    ids = torch.arange(length)
    labels = torch.full_like(ids, -100) if ignored else ids
    return {"ids": ids, "labels": labels, "factor": torch.tensor(factor)}


def steps_of(kind: str, **bad: Any) -> list[dict[str, Tensor]]:
    """The micro-batches of a step, of which the last one has a loss that is not finite."""
    last = batch(6 if kind == "two kinds" else 4, **bad)
    return [last] if kind == "one" else [batch(), last]


def train(program: megacompile.Program, kind: str, micro: list[dict[str, Tensor]]) -> Tensor:
    """One update; returns its loss."""
    if kind != "by hand":
        return program.train_step(micro if len(micro) > 1 else micro[0]).loss
    losses = [program.forward_backward(one, weight=1 / len(micro)).loss for one in micro]
    program.optimizer_step()
    return torch.stack(losses).mean()


def compiled(model: nn.Module, clip: float | None, policy: Any) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return megacompile.compile(
        model, "1MB", optimizer=optimizer, compute_dtype=torch.float32, device="cpu", max_grad_norm=clip,
        on_nonfinite=policy, planner="full-recompute",
    )  # fmt: skip


def assert_equal(program: megacompile.Program, wanted: dict[str, Tensor], atol: float = 0.0) -> None:
    for name, value in program.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=atol)


@pytest.mark.filterwarnings("ignore:Compiling another program")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_finite_gradient_is_applied_as_in_plain_torch(clip: float | None, kind: str) -> None:
    model = Tokens()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    program, given = compiled(model, clip, None), steps_of(kind, ignored=True)
    for micro in ([batch()], given, [batch()]):
        loss = torch.stack([eager(**one) for one in micro]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(eager.parameters(), clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        found = train(program, kind, micro)
        torch.testing.assert_close(found, loss.detach(), rtol=1e-6, atol=0, equal_nan=True)
    assert_equal(program, eager.state_dict(), atol=2e-6)
    program.close()


@pytest.mark.slow_cases(r"bad[12]-\w+-(None|1\.0)-(two|by hand)")
@pytest.mark.filterwarnings("ignore:Compiling another program")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("bad", [{"ignored": True}, {"factor": math.nan}, {"factor": math.inf}])
def test_a_policy_looks_at_losses_and_gradients(
    bad: dict[str, Any], policy: str, clip: float | None, kind: str
) -> None:
    program = compiled(Tokens(), clip, policy)
    first = float(train(program, kind, [batch()]))
    before = program.state_dict()
    assert not math.isfinite(train(program, kind, steps_of(kind, **bad)))
    if policy == "raise":
        what = "The loss was nan" if "ignored" in bad else r"The gradient's norm was (nan|inf)"
        with pytest.raises(megacompile.NonFiniteError, match=f"{what}: that step's update was not applied"):
            program.synchronize()
    assert_equal(program, before)
    assert float(train(program, kind, [batch()])) < first
    program.synchronize()
    assert any(not torch.equal(value, before[name]) for name, value in program.state_dict().items())
    program.close()


@pytest.mark.filterwarnings("ignore:Compiling another program")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_that_is_not_finite_is_never_applied(clip: float | None, kind: str) -> None:
    """Without a policy: told at once where updates do not wait for the norm, else by the next call."""
    program = compiled(Tokens(), clip, None)
    train(program, kind, [batch()])
    before = program.state_dict()
    at_once = clip is None and kind == "one"
    words = "The loss is nan, and not all" if at_once else "The gradient's norm was nan: that step's update"
    with pytest.raises(megacompile.NonFiniteError, match=words):
        train(program, kind, steps_of(kind, factor=math.nan))
        program.synchronize()
    assert_equal(program, before)
    assert math.isfinite(train(program, kind, [batch()]))
    program.close()


class Apart(nn.Module):
    """A loss of two terms, of which each has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (a * self.first(x)).square().mean() + (b * self.second(x)).square().mean()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("bad", ["a", "b"])
def test_one_gradient_that_is_not_finite_keeps_all_others_from_being_applied(
    bad: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever is made first, and wherever the state is kept."""
    if streams:
        monkeypatch.setattr(Compiler, "_may_reside", lambda *_: ())
    program = compiled(Apart(), None, None)
    good = {"x": torch.ones(2, 4), "a": torch.tensor(1.0), "b": torch.tensor(1.0)}
    program.train_step(good)
    before = program.state_dict()
    for value in (math.nan, math.inf):
        with pytest.raises(megacompile.NonFiniteError, match="no parameter was changed"):
            program.train_step(good | {bad: torch.tensor(value)})
    assert_equal(program, before)
    program.train_step(good)
    program.close()


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_loss_from_outside_is_asked_for_once(clip: float | None) -> None:
    """Its NaN has a gradient of zero."""
    model = Tokens()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    program, calls = compiled(model, clip, None), []

    def shifted(number: int, loss: Tensor) -> Tensor:
        calls.append(number)
        return loss + torch.tensor(math.nan)

    program.train_step(batch(), loss=shifted)
    eager(**batch()).backward()
    nn.utils.clip_grad_norm_(eager.parameters(), clip or math.inf)
    optimizer.step()
    assert calls == [0]
    assert_equal(program, eager.state_dict(), atol=1e-6)
    program.close()


@pytest.mark.slow_cases(r"(?!True-1-)")
@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("kept_out", [True, False])
def test_a_trainer_logs_what_plain_transformers_does(
    kept_out: bool, micro: int, clip: float, tmp_path: Path
) -> None:
    """A micro-batch without a label that counts, in updates 2 and 4, logged in pairs of updates too."""
    transformers = pytest.importorskip("transformers")
    trainers = transformers.Trainer, pytest.importorskip("megacompile.integrations.transformers").Trainer
    logged = []
    for kind in trainers:
        torch.manual_seed(0)
        shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **shape))
        rows = [torch.arange(6) + i for i in range(12)]
        none = {micro, 3 * micro + micro - 1}
        data = [
            {"input_ids": ids, "labels": torch.full_like(ids, -100) if i in none else ids}
            for i, ids in enumerate(rows)
        ]
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=1, gradient_accumulation_steps=micro, max_steps=6,
            logging_steps=2, logging_first_step=True, logging_nan_inf_filter=kept_out, max_grad_norm=clip,
            learning_rate=5e-3, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
            train_sampling_strategy="sequential",
        )  # fmt: skip
        given = {"hbm_budget": "20MB"} if kind is not transformers.Trainer else {}
        trainer = kind(model=model, args=arguments, train_dataset=data, **given)
        trainer.train()
        names = ("loss", "train_loss", *(["grad_norm"] if clip else []))
        logged.append([[entry.get(name) for name in names] for entry in trainer.state.log_history])
    theirs, ours = logged
    assert len(ours) == len(theirs) == 5
    for mine, plain in zip(ours, theirs, strict=True):
        assert [x is None for x in mine] == [x is None for x in plain]
        shown = [[math.inf if x is None else x for x in entry] for entry in (mine, plain)]
        assert shown[0] == pytest.approx(shown[1], rel=2e-5, nan_ok=True)


class Chain(nn.Module):
    """The gradient of a square root is infinite at zero, and NaN from there on down."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x)) * shift
        return (self.layers[2](x.abs().sqrt()) * x).mean()


@pytest.mark.parametrize("clipped", [False, True])
def test_the_error_says_where_it_began(clipped: bool) -> None:
    model = Chain()
    options: Any = {"max_grad_norm": 1.0} if clipped else {}
    adamw = torch.optim.AdamW(model.parameters())
    program = megacompile.compile(
        model, "1GB", optimizer=adamw, device="cpu", compute_dtype=torch.float32, **options
    )
    x = torch.randn(2, 4)
    said = "6 of 6 gradients" if clipped else r"the output of .* is the first that is not finite"
    with pytest.raises(megacompile.NonFiniteError, match=said):
        program.train_step({"x": x, "shift": torch.tensor(float("inf"))})
        program.synchronize()
    if clipped:
        with pytest.raises(megacompile.NonFiniteError, match=r"4 of 6 .* that of layers\.1"):
            program.train_step({"x": x, "shift": torch.tensor(0.0)})  # a finite loss
            program.synchronize()
    program.close()
