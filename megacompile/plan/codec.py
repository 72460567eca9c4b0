"""Frozen dataclasses as strict JSON, and back: exact, checked field by field, nothing executed.

A dataclass becomes an object, a tuple a list. Reading builds nothing but what the type hints say; any
other text, NaN and infinity included, is a :class:`MegacompileError` that names the place.
"""

from __future__ import annotations

import functools
import json
import math
import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megacompile.errors import MegacompileError

_hints = functools.cache(get_type_hints)


def parse_json(text: str, what: str) -> Any:
    """The value of a JSON text; ``what`` begins the sentence about one that is none."""
    try:
        return json.loads(text, parse_constant=lambda name: _refuse(what, name))
    except RecursionError as error:
        raise MegacompileError(f"{what} is nested too deeply to be what it should be.") from error
    except ValueError as error:  # JSONDecodeError, and numbers of thousands of digits
        if isinstance(error, MegacompileError):
            raise
        raise MegacompileError(f"{what} is no JSON, or was cut off: {error}.") from error


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and dicts of numbers and texts as what ``json.dumps`` takes."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def from_plain(kind: Any, value: Any, where: str) -> Any:
    """An instance of ``kind`` from plain JSON values; the inverse of :func:`to_plain`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin is tuple:
        return _tuple(arguments, value, where)
    if origin is dict:
        if isinstance(value, dict):
            return {k: from_plain(arguments[1], v, f"{where}.{k}") for k, v in value.items()}
    elif origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
    elif origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (a for a in arguments if a is not type(None))
        return from_plain(inner, value, where)
    elif kind is float:
        if type(value) in (int, float) and math.isfinite(value):
            return value
    elif type(value) is kind:
        return value
    raise MegacompileError(f"{where} is {_short(value)}, which cannot be.")


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    names = {f.name for f in fields(kind)}
    if not isinstance(value, dict) or set(value) != names:
        wrong = sorted(set(value) ^ names)[:3] if isinstance(value, dict) else [_short(value)]
        raise MegacompileError(f"{where} is no {kind.__name__}: it differs at {', '.join(wrong)}.")
    hints = _hints(kind)
    return kind(**{name: from_plain(hints[name], value[name], f"{where}.{name}") for name in value})


def _tuple(items: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise MegacompileError(f"{where} is {_short(value)}, which cannot be.")
    if items[-1] is Ellipsis:
        return tuple(from_plain(items[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(items) != len(value):
        raise MegacompileError(f"{where} has {len(value)} items in place of {len(items)}.")
    pairs = zip(items, value, strict=True)
    return tuple(from_plain(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(pairs))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _refuse(what: str, name: str) -> Any:
    raise MegacompileError(f"{what} contains {name}, which is no number of bytes or seconds.")
