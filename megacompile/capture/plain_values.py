"""Values described by plain ones, so that two descriptions are equal only if the values are.

Numbers, strings, containers and objects that hold nothing but data (a config) are described by what they
hold; tensors, functions and everything else by identity.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

PLAIN = {int, float, bool, str, bytes, complex, type(None)}
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_CODE = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial),
    *(type, torch.dtype, torch.device),
)
_NO_DATA = {"torch", "logging", "threading"}  # packages whose objects are none
_OF_CHECKPOINTS = {
    "architectures",
    "dtype",
}  # what save_pretrained writes into a config; no graph depends on it
# Containers of more items that are not all plain, and what is nested deeper, are told by identity.
_LARGE, _DEEP = 1000, 8


class Reader:
    """Describes values. ``held`` is everything that was described by its identity, and has to stay alive."""

    def __init__(self) -> None:
        self.held: list[object] = []
        self._seen: dict[int, int] = {}

    def read(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        number = self._seen.get(id(value))
        if number is not None:
            return "seen", number
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, _CONTAINERS):
            items = list(itertools.chain(*value.items()) if isinstance(value, dict) else value)
            if PLAIN.issuperset(map(type, items)):
                return kind.__name__, *items
            if len(items) <= _LARGE and depth < _DEEP:
                return kind.__name__, *[self.read(item, depth + 1) for item in items]
        elif depth < _DEEP and (data := _data_of(value)) is not None:
            return self._object(value, data, depth)
        return self.other(value)

    def other(self, value: Any) -> Any:
        """Describe a value that is no data, or not looked into."""
        self.held.append(value)
        left_behind = isinstance(value, FakeTensor)  # by a capture, which makes others each time
        return ("a", "FakeTensor") if left_behind else ("is", id(value))

    def _object(self, value: Any, data: dict[str, Any], depth: int) -> Any:
        """An object by what it holds, where that is data alone; else by its identity."""
        held, seen = len(self.held), len(self._seen)
        inside = [self.read(item, depth + 1) for item in itertools.chain(*data.items())]
        if all(isinstance(other, (Tensor, *_CODE)) for other in self.held[held:]):
            self.held.append(type(value))
            return id(type(value)), *inside
        del self.held[held:]
        for _ in range(len(self._seen) - seen):
            self._seen.popitem()
        return self.other(value)


class Contents(Reader):
    """Describes what is no data by its type, iterators by how far they are."""

    def other(self, value: Any) -> Any:
        if isinstance(value, _CODE):
            return super().other(value)
        self.held.append(value)
        pythons = isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")
        return "a", type(value).__qualname__, repr(value.__reduce__()) if pythons else ""


def _data_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that may be one that holds settings, as a config does."""
    if isinstance(value, (nn.Module, Tensor, types.ModuleType, *_CODE)):
        return None
    if type(value).__module__.partition(".")[0] in _NO_DATA:
        return None
    if dataclasses.is_dataclass(value) and not hasattr(value, "__dict__"):  # with slots
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    found: dict[str, Any] | None = getattr(value, "__dict__", None)
    transformers = sys.modules.get("transformers")
    if found and transformers is not None and isinstance(value, transformers.PreTrainedConfig):
        return {name: held for name, held in found.items() if name not in _OF_CHECKPOINTS}
    return found
