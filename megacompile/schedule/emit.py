"""Emit: the scheduled step as Python source that a person can read, equal layers as loops."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megacompile.printable import printable
from megacompile.schedule.op_table import SPECS, Buffer, Ring, Shard, Token
from megacompile.schedule.step import Event, Op, Step
from megacompile.schedule.workload import Workload

# ------------------------------------------------------------------------------------------------------------
# Loops: statements that repeat with numbers moving evenly, as they do over equal layers, as a ``for``.


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
    moves = [_move(a, b) for a, b in zip(statements, statements[period:], strict=False)]
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


def _move(first: Statement, second: Statement) -> tuple[int, ...] | None:
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


# ------------------------------------------------------------------------------------------------------------
# Emit: the scheduled step as Python source that a person can read.
#
# One statement per operation, in program order, as calls on a runtime ``rt``. Runs of statements that repeat
# with indices moving evenly, as they do over equal layers, are printed as a loop.


def emit_step(step: Step, work: Workload, *, title: str) -> str:
    """Source of ``def step(rt)`` for one program; no name in it can end the text that it stands in."""
    prefetches = [op for op in step.ops if op.kind == "prefetch"]
    lines = [
        *_wrapped(f'"""{printable(title)}'),
        "",
        "Streams run in order: compute is this thread, h2d and d2h copy, host updates masters.",
        *(["nvme_read and nvme_write fill and empty a window of host buffers."] if step.window else []),
        *_exchanges(work),
        "An operation starts when the named events before it (after=) are over.",
        "",
        *_legend(work),
        '"""',
        "",
    ]
    if prefetches:
        offsets = ", ".join(_repeats([op.offset for op in prefetches]))
        lines += ["# Byte offset in the weight slab of each prefetch, in order of issue.",
                  *_wrapped(f"OFFSETS = ({offsets},)"), "", ""]  # fmt: skip
    lines += ["def step(rt):", *_body(step)]
    return "\n".join(lines) + "\n"


def _legend(work: Workload) -> list[str]:
    lines = ["blocks:"]
    lines += [f"    {text}" for text in fold([printable(b.name) for b in work.blocks])]
    lines += ["weight groups:"]
    sizes = [f"{printable(g.name)}  {g.nbytes / 1e6:.2f} MB" for g in work.groups]
    lines += [f"    {text}" for text in fold(sizes)]
    return lines


def fold(names: Sequence[str]) -> list[str]:
    """One line per run of names that differ in evenly counted numbers: ``1-8  layers.0-7``."""
    lines = []
    start = 0
    while start < len(names):
        end = start + 1
        while end < len(names) and _alike(names[start], names[end], end - start):
            end += 1
        if end - start == 1:
            lines.append(f"{start}  {names[start]}")
        else:
            lines.append(f"{start}-{end - 1}  {_span(names[start], names[end - 1])}")
        start = end
    return lines


def _alike(first: str, other: str, distance: int) -> bool:
    a, b = re.split(r"(\d+)", first), re.split(r"(\d+)", other)
    if len(a) != len(b) or a[::2] != b[::2]:
        return False
    moved = [(int(x), int(y)) for x, y in zip(a[1::2], b[1::2], strict=True) if x != y]
    return len(moved) == 1 and moved[0][1] - moved[0][0] == distance


def _span(first: str, last: str) -> str:
    a, b = re.split(r"(\d+)", first), re.split(r"(\d+)", last)
    return "".join(x if x == y else f"{x}-{y}" for x, y in zip(a, b, strict=True))


