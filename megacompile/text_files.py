"""Files of text that a user names: their paths and what they say, or one sentence that names them."""

from __future__ import annotations

import os
from pathlib import Path

from megacompile.errors import MegacompileError


def path_of(name: str | os.PathLike[str], what: str = "") -> Path:
    """The path that a user's text names, with ``~`` expanded; ``what`` begins the sentence about one that
    cannot be."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a zero byte, of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        raise MegacompileError(
            f"{what}{' ' if what else ''}{str(name)[:80]!r} is no path: {reason}."
        ) from error
    return path


def read_text(path: Path) -> str:
    """The text of a file in UTF-8; :class:`MegacompileError` names one that cannot be read."""
    try:
        size = path.stat().st_size
        text = path.read_text(encoding="utf-8") if size <= _LONGEST else None
    except (OSError, ValueError) as error:  # UnicodeDecodeError, and a path with a zero byte
        raise MegacompileError(f"{path} cannot be read: {error}.") from error
    if text is None:
        raise MegacompileError(
            f"{path} is too large to be one of megacompile's files: it has {size:,} bytes."
        )
    return text


_LONGEST = 1 << 30  # bytes; the manifest of a checkpoint of 100,000 pieces has 100 MB
