"""Frozen weights in 4-bit codes: bitsandbytes' ``Linear4bit``, as QLoRA trains adapters over.

A program keeps such a weight as one tensor of bytes (:mod:`~megacompile.kernels.decode_4bit`): a frozen
parameter of uint8, which is stored and streamed as it is. Its decoding is a node of the graph, so a block
derives the weight on the device where it reads it, and again in its backward. bitsandbytes itself is never
imported: a model that has its modules did.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile.kernels.decode_4bit import decode_weight, parts, stored_bytes
from megacompile.kernels.registry import OpSpec, declare

_CODING = "_megacompile_coding"  # the attribute of a traced module whose weight is coded


@dataclass(frozen=True)
class WeightCoding:
    """The coding of a weight: its shape, and the elements that share a scale."""

    shape: tuple[int, ...]
    block: int

    @property
    def nbytes(self) -> int:
        """Bytes that a program stores of it."""
        return stored_bytes(prod(self.shape), self.block)


@torch.library.custom_op("megacompile::decode_4bit", mutates_args=())
def decode_4bit(stored: Tensor, shape: list[int], block: int, dtype: torch.dtype) -> Tensor:
    """Decode a weight of 4-bit codes; it has no gradient."""
    return decode_weight(stored, shape, block, dtype)


@decode_4bit.register_fake
def _(stored: Tensor, shape: list[int], block: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=stored.device)


declare(OpSpec("decode_4bit"))


def is_of_bitsandbytes(parameter: Tensor) -> bool:
    """Return whether a parameter is one of bitsandbytes' 4-bit weights."""
    return any(kind.__name__ == "Params4bit" for kind in type(parameter).__mro__)


def coding_of(parameter: Tensor) -> WeightCoding | None:
    """Return how a weight is coded; None for a plain parameter."""
    if not is_of_bitsandbytes(parameter):
        return None
    state = vars(parameter)["quant_state"]
    return WeightCoding(tuple(state.shape), state.blocksize)


def why_not_coded(module: nn.Module, parameter: Tensor) -> str | None:
    """Return why a weight of bitsandbytes cannot be kept as codes, and the way out; None where it can."""
    state = vars(parameter)["quant_state"]
    if state is None:
        return 'has no codes yet: call model.to("cpu"), which makes them'
    if not any(kind.__name__ == "Linear4bit" for kind in type(module).__mro__):
        return f"is in a {type(module).__name__}, and only Linear4bit is known: leave it out of quantization"
    if is_packed(parameter):
        return "was packed for inference on this CPU: load the model anew, and compile it before it is run"
    if len(state.shape) != 2 or tuple(state.shape) != (module.out_features, module.in_features):
        return f"holds {list(state.shape)}, not [out_features, in_features]: load the model anew"
    return None


def is_packed(parameter: Tensor) -> bool:
    """Return whether bitsandbytes has turned a weight's codes, for inference on this CPU, into another
    order."""
    return bool(getattr(vars(parameter).get("quant_state"), "packing_format_for_cpu", False))


def stored_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape in which a program stores a parameter."""
    coding = coding_of(parameter)
    return tuple(parameter.shape) if coding is None else (coding.nbytes,)


def stored_value(parameter: Tensor) -> Tensor:
    """Return a parameter's value as a program stores it: itself, or bytes that hold all of a coded one."""
    if not is_of_bitsandbytes(parameter):
        return parameter.detach()
    state = vars(parameter)["quant_state"]
    codes = parameter.detach().cpu().contiguous().view(torch.uint8).view(-1)
    scales, book = (x.detach().cpu().float().contiguous() for x in (_scales(state), state.code))
    return torch.cat((book.view(torch.uint8), scales.view(torch.uint8).view(-1), codes))


def set_stored(parameter: Tensor, stored: Tensor) -> None:
    """Make a coded weight hold what a program stored of one like it.

    Scales that were coded themselves stay so where these are the same. A weight that inference has packed is
    as it was loaded again, but for that.
    """
    state, coding = vars(parameter)["quant_state"], coding_of(parameter)
    assert coding is not None
    book, scales, codes = (x.clone() for x in parts(stored, prod(coding.shape), coding.block))
    codes = codes.view(vars(parameter)["quant_storage"]).view(-1, 1)  # as bitsandbytes makes them
    Tensor.data.__set__(parameter, codes)  # type: ignore[attr-defined]
    if is_packed(parameter):
        state.dtype, state.packing_format_for_cpu = state.original_dtype, False
    elif torch.equal(_scales(state).float(), scales) and torch.equal(state.code, book):
        return
    state.absmax, state.code, state.state2, state.offset, state.nested = scales, book, None, None, False


def copied_weight(parameter: nn.Parameter, stored: Tensor) -> nn.Parameter:
    """Return a coded weight like this one, which holds what a program stored."""
    fresh: nn.Parameter = type(parameter).__copy__(parameter)  # type: ignore[attr-defined]
    vars(fresh)["quant_state"] = copy.deepcopy(vars(parameter)["quant_state"])
    set_stored(fresh, stored)
    return fresh


def _scales(state: Any) -> Tensor:
    """The scale of each block, which may be coded itself, by blocks of scales around their mean."""
    scales: Tensor = state.absmax
    if state.nested:
        second = state.state2
        blocks = second.absmax.repeat_interleave(second.blocksize)[: len(scales)]
        scales = second.code[scales.long()] * blocks + state.offset
    return scales


def mark(module: nn.Module, coding: WeightCoding) -> None:
    """Tell a traced module that its weight is the bytes of a coded one."""
    vars(module)[_CODING] = coding


def is_marked(module: nn.Module) -> bool:
    """Return whether :func:`mark` was called on a module."""
    return _CODING in vars(module)


def linear(theirs: Callable[..., Any], module: Any, x: Tensor) -> Tensor:
    """The forward of a traced ``Linear4bit``, by decoding, in the dtype that bitsandbytes computes in."""
    coding: WeightCoding = vars(module)[_CODING]
    given = x.dtype
    if module.compute_type_is_set and module.compute_dtype is not None:
        x = x.to(module.compute_dtype)
    weight = torch.ops.megacompile.decode_4bit(module.weight, coding.shape, coding.block, x.dtype)
    bias = None if module.bias is None else module.bias.to(x.dtype)
    return F.linear(x, weight, bias).to(given)
