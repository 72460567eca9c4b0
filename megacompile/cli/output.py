"""What several commands write: JSON, and folders that a user names."""

from __future__ import annotations

import json
from pathlib import Path

from megacompile.errors import MegacompileError
from megacompile.text_files import path_of


def write_json(value: object) -> None:
    """Print strict JSON."""
    print(json.dumps(value, indent=1, allow_nan=False))


def folder_of(text: str, what: str = "--dump") -> Path:
    """A directory that can be written to; made where it is missing."""
    path = path_of(text, what)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MegacompileError(f"{what} {text}: {error.strerror or error}.") from error
    return path
