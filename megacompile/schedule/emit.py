"""Emit: the scheduled step as Python source that a person can read.

One statement per operation, in program order, as calls on a runtime ``rt``. Runs of statements that repeat
with indices moving evenly, as they do over equal layers, are printed as a loop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megacompile.printable import printable
from megacompile.schedule.emit_loops import Statement, find_loops, loop_lines, loop_variable, read_statement
from megacompile.schedule.op_table import SPECS, Buffer, Ring, Shard, Token
from megacompile.schedule.step import Event, Op, Step
from megacompile.schedule.workload import Workload


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
        while end < len(names) and _counted_evenly(names[start], names[end], end - start):
            end += 1
        if end - start == 1:
            lines.append(f"{start}  {names[start]}")
        else:
            lines.append(f"{start}-{end - 1}  {_name_range(names[start], names[end - 1])}")
        start = end
    return lines


def _counted_evenly(first: str, other: str, distance: int) -> bool:
    a, b = re.split(r"(\d+)", first), re.split(r"(\d+)", other)
    if len(a) != len(b) or a[::2] != b[::2]:
        return False
    moved = [(int(x), int(y)) for x, y in zip(a[1::2], b[1::2], strict=True) if x != y]
    return len(moved) == 1 and moved[0][1] - moved[0][0] == distance


def _name_range(first: str, last: str) -> str:
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
        arguments.append(f"after={_token_list(op.waits)}")
    if op.frees and not any(text.endswith("frees") for text in given):
        arguments.append(f"free={_token_list(op.frees)}")
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
            return f"{name}={_token_list(getattr(op, what))}".removeprefix("=")
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


def _token_list(tokens: Sequence[Token | Event]) -> str:
    return "[" + ", ".join(map(_token, tokens)) + "]"
