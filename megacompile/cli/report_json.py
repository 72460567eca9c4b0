"""A report as plain JSON values for programs: bytes, seconds, and rates per second."""

from __future__ import annotations

from typing import Any

from megacompile.cli.report_rows import Report, figures


def as_json(report: Report) -> dict[str, Any]:
    """The values that have a key, nested as its dots say."""
    found: dict[str, Any] = {}
    for key, row in figures(report).items():
        *outer, last = key.split(".")
        inside = found
        for name in outer:
            inside = inside.setdefault(name, {})
        (inside[last],) = row.values
    return found
