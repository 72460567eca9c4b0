"""TRL's trainers over a program beside TRL's own: every logged number, of chats, packed rows, preferences."""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import megacompile
from megacompile.integrations.training_arguments import settle
from tests.support.models import build
from tests.support.text import sentences, tokenizer

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # each trainer would say that it was made
trl = pytest.importorskip("trl", reason="trl is missing: pip install trl")
datasets = pytest.importorskip("datasets", reason="datasets is missing: pip install datasets")
ours = pytest.importorskip("megacompile.integrations.trl")
AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM

ROUNDED = functools.partial(
    pytest.approx, rel=2e-6, abs=5e-6
)  # rewards are tenths of differences of hundreds
CLOCK = ("runtime", "per_second", "preparation_time")
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-6,  # else one sign of a gradient near zero moves a weight
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "no",
    "max_length": 64,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
}


def lora(dropout: float = 0.0) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    torch.manual_seed(3)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", lora_dropout=dropout)
    model: nn.Module = peft.get_peft_model(build("llama"), settings)
    return model


def virtual_tokens() -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    torch.manual_seed(3)
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model: nn.Module = peft.get_peft_model(build("llama"), settings)
    return model


def sft(kind: Any, folder: Path, make: Callable[[], nn.Module], **given: Any) -> Any:
    chats = [
        [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
        for a, b in zip(sentences(12, 1), sentences(12, 2), strict=True)
    ]
    data = datasets.Dataset.from_dict({"messages": chats})
    settings = {"assistant_only_loss": True} | SETTINGS | given
    return kind(
        model=make(),
        args=trl.SFTConfig(output_dir=str(folder), **settings),
        train_dataset=data.select(range(8)),
        eval_dataset=data.select(range(8, 12)),
        processing_class=tokenizer(),
        **({"hbm_budget": "20MB"} if kind is ours.SFTTrainer else {}),
    )


def dpo(
    kind: Any,
    folder: Path,
    make: Callable[[], nn.Module],
    peft_config: Any = None,
    ref_model: Callable[[], nn.Module | None] = lambda: None,
    streams: bool = False,
    **given: Any,
) -> Any:
    data = preferences()
    train = data.select(range(4))
    return kind(
        model=make(),
        ref_model=ref_model(),
        args=trl.DPOConfig(output_dir=str(folder), **SETTINGS | {"precompute_ref_log_probs": True} | given),
        train_dataset=train.to_iterable_dataset() if streams else train,
        eval_dataset=data.select(range(4, 8)),
        processing_class=tokenizer(),
        peft_config=peft_config,
        **({"hbm_budget": "20MB"} if kind is ours.DPOTrainer else {}),
    )


def preferences() -> Any:
    texts = {name: sentences(8, i) for i, name in enumerate(("prompt", "chosen", "rejected"))}
    return datasets.Dataset.from_dict(texts)


def logs(of: Any) -> list[dict[str, float]]:
    return [
        {k: v for k, v in entry.items() if not any(c in k for c in CLOCK)} for entry in of.state.log_history
    ]


@pytest.mark.slow_cases(r"(chats|LoRA|virtual)")
@pytest.mark.parametrize(
    ("make", "given"),
    [
        pytest.param(lambda: build("llama", layers=1), {}, id="chats"),
        pytest.param(
            lambda: build("llama", layers=1),
            {"packing": True, "loss_type": "dft"},
            id="packed, DFT",
        ),
        pytest.param(lora, {}, id="LoRA"),
        pytest.param(virtual_tokens, {"assistant_only_loss": False}, id="virtual tokens"),
    ],
)
def test_sft_logs_what_trl_does(
    make: Callable[[], nn.Module], given: Mapping[str, Any], tmp_path: Path
) -> None:
    """Loss, norm, entropy, accuracy, tokens, of training and evaluation; TRL's loss is TRL's code."""
    compare([sft(kind, tmp_path, make, **given) for kind in (ours.SFTTrainer, trl.SFTTrainer)])


@pytest.mark.slow_cases(r"(LoRA|virtual)")
@pytest.mark.parametrize(
    ("make", "given"),
    [
        pytest.param(lambda: build("llama", layers=1), {"loss_type": ["sigmoid", "sft"]}, id="two losses"),
        pytest.param(lora, {}, id="LoRA"),
        pytest.param(virtual_tokens, {}, id="virtual tokens"),
    ],
)
def test_dpo_logs_what_trl_does(
    make: Callable[[], nn.Module], given: Mapping[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also rewards and log-probabilities; the reference is the policy before training, whose programs
    training and evaluation go on with."""
    with caplog.at_level("INFO", "megacompile.compiler"):
        trainers = [dpo(kind, tmp_path, make, **given) for kind in (ours.DPOTrainer, trl.DPOTrainer)]
        compare(trainers)
    compiled = re.findall(r"compiling a program to (\w+): a batch of \((\d+), (\d+)", caplog.text)
    assert len(compiled) == len(set(compiled))
    assert {rows for kind, rows, _ in compiled if kind == "train"} == {"4"}  # two pairs
    if make is not virtual_tokens:  # results longer than rows: each length is compiled
        assert len(compiled) == len({(kind, rows) for kind, rows, _ in compiled}), (
            "shorter rows run on longer"
        )
    if make is lora:  # adapters are switched
        compare_later(*trainers)
        return
    with pytest.raises(ValueError, match="ref_model"):  # of data that came later the policy is none
        trainers[0].evaluate(preferences().select(range(2, 7)))


def test_rows_are_not_padded_to_what_the_longest_could_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Chats are often far shorter than ``max_length``; a quarter of it was the least that a batch had."""
    given = {"max_length": 1024, "max_steps": 1, "gradient_accumulation_steps": 1, "eval_strategy": "no"}
    with caplog.at_level("INFO", "megacompile.compiler"):
        trainer = sft(ours.SFTTrainer, tmp_path, lambda: build("llama", layers=1), **given)
        trainer.train()
    longest = max(map(len, [*trainer.train_dataset["input_ids"], *trainer.eval_dataset["input_ids"]]))
    lengths = [int(found) for found in re.findall(r"batch of \(2, (\d+)\)", caplog.text)]
    assert lengths and max(lengths) <= longest < 256


@pytest.mark.slow
def test_dpo_beside_adapters_that_change_the_model_from_the_start(tmp_path: Path) -> None:
    """They are switched off for the reference, also of data that come after training; prompts cannot be."""
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    drawn = peft.LoraConfig(
        r=2, target_modules=["down_proj"], task_type="CAUSAL_LM", init_lora_weights=False, lora_alpha=64
    )
    trainers = []
    for kind in (ours.DPOTrainer, trl.DPOTrainer):
        torch.manual_seed(3)
        trainers.append(dpo(kind, tmp_path, lambda: build("llama", layers=1), peft_config=drawn))
    compare(trainers)
    assert abs(logs(trainers[0])[0]["rewards/margins"]) > 1e-3
    compare_later(*trainers)
    model: Any = virtual_tokens()
    with pytest.raises(megacompile.MegacompileError, match=r"as ref_model=; or peft\.get_peft_model"):
        dpo(ours.DPOTrainer, tmp_path, lambda: build("llama"), peft_config=model.peft_config["default"])


def another() -> nn.Module:
    """Another model than the policy, and a deeper one."""
    model, draws = build("llama", layers=2), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.02)
    return model.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "ref_model"),
    [
        pytest.param(lambda: build("llama", layers=1), another, id="another model"),
        pytest.param(lambda: build("llama", layers=1), lambda: build("llama", layers=1), id="an equal one"),
        pytest.param(virtual_tokens, lambda: build("llama"), id="virtual tokens"),
    ],
)
def test_dpo_beside_a_reference_that_is_given(
    make: Callable[[], nn.Module], ref_model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """It stays the user's, as it was; data that come after training are compared with it as well."""
    mine, theirs = (
        dpo(kind, tmp_path / kind.__module__, make, ref_model=ref_model)
        for kind in (ours.DPOTrainer, trl.DPOTrainer)
    )
    compare([mine, theirs])
    plain = ref_model()
    for (name, kept), value in zip(mine.ref_model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(kept, value) and kept.requires_grad == value.requires_grad, name
    compare_later(mine, theirs)


def compare_later(mine: Any, theirs: Any) -> None:
    """Of data that come after training."""
    later = [trainer.evaluate(preferences().select(range(2, 7))) for trainer in (mine, theirs)]
    found, wanted = ({k: v for k, v in e.items() if not any(c in k for c in CLOCK)} for e in later)
    assert found == ROUNDED(wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"sync_ref_model": True, "ref_model_sync_steps": 2}, id="that follows the policy"),
        pytest.param({"streams": True}, id="of a stream"),
    ],
)
def test_dpo_beside_a_reference_that_stays(given: Mapping[str, Any], tmp_path: Path) -> None:
    given = {"precompute_ref_log_probs": False, "ref_model": lambda: build("llama", layers=1), **given}
    mine, theirs = (
        dpo(kind, tmp_path, lambda: build("llama", layers=1), **given)
        for kind in (ours.DPOTrainer, trl.DPOTrainer)
    )
    compare([mine, theirs])
    mine.release()
    for value, expected in zip(mine.ref_model.parameters(), theirs.ref_model.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=2e-5)


