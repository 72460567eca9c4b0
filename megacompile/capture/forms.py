"""How a model's parameters compute, and a copy of the model that traces so without touching a weight."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.capture.coded_weights import coding_of, mark, stored_shape
from megacompile.capture.snapshot import modules_of, tensors_of
from megacompile.capture.wrappers import uncompiled

Form = tuple[torch.dtype, tuple[int, ...]]
"""How a parameter computes: its dtype and its dense strides."""


def parameter_forms(model: nn.Module, compute_dtype: torch.dtype) -> dict[str, Form]:
    """The form of each parameter: ``compute_dtype``, or fp32 where the model keeps it so; beside running
    statistics, as these are, since torch takes no others there.

    transformers models name such modules in ``_keep_in_fp32_modules_strict``. Those that they name in
    ``_keep_in_fp32_modules`` are kept from fp16 alone; some forwards fail where they are fp32 beside bf16.
    """
    kept: set[str] = set()
    for module in model.modules():
        kept |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    pattern = re.compile("|".join(rf"(^|\.){re.escape(k)}($|\.)" for k in sorted(kept)) or r"$^")
    norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase))
    beside = {
        id(p): m.running_mean.dtype for m in norms if m.running_mean is not None for p in m.parameters()
    }
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


def fake_copy(
    model: nn.Module, forms: Mapping[str, Form], mode: FakeTensorMode, trained: Collection[str]
) -> nn.Module:
    """A structural copy of ``model`` whose parameters and buffers are fake CPU tensors.

    Other tensors that its modules hold are the model's own, so that what is done to them is seen.
    Parameters named in ``trained`` require a gradient.
    """
    memo: dict[int, Any] = {}
    with mode:
        for name, parameter in model.named_parameters():
            dtype, strides = forms[name]
            fake = torch.empty_strided(stored_shape(parameter), strides, dtype=dtype, device="cpu")
            memo[id(parameter)] = nn.Parameter(fake, requires_grad=name in trained)
            memo[id(vars(parameter).get("quant_state"))] = None  # which holds a coded weight's scales
        for _, buffer in model.named_buffers():
            memo[id(buffer)] = torch.empty_strided(
                buffer.shape, buffer.stride(), dtype=buffer.dtype, device="cpu"
            )
    memo |= {id(t): t for t in tensors_of(model) if id(t) not in memo}
    copied = copy.deepcopy(model, memo)
    for module in modules_of(model):
        for name, value in vars(module).items():
            method = uncompiled(value)
            if method is not value:  # which the copy shares, and the model's values with it
                vars(memo[id(module)])[name] = copy.deepcopy(method, memo)
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and (coding := coding_of(weight)) is not None:
            mark(copied.get_submodule(name), coding)
    return copied


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a dense copy of a parameter that keeps the order of its dimensions."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    return tuple(torch.empty_like(meta).stride())
