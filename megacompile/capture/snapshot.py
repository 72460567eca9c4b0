"""What a captured graph takes for granted of a model besides its tensors' values, cheap to look at.

In: a model. Out: :class:`ModelSettings`, which are equal only if a capture would give the same graph, and
refusals of what no program can follow. Data is compared by value, code and all else by identity.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import marshal
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from megacompile.errors import MegacompileError

_PLAIN = {int, float, bool, str, bytes, complex, type(None)}
_WAY_OUT = "undo that, or call program.sync_to(model) and compile the model again."
_TORCHS = frozenset(vars(nn.Module()))  # what every module has
_EXACT = 2  # a version of marshal whose bytes depend on types and values alone, not on who shares an object
_CLOSURES = (types.FunctionType, types.MethodType, functools.partial)
_CODE = (*_CLOSURES, types.BuiltinFunctionType, type, torch.dtype, torch.device)
_LARGE, _DEEP = 1000, 8  # containers of more items, or nested deeper, are looked at by identity


@dataclass(frozen=True)
class ModelSettings:
    """What a model is set to; ``held`` keeps alive what ``values`` tells apart by identity."""

    values: bytes
    held: tuple[object, ...] = field(compare=False, repr=False)


class Reader:
    """Describes values by plain ones: numbers, strings, containers and objects of those by what they hold.

    ``held`` is everything that was described by its identity: tensors, functions, all other objects.
    """

    def __init__(self) -> None:
        self.held: list[object] = []
        self._seen: dict[int, int] = {}

    def read(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        number = self._seen.get(id(value))
        if number is not None:
            return "seen", number
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            if len(value) <= _LARGE and depth < _DEEP:
                items = itertools.chain(*value.items()) if isinstance(value, dict) else value
                return kind.__name__, *[self.read(item, depth + 1) for item in items]
        elif depth < _DEEP and isinstance(value, _CLOSURES):
            self.held.append(value)
            return id(value), *[self.read(item, depth + 1) for item in _closed_over(value)]
        elif depth < _DEEP and _may_be_data(value):
            already = len(self.held)
            inside = self.read(vars(value), depth + 1)
            if all(isinstance(held, (Tensor, *_CODE)) for held in self.held[already:]):
                self.held.append(kind)
                return id(kind), inside
            del self.held[already:]
        self.held.append(value)
        return "is", id(value)


def _closed_over(function: Any) -> Iterator[Any]:
    """What a function, a method or a partial call brings along: of a function's globals the data alone."""
    if isinstance(function, functools.partial):
        yield from (function.func, function.args, function.keywords)
    elif isinstance(function, types.MethodType):
        yield from (function.__func__, function.__self__)
    else:
        yield function.__defaults__
        named = (function.__globals__.get(name) for name in function.__code__.co_names)
        yield from (value for value in named if not isinstance(value, (types.ModuleType, nn.Module, *_CODE)))
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not assigned yet
                yield cell.cell_contents


def _may_be_data(value: Any) -> bool:
    """Whether an object may be one that holds settings, as a config does; torch's own are none."""
    if isinstance(value, (nn.Module, Tensor, types.ModuleType, *_CODE)) or not hasattr(value, "__dict__"):
        return False
    return not type(value).__module__.startswith("torch.")


def model_settings(model: nn.Module, *, evaluate: bool, loss_fn: Any = None) -> ModelSettings:
    """Types, attributes, hooks and code of all modules, which buffers they hold, and what ``loss_fn`` holds.

    Equal ones mean equal values: 1, 1.0 and True differ. In eval mode nothing depends on ``training``.
    """
    reader, classes = Reader(), set[type]()
    found: list[Any] = []
    own = modules_of(loss_fn) if isinstance(loss_fn, nn.Module) else []
    for module in modules_of(model) + own:
        values = vars(module)
        classes.add(type(module))
        found.append(type(module).__qualname__)
        if not evaluate:
            found.append(module.training)
        for name in values.keys() - _TORCHS:
            value = values[name]
            found += (name, value if type(value) in _PLAIN else reader.read(value))
        if module._buffers:
            found += map(id, module._buffers.values())
            reader.held += module._buffers.values()
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            if hooks:
                found += _others(reader, hooks.values())
    for hooks in (global_hooks._global_forward_pre_hooks, global_hooks._global_forward_hooks):
        found += _others(reader, hooks.values())
    found.append(reader.read(loss_fn))
    found += (_code(reader, each) for each in sorted(classes, key=id))
    return ModelSettings(marshal.dumps(found, _EXACT), tuple(reader.held))


