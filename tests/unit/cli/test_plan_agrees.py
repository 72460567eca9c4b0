"""What ``megacompile plan`` predicts is what ``megacompile.compile`` does: the same cuts, plan and peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import megacompile
from megacompile import api
from megacompile.cli.plan import Prediction, Question, Study, dump, schedule_of
from megacompile.cli.presets import build
from megacompile.cli.report import Extras, render
from megacompile.machine.catalog import load_machine

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
_SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
BATCH, SEQ = 2, 32
QUESTION = Question(load_machine("rtx-4090"), BATCH, SEQ, 1)


def config(vocab: int, *, tied: bool = False) -> Any:
    return transformers.LlamaConfig(vocab_size=vocab, tie_word_embeddings=tied, **_SHAPE)


def compiled(
    monkeypatch: pytest.MonkeyPatch, given: Any, budget: int, clip: bool, **options: Any
) -> megacompile.Program:
    """A program over real weights, planned for the machine of the question."""
    opened = api.open_backend("cpu", torch.bfloat16)
    backend = replace(opened, machine=QUESTION.machine)
    monkeypatch.setattr(api, "open_backend", lambda device, dtype: backend)
    model = transformers.LlamaForCausalLM(given).train()
    ids = torch.randint(given.vocab_size, (BATCH, SEQ))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program = megacompile.compile(
        model, f"{budget}B", optimizer=optimizer, compute_dtype=torch.bfloat16,
        max_grad_norm=1.0 if clip else None, example_batch={"input_ids": ids, "labels": ids}, **options,
    )  # fmt: skip
    program.train_step({"input_ids": ids, "labels": ids})
    return program


def agree(predicted: Prediction | None, program: megacompile.Program) -> None:
    assert predicted is not None
    schedule = program.schedule
    assert predicted.compiled.assembly.work == schedule.work
    assert predicted.planned.plan == program.plan
    assert predicted.planned.step == schedule.step
    assert predicted.planned.peak_bytes == schedule.peak_bytes == program.memory.predicted_peak_bytes
    held = program.memory.host_bytes
    assert predicted.host.masters == held["masters"]
    assert predicted.host.moments == held["moments"]


@pytest.mark.parametrize(("tied", "clip"), [(True, True), (False, False)])
def test_a_large_vocabulary_is_cut_alike(monkeypatch: pytest.MonkeyPatch, tied: bool, clip: bool) -> None:
    for module in ("tile.cuts", "search.tile_choice"):
        monkeypatch.setattr(f"megacompile.{module}.LEAST_PIECE", 1 << 16)
    given = config(4096, tied=tied)
    study = Study(build("llama", given), "bf16", lambda message: None)
    whole = study.captured(BATCH, SEQ)[0]
    least = study.least(QUESTION)[0].device_bytes
    uncut = study.least(replace(QUESTION, hbm_budget=1 << 40))
    assert uncut[1].assembly.work == whole.assembly.work
    assert least < uncut[0].device_bytes
    answer = study.answer(replace(QUESTION, hbm_budget=int(1.05 * least)), both=False, clip=clip)
    predicted = answer.prediction(clip)
    assert predicted is not None and predicted.compiled.tiled.cuts
    program = compiled(monkeypatch, given, int(1.05 * least), clip)
    agree(predicted, program)
    cuts = predicted.compiled.tiled.cuts
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    text = f"cut: lm_head into {len(cuts[head]) - 1}; rows of embed_tokens gathered on the host"
    schedule = schedule_of(answer, clip)
    assert schedule is not None
    for printed in (render(answer, Extras(clip)), str(program.plan), str(program.schedule), str(schedule)):
        assert text in printed
    program.close()


def test_state_that_fits_the_device_stays_there_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    given = config(256)
    study = Study(build("llama", given), "bf16", lambda message: None)
    whole = study.answer(replace(QUESTION, hbm_budget=10**9), both=False, clip=True).clipped
    assert whole is not None
    for budget in (10**9, int(0.7 * whole.planned.peak_bytes)):
        answer = study.answer(replace(QUESTION, hbm_budget=budget), both=False, clip=True)
        program = compiled(monkeypatch, given, budget, True)
        agree(answer.clipped, program)
        assert answer.clipped is not None and answer.clipped.planned.step.resident
        assert "state on the device" in render(answer, Extras(clip=True))
        dump(answer, tmp_path / str(budget), clip=True)
        program.close()
