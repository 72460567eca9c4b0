"""Trainers, and ``megacompile train``, on real files of images, beside plain transformers and TRL."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import images

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # each trainer would say that it was made
transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
trl = pytest.importorskip("trl", reason="trl is missing: pip install trl")
datasets = pytest.importorskip("datasets", reason="datasets is missing: pip install datasets")
ours = pytest.importorskip("megacompile.integrations.trl")
CLOCK = ("runtime", "per_second")
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-6,  # else one sign of a gradient near zero moves a weight
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "max_length": 64,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
}


def sft(kind: Any, folder: Path, make: Callable[[], tuple[nn.Module, Any]], **given: Any) -> Any:
    """Of three rows to train on, the last of which is a batch of its own, and two for evaluation."""
    paths = images.files(folder / "images", 5)
    rows = {"messages": images.chats(5), "images": [[str(path)] for path in paths]}
    data = datasets.Dataset.from_dict(rows).cast_column("images", datasets.List(datasets.Image()))
    model, processor = make()
    return kind(
        model=model,
        args=trl.SFTConfig(
            output_dir=str(folder / "out"), **SETTINGS | {"assistant_only_loss": True} | given
        ),
        train_dataset=data.select(range(3)),
        eval_dataset=data.select(range(3, 5)),
        processing_class=processor,
        **({"hbm_budget": "20MB"} if kind is ours.SFTTrainer else {}),
    )


def logs(of: Any) -> list[dict[str, float]]:
    return [
        {k: v for k, v in entry.items() if not any(c in k for c in CLOCK)} for entry in of.state.log_history
    ]


@pytest.mark.parametrize("make", [images.gemma3, images.qwen3_vl])
def test_sft_on_images_logs_what_trl_does_saves_and_goes_on(
    make: Callable[[], tuple[nn.Module, Any]], tmp_path: Path
) -> None:
    """With the assistant's turns alone, the last short batch, and evaluation; each folder has the processor,
    so that plain transformers reads it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = sft(ours.SFTTrainer, tmp_path / "mine", make)
    assert not [w for w in caught if "no effect" in str(w.message) and "ddp" in str(w.message)]
    theirs = sft(trl.SFTTrainer, tmp_path / "theirs", make)
    for one in (mine, theirs):
        one.train()
    assert len(logs(mine)) == len(logs(theirs)) > 3
    for found, wanted in zip(logs(mine), logs(theirs), strict=True):
        assert found == pytest.approx(wanted, rel=2e-6, abs=5e-6)
    values = mine.program.state_dict()
    for name, value in theirs.model.named_parameters():
        torch.testing.assert_close(values[name], value, rtol=0, atol=2e-5)
    mine.save_model(str(tmp_path / "model"))
    checkpoint = tmp_path / "mine" / "out" / "checkpoint-2"
    for folder in (tmp_path / "model", checkpoint):
        assert (
            transformers.AutoProcessor.from_pretrained(folder).chat_template
            == mine.processing_class.chat_template
        )
    plain = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(plain.state_dict(), values, rtol=0, atol=0)
    again = sft(ours.SFTTrainer, tmp_path / "mine", make, eval_strategy="no")
    again.train(resume_from_checkpoint=str(checkpoint))
    for name, value in again.program.state_dict().items():
        assert torch.equal(value, values[name]), name