def _others(reader: Reader, hooks: Iterable[Any]) -> list[Any]:
    """Hooks but for those of a program that owns the model, which are no part of it."""
    return [reader.read(h) for h in hooks if not getattr(h, "__module__", "").startswith("megacompile.")]


def _code(reader: Reader, kind: type) -> tuple[Any, ...]:
    """The functions and plain attributes of a class and of its bases, without torch's and Python's own."""
    found: list[Any] = [id(kind)]
    for base in kind.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        for name, value in vars(base).items():
            if type(value) in _PLAIN and not name.startswith("__"):
                found += (name, value)
            elif isinstance(value, types.FunctionType):
                found.append(id(value))
                reader.held.append(value)
    return tuple(found)


class _Kinds(Reader):
    """Describes what is no data by its type alone."""

    def read(self, value: Any, depth: int = 0) -> Any:
        found = super().read(value, depth)
        return ("a", type(value).__qualname__) if found == ("is", id(value)) else found


def attributes(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute of each module by its name, as it is and described; all tensors are alike."""
    found = {}
    for prefix, module in model.named_modules():
        for name in vars(module).keys() - (_TORCHS - {"training"}):
            value = vars(module)[name]
            found[f"{prefix}.{name}" if prefix else name] = value, _Kinds().read(value)
    return found


def tensors_of(model: nn.Module) -> list[Tensor | numpy.ndarray[Any, Any]]:
    """The tensors and arrays that modules hold, or containers of theirs: neither parameters nor buffers."""
    held = itertools.chain.from_iterable(_held(module) for module in modules_of(model))
    return [value for value in held if isinstance(value, (Tensor, numpy.ndarray))]


def _held(module: nn.Module) -> list[object]:
    reader = Reader()
    for name in vars(module).keys() - _TORCHS:
        reader.read(vars(module)[name])
    return reader.held


def modules_of(model: nn.Module) -> list[nn.Module]:
    """As ``model.modules()``, in another order and four times as fast."""
    found, seen = [model], {model}
    for module in found:
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


class Frozen:
    """What a program cannot follow once it is compiled: its parameters, which are trained, by which group."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._parameters = list(self._find())
        self._groups = self._owners()

    def check(self) -> None:
        """Refuse, by name, a parameter, a param group or a gradient hook that changed since compilation."""
        if list(self._find()) != self._parameters:
            before = dict(self._parameters)
            for name, parameter in self._model.named_parameters():
                known = before.get(id(parameter))
                if known is None:
                    raise MegacompileError(f"The parameter {name} was assigned after compilation: {_WAY_OUT}")
                if known != parameter.requires_grad:
                    raise MegacompileError(
                        f"requires_grad of {name} was set to {parameter.requires_grad} after compilation: "
                        + _WAY_OUT
                    )
            raise MegacompileError(f"A parameter was moved or removed after compilation: {_WAY_OUT}")
        if self._owners() != self._groups:
            raise MegacompileError(f"The optimizer's param groups changed after compilation: {_WAY_OUT}")
        refuse_gradient_hooks(self._model)

    def _find(self) -> Iterator[tuple[int, bool]]:
        for module in modules_of(self._model):
            for parameter in module._parameters.values():
                if parameter is not None:
                    yield id(parameter), parameter.requires_grad

    def _owners(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Refuse, by name, hooks on gradients, which leave the device block by block and pass none."""
    if global_hooks._global_backward_hooks or global_hooks._global_backward_pre_hooks:
        raise MegacompileError(
            "A backward hook is registered for all modules, which would never run: remove it."
        )
    modules = modules_of(model)
    if not any(module._backward_hooks or module._backward_pre_hooks for module in modules):
        parameters = (p for module in modules for p in module._parameters.values() if p is not None)
        if not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters):
            return
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise MegacompileError(
                f"The parameter {name} has a gradient hook, which would never run: remove it."
            )
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise MegacompileError(
                f"The module {name or type(model).__name__} has a backward hook, which would never "
                "run: remove it."
            )
