"""Trainers of ``trl.experimental`` over a program, beside TRL's own: every logged number."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_policy_trainers import SETTINGS, adapters, compare
from tests.support.models import build
from tests.support.text import sentences, tokenizer

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
datasets = pytest.importorskip("datasets", reason="datasets is missing: pip install datasets")
plain = pytest.importorskip("trl.experimental", reason="trl is missing: pip install trl")
ours = pytest.importorskip("megacompile.integrations.trl_experimental")


def preferences(kind: Any, config: Any, folder: Path, peft: bool = False, **given: Any) -> Any:
    names = ("prompt", "chosen", "rejected", *(("reference",) if "TPO" in kind.__name__ else ()))
    texts = {name: sentences(8, i) for i, name in enumerate(names)}
    data = datasets.Dataset.from_dict(texts)
    settings = SETTINGS | {"max_length": 64, "eval_strategy": "epoch"} | given
    return kind(
        build("llama", layers=1),
        args=config(output_dir=str(folder), **settings),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=tokenizer(),
        peft_config=adapters() if peft else None,
        **({"hbm_budget": "20MB"} if kind.__module__.startswith("megacompile") else {}),
    )


@pytest.mark.slow_cases(r"(ORPO with|CPO|SimPO|TPO|of the teacher|of data|of its own)")
@pytest.mark.parametrize(
    ("name", "given"),
    [
        pytest.param("orpo", {}, id="ORPO"),
        pytest.param("orpo", {"peft": True}, id="ORPO with LoRA"),
        pytest.param("cpo", {}, id="CPO"),
        pytest.param("tpo", {}, id="TPO"),
        pytest.param("cpo", {"loss_type": "simpo", "cpo_alpha": 0.5}, id="SimPO"),
    ],
)
def test_preferences_without_a_reference_log_what_trl_does(
    name: str, given: Mapping[str, Any], tmp_path: Path
) -> None:
    trainer, config, module = f"{name.upper()}Trainer", f"{name.upper()}Config", getattr(plain, name)
    compare(
        preferences(getattr(ours, trainer), getattr(ours, config), tmp_path, **given),
        preferences(getattr(module, trainer), getattr(module, config), tmp_path, **given),
    )


def distilled(kind: Any, config: Any, folder: Path, **given: Any) -> Any:
    chats = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
        for ask, answer in zip(sentences(8, 1), sentences(8, 2), strict=True)
    ]
    data = datasets.Dataset.from_list(chats)
    settings = SETTINGS | {"max_length": 64, "max_new_tokens": 6, "eval_strategy": "epoch"} | given
    torch.manual_seed(7)
    teacher = build("llama", layers=2)
    return kind(
        build("llama", layers=1),
        teacher,
        args=config(output_dir=str(folder), **settings),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=chatting(),
        **({"hbm_budget": "20MB"} if kind.__module__.startswith("megacompile") else {}),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"lmbda": 0.0}, id="of data"),
        pytest.param({"lmbda": 0.5, "beta": 0.0}, id="of its own and of data"),
        pytest.param({"lmbda": 0.0, "seq_kd": True, "beta": 1.0}, id="of the teacher's"),
    ],
)
def test_distillation_logs_what_trl_does(given: Mapping[str, Any], tmp_path: Path) -> None:
    """From data, from completions of the student, and of the teacher."""
    mine = distilled(ours.GKDTrainer, ours.GKDConfig, tmp_path, **given)
    teacher = {name: value.clone() for name, value in mine._teacher.state_dict().items()}
    compare(mine, distilled(plain.gkd.GKDTrainer, plain.gkd.GKDConfig, tmp_path, **given))
    mine.release()
    assert all(torch.equal(value, teacher[name]) for name, value in mine._teacher.state_dict().items())


def chatting() -> Any:
    made = tokenizer()
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made
