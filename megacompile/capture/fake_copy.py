"""Copies of a model that trace as it does without touching a weight."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.capture.coded_modules import mark
from megacompile.capture.fingerprint import modules_of, tensors_of
from megacompile.capture.module_wrappers import uncompiled
from megacompile.capture.parameter_forms import Form
from megacompile.capture.quantized_weights import coding_of, stored_shape
from megacompile.capture.weight_codings import settle


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
        for _, buffer in model.named_buffers():
            memo[id(buffer)] = torch.empty_strided(
                buffer.shape, buffer.stride(), dtype=buffer.dtype, device="cpu"
            )
    return copy_around(model, memo | {id(t): t for t in tensors_of(model) if id(t) not in memo})


def copy_around(model: nn.Module, tensors: Mapping[int, Any]) -> nn.Module:
    """A structural copy of ``model`` whose tensors are those given by the ids of the model's own.

    A coded weight stands there as the bytes that a program stores of it, and each of its modules is marked.
    """
    settle(model)
    memo: dict[int, Any] = dict(tensors)
    for parameter in model.parameters():
        memo[id(vars(parameter).get("quant_state"))] = None  # which holds a coded weight's scales
    copied = copy.deepcopy(model, memo)
    for module in modules_of(model):
        for name, value in vars(module).items():
            method = uncompiled(value)
            if method is not value:  # which the copy shares, and the model's values with it
                vars(memo[id(module)])[name] = copy.deepcopy(method, memo)
    for name, module in model.named_modules():
        own = {key: (coding_of(p), p) for key, p in module._parameters.items() if p is not None}
        codings = {key: (coding, p) for key, (coding, p) in own.items() if coding is not None}
        if codings:
            mark(copied.get_submodule(name), codings)
    return copied
