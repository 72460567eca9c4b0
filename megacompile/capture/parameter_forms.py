"""How a model's parameters compute: in which dtype, and with which strides."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from megacompile.capture.quantized_weights import coding_of

Form = tuple[torch.dtype, tuple[int, ...]]
"""How a parameter computes: its dtype and its dense strides."""


def parameter_forms(model: nn.Module, compute_dtype: torch.dtype) -> dict[str, Form]:
    """The form of each parameter: ``compute_dtype``, or fp32 where the model keeps it so; beside running
    statistics, as these are, since torch takes no others there.

    A model of which most is bf16 or fp16 keeps in fp32 what it holds in fp32. transformers models name such
    modules in ``_keep_in_fp32_modules_strict``. Those that they name in ``_keep_in_fp32_modules`` are kept
    from fp16 alone; some forwards fail where they are fp32 beside bf16.
    """
    kept: set[str] = set()
    for module in model.modules():
        kept |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    pattern = re.compile("|".join(rf"(^|\.){re.escape(k)}($|\.)" for k in sorted(kept)) or r"$^")
    norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase))
    beside = {
        id(p): m.running_mean.dtype for m in norms if m.running_mean is not None for p in m.parameters()
    }
    beside |= dict.fromkeys(_held_in_fp32(model), torch.float32)
    forms: dict[str, Form] = {}
    for name, parameter in model.named_parameters():
        if coding_of(parameter) is not None:
            forms[name] = (torch.uint8, (1,))
            continue
        dtype = parameter.dtype
        if parameter.is_floating_point():
            dtype = torch.float32 if pattern.search(name) else beside.get(id(parameter), compute_dtype)
        forms[name] = (dtype, _dense_strides(parameter))
    return forms


def _held_in_fp32(model: nn.Module) -> set[int]:
    """The parameters that a model of low precision holds in fp32, by id, its PEFT adapters left out.

    Those are fp32 by ``autocast_adapter_dtype``, for the sake of their updates, which fp32 masters serve; in
    fp32 they would save an fp32 copy of each layer's input, which training in bf16 does not do either.
    """
    floats = [p for p in model.parameters() if p.is_floating_point() and coding_of(p) is None]
    low = sum(p.numel() for p in floats if p.dtype in (torch.bfloat16, torch.float16))
    if 2 * low <= sum(p.numel() for p in floats):
        return set()
    adapters = {
        id(p)
        for module in model.modules()
        for name in getattr(module, "adapter_layer_names", ())
        for part in (getattr(module, name, None),)
        for p in (part.parameters() if isinstance(part, nn.Module) else (part,))
    }
    return {id(p) for p in floats if p.dtype == torch.float32} - adapters


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a dense copy of a parameter that keeps the order of its dimensions."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    return tuple(torch.empty_like(meta).stride())