def test_what_a_reference_cannot_do_beside_the_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(megacompile.MegacompileError, match="give a ref_model that has the same weights"):
        dpo(ours.DPOTrainer, tmp_path, lambda: build("llama", layers=1), ref_model=another,
            sync_ref_model=True, precompute_ref_log_probs=False)  # fmt: skip
    with pytest.raises(megacompile.MegacompileError, match="a stream needs: give Datasets that have rows"):
        dpo(ours.DPOTrainer, tmp_path, lora, streams=True)


def compare(both: list[Any]) -> None:
    for one in both:
        one.train()
    mine, theirs = both
    assert len(logs(mine)) == len(logs(theirs)) > 3
    for found, wanted in zip(logs(mine), logs(theirs), strict=True):
        if abs(found.get("rewards/margins", 1.0)) < 1e-6:  # the sign of what rounding left
            del found["rewards/accuracies"], wanted["rewards/accuracies"]
        assert found == ROUNDED(wanted)
    values = mine.program.state_dict()
    for name, value in theirs.model.named_parameters():
        torch.testing.assert_close(values[name], value, rtol=0, atol=2e-5)


def test_logits_are_never_whole_on_the_device() -> None:
    """Neither for the log-probabilities, nor for metrics, where a budget asks for it."""
    config = transformers.LlamaConfig(
        vocab_size=16000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model, ids = transformers.LlamaForCausalLM(config), torch.randint(0, 16000, (2, 512))
    program = megacompile.compile(model, "2kB", optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(megacompile.BudgetError) as refused:
        program.prepare({"input_ids": ids, "labels": ids}, outputs=ours.SFTTrainer._token_outputs)
    assert refused.value.least_bytes is not None
    assert refused.value.least_bytes < ids.numel() * 16000 * 2  # of the logits in bf16


@pytest.mark.parametrize("kind", ["SFTConfig", "DPOConfig"])
def test_what_nobody_set_is_not_said_to_have_no_effect(kind: str, tmp_path: Path) -> None:
    """TRL's configs switch checkpointing on by its former name; ours do not."""

    def warned(config: Any, **given: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            settle(config(str(tmp_path), use_cpu=True, bf16=False, **given), ours.MegacompileConfig())
        return [str(w.message) for w in caught]

    assert not warned(getattr(ours, kind))
    assert not [text for text in warned(getattr(trl, kind)) if "no effect" in text]
    assert [text for text in warned(getattr(ours, kind), gradient_checkpointing=True) if "no effect" in text]


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated")
def test_losses_of_all_logits_are_refused(tmp_path: Path) -> None:
    trainer = sft(ours.SFTTrainer, tmp_path, lambda: build("llama"), label_smoothing_factor=0.1)
    with pytest.raises(megacompile.MegacompileError, match="leave out label_smoothing_factor"):
        trainer.train()


@pytest.mark.slow
def test_trls_own_script_runs_with_one_import_changed(tmp_path: Path) -> None:
    """``trl/scripts/sft.py`` as it is installed, from a command line."""
    source = (Path(trl.__file__).parent / "scripts" / "sft.py").read_text()
    changed = source.replace("from trl import SFTTrainer, get_dataset", "from trl import get_dataset", 1)
    changed = changed.replace(
        "    from trl import get_dataset",
        "    from megacompile.integrations.trl import SFTTrainer\n    from trl import get_dataset",
        1,
    )
    assert changed.count("SFTTrainer") == source.count("SFTTrainer")
    build("llama").save_pretrained(tmp_path / "model")  # type: ignore[operator]
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"text": text}) for text in sentences(8)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    script: dict[str, Any] = {"__name__": "script"}
    exec(compile(changed, "sft.py", "exec"), script)
    given = {
        "model_name_or_path": tmp_path / "model",
        "dataset_name": tmp_path / "data",
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "max_length": 48,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
    }
    arguments = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    script["main"](*script["make_parser"]().parse_args_and_config(arguments))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not torch.equal(loaded.lm_head.weight, build("llama").lm_head.weight)  # type: ignore[union-attr]
