"""Forwards that draw random numbers from Python or NumPy: anew in each step, from the program's seed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import Tensor, nn

import megacompile
from megacompile import Program
from megacompile.errors import CaptureError
from megacompile.runtime.step_results import step_seed

SEED, ROWS = 3, 6


class Draws(nn.Module):
    """A layer, and what is drawn beside it: by functions of the model's file, or in its forward."""

    def __init__(self, drawn: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.token = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.kept = numpy.random.default_rng(0)
        self._drawn = drawn

    def forward(self, x: Tensor) -> Tensor:
        return (self._drawn(self, x) * torch.arange(1.0, 1 + ROWS)[:, None]).square().mean()

    def order(self) -> Any:
        return numpy.random.permutation(ROWS)  # noqa: NPY002

    def spans(self, lengths: Tensor) -> Any:
        mask = numpy.zeros((ROWS, 4), dtype=bool)
        for row, length in zip(mask, lengths.tolist(), strict=True):
            row[random.randrange(length) :] = True
        return mask

    def order_of_torch(self) -> Tensor:
        return torch.tensor(torch.randperm(ROWS).tolist())

    def fresh(self) -> Any:
        return numpy.random.default_rng().random((ROWS, 1), dtype=numpy.float32) + random.Random().random()

    def some(self) -> Any:
        return numpy.nonzero(numpy.random.rand(ROWS) > 0.5)[0]  # noqa: NPY002

    def keep(self) -> Any:
        self.last = numpy.random.rand(ROWS, 1)  # noqa: NPY002
        return self.last

    def skips(self) -> bool:
        return random.random() < 0.5


def mixed(m: Any, x: Tensor) -> Tensor:
    share = numpy.random.beta(0.4, 0.4)  # noqa: NPY002
    return share * m.linear(x) + (1 - share) * m.linear(x.flip(0))


def masked(m: Any, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden[torch.tensor(m.spans((x > 0).sum(-1) + 1), dtype=torch.bool)] = 0
    hidden[torch.from_numpy(numpy.random.rand(ROWS)) < 0.5] = m.token  # noqa: NPY002
    return hidden


def noisy(m: Any, x: Tensor) -> Tensor:
    noise = numpy.random.randn(*x.shape).clip(-1, 1) * (random.gauss(0, 1) - 2)  # noqa: NPY002
    return m.linear(x) + torch.from_numpy(noise).float()


DRAWN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a number": lambda m, x: m.linear(x) * random.random(),
    "mixed": mixed,
    "masked": masked,
    "noisy": noisy,
    "an order": lambda m, x: m.linear(x)[torch.as_tensor(m.order())],
    "places": lambda m, x: m.linear(x)[torch.tensor([*random.sample(range(ROWS), 5), 0])],
    "of torch": lambda m, x: m.linear(x)[m.order_of_torch()],
    "unused": lambda m, x: m.linear(x) if random.random() >= 0 else x,
}


def compiled(model: nn.Module, **options: Any) -> Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    given: dict[str, Any] = {"optimizer": optimizer, "compute_dtype": torch.float32, "device": "cpu"}
    return megacompile.compile(model, "1GB", **given, **{"seed": SEED} | options)


def batches(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, 4, generator=draw) for _ in range(count)]


def seed_everything(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def made(name: str) -> Draws:
    torch.manual_seed(0)
    return Draws(DRAWN[name])


@pytest.mark.parametrize("name", DRAWN)
def test_trains_as_a_plain_loop_that_is_seeded_before_each_forward(name: str) -> None:
    model = made(name)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=1e-2)
    program, losses = compiled(model), []
    for step in range(3):
        micro = batches(2)
        optimizer.zero_grad()
        for number, x in enumerate(micro):
            seed_everything(step_seed(SEED, step, number))
            losses.append(eager(x).div(2))
            losses[-1].backward()
        optimizer.step()
        random.seed(7)
        numpy.random.seed(7)  # noqa: NPY002
        before = random.getstate(), numpy.random.get_state()[1].tolist()  # noqa: NPY002
        out = program.train_step([{"x": x} for x in micro])
        torch.testing.assert_close(torch.stack(out.losses) / 2, torch.stack(losses[-2:]), rtol=1e-6, atol=0)
        assert before == (random.getstate(), numpy.random.get_state()[1].tolist())  # noqa: NPY002
    values = program.state_dict()
    for key, value in eager.state_dict().items():
        torch.testing.assert_close(values[key], value, rtol=1e-6, atol=1e-7)
    assert len(program._session.decided.programs) == 1
    program.close()


RESUMED = {"masked": masked, "fresh": lambda m, x: m.linear(x) * torch.from_numpy(m.fresh())}


