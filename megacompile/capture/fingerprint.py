"""Fingerprints of a model: what a captured graph takes for granted of it, and what must not change."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import marshal
import re
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as global_hooks

from megacompile.capture.module_wrappers import uncompiled
from megacompile.capture.quantized_weights import coding_of, mark, settle, stored_shape
from megacompile.errors import MegacompileError

# ------------------------------------------------------------------------------------------------------------
# Values described by plain ones, so that two descriptions are equal only if the values are.
#
# Numbers, strings, containers and objects that hold nothing but data (a config) are described by what they
# hold; tensors, functions and everything else by identity.


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


# ------------------------------------------------------------------------------------------------------------
# What a captured graph takes for granted of a model besides its tensors' values, cheap to look at.
#
# In: a model. Out: :class:`ModelSettings`, which are equal only if a capture would give the same graph. What
# Python code reads outside the modules (globals, closures, classes) is not looked at.


_TORCHS = frozenset(vars(nn.Module()))  # what every module has
_EXACT = 2  # a version of marshal whose bytes depend on types and values alone, not on who shares an object


@dataclass(frozen=True)
class ModelSettings:
    """The settings of a model; ``held`` keeps alive what ``values`` tells apart by identity."""

    values: bytes
    held: tuple[object, ...] = field(compare=False, repr=False)


def model_settings(model: nn.Module, *, evaluate: bool, function: Any = None) -> ModelSettings:
    """Types, modes, attributes, forward hooks and buffers of all modules, and of the user's ``function`` of
    what the forward returns.

    Equal ones mean equal values: 1, 1.0 and True differ. In eval mode nothing depends on ``training``.
    """
    reader = Reader()
    found: list[Any] = [reader.read(function)]
    own = modules_of(function) if isinstance(function, nn.Module) else []
    for module in modules_of(model) + own:
        values = vars(module)
        found.append(id(type(module)))
        reader.held.append(type(module))
        if not evaluate:
            found.append(module.training)
        for name in values.keys() - _TORCHS:
            value = values[name]
            found += (name, value if type(value) in PLAIN else reader.read(value))
        if module._buffers:
            found += map(id, module._buffers.values())
            reader.held += module._buffers.values()
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            if hooks:
                found += _others(reader, hooks)
    for hooks in (global_hooks._global_forward_pre_hooks, global_hooks._global_forward_hooks):
        found += _others(reader, hooks)
    return ModelSettings(marshal.dumps(found, _EXACT), tuple(reader.held))


def _others(reader: Reader, hooks: dict[int, Any]) -> Iterator[Any]:
    """Hooks but for those of a program that owns the model, which are no part of it."""
    hooks_of_others = (
        h for h in hooks.values() if not getattr(h, "__module__", "").startswith("megacompile.")
    )
    return map(reader.read, hooks_of_others)


def attributes(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each attribute of each module by its name, as it is and described; all tensors are alike."""
    found = {}
    for prefix, module in model.named_modules():
        for name in vars(module).keys() - (_TORCHS - {"training"}):
            value = vars(module)[name]
            found[f"{prefix}.{name}" if prefix else name] = value, Contents().read(value)
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


# ------------------------------------------------------------------------------------------------------------
# What no program follows once it is compiled, refused by name: parameters, param groups, gradient hooks.


_WAY_OUT = "undo that, or call program.sync_to(model) and compile the model, or make its trainer, again."


class Frozen:
    """The facts that a program cannot follow once it is compiled: its parameters, which are trained, by which
    group."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._parameters = list(self._find())
        self._groups = self._owners()

    def check(self, *, trains: bool) -> None:
        """Refuse, by name, a parameter that changed since compilation, and for a step that ``trains`` a param
        group or a gradient hook."""
        now = list(self._find())
        if now != self._parameters and (trains or [p for p, _ in now] != [p for p, _ in self._parameters]):
            before = dict(self._parameters)
            for name, parameter in self._model.named_parameters():
                known = before.get(id(parameter))
                if known is None:
                    raise MegacompileError(f"The parameter {name} was assigned after compilation: {_WAY_OUT}")
                if trains and known != parameter.requires_grad:
                    raise MegacompileError(
                        f"requires_grad of {name} was set to {parameter.requires_grad} after compilation: "
                        + _WAY_OUT
                    )
            raise MegacompileError(f"A parameter was moved or removed after compilation: {_WAY_OUT}")
        if not trains:
            return
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
    for module in modules_of(model):
        if module._backward_hooks or module._backward_pre_hooks:
            raise _hooked("module", "backward", module, model.named_modules())
        for p in module._parameters.values():
            if p is not None and (p._backward_hooks or p._post_accumulate_grad_hooks):
                raise _hooked("parameter", "gradient", p, model.named_parameters())


def _hooked(kind: str, hook: str, held: object, named: Iterable[tuple[str, object]]) -> MegacompileError:
    name = next(name for name, other in named if other is held) or type(held).__name__
    return MegacompileError(f"The {kind} {name} has a {hook} hook, which would never run: remove it.")


# ------------------------------------------------------------------------------------------------------------
# How a model's parameters compute, and a copy of the model that traces so without touching a weight.


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


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a dense copy of a parameter that keeps the order of its dimensions."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    return tuple(torch.empty_like(meta).stride())
