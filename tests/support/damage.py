"""Files as disks and hands leave them: flipped bytes, lost ends, other numbers, edits with a new digest."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megacompile.json_codec import sealed

_NUMBER = re.compile(rb"(?<![\w.\"])-?\d+(\.\d+)?([eE][-+]?\d+)?(?![\w.\"])")  # none within a text
_OTHERS = (
    b"0", b"1", b"-1", b"7", b"0.5", b"-0.0", b"1e308", b"1e999", b"-1e300", b"NaN", b"-Infinity", b"true",
    b"null", b'"x"', b"[]", b"{}", b"9" * 5000, b"%d" % 10**12, b"%d" % 2**63, b"%d" % 10**300,
)  # fmt: skip


def resealed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the fields of a JSON file that has a digest, as a program would that writes them so."""
    fields = json.loads(path.read_text())
    del fields["digest"]
    change(fields)
    path.write_text(json.dumps(sealed(fields)))


def unsealed(path: Path) -> None:
    """Write a checkpoint's manifest as versions did that had no digest, and no checksums of headers."""
    fields = json.loads(path.read_text())
    del fields["digest"]
    for file in fields["files"].values():
        del file["header"]
    path.write_text(json.dumps(fields | {"version": 1}, indent=1))


def flipped(content: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """``count`` copies with one byte of another value, at places all over."""
    draw = random.Random(seed)
    for _ in range(count):
        place = draw.randrange(len(content))
        yield content[:place] + bytes([content[place] ^ draw.randrange(1, 256)]) + content[place + 1 :]


def truncated(content: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """``count`` beginnings, an empty one and one that lacks a byte among them."""
    draw = random.Random(seed)
    yield from (content[:0], content[:-1])
    yield from (content[: draw.randrange(len(content))] for _ in range(count - 2))


def renumbered(content: bytes, places: int | None = None, seed: int = 0) -> Iterator[bytes]:
    """Copies of a text with one number changed: in each of its digits, and to one that cannot be.

    All numbers, or those at so many ``places``.
    """
    draw = random.Random(seed)
    found = [match.span() for match in _NUMBER.finditer(content)]
    for start, stop in found if places is None else draw.sample(found, min(places, len(found))):
        number = content[start:stop]
        digits = [i for i, character in enumerate(number) if 48 <= character < 58]
        changed = [number[:i] + b"%d" % ((number[i] - 48 + draw.randrange(1, 10)) % 10) + number[i + 1 :]
                   for i in digits]  # fmt: skip
        for other in (*changed, b"-" + number.lstrip(b"-"), draw.choice(_OTHERS)):
            if other != number:
                yield content[:start] + other + content[stop:]
