"""Batches of many lengths: few programs serve them, and what is trained or predicted is eager's."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.api.decisions import Decisions

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")


def shifted(outputs: Any, batch: Any) -> Tensor:
    """A loss of the user's own, which ignores padding."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)


def regularised(outputs: Any, batch: Any) -> Tensor:
    """One that counts padding."""
    return shifted(outputs, batch) + 1e-2 * outputs.logits.logsumexp(-1).square().mean()


class Pair:
    """A tiny Llama as a program and eager."""

    def __init__(self, loss_fn: Callable[..., Tensor] | None = None, *, outside: bool = False) -> None:
        self.loss_fn, self.outside = loss_fn, outside
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=1, intermediate_size=48,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=128,
        )  # fmt: skip
        model: nn.Module = transformers.LlamaForCausalLM(config).train()
        self.eager: Any = copy.deepcopy(model)
        ours, self.theirs = (
            torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, self.eager)
        )
        self.program = megacompile.compile(
            model,
            "1GB",
            optimizer=ours,
            compute_dtype=torch.float32,
            planner="full-recompute",
            loss_fn=None if outside else loss_fn,
        )

    def step(self, micro: list[dict[str, Tensor]]) -> None:
        """One step of both, whose losses are equal."""
        loss = torch.stack([self.loss_of(batch) for batch in micro]).mean()
        self.theirs.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.theirs.step()
        outside = functools.partial(self.computed_outside, micro) if self.outside else None
        assert float(self.program.train_step(micro, loss=outside).loss) == pytest.approx(
            loss.item(), rel=1e-6
        )

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        outputs = self.eager(**batch)
        loss: Tensor = outputs.loss if self.loss_fn is None else self.loss_fn(outputs, batch)
        return loss

    def computed_outside(self, micro: list[dict[str, Tensor]], number: int, outputs: Any) -> Tensor:
        assert self.loss_fn is not None
        return self.loss_fn(outputs, micro[number])

    @property
    def programs(self) -> int:
        return len(self.program._session.decided.programs)

    def close(self) -> None:
        """The weights of both are equal."""
        state = self.program.state_dict()
        for name, value in self.eager.named_parameters():
            torch.testing.assert_close(state[name], value.detach(), rtol=0, atol=2e-5)
        self.program.close()


def tokens(length: int) -> dict[str, Tensor]:
    ids = torch.randint(5, 64, (2, length))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.filterwarnings("ignore:Compiling another program")
@pytest.mark.slow_cases(r"(shifted|None)")
@pytest.mark.parametrize(("loss_fn", "outside"), [(None, False), (shifted, False), (regularised, True)])
def test_an_epoch_of_random_lengths_needs_few_programs(
    loss_fn: Callable[..., Tensor] | None, outside: bool
) -> None:
    pair = Pair(loss_fn, outside=outside)
    for _ in range(8):
        pair.step([tokens(length) for length in torch.randint(5, 49, (4,)).tolist()])
    assert pair.programs <= 3
    pair.close()


def test_lengths_of_a_loss_that_counts_padding_are_programs_of_their_own() -> None:
    pair = Pair(regularised)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for length in (13, 11, 13):
            pair.step([tokens(length)])
    assert pair.programs == 2
    assert sum("loss_fn is not known to ignore padding" in str(w.message) for w in told) == 1
    pair.close()


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_outputs_without_an_axis_of_positions_are_not_padded_for_a_loss_outside() -> None:
    """Attention's shares have two of them."""
    pair = Pair(shifted, outside=True)
    for length in (13, 11):
        pair.step([tokens(length) | {"output_attentions": True}])
    assert pair.programs == 2
    pair.close()


