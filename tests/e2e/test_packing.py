"""Packed rows: each token's loss is the one that it has in a row of its own, and no text sees another."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import build
from tests.support.text import sentences, tokenizer

pytestmark = pytest.mark.slow

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # each trainer would say that it was made
trl = pytest.importorskip("trl", reason="trl is missing: pip install trl")
datasets = pytest.importorskip("datasets", reason="datasets is missing: pip install datasets")
ours = pytest.importorskip("megacompile.integrations.trl")


def packed_trainer(folder: Path, packing: bool) -> Any:
    """Over six chats, all in one batch: packed, in rows of 128 tokens."""
    chats = [
        [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
        for a, b in zip(sentences(6, 1), sentences(6, 2), strict=True)
    ]
    data = datasets.Dataset.from_dict({"messages": chats})
    arguments = trl.SFTConfig(
        output_dir=str(folder), assistant_only_loss=True, packing=packing, max_length=128,
        per_device_train_batch_size=6, max_steps=2, learning_rate=1e-2, adam_epsilon=1e-6,
        logging_steps=1, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    model: Any = build("llama")
    return ours.SFTTrainer(
        model=model, args=arguments, train_dataset=data, processing_class=tokenizer(), hbm_budget="20MB"
    )


def log_probs(trainer: Any, batch: Any) -> dict[tuple[int, ...], torch.Tensor]:
    """Of the labels of each chat, by its tokens."""
    found = ours.TokenModel(trainer, None)(fused_lm_head=True, **batch)
    values, ids = torch.nn.functional.pad(found.log_probs, (1, 0)), batch["input_ids"]
    if "position_ids" in batch:
        begins = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), ids.shape[1]]
        parts = [(0, slice(a, b)) for a, b in itertools.pairwise(begins)]
    else:
        parts = [(i, slice(0, int(row.sum()))) for i, row in enumerate(batch["attention_mask"])]
    return {tuple(ids[i, part].tolist()): values[i, part] for i, part in parts}


def test_a_token_has_the_same_loss_in_a_packed_row(tmp_path: Path) -> None:
    """The loss of each token, and, trained, the loss and the norm of the gradient of both batches."""
    trainers = [packed_trainer(tmp_path, packing) for packing in (True, False)]
    batches = [list(trainer.get_train_dataloader()) for trainer in trainers]
    assert [batch["input_ids"].shape[0] for (batch,) in batches] == [1, 6]
    assert 1 < len(trainers[0].train_dataset) < 6
    packed, rows = (log_probs(one, batch) for one, (batch,) in zip(trainers, batches, strict=True))
    assert packed.keys() == rows.keys()
    assert len(rows) == 6
    for ids, values in rows.items():
        assert values.count_nonzero() > 3
        torch.testing.assert_close(packed[ids], values, rtol=0, atol=2e-6)
    for trainer in trainers:
        trainer.train()
    logged = [[(e["loss"], e["grad_norm"]) for e in t.state.log_history if "loss" in e] for t in trainers]
    assert len(logged[0]) == 2
    for found, wanted in zip(*logged, strict=True):
        assert found == pytest.approx(wanted, rel=2e-6)


def test_packed_chats_do_not_see_each_other(tmp_path: Path) -> None:
    """Another first chat in the row: the numbers of the others stay, bit for bit."""
    trainer = packed_trainer(tmp_path, True)
    (batch,) = list(trainer.get_train_dataloader())
    second = int((batch["position_ids"][0] == 0).nonzero()[1])
    other = batch | {"input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, :second] = (other["input_ids"][0, :second] + 5) % 30
    before, after = log_probs(trainer, batch), log_probs(trainer, other)
    assert len(before.keys() & after.keys()) == 5
    for ids in before.keys() & after.keys():
        assert torch.equal(before[ids], after[ids])
