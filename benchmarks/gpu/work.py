"""What is trained: models of published shapes with random weights, and batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megacompile.estimate.models import Model, load_model

TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 4096, "use_cache": False,
}  # fmt: skip


def tiny(name: str) -> nn.Module:
    """A small Llama, Gemma3 or Mixtral with seeded weights, in train mode."""
    import transformers

    torch.manual_seed(0)
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", {}),
        "gemma3": ("Gemma3", {"sliding_window": 32, "query_pre_attn_scalar": 16}),
        "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    }
    family, more = kinds[name]
    config_of = getattr(transformers, f"{family}TextConfig" if name == "gemma3" else f"{family}Config")
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config_of(**TINY, **more))
    return model.train()


def shaped(name: str) -> tuple[Model, nn.Module]:
    """A preset with random bf16 weights on the host, made at the speed of memory."""
    described = load_model(name)
    module = described.module.to(torch.bfloat16).to_empty(device="cpu")
    pool = torch.randn(1 << 22).mul_(0.02).bfloat16()
    for parameter in module.parameters():
        flat = parameter.data.view(-1)
        for start in range(0, flat.numel(), pool.numel()):
            part = flat[start : start + pool.numel()]
            part.copy_(pool[: part.numel()])
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
    fresh_buffers(module, described.config)
    return described, module.train()


def fresh_buffers(module: nn.Module, config: Any) -> None:
    """Rotary frequencies are computed when a model is built: ``to_empty`` has lost them."""
    for child in module.modules():
        if hasattr(child, "inv_freq"):
            fresh = type(child)(config=config)
            for name, buffer in fresh.named_buffers():
                child.register_buffer(name, buffer, persistent=False)
            if hasattr(child, "original_inv_freq"):
                child.original_inv_freq = child.inv_freq.clone()


def batch_of(tokens: int, sequence: int, vocabulary: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """[tokens / sequence, sequence] of random ids, all of them real; labels are the ids."""
    generator = torch.Generator().manual_seed(seed)
    length = min(tokens, sequence)
    ids = torch.randint(0, vocabulary, (max(1, tokens // length), length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
