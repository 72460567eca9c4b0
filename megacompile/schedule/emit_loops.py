"""Find statements that repeat with numbers moving evenly, as they do over equal layers: one ``for`` prints
them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_INTEGER = re.compile(r"(?<![A-Za-z_0-9.])-?\d+")
_LONGEST_BODY = 64
_HOLE = "\0"


@dataclass(frozen=True, slots=True)
class Statement:
    """A line of code with its numbers taken out."""

    shape: str
    numbers: tuple[int, ...]

    def text(self, expressions: Sequence[str]) -> str:
        """The line with other expressions in their place."""
        parts = self.shape.split(_HOLE)
        text = "".join(a + b for a, b in zip(parts, (*expressions, ""), strict=True))
        return re.sub(r"\((\w+)\) %", r"\1 %", text)  # parentheses around a single term


def read_statement(text: str) -> Statement:
    """A line of code as its shape and its numbers."""
    return Statement(_INTEGER.sub(_HOLE, text), tuple(int(n) for n in _INTEGER.findall(text)))


def find_loops(statements: list[Statement]) -> list[tuple[int, int, int]]:
    """(start, body length, repetitions), covering all statements in the fewest lines."""
    count = len(statements)
    periods = range(1, min(_LONGEST_BODY, count // 2) + 1)
    repetitions = {period: _repetitions(statements, period) for period in periods}
    lines = [0] * (count + 1)  # that print the statements from here on
    choice = [(1, 1)] * count
    for start in reversed(range(count)):
        lines[start] = 1 + lines[start + 1]
        for period in periods:
            most = repetitions[period][start] if start + 2 * period <= count else 1
            for times in (most, most - 1):
                printed = 1 + period + lines[start + period * times] if times > 1 else count
                if printed < lines[start]:
                    lines[start], choice[start] = printed, (period, times)
    found, start = [], 0
    while start < count:
        found.append((start, *choice[start]))
        start += choice[start][0] * choice[start][1]
    return found


def _repetitions(statements: list[Statement], period: int) -> list[int]:
    """Return how often the ``period`` statements from each position on follow each other.

    All numbers must move evenly. Any two numbers do, so two repetitions alone count only if none
    moves by more than one.
    """
    moves = [_number_moves(a, b) for a, b in zip(statements, statements[period:], strict=False)]
    counts = [1] * len(moves)
    alike = close = even = 0  # how many moves from here on exist, are small, equal the next body's
    for start in reversed(range(len(moves))):
        move = moves[start]
        alike = alike + 1 if move is not None else 0
        close = close + 1 if move is not None and all(-1 <= m <= 1 for m in move) else 0
        following = moves[start + period] if start + period < len(moves) else None
        even = even + 1 if move is not None and move == following else 0
        if alike >= period:
            times = 2 + even // period
            counts[start] = times if times > 2 or close >= period else 1
    return counts


def _number_moves(first: Statement, second: Statement) -> tuple[int, ...] | None:
    if first.shape != second.shape:
        return None
    return tuple(b - a for a, b in zip(first.numbers, second.numbers, strict=True))


def loop_lines(body: list[Statement], following: list[Statement], count: int) -> list[str]:
    origin, stride = loop_variable(body, following)
    stop = origin + count * stride
    steps = f"{origin}, {stop}" if stride == 1 else f"{origin}, {stop}, {stride}"
    lines = [f"    for i in range({steps}):"]
    for s, t in zip(body, following, strict=True):
        expressions = [
            _expression(a, (b - a) * stride, origin) for a, b in zip(s.numbers, t.numbers, strict=True)
        ]
        lines.append(f"        {s.text(expressions)}")
    return lines


def loop_variable(body: list[Statement], following: list[Statement]) -> tuple[int, int]:
    """(first value, step) of a loop's variable: the first number that moves by one."""
    moves = [
        (a, b - a)
        for s, t in zip(body, following, strict=True)
        for a, b in zip(s.numbers, t.numbers, strict=True)
    ]
    return next(((a, d) for a, d in moves if abs(d) == 1), (0, 1))


def _expression(value: int, slope: int, origin: int) -> str:
    """``value + slope * (i - origin)`` in its shortest form."""
    if slope == 0:
        return str(value)
    constant = value - slope * origin
    term = {1: "i", -1: "-i"}.get(slope, f"{slope} * i")
    if slope == -1 and constant > 0:
        return f"{constant} - i"
    if constant == 0:
        return term
    return f"{term} {'+' if constant > 0 else '-'} {abs(constant)}"
