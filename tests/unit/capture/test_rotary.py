"""Rotary embeddings whose frequencies depend on the length, beside transformers' own forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

import megacompile
from megacompile import CaptureError
from megacompile.capture.rotary_frequencies import turning_lengths

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "pad_token_id": 0,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "initializer_range": 0.3,
}  # fmt: skip
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 18}
_LONG |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}


def phi3() -> nn.Module:
    lengths = {"max_position_embeddings": 64, "original_max_position_embeddings": 18}
    return Phi3ForCausalLM(Phi3Config(**_SMALL, **lengths, rope_parameters=_LONG, eos_token_id=1))


def phi3_of_shared_modules() -> nn.Module:
    """In its trace each access of a module gives an object of another class."""
    model: Any = phi3()
    model.model.layers[1].mlp.activation_fn = model.model.layers[0].mlp.activation_fn
    return model  # type: ignore[no-any-return]


def gemma3() -> nn.Module:
    """Frequencies of two kinds of layers, of which one depends on the length."""
    rope = {"full_attention": _LONG, "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**_SMALL, sliding_window=8, layer_types=layers, rope_parameters=rope)
    )


def dynamic(longest: int) -> nn.Module:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return LlamaForCausalLM(LlamaConfig(**_SMALL, max_position_embeddings=longest, rope_parameters=rope))


def tokens(length: int, **more: Any) -> dict[str, Any]:
    ids = torch.randint(5, 64, (2, length))
    return {"input_ids": ids, "labels": ids, **more}


def train_beside_eager(model: nn.Module, batches: list[dict[str, Any]]) -> None:
    """Losses are those of eager PyTorch, and the buffers of the model stay as they are."""
    eager = copy.deepcopy(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    plain = torch.optim.AdamW(eager.parameters(), lr=1e-3)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program = megacompile.compile(model, "1GB", optimizer=adamw, compute_dtype=torch.float32)
    for batch in batches:
        loss = eager(**batch).loss
        loss.backward()
        plain.step()
        plain.zero_grad()
        assert float(program.train_step(batch).loss) == pytest.approx(loss.item(), rel=2e-6)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    program.close()


@pytest.mark.slow
@pytest.mark.parametrize("make", [phi3, phi3_of_shared_modules, gemma3])
def test_longrope_turns_where_transformers_does(make: Any) -> None:
    """Beyond 18 tokens the long factors count: 17 must not be padded to 24, and 19 may be."""
    torch.manual_seed(0)
    model = make()
    assert turning_lengths(model) == {18}
    train_beside_eager(model, [tokens(n) for n in (16, 17, 24, 19)])


def test_longrope_with_positions_of_the_batch() -> None:
    torch.manual_seed(0)
    mask = torch.ones(2, 16, dtype=torch.long)
    positions = [torch.arange(start, start + 16)[None] for start in (0, 2, 3)]  # up to 15, 17 and 18
    train_beside_eager(phi3(), [tokens(16, position_ids=p, attention_mask=mask) for p in positions])


@pytest.mark.slow
def test_dynamic_scaling_up_to_the_original_length() -> None:
    torch.manual_seed(0)
    train_beside_eager(dynamic(20), [tokens(n) for n in (16, 19, 20, 17)])


@pytest.mark.parametrize("batch", [tokens(24), tokens(16, position_ids=torch.arange(16)[None])])
def test_dynamic_scaling_that_depends_on_earlier_batches_is_refused(batch: dict[str, Any]) -> None:
    model = dynamic(20)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(CaptureError, match=r"dynamic rotary embedding .* at most 20 tokens"):
        megacompile.compile(model, "1GB", optimizer=optimizer, example_batch=batch)
