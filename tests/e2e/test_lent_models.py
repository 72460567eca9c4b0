"""A Trainer's model in callbacks and after training: an ordinary one, whose values are those of now."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.api.generate_with_cache import Rollout
from megacompile.errors import BudgetError, MegacompileError, ProgramError
from tests.e2e.test_trainer import Trainer, logs, lora, rows, trainer, transformers

Seq2SeqTrainer, Seq2SeqTrainingArguments = (
    getattr(pytest.importorskip("megacompile.integrations.transformers"), name)
    for name in ("Seq2SeqTrainer", "Seq2SeqTrainingArguments")
)

KINDS = (transformers.Trainer, Trainer)
PROMPT = torch.tensor([[3, 4, 5]])
QUIET = {"max_steps": 2, "eval_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}


def batch() -> dict[str, Tensor]:
    return {name: value[None] for name, value in rows(1, 9)[0].items()}


def generated(model: Any) -> list[list[int]]:
    tokens: Tensor = model.generate(PROMPT, max_new_tokens=5, do_sample=False, pad_token_id=0)
    return tokens.tolist()


def norms(state: dict[str, Tensor]) -> dict[str, float]:
    return {name: pytest.approx(float(value.norm()), rel=1e-5) for name, value in state.items()}


class Each(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Calls a function of the model after each step."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function, self.seen = function, list[Any]()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.seen.append(self.function(model))


def trained(kind: Any, folder: Path, function: Callable[[Any], Any] | None = None, **given: Any) -> Any:
    each = [Each(function)] if function else None
    made = trainer(kind, folder / kind.__module__, callbacks=each, **QUIET, **given)
    made.train()
    made.seen = each[0].seen if each else []
    return made


def test_after_training_the_model_is_an_ordinary_one(tmp_path: Path) -> None:
    plain, ours = (trained(kind, tmp_path) for kind in KINDS)
    loss = ours.evaluate()["eval_loss"]
    assert generated(ours.model) == generated(plain.model)
    assert ours.model(**batch()).loss.item() == pytest.approx(plain.model(**batch()).loss.item(), rel=1e-6)
    torch.save(ours.model.state_dict(), tmp_path / "state.pt")
    assert norms(torch.load(tmp_path / "state.pt")) == norms(plain.model.state_dict())
    torch.save(ours.model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert {type(p) for p in loaded.parameters()} == {nn.Parameter}
    assert norms(loaded.state_dict()) == norms(copy.deepcopy(ours.model).state_dict())
    ours.model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert norms(again.state_dict()) == norms(plain.model.state_dict())
    assert ours.evaluate()["eval_loss"] == loss == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
    ours.train()
    plain.train()
    assert norms(ours.model.state_dict()) == norms(plain.model.state_dict())
    ours.release()


@pytest.mark.slow
def test_what_a_loop_of_the_user_changes_afterwards_is_what_the_trainer_evaluates(tmp_path: Path) -> None:
    losses = []
    for kind in KINDS:
        made = trained(kind, tmp_path)
        optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
        made.model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(made.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_adapters_are_merged_after_training(tmp_path: Path) -> None:
    plain, ours = (trained(kind, tmp_path, make=lora).model.merge_and_unload() for kind in KINDS)
    assert generated(ours) == generated(plain)
    assert norms(ours.state_dict()) == norms(plain.state_dict())


@pytest.mark.slow_cases(r"lora")
@pytest.mark.parametrize("make", [None, lora])
def test_callbacks_read_the_values_of_now(make: Any, tmp_path: Path) -> None:
    def look(model: Any) -> list[float]:
        state, loss = model.state_dict(), float(model(**batch()).loss.detach())
        assert generated(model)
        return [loss, *(float(value.norm()) for value in state.values())]

    plain, ours = (trained(kind, tmp_path, look, make=make) for kind in KINDS)
    assert len(ours.seen) == 2
    for a, b in zip(ours.seen, plain.seen, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert norms(ours.model.state_dict()) == norms(plain.model.state_dict())


def test_what_a_callback_writes_is_trained_on(tmp_path: Path) -> None:
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def halve(model: Any) -> None:
        model.lm_head.weight.mul_(0.5)

    plain, ours = (trained(kind, tmp_path, halve) for kind in KINDS)
    assert norms(ours.model.state_dict()) == norms(plain.model.state_dict())


def test_gradients_of_a_callback_and_reads_of_other_threads_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"A gradient of .* was computed outside"):
        trained(Trainer, tmp_path, lambda model: model(**batch()).loss.backward())

    def elsewhere(model: Any) -> Any:
        refusals: list[Exception] = []

        def read() -> None:
            try:
                model.lm_head.weight.norm()
            except ProgramError as error:
                refusals.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        return refusals

    (refusal,), _ = trained(Trainer, tmp_path, elsewhere).seen
    assert "for callbacks alone" in str(refusal)


def test_a_frozen_value_that_would_be_rounded_is_refused_by_name(tmp_path: Path) -> None:
    """Frozen weights that bfloat16 holds are kept in it alone."""

    def whole() -> nn.Module:
        model = lora()
        for parameter in model.parameters():
            parameter.data = parameter.bfloat16().float()
        return model

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def write(model: Any) -> None:
        model.get_input_embeddings().weight.add_(1e-4)

    with pytest.raises(MegacompileError, match=r"is frozen .* would be rounded"):
        trained(Trainer, tmp_path, write, make=whole, bf16=True)


def test_a_second_trainer_takes_the_model_of_a_first_one(tmp_path: Path) -> None:
    losses = []
    for kind in KINDS:
        first = trained(kind, tmp_path)
        second = trained(kind, tmp_path, make=lambda made=first: made.model)
        losses.append(second.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    with pytest.raises(ProgramError, match="Another program has taken over the model"):
        first.evaluate()


@pytest.mark.slow
@pytest.mark.parametrize("room", [True, False])
def test_texts_of_a_seq2seq_trainer(room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made in rollouts; or on the host, where the budget has no room for one, which is said."""
    made_on_device = list[Any]()

    def place(rollout: Rollout) -> None:
        if not room:
            raise BudgetError("no room", least_bytes=1)
        made_on_device.append(rollout)
        placed(rollout)

    placed = Rollout._place_weights
    monkeypatch.setattr(Rollout, "_place_weights", place)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0)
    data = [{"input_ids": row["input_ids"][:8], "labels": row["input_ids"][:6]} for row in rows(8, 3)]
    settings = {
        "max_steps": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    made = []
    for kind, more in ((transformers.Seq2SeqTrainer, {}), (Seq2SeqTrainer, {"hbm_budget": "20MB"})):
        torch.manual_seed(0)
        one = kind(
            model=transformers.T5ForConditionalGeneration(config),
            args=Seq2SeqTrainingArguments(
                str(tmp_path), predict_with_generate=True, generation_max_length=8, **settings, **quiet
            ),
            train_dataset=data,
            eval_dataset=data[:4],
            compute_metrics=lambda made: {"sum": float(made.predictions.sum())},
            **more,
        )
        said = pytest.warns(UserWarning, match="made on the host") if more and not room else nullcontext()
        with said:
            one.train()
            made.append((logs(one), one.predict(data[4:], num_beams=2).predictions.tolist()))
    (plain, texts), (ours, own) = made
    assert own == texts and bool(made_on_device) == room
    assert len(ours) == len(plain)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
