"""Small real models, built from configurations, and batches for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 128
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(layers: int = 4) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SHAPE | {"num_hidden_layers": layers}))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_SHAPE, tie_word_embeddings=False))


def gpt2(dropout: float = 0.0, layers: int = 4) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=layers, n_head=4, n_positions=64,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
            bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(Gemma3TextConfig(**_SHAPE, sliding_window=8, layer_types=kinds))


class Through(nn.Module):
    """A layer, and a function of what it gives and of the rest of the batch."""

    def __init__(self, layer: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.function(self.layer(x), *rest)


class Plain(nn.Module):
    """No transformer: residual MLP blocks over dense features, a regression loss in the forward."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )
            for _ in range(depth)
        )
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return nn.functional.mse_loss(self.last(h), y)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": llama,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "gpt2-dropout": functools.partial(gpt2, 0.1),
    "gemma3": gemma3,
    "plain": Plain,
}


class Deep(nn.Module):
    """Blocks of few weights, that save much where a batch of rows is long."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Residual(nn.Module):
    """Two products around a ReLU, and their input again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """0.5 M parameters in four layers: 6.5 MB of FP32 state."""

    width = 128

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Residual(self.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.layers[0].up.weight.dtype)  # type: ignore[union-attr]
        for layer in self.layers:
            x = layer(x)
        return (x.float() ** 2).mean()


def build(name: str, seed: int = 0, **options: Any) -> nn.Module:
    """A model in train mode with seeded weights; ``options`` are those of its function, as ``layers``."""
    torch.manual_seed(seed)
    return MODELS[name](**options).train()


def batch_for(name: str, seed: int = 0, size: int = 2, length: int = 24) -> dict[str, Any]:
    """A seeded batch that the model's forward takes."""
    generator = torch.Generator().manual_seed(1000 + seed)
    if name == "plain":
        return {
            "x": torch.randn(size, 16, generator=generator),
            "y": torch.randn(size, 3, generator=generator),
        }
    ids = torch.randint(3, VOCABULARY, (size, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}
