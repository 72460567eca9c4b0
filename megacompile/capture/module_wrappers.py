"""Wrappers of torch around modules and methods, which change how one is called and what parameters are named.

In: a model that torch.compile, DataParallel or DistributedDataParallel wrapped, or a part or a method of it.
Out: what is inside, and the names of its tensors as they would be without any wrapper.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from megacompile.errors import MegacompileError


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of all wrappers, or the model itself. A hook of a wrapper is refused."""
    while (child := _child_of(model)) is not None:
        if model._forward_hooks or model._forward_pre_hooks:
            raise MegacompileError(
                f"A forward hook is registered on the {type(model).__name__} around the model, which would "
                "never run: register it on the model that this wraps."
            )
        model = model.get_submodule(child)
    return model


def plain_names(model: nn.Module) -> dict[str, str]:
    """Return the name that each parameter and buffer would have if no part of the model were wrapped."""
    names: dict[str, str] = {}

    def walk(module: nn.Module, own: str, plain: str) -> None:
        names.update({own + name: plain + name for name in (*module._parameters, *module._buffers)})
        wrapped = _child_of(module)
        for name, child in module._modules.items():
            if child is not None:
                walk(child, f"{own}{name}.", plain if name == wrapped else f"{plain}{name}.")

    walk(model, "", "")
    return names


def uncompiled(value: Any) -> Any:
    """Return the function or method that torch.compile was given, where ``value`` is what it returned."""
    while not isinstance(value, nn.Module) and hasattr(value, "_torchdynamo_orig_callable"):
        value = value._torchdynamo_orig_callable
        if inspect.isfunction(value) and inspect.ismethod(inner := getattr(value, "__wrapped__", None)):
            value = inner  # of a module of torch's own, whose methods it wraps twice
    return value


def _child_of(module: nn.Module) -> str | None:
    """Return the attribute in which a wrapper has its module; None: it is no wrapper."""
    if type(module).__name__ == "OptimizedModule":  # torch.compile's, whose import takes a second
        return "_orig_mod"
    wraps = isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    return "module" if wraps else None
