"""The least device bytes of a long sequence in chunks: what attention reads and writes, token by token."""

from __future__ import annotations

import pytest

from megacompile.cli.estimator import Study
from megacompile.cli.models import build
from megacompile.cli.plan_answer import Question
from megacompile.hardware.catalog import load_machine

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")


@pytest.mark.slow
def test_the_least_bytes_grow_with_what_attention_holds_of_a_token() -> None:
    """A layer's backward holds x and the residual's gradient; o, q, k, v and their gradients; log-sum-exp
    and delta; beside them cos, sin and labels."""
    hidden, heads, shared, width = 256, 4, 2, 64
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=512, num_hidden_layers=3, num_attention_heads=heads,
        num_key_value_heads=shared, head_dim=width, vocab_size=1000, tie_word_embeddings=True,
    )  # fmt: skip
    per_token = 4 * hidden + 8 * heads * width + 8 * shared * width + 8 * heads + (4 * width + 8)
    study = Study(build("llama", config), "bf16", lambda message: None)
    found: dict[int, int] = {}
    for length in (32768, 65536, 131072):
        question = Question(load_machine("h200"), 1, length, hbm_budget=1000, host_budget=10**12)
        needs, compiled = study.least(question)
        assert compiled.chunk
        found[length] = needs.device_bytes
    for length in (32768, 65536):
        slope = (found[2 * length] - found[length]) / length
        assert slope == pytest.approx(per_token, rel=0.03)
