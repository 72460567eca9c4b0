"""What is trained: models of published shapes with random weights, and batches."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.cli.models import Model, build, load_model

SEQUENCE = 4096
_TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 4096, "use_cache": False,
}  # fmt: skip
_SCALE, _POOL = 0.02, 1 << 22  # of random weights; so many numbers are drawn and used again and again


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def missing(*packages: str) -> str:
    """Return why one of these cannot be imported; nothing where all can."""
    try:
        for package in packages:
            importlib.import_module(package)
    except ImportError as error:
        return f"{package}: {error}"
    return ""


def tiny(**more: Any) -> nn.Module:
    """A small Llama with seeded weights, in train mode."""
    import transformers

    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TINY | more))
    return model.train()


def described(name: str) -> Model:
    """A preset on the meta device; "tiny" is a Qwen2 of two layers."""
    if name != "tiny":
        return load_model(name)
    import transformers

    return build(name, transformers.Qwen2Config(**_TINY))


def weights_of(module: nn.Module) -> Callable[[str], Tensor]:
    """The value of each parameter by its name: random numbers, drawn once for all parameters of a shape, the
    same in every process."""
    pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(0)).mul_(_SCALE)
    shapes = {name: p.shape for name, p in module.named_parameters()}

    @functools.cache
    def matrix(shape: torch.Size) -> Tensor:
        return pool.repeat(-(-shape.numel() // _POOL))[: shape.numel()].view(shape)

    def value(name: str) -> Tensor:
        shape = shapes[name]
        return torch.full(shape, float(name.endswith("norm.weight"))) if len(shape) == 1 else matrix(shape)

    return value


def fill(module: nn.Module, config: Any, where: str) -> nn.Module:
    """Give a module of the meta device memory on ``where``, and the values of :func:`weights_of`."""
    module = module.to_empty(device=where)
    module.tie_weights()  # type: ignore[operator]  # to_empty has untied them
    value = weights_of(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(value(name))
    make_buffers(module, config)
    return module


def make_buffers(module: nn.Module, config: Any) -> None:
    """Compute rotary frequencies, which a model computes where it is built: on meta they have no values."""
    for child in module.modules():
        if hasattr(child, "inv_freq"):
            fresh = type(child)(config=config)
            for name, buffer in fresh.named_buffers():
                child.register_buffer(name, buffer, persistent=False)
            if hasattr(child, "original_inv_freq"):
                child.original_inv_freq = child.inv_freq.clone()


def batch_of(tokens: int, sequence: int, vocabulary: int, seed: int = 0) -> dict[str, Tensor]:
    """[tokens / sequence, sequence] of random ids, all of them real; labels are the ids."""
    generator = torch.Generator().manual_seed(seed)
    length = min(tokens, sequence)
    ids = torch.randint(0, vocabulary, (max(1, tokens // length), length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def share_off(ours: Tensor, exact: Tensor) -> float:
    """Return the largest difference as a share of the largest value; infinite where one is not finite."""
    exact = exact.float()
    share = float((ours.float() - exact).abs().max() / exact.abs().max())
    return share if math.isfinite(share) else math.inf  # the maximum of several passes over NaN