def _repeats(numbers: Sequence[int], longest: int = 16) -> list[str]:
    """Items of a tuple display; what repeats is written once: ``*(0, 512) * 40``."""
    items, start = [], 0
    while start < len(numbers):
        best = (1, 1)
        for period in range(1, min(longest, (len(numbers) - start) // 2) + 1):
            count, body = 1, numbers[start : start + period]
            while numbers[start + count * period : start + (count + 1) * period] == body:
                count += 1
            if period * (count - 1) > max(2, best[0] * (best[1] - 1)):
                best = (period, count)
        period, count = best
        body = numbers[start : start + period]
        ending = "," if period == 1 else ""
        items.append(f"*({', '.join(map(str, body))}{ending}) * {count}" if count > 1 else str(body[0]))
        start += period * count
    return items


def _wrapped(text: str, width: int = 100) -> list[str]:
    lines, line = [], ""
    for word in text.split(" "):
        if line and len(line) + len(word) + 1 > width:
            lines.append(line)
            line = "   "
        line = f"{line} {word}" if line else word
    return [*lines, line]


# ---- statements ---------------------------------------------------------------------------------


def _statements(step: Step) -> list[Statement]:
    statements = []
    prefetches = 0
    pushes: dict[int, int] = {}
    fills: dict[
        tuple[str, int, int], int
    ] = {}  # number of the latest that a group or block's offloaded activations had
    counts = {"window": 0, "staged": 0, "spill": 0}
    reduces = 0
    for op in step.ops:
        if any(isinstance(t, Ring) for t in op.writes):
            pushes.setdefault(op.group, len(pushes))
        reduces += op.kind == "reduce"
        number, buffer = 0, op.buffer
        if buffer is not None:
            owner = (buffer.tag, *((op.group, 0) if op.group >= 0 else (op.block, op.micro)))
            if buffer in op.writes and op.kind not in ("momentum", "adam"):
                fills[owner] = counts[buffer.tag]
                counts[buffer.tag] += 1
            number = fills.get(owner, 0)
        turns: Turns = {
            "ring": (pushes.get(op.group, 0), len(step.ring)),
            "shard": (reduces - 1, len(step.shards)),
            **dict.fromkeys(counts, (number, step.window)),
        }
        text = statement(op, prefetches, turns)
        prefetches += op.kind == "prefetch"
        statements.append(read_statement(text))
    return statements


def _exchanges(work: Workload) -> list[str]:
    """Whom the stream of collectives meets; nobody where there is one rank."""
    if work.ranks == 1:
        return []
    lines = [f"comm exchanges with the other {work.ranks - 1} of {work.ranks} ranks."]
    if work.replicas > 1:
        lines.append(f"There are {work.replicas} replicas of such ranks, whose sums it adds up.")
    return lines


def _body(step: Step) -> list[str]:
    statements, lines = _statements(step), []
    for start, period, count in find_loops(statements):
        body = statements[start : start + period]
        if count == 1:
            lines += [f"    {s.text([str(n) for n in s.numbers])}" for s in body]
        else:
            lines += loop_lines(body, statements[start + period : start + 2 * period], count)
    return lines or ["    pass"]


def line_of_each(step: Step) -> list[tuple[int, int | None]]:
    """Return for each operation the line of the emitted function's body, from 0, and the loop variable
    there."""
    statements, line = _statements(step), 0
    places: list[tuple[int, int | None]] = []
    for start, period, count in find_loops(statements):
        body, following = (statements[start + i * period : start + (i + 1) * period] for i in (0, 1))
        if count == 1:
            places += [(line + j, None) for j in range(period)]
        else:
            origin, stride = loop_variable(body, following)
            places += [(line + 1 + j, origin + n * stride) for n in range(count) for j in range(period)]
        line += period + (count > 1)
    return places


Turns = Mapping[str, tuple[int, int]]
"""By tag of buffers that are filled in turn: the number of what one holds, and how many there are."""


def statement(op: Op, prefetch: int = 0, turns: Turns | None = None) -> str:
    """The call on the runtime that runs one operation; ``prefetch`` counts earlier prefetches."""
    given, turns = SPECS[op.kind].arguments.split(), turns or {}
    arguments = [_argument(op, text, prefetch, turns) for text in given]
    if op.buffer is not None:
        arguments.append(f"slot={_slot(op.buffer, turns)}")
    if op.waits:
        arguments.append(f"after={_tokens(op.waits)}")
    if op.frees and not any(text.endswith("frees") for text in given):
        arguments.append(f"free={_tokens(op.frees)}")
    return f"rt.{op.kind}({', '.join(arguments)})"


def _argument(op: Op, text: str, prefetch: int, turns: Turns) -> str:
    """One of the arguments that :data:`SPECS` names, as source."""
    name, _, what = text.rpartition("=")
    match what:
        case "offset":
            return f"offset=OFFSETS[{prefetch}]"
        case "policy":
            return f'{name}="{op.policy}"'
        case "read" | "write":
            return f"{name}={_home((op.reads if what == 'read' else op.writes)[0], turns)}"
        case "reads" | "writes" | "frees":
            return f"{name}={_tokens(getattr(op, what))}".removeprefix("=")
        case _:
            return f"{what}={getattr(op, what)}"


def _home(token: Token, turns: Turns) -> str:
    """Return where a gradient lands: a group's own buffer, or the next one of a ring."""
    return f'("{token.tag}", {_slot(token, turns)})' if isinstance(token, Ring | Shard) else _token(token)


def _slot(buffer: Ring | Shard | Buffer, turns: Turns) -> str:
    """The number of a buffer; buffers are filled in turn."""
    if buffer.tag not in turns:
        return str(buffer.slot)
    number, buffers = turns[buffer.tag]
    assert buffer.slot == number % buffers
    return f"({number}) % {buffers}"


def _token(token: Token | Event) -> str:
    return "(" + ", ".join([f'"{token[0]}"', *map(str, token[1:])]) + ("," if len(token) == 1 else "") + ")"


def _tokens(tokens: Sequence[Token | Event]) -> str:
    return "[" + ", ".join(map(_token, tokens)) + "]"
