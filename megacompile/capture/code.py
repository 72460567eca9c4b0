"""What Python functions read from outside: global data, as the paths to it that their bytecode names.

``CONFIG.scale`` reads one attribute of a global, ``TABLE["a"]`` one entry, ``f(TABLE)`` the whole of it.
Code of libraries is taken to compute the same whenever it is called.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_LIBRARIES = {"torch", "numpy", "transformers", "megacompile"} | sys.stdlib_module_names
_BESIDE = {"COPY", "PUSH_NULL", "PRECALL"}  # stand between the steps of a path
_ABSENT = object()
_SITE = sysconfig.get_paths()
_CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType)

Step = tuple[bool, Any]
"""An attribute's name, or (where the first is true) a key."""


@dataclass(frozen=True)
class Reads:
    """The paths that a function reads, each from a global name on, and all names in its code."""

    paths: tuple[tuple[str, tuple[Step, ...]], ...]
    names: frozenset[str]


_reads: weakref.WeakKeyDictionary[types.FunctionType, Reads] = weakref.WeakKeyDictionary()


def reads(function: types.FunctionType) -> Reads:
    """What a function's code reads, and the code of functions inside it."""
    found = _reads.get(function)
    if found is None:
        codes = [function.__code__]
        for code in codes:
            codes += (const for const in code.co_consts if isinstance(const, types.CodeType))
        paths = dict.fromkeys(path for code in codes for path in _paths(code))
        names = frozenset(name for code in codes for name in code.co_names)
        found = _reads[function] = Reads(tuple(paths), names)
    return found


def _paths(code: types.CodeType) -> Iterator[tuple[str, tuple[Step, ...]]]:
    body = [i for i in dis.get_instructions(code) if i.opname not in _BESIDE]
    for start, instruction in enumerate(body):
        if instruction.opname != "LOAD_GLOBAL":
            continue
        steps, at = [], start + 1
        while at + 1 < len(body):
            if body[at].opname in ("LOAD_ATTR", "LOAD_METHOD"):
                steps.append((False, body[at].argval))
            elif _is_item(body[at], body[at + 1], "BINARY_SUBSCR"):
                steps.append((True, body[at].argval))
                at += 1
            else:
                break
            at += 1
        writes = at + 1 < len(body) and _is_item(body[at], body[at + 1], "STORE_SUBSCR")
        if not writes and body[at].opname != "STORE_ATTR":
            yield instruction.argval, tuple(steps)


def _is_item(key: dis.Instruction, access: dis.Instruction, name: str) -> bool:
    """Whether two instructions read (or write) an entry under a constant key."""
    subscript = access.opname == name or (name == "BINARY_SUBSCR" and access.argrepr == "[]")  # since 3.14
    constant = key.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and isinstance(key.argval, (str, int))
    return subscript and constant


def global_data(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads through its globals, named as its code does; no modules, nothing of torch."""
    for name, steps in reads(function).paths:
        value = function.__globals__.get(name, _ABSENT)
        label = name
        for is_item, key in steps:
            inner = _inside(value, is_item, key)
            if inner is value:
                break
            value, label = inner, f"{label}[{key!r}]" if is_item else f"{label}.{key}"
        if value is os.getenv:
            yield "os.environ", os.environ
        elif value is not _ABSENT and not isinstance(value, (types.ModuleType, nn.Module)):
            yield label, value


def _inside(value: Any, is_item: bool, key: Any) -> Any:
    """An entry or attribute that can be found without running code; else the value itself, or nothing."""
    if is_item:
        if isinstance(value, dict):
            return dict.get(value, key, _ABSENT)
        return value[key] if type(value) in (list, tuple) and -len(value) <= key < len(value) else value
    if isinstance(value, types.ModuleType):
        torchs = value.__name__.partition(".")[0] == "torch"
        return _ABSENT if torchs else vars(value).get(key, _ABSENT)
    if isinstance(value, type):
        return _of_class(value, key, _ABSENT)
    if isinstance(value, (nn.Module, torch.Tensor, *_CALLED)):
        return value
    mine = getattr(value, "__dict__", {}).get(key, _ABSENT)
    if mine is not _ABSENT:
        return mine
    method = isinstance(_of_class(type(value), key, None), _CALLED)
    return _ABSENT if method and not isinstance(value, Collection) and is_library(type(value)) else value


def _of_class(kind: type, name: str, default: Any) -> Any:
    for base in kind.__mro__:
        if name in vars(base):
            found = vars(base)[name]
            return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    return default


def is_library(owner: type | types.FunctionType) -> bool:
    """Whether a class or a function is of Python, torch, or any other installed package."""
    module = owner.__module__ if isinstance(owner, type) else owner.__globals__.get("__name__")
    return _is_installed(str(module).partition(".")[0])


@functools.cache
def _is_installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in _LIBRARIES or file.startswith((_SITE["purelib"], _SITE["platlib"]))
