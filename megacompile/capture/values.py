"""Values described by plain ones, so that two descriptions are equal only if the values are.

Data is described by what it holds, functions by what they read, all else by its identity.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import marshal
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from megacompile.capture.code import global_data, is_library, reads

PLAIN = {int, float, bool, str, bytes, complex, type(None)}
EXACT = 2  # a version of marshal whose bytes depend on types and values alone, not on who shares an object
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_CLOSURES = (types.FunctionType, types.MethodType, functools.partial)
CODE = (*_CLOSURES, types.BuiltinFunctionType, type, torch.dtype, torch.device)
_NO_DATA = {"torch", "logging", "threading"}  # packages whose objects are none
_LARGE, _DEEP = 1000, 8  # of more items: by a digest; nested deeper: by identity


class Reader:
    """Describes values by plain ones: numbers, strings, containers and objects of those by what they hold.

    ``held`` is everything that was described by its identity: tensors, functions, all other objects.
    ``reached`` is what functions read of globals, ``names`` the names in their code. ``kinds`` are the
    classes of objects that hold data, ``mixed`` the objects that hold more, described by their identity.
    """

    def __init__(self) -> None:
        self.held: list[object] = []
        self.reached: list[tuple[str, Any]] = []
        self.names: set[str] = set()
        self.kinds: set[type] = set()
        self.mixed: list[Any] = []
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
            if len(value) > _LARGE:
                return self._large(value)
            if depth < _DEEP:
                items = itertools.chain(*value.items()) if isinstance(value, dict) else value
                return kind.__name__, *[self.read(item, depth + 1) for item in items]
        elif depth < _DEEP and isinstance(value, _CLOSURES):
            self.held.append(value)
            return id(value), *[self.read(item, depth + 1) for item in self._closed_over(value)]
        elif depth < _DEEP and (data := data_of(value)) is not None:
            return self._object(value, data, depth)
        self.held.append(value)
        left_behind = isinstance(value, FakeTensor)  # by a capture, which makes others each time
        return ("a", kind.__name__) if left_behind else ("is", id(value))

    def _object(self, value: Any, data: dict[str, Any], depth: int) -> Any:
        """An object by what it holds, where that is data alone; else it is one of ``mixed``."""
        held, seen = len(self.held), len(self._seen)
        inside = [self.read(item, depth + 1) for item in itertools.chain(*data.items())]
        if all(isinstance(other, (Tensor, *CODE)) for other in self.held[held:]):
            self.kinds.add(type(value))
            self.held.append(type(value))
            return id(type(value)), *inside
        del self.held[held:]
        for _ in range(len(self._seen) - seen):
            self._seen.popitem()
        self.mixed.append(value)
        self.held.append(value)
        return "is", id(value)

    def _large(self, value: Any) -> Any:
        """A large sequence of plain values by a digest of them; any other by its identity."""
        if isinstance(value, (list, tuple, deque)):
            with contextlib.suppress(ValueError):
                return type(value).__name__, len(value), hash(marshal.dumps(list(value), EXACT))
        self.held.append(value)
        return "is", id(value)

    def _closed_over(self, function: Any) -> Iterator[Any]:
        """What a function, a method or a partial call brings along, and the data that its code reads."""
        if isinstance(function, functools.partial):
            yield from (function.func, function.args, function.keywords)
        elif isinstance(function, types.MethodType):
            yield from (function.__func__, function.__self__)
        else:
            yield function.__defaults__
            if not is_library(function):
                self.names |= reads(function).names
                data = list(global_data(function))
                self.reached += data
                yield from (value for _, value in data)
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):  # not assigned yet
                    yield cell.cell_contents


def data_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that may be one that holds settings, as a config does."""
    kind = type(value)
    if isinstance(value, (nn.Module, Tensor, types.ModuleType, *CODE)):
        return None
    if kind.__module__.partition(".")[0] in _NO_DATA:
        return None
    found: dict[str, Any] | None = getattr(value, "__dict__", None)
    if hasattr(kind, "__slots__") and not is_library(kind):
        return {**(found or {}), **_slots(value)}
    return found


def _slots(value: Any) -> dict[str, Any]:
    """Attributes that a class keeps in slots."""
    found = {}
    for base in type(value).__mro__:
        for name, slot in vars(base).items() if "__slots__" in vars(base) else ():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                found[name] = slot.__get__(value)
    return found
