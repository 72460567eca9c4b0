"""The fine-tuning example: interrupted and resumed it ends, bit for bit, where it ends without."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from tests.support.examples import load_example


@pytest.fixture(scope="module")
def finetune() -> ModuleType:
    return load_example("finetune")


def test_an_interrupted_run_goes_on_bit_for_bit(
    finetune: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Weights stream to the device just before they are used. " * 20)

    def settings(out: str) -> Any:
        return finetune.Settings(
            model=finetune.tiny_model(tmp_path / "tiny"), text=(text,), out=tmp_path / out, budget="20MB",
            steps=5, batch=1, length=16, micro_batches=2, learning_rate=1e-3, save_every=2,
        )  # fmt: skip

    finetune.main(settings("whole"))
    batches = finetune.batches_of

    def cut_off(tokens: torch.Tensor, step: int, given: Any) -> Any:
        if step == 3:
            raise KeyboardInterrupt
        return batches(tokens, step, given)

    with monkeypatch.context() as patch:
        patch.setattr(finetune, "batches_of", cut_off)
        with pytest.raises(KeyboardInterrupt):
            finetune.main(settings("cut"))
    assert (tmp_path / "cut" / "latest").read_text() == "step-000002"
    finetune.main(settings("cut"))
    assert [f.name for f in (tmp_path / "cut").glob("step-*")] == ["step-000005"]
    whole, cut = (
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / out / "model").state_dict()
        for out in ("whole", "cut")
    )
    start = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "tiny").state_dict()
    for name, value in whole.items():
        assert torch.equal(value, cut[name]), name
    assert any(not torch.equal(value, start[name].to(value.dtype)) for name, value in whole.items())


def test_text_shorter_than_a_window_is_refused_in_a_sentence(finetune: ModuleType, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("short")
    with pytest.raises(SystemExit, match="5 tokens, fewer than one window of 256"):
        finetune.main(
            finetune.Settings(
                model=finetune.tiny_model(tmp_path / "tiny"), text=(text,), out=tmp_path / "out"
            )
        )
