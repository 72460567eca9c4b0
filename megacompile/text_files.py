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


def read_text(path: Path, most: int = 1 << 28) -> str:
    """The text of a file in UTF-8, of ``most`` bytes."""
    try:
        if path.stat().st_size > most:
            raise MegacompileError(f"{path} cannot be read: it is larger than {most >> 20} MiB.")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise MegacompileError(f"{path} cannot be read: {error}.") from error
