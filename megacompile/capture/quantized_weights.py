"""Frozen weights in codes: bitsandbytes' ``Linear4bit`` and ``Linear8bitLt``, and tensor subclasses such as
torchao's, as adapters are trained over.

A program keeps such a weight as one tensor of bytes: a frozen parameter of uint8, which is stored and
streamed as it is. Its decoding is part of the graph, so a block derives the weight on the device where it
reads it, and again in its backward. bitsandbytes' layers decode by an operator each
(:mod:`~megacompile.kernels.decode_4bit`, :mod:`~megacompile.kernels.decode_8bit`). A subclass is put together
again from the tensors that it holds, and computes by its own code, whose operators are traced. Code outside
of the layer, as of DoRA's adapters, reads the weight that it knows: the codes, with their attributes, as
views of the bytes. Neither library is ever imported: a model that has its weights did.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megacompile.capture.weight_codings import (
    BlockCoding,
    RowCoding,
    SubclassCoding,
    SubclassPart,
    WeightCoding,
    is_of_class,
    is_packed,
)

_PLANNED = "_megacompile_planned"  # the attribute of a weight that stands for a coded one
_ALIGNED = 16  # bytes, of each tensor that a subclass holds


def is_coded(parameter: Tensor) -> bool:
    """Return whether a parameter's values are not its memory's own."""
    return (
        _PLANNED in vars(parameter)
        or is_of_class(parameter, "Params4bit")
        or is_of_class(parameter, "Int8Params")
        or is_traceable_wrapper_subclass(parameter)
    )


def rounds_inputs(parameter: Tensor) -> bool:
    """Return whether the layer of a coded weight rounds its inputs too, but where it is trained on a CPU."""
    return is_of_class(parameter, "Int8Params")


def coding_of(parameter: Tensor) -> WeightCoding | None:
    """Return how a weight is coded; None for a plain parameter."""
    if _PLANNED in vars(parameter):
        planned: WeightCoding = vars(parameter)[_PLANNED]
        return planned
    if is_of_class(parameter, "Params4bit"):
        state = vars(parameter)["quant_state"]
        return BlockCoding(tuple(state.shape), state.blocksize)
    if is_of_class(parameter, "Int8Params"):
        return RowCoding(tuple(parameter.shape))
    if not is_traceable_wrapper_subclass(parameter):
        return None
    names, context = parameter.__tensor_flatten__()
    parts, start = list[SubclassPart](), 0
    for name in names:
        held = getattr(parameter, name)
        parts.append(SubclassPart(name, tuple(held.shape), held.dtype, start))
        start = -(-parts[-1].stop // _ALIGNED) * _ALIGNED
    shape, strides = tuple(parameter.shape), tuple(parameter.stride())
    return SubclassCoding(type(parameter), tuple(parts), context, shape, strides)


def plan_as(parameter: Tensor, coding: WeightCoding) -> None:
    """Mark a linear layer's weight without values as one with this coding."""
    vars(parameter)[_PLANNED] = coding


def why_not_coded(module: nn.Module, parameter: Tensor) -> str | None:
    """Return why a coded weight cannot be kept as codes, and the way out; None where it can."""
    if is_traceable_wrapper_subclass(parameter):
        return _why_not_parts(parameter)
    layer = "Linear4bit" if is_of_class(parameter, "Params4bit") else "Linear8bitLt"
    if not is_of_class(module, layer) and not _lacks_codes(parameter):
        return f"is in a {type(module).__name__}, and only {layer} is known: leave it out of quantization"
    if vars(parameter).get("has_fp16_weights"):
        return "is coded anew in each step: make its layer with has_fp16_weights=False"
    if _lacks_codes(parameter):
        return 'has no codes yet: call model.to("cpu"), which makes them'
    if is_packed(parameter):
        return "was packed for inference on this CPU: load the model anew, and compile it before it is run"
    state = vars(parameter).get("quant_state", parameter)
    if tuple(state.shape) != (module.out_features, module.in_features):
        return f"holds {list(state.shape)}, not [out_features, in_features]: load the model anew"
    return None


def _lacks_codes(parameter: Tensor) -> bool:
    if is_of_class(parameter, "Params4bit"):
        return vars(parameter)["quant_state"] is None
    return parameter.dtype != torch.int8


def _why_not_parts(parameter: Any) -> str | None:
    kind = type(parameter)
    what = f"is a {kind.__name__} of {kind.__module__.partition('.')[0]}"
    way_out = "load the model without quantization_config, or give its dequantize()"
    if is_of_class(parameter, "DTensor"):
        return f"{what}, a part of a tensor: give its full_tensor()"
    if parameter.requires_grad:
        return f"{what} and trained, and codes have no gradient: freeze it, or {way_out}"
    above = inspect.getattr_static(kind, "__torch_function__")
    if above in (
        inspect.getattr_static(Tensor, "__torch_function__"),
        torch._C._disabled_torch_function_impl,
    ):
        return f"{what}, and computes below autograd, which a graph does not show: {way_out}"
    held = [getattr(parameter, name) for name in parameter.__tensor_flatten__()[0]]
    if any(is_traceable_wrapper_subclass(tensor) or tensor.is_meta for tensor in held):
        return f"{what} around tensors without values of their own: {way_out}"
    return None


def stored_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape in which a program stores a parameter."""
    coding = coding_of(parameter)
    return tuple(parameter.shape) if coding is None else (coding.nbytes,)


def stored_value(parameter: Tensor) -> Tensor:
    """Return a parameter's value as a program stores it: itself, or bytes that hold all of a coded one."""
    coding = coding_of(parameter)
    return parameter.detach() if coding is None else coding.stored(parameter)


def copied_weight(parameter: nn.Parameter, stored: Tensor) -> nn.Parameter:
    """Return a coded weight like this one, which holds what a program stored."""
    coding = coding_of(parameter)
    assert coding is not None
    fresh = coding.copied(parameter)
    coding.set(fresh, stored)
    return fresh