@pytest.mark.slow_cases(r"masked")
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_draws_on_and_another_seed_draws_others(name: str, tmp_path: Path) -> None:
    def run(program: Program, steps: int) -> list[Tensor]:
        return [program.train_step(x).loss.clone() for x in batches(steps)]

    def model() -> Draws:
        torch.manual_seed(0)
        return Draws(RESUMED[name])

    with compiled(model()) as program:
        whole = run(program, 2)
        program.save(tmp_path / "two")
        whole += run(program, 2)
        wanted = program.state_dict()
    assert len({float(loss) for loss in whole}) == 4  # of two batches, seen twice
    with compiled(model(), example_batch=batches(1)[0]) as program:
        program.load(tmp_path / "two")
        resumed = run(program, 2)
        values = program.state_dict()
    assert torch.equal(torch.stack(resumed), torch.stack(whole[2:]))
    assert all(torch.equal(values[key], value) for key, value in wanted.items())
    with compiled(model(), seed=4) as program:
        assert not torch.equal(run(program, 1)[0], whole[0])


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a branch": (
        lambda m, x: x if random.random() < 0.5 else m.linear(x),
        r"shapes or branches depend at test_host_draws\.py:\d+ .*layerdrop",
    ),
    "a branch on a function": (
        lambda m, x: x if m.skips() else m.linear(x),
        "shapes or branches depend at",
    ),
    "a float": (lambda m, x: m.linear(x) * float(random.random()), "shapes or branches depend at"),
    "a size": (lambda m, x: m.linear(x[: random.randint(1, 3)]), "shapes or branches depend at"),
    "a mask's places": (
        lambda m, x: m.linear(x)[torch.from_numpy(numpy.random.rand(ROWS)) < 0.5],  # noqa: NPY002
        "shapes or branches depend at",
    ),
    "an array of any length": (
        lambda m, x: m.linear(x)[torch.from_numpy(m.some())].sum() + m.linear(x),
        "shapes or branches depend",
    ),
    "an array that is kept": (
        lambda m, x: m.linear(x) * torch.from_numpy(m.keep()),
        "keep of the model draws random numbers and changes last",
    ),
    "a generator that is kept": (lambda m, x: m.linear(x) * m.kept.random(), "a generator that it keeps"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_would_go_by_is_refused(name: str) -> None:
    drawn, words = REFUSED[name]
    with pytest.raises(CaptureError, match=words):
        compiled(Draws(drawn)).train_step(batches(1)[0])


AUDIO: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (5, 5), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "vocab_size": 8,
    "feat_extract_norm": "layer", "classifier_proj_size": 8,
}  # fmt: skip
AUGMENTED: dict[str, Any] = {
    "apply_spec_augment": True, "mask_time_prob": 0.4, "mask_time_length": 3, "mask_feature_prob": 0.3,
    "mask_feature_length": 2,
}  # fmt: skip


def wav2vec2() -> tuple[nn.Module, list[Any]]:
    """A model whose adapter draws a number for each layer, too, which ``layerdrop=0`` makes no matter."""
    config = transformers.Wav2Vec2Config(
        **AUDIO | AUGMENTED, add_adapter=True, num_adapter_layers=1, output_hidden_size=16
    )
    shown = torch.ones(2, 400, dtype=torch.long)
    shown[1, 300:] = 0
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
    given = [{"input_values": torch.randn(2, 400), "attention_mask": shown, "labels": labels}] * 2
    return transformers.Wav2Vec2ForCTC(config), given


def hubert() -> tuple[nn.Module, list[Any]]:
    config = transformers.HubertConfig(**AUDIO | AUGMENTED)
    given = [{"input_values": torch.randn(2, 400), "labels": torch.tensor([0, 1])}] * 2
    return transformers.HubertForSequenceClassification(config), given


def whisper() -> tuple[nn.Module, list[Any]]:
    config = transformers.WhisperConfig(
        vocab_size=32, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        max_source_positions=20, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, dropout=0.0, **AUGMENTED,
    )  # fmt: skip
    given = [{"input_features": torch.randn(2, 8, 40), "labels": torch.randint(3, 32, (2, 6))}] * 2
    return transformers.WhisperForConditionalGeneration(config), given


@pytest.mark.slow_cases(r"(wav2vec2|hubert)")
@pytest.mark.filterwarnings("ignore:The loss of Wav2Vec2ForCTC cannot be traced")
@pytest.mark.parametrize("make", [wav2vec2, hubert, whisper])
def test_spec_augment(make: Callable[[], tuple[nn.Module, list[Any]]]) -> None:
    torch.manual_seed(0)
    model, given = make()
    eager = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(eager.parameters(), lr=1e-2)
    program = compiled(model.train())
    for step, batch in enumerate(given):
        seed_everything(step_seed(SEED, step, 0))
        optimizer.zero_grad()
        loss = eager(**copy.deepcopy(batch)).loss  # Whisper masks its batch
        loss.backward()
        optimizer.step()
        assert float(program.train_step(batch).loss) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert len(program._session.decided.programs) == 1
    evaluated = float(program.evaluate(given[0]))
    assert evaluated == float(program.evaluate(given[0]))
    assert evaluated == pytest.approx(float(eager.eval()(**given[0]).loss.detach()), rel=1e-5)
    program.close()
