"""The Trainer through the real ``torch.cuda``: the program alone uses the device, with the CPU's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

ids = torch.randint(3, 60, (8, 12), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": row, "labels": row} for row in ids]


def right(found: Any) -> dict[str, float]:
    return {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def trained(folder: Path, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from megacompile.integrations.training_arguments import MegacompileConfig
    from megacompile.integrations.transformers import Trainer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2,
            logging_steps=1, eval_strategy="steps", eval_steps=1, save_steps=1, learning_rate=1e-2,
            report_to=[], disable_tqdm=True,
        ),
        train_dataset=DATA,
        eval_dataset=DATA[:4],
        compute_metrics=right,
        config=MegacompileConfig("2GB" if device == "cuda" else "20MB", device=device),
    )  # fmt: skip
    trainer.train()
    return trainer


def test_the_trainer_trains_on_the_device(tmp_path: Path) -> None:
    """Logs equal those on the CPU; upstream's own tensors are on the host."""
    on_device, on_cpu = trained(tmp_path / "cuda", "cuda"), trained(tmp_path / "cpu", "cpu")
    assert torch.cuda.is_available() and on_device.args.device.type == "cpu"
    assert on_device._tr_loss.device.type == "cpu"
    for mine, wanted in zip(on_device.state.log_history, on_cpu.state.log_history, strict=True):
        names = wanted.keys() & {"loss", "grad_norm", "learning_rate", "eval_loss", "eval_right"}
        assert [mine[name] for name in names] == pytest.approx([wanted[name] for name in names], rel=1e-6)
    for one in (on_device, on_cpu):
        one.program.close()
