"""One architecture per mechanism, judged as ``python -m benchmarks.models`` judges all of them."""

from __future__ import annotations

import pytest
import torch

import megacompile
from megacompile.errors import CaptureError
from tests.support.judge import judge
from tests.support.zoo import cases

FP32 = (
    "U-Net",  # skips, convolutions, gradients that are slices of one tensor
    "MLP-Mixer",  # gradients laid out unlike their values
    "LSTM, bidirectional, dropout",
    "one block called 4 times",
    "nn.Transformer",  # the encoder's output read by all decoder blocks
    "T5, padded",
    "gpt_oss, left-padded",  # sinks, sliding windows, rows without keys
    "bloom",  # an autograd.Function that says what torch would
    "deepseek_v32",  # latent and sparse attention
    "mamba2",  # a recurrence that is one operator
)
BF16 = ("mixtral, experts without tokens", "mamba", "llama, packed")


@pytest.mark.slow_cases(r"(?!one block)")
@pytest.mark.parametrize(
    ("name", "dtype"), [*((n, torch.float32) for n in FP32), *((n, torch.bfloat16) for n in BF16)]
)
def test_architecture_trains_right(name: str, dtype: torch.dtype) -> None:
    verdict = judge(cases()[name], dtype)
    assert (verdict.status, verdict.reason) == ("right", "")
    assert set(verdict.budgets) == {"100 %", "40 %", "least"}
    for label, budget in verdict.budgets.items():
        assert budget["peak_bytes"] <= budget["predicted_bytes"] <= budget["budget_bytes"], label
        assert budget["peak_bytes"] >= 0.97 * budget["predicted_bytes"], label


@pytest.mark.slow_cases(r"(jetmoe|longcat)")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gemma3n_text", r"calls clamp_ on a tensor .* where autograd does not see it"),
        ("jetmoe", r"experts\.router takes a number out of a tensor"),
        ("longcat_flash", r"modeling_longcat_flash\.py:\d+"),
    ],
)
def test_architecture_is_refused_by_name(name: str, words: str) -> None:
    case = cases()[name]
    model = case.build()
    options = {"optimizer": torch.optim.AdamW(model.parameters()), "compute_dtype": torch.float32}
    with pytest.raises(CaptureError, match=words):
        megacompile.compile(model, "1GB", example_batch=case.batch(0), **options)
