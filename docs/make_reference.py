"""Write docs/reference.md, the page of the public interface, from the docstrings.

``python docs/make_reference.py``; with ``--check`` it only says whether the page is up to date. What goes in
is what ``megacompile`` exports and what those objects give back; what comes out says nothing of its own.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import megacompile
from megacompile.errors import (
    BudgetExceededError,
    DeviceFullError,
    DeviceLostError,
    DiskError,
    ScheduleError,
    StorageError,
    UntraceableError,
)
from megacompile.report.schedule import Schedule
from megacompile.runtime.memory_report import Memory
from megacompile.runtime.step_output import StepOutput

PAGE = Path(__file__).with_name("reference.md")
FUNCTIONS = (megacompile.compile, megacompile.from_pretrained, megacompile.our_operators)
CLASSES = (megacompile.Program, StepOutput, Memory, Schedule, megacompile.Plan)
ERRORS = (
    megacompile.MegacompileError,
    megacompile.CaptureError,
    UntraceableError,
    megacompile.BudgetError,
    ScheduleError,
    megacompile.ProgramError,
    megacompile.NonFiniteError,
    BudgetExceededError,
    DeviceFullError,
    DeviceLostError,
    DiskError,
    StorageError,
)
FOR_TRAINERS = ("lend", "expect_mixing", "mix", "vacate", "resume", "plan_all", "plans_only")
"""What trainers built on a program call, and a training loop does not need."""
_HEAD = """# Reference

Made from the docstrings by `python docs/make_reference.py`: change those, not this page.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    parts += [function_text(f) for f in FUNCTIONS]
    parts += [class_text(c) for c in CLASSES]
    parts.append(errors_text())
    return "\n".join(parts)


def function_text(function: Any) -> str:
    """A function: its signature, its parameters as a table, the rest of its docstring."""
    intro, rows, rest = sections(inspect.getdoc(function) or "")
    name = f"megacompile.{function.__name__}"
    lines = [f"## `{name}`", "", markdown(intro), ""]
    if rows:
        defaults = inspect.signature(function).parameters
        lines += ["| argument | default | meaning |", "|---|---|---|"]
        lines += [f"| `{n}` | {default(defaults[n])} | {cell(text)} |" for n, text in rows]
        lines.append("")
    if rest:
        lines += [markdown(rest), ""]
    return "\n".join(lines)


def class_text(kind: type) -> str:
    """A class: its docstring, then its public methods, properties and documented fields as a table."""
    lines = [f"## `{kind.__name__}`", "", markdown(inspect.getdoc(kind) or ""), ""]
    if is_dataclass(kind):
        lines += [f"Fields: {', '.join(f'`{f.name}`' for f in fields(kind))}.", ""]
    for tools in (False, True):
        listed = [(n, text) for n, text in members(kind) if (n.partition("(")[0] in FOR_TRAINERS) == tools]
        head = ["For trainers that are built on it:", ""] if tools else []
        rows = [f"| `{name}` | {cell(text)} |" for name, text in listed]
        lines += [*head, "| | |", "|---|---|", *rows, ""] if rows else []
    return "\n".join(lines)


def members(kind: type) -> Iterator[tuple[str, str]]:
    """(how it is written, docstring) of what a class offers, in the order of its source, its own first."""
    seen: set[str] = set()
    for base in kind.__mro__[:-1]:
        for name, member in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
            if isinstance(function, property | cached_property):
                getter = function.fget if isinstance(function, property) else function.func
                text = inspect.getdoc(getter)
                if text:
                    yield name, text
            elif inspect.isfunction(function) and inspect.getdoc(function):
                yield f"{name}({arguments(function)})", inspect.getdoc(function) or ""


def arguments(function: Any) -> str:
    """The names that a call gives, with defaults where there are any."""
    given = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={_literal(p.default)}" for p in given)


def errors_text() -> str:
    """What can be raised, each with its base class."""
    rows = [
        f"| `{e.__name__}` | `{e.__bases__[0].__name__}` | {cell(inspect.getdoc(e) or '')} |" for e in ERRORS
    ]
    return "\n".join(["## Errors", "", "| error | is a | raised where |", "|---|---|---|", *rows, ""])


def sections(doc: str) -> tuple[str, list[tuple[str, str]], str]:
    """(text, (parameter, meaning) pairs, text after them) of a docstring with a Parameters section."""
    match = re.search(r"^Parameters\n-+\n((?:.+\n?)+)", doc, re.M)
    if not match:
        return doc, [], ""
    rows = re.findall(r"^(\w+): (.*(?:\n    .*)*)", match[1], re.M)
    return doc[: match.start()].strip(), rows, doc[match.end() :].strip()


def default(parameter: inspect.Parameter) -> str:
    """A parameter's default as the page shows it."""
    return "" if parameter.default is parameter.empty else f"`{_literal(parameter.default)}`"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def cell(text: str) -> str:
    """A docstring as one cell of a table."""
    return markdown(" ".join(text.split())).replace("|", "\\|")


def markdown(text: str) -> str:
    """reStructuredText's marks of names as Markdown's."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page is not up to date")
    if parser.parse_args().check:
        return int(not PAGE.exists() or PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
