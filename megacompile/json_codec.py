"""Frozen dataclasses as strict JSON, and back: exact, checked field by field, nothing executed.

A dataclass becomes an object, or the list of its fields' values; a tuple becomes a list. Reading builds
nothing but what the type hints say; any other text, NaN and infinity included, is a
:class:`MegacompileError` that names the place.

Files that programs write for programs are :func:`sealed` by a digest: checkpoints, schedules, what caches
keep. Files that people edit, plan.json and machine.json, have none: each of their numbers is checked, and a
plan is proven, whoever wrote it.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import math
import types
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megacompile.errors import MegacompileError

_hints = functools.cache(get_type_hints)
LATER = "later"
"""In the metadata of a dataclass's last fields: left out where it and those after it have their defaults, so
that texts, and digests of them, are as before there was such a field."""


@functools.cache
def _names(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass; of another class None."""
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else None


@functools.cache
def _later_fields(kind: type) -> dict[str, Any]:
    """The defaults of the fields of a dataclass that are left out where they have them, by their names."""
    return {f.name: f.default for f in fields(kind) if LATER in f.metadata}


def parse_json(text: str, what: str, *, finite: bool = True) -> Any:
    """The value of a JSON text; ``what`` begins the sentence about one that is none.

    Infinity is taken where numbers need not be ``finite``, NaN nowhere.
    """

    def number(name: str) -> float:
        value = float(name)  # "1e999" is infinite
        return _refuse(what, name) if math.isnan(value) or (finite and math.isinf(value)) else value

    try:
        return json.loads(text, parse_constant=number, parse_float=number)
    except RecursionError as error:
        raise MegacompileError(f"{what} is no JSON that can be read: it is nested too deeply.") from error
    except ValueError as error:  # JSONDecodeError, and numbers of thousands of digits
        if isinstance(error, MegacompileError):
            raise
        raise MegacompileError(f"{what} is no JSON, or was cut off: {error}.") from error


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """Add a digest of all ``fields``, plain JSON values, to them; :func:`unsealed` checks it."""
    return {"digest": _content_digest(fields), **fields}


def unsealed(given: Any, what: str) -> dict[str, Any]:
    """The fields that were sealed; :class:`MegacompileError` where they are not those of the digest."""
    if not isinstance(given, dict) or "digest" not in given:
        raise MegacompileError(f"{what} is damaged: it has no digest.")
    found = {name: value for name, value in given.items() if name != "digest"}
    if given["digest"] != _content_digest(found):
        raise MegacompileError(f"{what} is damaged, or was changed: its digest is that of other content.")
    return found


def _content_digest(content: dict[str, Any]) -> str:
    """SHA-256 of the values, however their text is laid out."""
    text = json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def to_plain(value: Any, named: bool = True) -> Any:
    """Dataclasses, tuples and dicts of numbers and texts as what ``json.dumps`` takes.

    Dataclasses become objects where ``named``, otherwise lists.
    """
    kind: type = type(value)
    names = _names(kind)
    if names is not None:
        later, kept = _later_fields(kind), list(names)
        while kept and kept[-1] in later and getattr(value, kept[-1]) == later[kept[-1]]:
            kept.pop()
        items = {name: to_plain(getattr(value, name), named) for name in kept}
        return items if named else [*items.values()]
    if isinstance(value, (tuple, list)):
        return [to_plain(item, named) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item, named) for key, item in value.items()}
    return value


def from_plain(kind: Any, value: Any, where: str, partial: bool = False) -> Any:
    """An instance of ``kind`` from plain JSON values; the inverse of :func:`to_plain`.

    ``partial`` allows that fields with a default are missing.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _dataclass(kind, value, where, partial)
    if origin is tuple and isinstance(value, list):
        return _tuple(arguments, value, where, partial)
    if origin in (dict, list) and isinstance(value, origin):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        read = {k: from_plain(arguments[-1], v, f"{where}.{k}", partial) for k, v in items}
        return read if origin is dict else [*read.values()]
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (a for a in arguments if a is not type(None))
        return from_plain(inner, value, where, partial)
    if kind is float or kind is int:
        # of 64 bits: a larger one is no count of anything, and a float may not hold it
        if type(value) is int and -(1 << 63) <= value < 1 << 64:
            return value
        if kind is float and type(value) is float and math.isfinite(value):
            return value
    elif type(value) is kind:
        return value
    raise MegacompileError(f"{where} is {_short(value)}, which cannot be.")


def _dataclass(kind: Any, value: Any, where: str, partial: bool) -> Any:
    known = {f.name: f for f in fields(kind)}
    if isinstance(value, list) and len(value) <= len(known):
        value = dict(zip(known, value, strict=False))
    if not isinstance(value, dict):
        raise MegacompileError(f"{where} is {_short(value)} and no {kind.__name__}.")
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f": did you mean {near[0]}?" if near else "."
            raise MegacompileError(f"{where} has a field {_short(name)} that no {kind.__name__} has{hint}")
    missing = [
        n
        for n, f in known.items()
        if n not in value and not (LATER in f.metadata or (partial and _has_default(f)))
    ]
    if missing:
        raise MegacompileError(f"{where} lacks {', '.join(missing[:3])}.")
    hints = _hints(kind)
    return kind(**{n: from_plain(hints[n], item, f"{where}.{n}", partial) for n, item in value.items()})


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _tuple(items: tuple[Any, ...], value: list[Any], where: str, partial: bool) -> tuple[Any, ...]:
    if items[-1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise MegacompileError(f"{where} has {len(value)} items in place of {len(items)}.")
    pairs = enumerate(zip(items, value, strict=True))
    return tuple(from_plain(kind, item, f"{where}[{i}]", partial) for i, (kind, item) in pairs)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _refuse(what: str, name: str) -> Any:
    raise MegacompileError(f"{what} contains {name}, which is no number of bytes or seconds.")
