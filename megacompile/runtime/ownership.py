"""Who owns a model's values: a program takes them over, and using the model then says so."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from megacompile.errors import ProgramError

_OWNED: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def take(model: nn.Module) -> None:
    """A program holds the model's values from now on."""
    if model not in _OWNED:
        model.register_forward_pre_hook(_refuse_use)
    _OWNED[model] = "taken"


def give_back(model: nn.Module) -> None:
    """The model holds its values again."""
    _OWNED[model] = "synced"


def _refuse_use(module: nn.Module, args: Any) -> None:
    if _OWNED.get(module) == "taken":
        raise ProgramError(
            f"This {type(module).__name__} belongs to a megacompile program and holds no values: call "
            "program.train_step or program.evaluate, or program.sync_to(model) to get the values back."
        )


def is_owned(model: nn.Module) -> bool:
    """Whether a program already owns this model."""
    return _OWNED.get(model) == "taken"


def persistent_buffers(model: nn.Module) -> set[str]:
    names = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer is not None and name not in module._non_persistent_buffers_set:
                names.add(f"{prefix}.{name}" if prefix else name)
    return names
