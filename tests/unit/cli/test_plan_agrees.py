"""What ``megacompile plan`` predicts is what ``megacompile.compile`` does, which plans in the same way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import megacompile
from megacompile.api import compile
from megacompile.cli.estimator import Study
from megacompile.cli.models import Lora, build
from megacompile.cli.plan_answer import Question
from megacompile.cli.plan_report import Extras, plan_text
from megacompile.hardware.catalog import load_machine
from megacompile.state.moment_formats import StateFormat
from tests.support.coded_weights import Linear4bit, Linear8bitLt

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
_SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4096, "tie_word_embeddings": True,
}  # fmt: skip
BATCH, SEQ = 2, 32
QUESTION = Question(load_machine("rtx-4090"), BATCH, SEQ, 1, host_budget=10**9)


def test_a_prediction_is_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tied vocabulary, cut, and planned from a few layers: cuts, plan, peak, host bytes."""
    for module in ("megacompile.graph.tile_cuts", "megacompile.planner.tiling"):
        monkeypatch.setattr(f"{module}.LEAST_PIECE", 1 << 16)
    given = transformers.LlamaConfig(**_SHAPE)
    study = Study(build("llama", given), "bf16", lambda message: None)
    budget = int(1.05 * study.least(QUESTION)[0].device_bytes)
    uncut = study.least(replace(QUESTION, hbm_budget=1 << 40))[0]
    assert budget < uncut.device_bytes
    answer = study.answer(replace(QUESTION, hbm_budget=budget), both=False)
    predicted = answer.predictions[True]

    backend = replace(compile.open_backend("cpu", torch.bfloat16), machine=QUESTION.terms.machine)
    monkeypatch.setattr(compile, "open_backend", lambda device, dtype: backend)
    monkeypatch.setattr(compile, "gpu_of", lambda device: QUESTION.kind[3])  # the card of the question
    model = transformers.LlamaForCausalLM(given).train()
    ids = torch.randint(given.vocab_size, (BATCH, SEQ))
    program = megacompile.compile(
        model, f"{budget}B", optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), host_budget="1GB",
        compute_dtype=torch.bfloat16, max_grad_norm=1.0, kernels=True,
        example_batch={"input_ids": ids, "labels": ids},
    )  # fmt: skip
    program.train_step({"input_ids": ids, "labels": ids})
    schedule, held = program.schedule, program.memory.host_bytes
    assert predicted.work == schedule.work and predicted.planned.plan == program.plan
    assert predicted.planned.step == schedule.step
    assert predicted.planned.peak_bytes == schedule.peak_bytes == program.memory.predicted_peak_bytes
    assert (predicted.host.masters, predicted.host.moments) == (held["masters"], held["moments"])
    assert program._session.runtime is not None
    assert predicted.host.total == program._session.runtime.state.arena.nbytes
    pieces = len(predicted.compiled.tiled.cuts["model.embed_tokens.weight"]) - 1
    text = f"cut: lm_head into {pieces}; rows of embed_tokens gathered on the host"
    for printed in (plan_text(answer, Extras(True)), str(program.plan), str(schedule)):
        assert text in printed
    program.close()


@pytest.mark.filterwarnings("ignore:.*and other 8-bit weights")
@pytest.mark.parametrize(
    ("lora", "form"),
    [
        (Lora(4), "fp32"),
        (None, "int8"),
        (Lora(2, ("q_proj", "v_proj")), "int4"),
        (Lora(4, frozen="8bit"), "fp32"),
        (Lora(4, frozen="4bit"), "fp32"),
    ],
)
def test_adapters_and_coded_moments_are_planned_as_compiled(
    lora: Lora | None, form: StateFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters as PEFT makes them over a frozen base: plan, peak, host bytes, and what is trained."""
    config = transformers.LlamaConfig(**_SHAPE | {"vocab_size": 512})
    model = transformers.LlamaForCausalLM(config).train()
    if lora is not None:
        peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
        targets = list(lora.targets) or "all-linear"
        given = peft.LoraConfig(task_type="CAUSAL_LM", r=lora.rank, target_modules=targets)
        base = coded(model.bfloat16().float(), lora.frozen)  # as of a checkpoint in it
        model = peft.get_peft_model(base, given)
    told_of = {"8bit": "(8bit)", "4bit": "(4bit)"}.get(lora.frozen if lora else "", "kept in bfloat16")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    study = Study(build("llama", config, lora), "bf16", lambda message: None)
    asked = replace(QUESTION, optimizer_state=form)
    asked = replace(asked, hbm_budget=int(1.2 * study.least(asked)[0].device_bytes))
    assert study.model.trained_parameters == trained
    answer = study.answer(asked, both=False)
    predicted = answer.predictions[True]
    told = told_of in plan_text(answer, Extras(True)) and "the rest frozen" in plan_text(answer, Extras(True))
    assert told == (lora is not None)

    backend = replace(compile.open_backend("cpu", torch.bfloat16), machine=asked.terms.machine)
    monkeypatch.setattr(compile, "open_backend", lambda device, dtype: backend)
    monkeypatch.setattr(compile, "gpu_of", lambda device: asked.kind[3])  # the card of the question
    ids = torch.randint(config.vocab_size, (BATCH, SEQ))
    program = megacompile.compile(
        model, f"{asked.hbm_budget}B", optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        host_budget="1GB", optimizer_state=form, compute_dtype=torch.bfloat16, max_grad_norm=1.0,
        kernels=True,
        example_batch={"input_ids": ids, "labels": ids},
    )  # fmt: skip
    program.train_step({"input_ids": ids, "labels": ids})
    held = program.memory.host_bytes
    assert predicted.work == program.schedule.work and predicted.planned.plan == program.plan
    assert predicted.planned.peak_bytes == program.memory.predicted_peak_bytes
    assert (predicted.host.masters, predicted.host.moments) == (held["masters"], held["moments"])
    assert program._session.runtime is not None
    assert predicted.host.total == program._session.runtime.state.arena.nbytes
    program.close()


def coded(model: Any, frozen: str) -> Any:
    """The model with the linear layers but its head in codes."""
    kind: Any = {"8bit": Linear8bitLt, "4bit": Linear4bit}.get(frozen)
    for name, layer in list(model.named_modules()) if kind is not None else ():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            made = kind(layer.in_features, layer.out_features)
            made.bias = None
            model.set_submodule(name, made)
    return model


def test_a_frozen_weight_has_no_gradient_to_compute() -> None:
    """Of the three products of a layer two are left, and those of its adapters."""
    pytest.importorskip("peft", reason="peft is missing: pip install peft")
    config = transformers.LlamaConfig(**_SHAPE)
    whole, adapted = build("llama", config), build("llama", config, Lora(4))
    products = adapted.matmul_parameters - whole.matmul_parameters
    assert products == adapted.trained_parameters == 5 * 4 * (2 * 128 + 2 * (64 + 32) + 3 * (64 + 128))
    fewer = 2 * whole.matmul_parameters * BATCH * SEQ - 6 * products * BATCH * SEQ
    assert whole.step_flops(BATCH, SEQ) - adapted.step_flops(BATCH, SEQ) == pytest.approx(fewer)
