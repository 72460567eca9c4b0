"""Rotary embeddings of transformers whose frequencies depend on how long the sequence is.

A model's own forward keeps the frequencies of the batch at hand in a buffer. Here they are a value of the
graph: LongRoPE (arXiv 2402.13753) chooses by the largest position, as transformers does; dynamic NTK
scaling is the original embedding up to the original length, and beyond it depends on all batches before:
refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import CaptureError

_UPDATES = "transformers.modeling_rope_utils"


def turning_lengths(model: nn.Module) -> frozenset[int]:
    """The lengths beyond which some rotary embedding of the model computes otherwise."""
    rotary: list[Any] = [module for module in model.modules() if depends_on_length(module)]
    return frozenset(length for module in rotary for length in _limits(module))


def _limits(rotary: Any) -> Iterator[int]:
    types = rotary.rope_type if isinstance(rotary.rope_type, dict) else {None: rotary.rope_type}
    for layer_type, name in types.items():
        if name == "longrope":
            yield _original_length(rotary, layer_type)
        elif "dynamic" in name:
            yield rotary.original_max_seq_len


def _original_length(rotary: Any, layer_type: str | None) -> int:
    parameters = rotary.config.rope_parameters
    length: int = (parameters if layer_type is None else parameters[layer_type])[
        "original_max_position_embeddings"
    ]
    return length


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding whose frequencies depend on the length."""
    types = getattr(module, "rope_type", None)
    named = list(types.values()) if isinstance(types, dict) else [types]
    if not any(isinstance(name, str) and (name == "longrope" or "dynamic" in name) for name in named):
        return False
    forward: Any = type(module).forward
    while forward := getattr(forward, "__wrapped__", None):
        if getattr(forward, "__globals__", {}).get("__name__") == _UPDATES:
            return True
    return False


@torch.no_grad()
def rotary_forward(
    positions_given: bool,
    theirs: Any,
    rotary: Any,
    x: Tensor,
    position_ids: Tensor,
    layer_type: str | None = None,
) -> Any:
    """The forward of an embedding that depends on the length, which writes no frequencies into its buffers.

    ``positions_given`` says that positions come with the batch, so that no shape tells the largest.
    """
    named = {} if layer_type is None else {"layer_type": layer_type}
    name: Any = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]
    frequencies = None
    if "dynamic" in name:
        frequencies = _original(rotary, position_ids, layer_type, positions_given)
    elif name == "longrope":
        frequencies = _short_or_long(rotary, position_ids, layer_type, x.device)
    buffer = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    module = rotary if frequencies is None else _With(rotary, buffer, frequencies)
    return inspect.unwrap(theirs)(module, x, position_ids, **named)


class _With:
    """A module as its forward sees it, with other frequencies."""

    def __init__(self, module: nn.Module, buffer: str, frequencies: Tensor) -> None:
        self._module = module
        setattr(self, buffer, frequencies)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _prefixed(module: nn.Module, layer_type: str | None, name: str) -> Any:
    return getattr(module, name if layer_type is None else f"{layer_type}_{name}")


def _original(rotary: Any, positions: Tensor, layer_type: str | None, positions_given: bool) -> Tensor:
    """Dynamic NTK scaling where it scales nothing, or refused."""
    limit = rotary.original_max_seq_len
    if positions_given or positions.dim() != 2 or positions.shape[-1] > limit:
        raise CaptureError(
            "The dynamic rotary embedding of this model depends on all batches before, where positions may "
            f"reach {limit}: give batches of at most {limit} tokens and no position_ids, or set another "
            "rope_type, such as yarn."
        )
    frequencies: Tensor = _prefixed(rotary, layer_type, "original_inv_freq")
    return frequencies


def _short_or_long(rotary: Any, positions: Tensor, layer_type: str | None, device: torch.device) -> Tensor:
    """LongRoPE's frequencies [dim / 2] for the largest of these positions."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    limit = _original_length(rotary, layer_type)
    short: Tensor = _prefixed(rotary, layer_type, "original_inv_freq").to(device)
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, device, seq_len=limit + 1, layer_type=layer_type)
    return torch.where(positions.max() + 1 > limit, long, short)