def test_micro_batches_with_and_without_padding_of_their_own_are_one_program() -> None:
    pair = Pair()
    for _ in range(2):
        plain, masked = tokens(16), tokens(16)
        mask = torch.ones_like(masked["input_ids"])
        mask[0, -3:] = 0
        masked |= {"attention_mask": mask, "labels": masked["labels"].masked_fill(mask == 0, -100)}
        pair.step([plain, masked])
    assert pair.programs == 1
    pair.close()


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_a_length_gets_a_program_once_its_padding_has_cost_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of any program takes a second here, and compiling takes 2.3."""
    monkeypatch.setattr(Decisions, "seconds", lambda *_: (1.0, 2.3))
    pair = Pair()
    pair.step([tokens(11), tokens(31)])
    for _ in range(6):
        pair.step([tokens(11), tokens(20)])  # of which 12 of 32 tokens are padding
    assert pair.programs == 1
    pair.step([tokens(11), tokens(20)])
    assert pair.programs == 2
    pair.step([tokens(12), tokens(24)])
    pair.step([tokens(10), tokens(15)])  # on that for 24
    assert pair.programs == 2
    pair.close()


def test_what_compiling_takes_grows_with_the_blocks() -> None:
    pair = Pair()
    pair.step([tokens(16)])
    session = pair.program._session
    step_seconds, compile_seconds = session.decided.seconds(session.read(tokens(16))[0])
    assert step_seconds == session.scheduled().planned.seconds
    assert compile_seconds == 0.5 + 3 * 0.05
    pair.close()


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_one_long_micro_batch_does_not_make_many_short_ones_long() -> None:
    pair = Pair()
    pair.step([tokens(length) for length in (5, 6, 7, 8, 5, 64)])
    shapes = {shape for key in pair.program._session.decided.keys for shape, *_ in key[1]}
    assert shapes == {(2, 8), (2, 64)}
    pair.close()


LENGTHS = (13, 31, 9, 30, 16)


def scores(outputs: Any, batch: Any) -> dict[str, Tensor]:
    """Of each next token, weighted by an entry that the forward does not take."""
    next_token = batch["input_ids"][:, 1:, None]
    chosen = outputs.logits[:, :-1].log_softmax(-1).gather(-1, next_token).squeeze(-1)
    weighted = chosen * batch["weights"][:, 1:]
    return {"loss": outputs.loss, "scores": weighted, "best": outputs.logits.argmax(-1)}


scores.inputs = ("weights",)  # type: ignore[attr-defined]


def reversed_by_index(outputs: Any, batch: Any) -> Tensor:
    return outputs.logits[:, torch.arange(outputs.logits.shape[1] - 1, -1, -1)]


def all_that_the_model_returns(outputs: Any, batch: Any) -> Any:
    return {name: outputs[name] for name in ("loss", "logits", "hidden_states") if outputs[name] is not None}


def assert_predicts(
    pair: Pair, function: Callable[..., Any] | None, lengths: tuple[int, ...], **more: bool
) -> None:
    """As eager does, at each of these lengths."""
    pair.eager.eval()
    for length in lengths:
        batch = tokens(length) | more
        weights = {"weights": torch.rand(2, length)} if function is scores else {}
        with torch.no_grad():
            wanted = (function or all_that_the_model_returns)(pair.eager(**batch), batch | weights)
        found = pair.program.predict(batch | weights, outputs=function)
        found = all_that_the_model_returns(found, batch) if function is None else found
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.slow_cases(r"None")
@pytest.mark.parametrize("function", [None, scores])
def test_predictions_of_many_lengths_need_few_programs(function: Callable[..., Any] | None) -> None:
    pair = Pair()
    pair.program.prepare(tokens(8))
    assert_predicts(pair, function, LENGTHS, output_hidden_states=function is None)
    assert pair.programs <= 1 + 2
    pair.program.close()


def test_predictions_that_cannot_be_cut_are_programs_of_their_own() -> None:
    pair = Pair()
    pair.program.prepare(tokens(8))
    assert_predicts(pair, reversed_by_index, (13, 11))
    assert pair.programs == 1 + 2
    pair.program.close()
