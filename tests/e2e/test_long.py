"""One long sequence: loops over its chunks where the whole does not fit, beside eager PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.api import frontend

LENGTH, CHUNKS = 480, (60, 20)
VOCABULARY = 512


def model_of(kind: str, vocabulary: int = VOCABULARY, layers: int = 1) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocabulary, n_embd=32, n_layer=layers, n_head=4, n_positions=LENGTH,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
            )
        )  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=32, intermediate_size=256, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        )
    )  # fmt: skip


def packed() -> dict[str, Tensor]:
    """Four documents, told apart by their positions."""
    positions = torch.cat([torch.arange(n) for n in (200, 40, 120, LENGTH - 360)])[None]
    return {**batch_of(), "position_ids": positions}


def batch_of(length: int = LENGTH, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    ids = torch.randint(3, vocabulary, (1, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, : length // 3] = -100
    return {"input_ids": ids, "labels": labels}


def start(model: nn.Module, budget: str, **options: Any) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    return megacompile.compile(
        model, budget, optimizer=optimizer, max_grad_norm=1.0, compute_dtype=torch.float32, **options
    )


def least_whole(model: nn.Module, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> int:
    """The least budget with sequences whole."""
    with monkeypatch.context() as patch, pytest.raises(megacompile.BudgetError) as caught:
        patch.setattr(frontend, "CHUNKS", ())
        start(model, "100B").prepare(batch)
    assert caught.value.least_bytes is not None
    return caught.value.least_bytes


def trains_as_eager(
    program: megacompile.Program, model: nn.Module, batch: dict[str, Tensor], steps: int
) -> None:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    for _ in range(steps):
        found = program.train_step(batch)
        optimizer.zero_grad()
        loss: Tensor = model(**batch).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch.testing.assert_close(float(found.loss), loss.item(), rtol=1e-5, atol=0)
        torch.testing.assert_close(float(found.grad_norm), float(norm), rtol=1e-5, atol=0)  # type: ignore[arg-type]


@pytest.mark.slow_cases(r"gpt2")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_long_sequence_trains_far_below_what_it_needs_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    budget = int(0.4 * least_whole(model_of(kind), batch_of(), monkeypatch))
    monkeypatch.setattr(frontend, "CHUNKS", CHUNKS)
    program = start(model_of(kind), f"{budget}B", dump=tmp_path)
    trains_as_eager(program, model_of(kind), batch_of(), steps=3)
    memory = program.memory
    assert memory.device_peak_bytes == memory.predicted_peak_bytes <= budget
    length, chunk = program.schedule.work.loops
    assert length == LENGTH and chunk in CHUNKS
    text = f"sequences in {LENGTH // chunk} chunks of {chunk} tokens"
    assert text in str(program.plan) and text in (tmp_path / "train" / "02_policies.txt").read_text()
    assert "for start, end in spans(" in (tmp_path / "train" / "03_blocks.py").read_text()
    assert float(program.evaluate(batch_of(24))) > 0  # a short one has no loops


@pytest.mark.slow
def test_a_sequence_trains_where_a_64th_of_it_fits_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, length = 8000, 256  # a length that is no size of a weight
    model = functools.partial(model_of, "llama", vocabulary, layers=2)
    budget = least_whole(model(), batch_of(length, vocabulary), monkeypatch)
    monkeypatch.setattr(frontend, "CHUNKS", (128,))
    program = start(model(), f"{budget}B")
    trains_as_eager(program, model(), batch_of(64 * length, vocabulary), steps=2)
    assert program.memory.device_peak_bytes == program.memory.predicted_peak_bytes <= budget


def test_packed_documents_have_loops_and_train_as_eager_does(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = int(0.9 * least_whole(model_of("llama"), packed(), monkeypatch))  # attention takes most
    monkeypatch.setattr(frontend, "CHUNKS", CHUNKS)
    program = start(model_of("llama"), f"{budget}B")
    eager = model_of("llama")
    eager.config.use_cache = False  # else it does not tell documents apart
    trains_as_eager(program, eager, packed(), steps=2)
    assert program.memory.device_peak_bytes == program.memory.predicted_peak_bytes <= budget
    assert program.schedule.work.loops[1] in CHUNKS


def several() -> dict[str, Tensor]:
    return {name: x.repeat(2, 1) for name, x in batch_of().items()}


def padded() -> dict[str, Tensor]:
    return {**batch_of(), "attention_mask": (torch.arange(LENGTH) >= 50).long()[None]}


def dropping() -> nn.Module:
    model = model_of("gpt2")
    for layer in model.transformer.h:  # type: ignore[union-attr]
        layer.attn.attn_dropout.p = 0.1  # type: ignore[union-attr]
    return model


@pytest.mark.slow_cases(r"dropout")
@pytest.mark.parametrize(
    ("make", "batch", "why"),
    [
        (lambda: model_of("llama"), several, "stay whole: a batch of several sequences; give micro-batches"),
        (lambda: model_of("llama"), padded, "mask of tokens × tokens stays whole: give sequences without"),
        (dropping, batch_of, "Attention stays whole, with its tokens × tokens: dropout acts in it"),
        (lambda: model_of("llama"), batch_of, None),
    ],
    ids=["several sequences", "a dense mask", "dropout in attention", "nothing"],
)
def test_a_refusal_says_what_stays_whole(
    make: Callable[[], nn.Module],
    batch: Callable[[], dict[str, Tensor]],
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frontend, "CHUNKS", CHUNKS[:1])
    with pytest.raises(megacompile.BudgetError) as caught:
        start(make(), "100B").prepare(batch())
    assert why in str(caught.value) if why else "whole" not in str(caught.value)


def test_sequences_that_fit_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "CHUNKS", CHUNKS)
    program = start(model_of("llama"), "1GB")
    program.prepare(batch_of())
    assert program.schedule.work.loops == (0, 0) and "chunks" not in str(program.plan)


def test_a_plan_with_loops_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = f"{int(0.5 * least_whole(model_of('llama'), batch_of(), monkeypatch))}B"
    monkeypatch.setattr(frontend, "CHUNKS", CHUNKS)
    first = start(model_of("llama"), budget)
    again = start(model_of("llama"), budget, plan=(first.prepare(batch_of()), first.plan)[1])
    losses = [float(program.train_step(batch_of()).loss) for program in (first, again)]
    assert losses[0] == losses[1] and again.plan == first.plan
