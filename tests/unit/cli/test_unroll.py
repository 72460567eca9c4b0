"""Planning from a few layers gives the very partition that capturing the whole model gives, however cut."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from megacompile.api.frontend import Frontend
from megacompile.capture.batch import read_batch
from megacompile.cli.models import Model, build
from megacompile.cli.repeat_layers import Repeated
from megacompile.planner.lowest_bytes import lowest_bytes
from megacompile.schedule.plan import Mode

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
_TILINGS = 3  # whole, and cut down to the layers
_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 6},
    "qwen3": {"num_hidden_layers": 5, "head_dim": 8, "tie_word_embeddings": True},
    "gemma3_text": {"num_hidden_layers": 9, "head_dim": 8, "sliding_window": 8},
    "gpt_oss": {"num_hidden_layers": 7, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 8},
    "mixtral": {"num_hidden_layers": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_hidden_layers": 7, "num_key_value_heads": 4, "n_routed_experts": 4,
                    "num_experts_per_tok": 2, "first_k_dense_replace": 2, "n_group": 2, "topk_group": 1,
                    "moe_intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}  # fmt: skip


def small_model(kind: str) -> Model:
    config = transformers.CONFIG_MAPPING[kind](**(_SMALL | _MODELS[kind]))
    return build(kind, config)


@pytest.mark.slow_cases(r"(?!llama)")
@pytest.mark.parametrize("kind", _MODELS)
def test_unrolled_is_what_a_whole_capture_gives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(kind)
    ids = torch.zeros(1, 16, dtype=torch.long)
    batch = read_batch({"input_ids": ids, "labels": ids}, model.module)
    whole = Frontend(model.module, torch.bfloat16)
    monkeypatch.setattr("megacompile.graph.tile_cuts.LEAST_PIECE", 2048)
    monkeypatch.setattr("megacompile.planner.tiling.LEAST_PIECE", 2048)
    found_candidates = islice(Repeated(model, batch, torch.bfloat16).tilings(), _TILINGS)
    expected_candidates = islice(whole.tilings(batch), _TILINGS)
    cut, mode = 0, Mode("evaluate")
    for few, all_of_it in zip(found_candidates, expected_candidates, strict=True):
        found, expected = few.build(), all_of_it.build()
        assert len(found.captured.graph.nodes) < len(expected.captured.graph.nodes)
        assert found.tiled.cuts == expected.tiled.cuts
        assert found.assembly == expected.assembly
        assert 0 < few.floor_bytes <= all_of_it.floor_bytes <= lowest_bytes(expected.assembly.work, mode)
        cut += any("layers." in name for name in found.tiled.cuts)
    assert cut


def test_a_model_of_few_layers_is_captured_whole() -> None:
    config = transformers.CONFIG_MAPPING["llama"](**(_SMALL | {"num_hidden_layers": 2}))
    model = build("llama", config)
    ids = torch.zeros(1, 16, dtype=torch.long)
    batch = read_batch({"input_ids": ids, "labels": ids}, model.module)
    found = next(Repeated(model, batch, torch.bfloat16).tilings()).build()
    assert len(found.assembly.work.blocks) >= 3
