"""Rows of a report: labels, values, units and explanations, which text, JSON, a table and a picture show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megacompile.units import format_bytes, format_hours, format_seconds

Unit = Literal[
    "text", "bytes", "bytes if any", "seconds", "hours", "money", "count", "FLOP/s", "share", "change"
]
_NONE = "–"
_UNITS: dict[Unit, Callable[[Any], str]] = {
    "text": str,
    "bytes": format_bytes,
    "bytes if any": lambda nbytes: format_bytes(nbytes) if nbytes else _NONE,
    "seconds": format_seconds,
    "hours": format_hours,
    "money": "{:,.2f}".format,
    "count": "{:,.0f}".format,
    "FLOP/s": lambda rate: f"{rate / 1e12:.1f}",  # in TFLOP/s
    "share": "{:.1%}".format,
    "change": "{:+.0%}".format,
}


@dataclass(frozen=True)
class Row:
    """Values of one unit under a label.

    ``values``: one for each column of the section, None where there is none. ``keys``: the place of each in
    JSON, names with dots between them, "" for none; () where no value has one. ``text``: a sentence with a
    ``{}`` for each value; "": they stand in columns. ``notes``: paragraphs that explain them. Under the label
    "" the sentence stands alone; a row whose label is None is for programs alone.
    """

    label: str | None
    values: tuple[Any, ...] = ()
    unit: Unit = "text"
    keys: tuple[str, ...] = ()
    text: str = ""
    notes: tuple[str, ...] = ()

    def texts(self) -> list[str]:
        """The values in their unit."""
        return [_NONE if value is None else _UNITS[self.unit](value) for value in self.values]


@dataclass(frozen=True)
class Section:
    """Rows under a title, "" for one that text leaves out.

    For text: ``width`` is that of labels, ``cells`` are format specifications of columns, ``indent`` is how
    far in notes begin, ``wrap`` where they break.
    """

    title: str
    rows: tuple[Row, ...] = ()
    width: int = 0
    cells: tuple[str, ...] = ()
    indent: int = 4
    wrap: int = 98


Report = tuple[Section, ...]


def told(key: str, value: object) -> Row:
    """A row for programs alone."""
    return Row(None, (value,), keys=(key,))


def figures(report: Report) -> dict[str, Row]:
    """Each value that has a key, under it, in a row of its own."""
    return {
        key: Row(row.label, (value,), row.unit, (key,))
        for section in report
        for row in section.rows
        for key, value in zip(row.keys, row.values, strict=False)
        if key
    }
