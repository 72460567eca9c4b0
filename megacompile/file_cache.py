"""Keep what was found for the next run: files in the user's cache folder, under a hash of all they depend on.

In: what is found, as plain JSON values, and everything that decides it, with the code that finds it. Out: the
same values, sealed by a digest, in this run and in later ones. What cannot be read, is damaged or was written
by other code is as if it were not there.
"""

from __future__ import annotations

import functools
import hashlib
import json
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from megacompile.cache_dir import cache_folder
from megacompile.errors import MegacompileError
from megacompile.json_codec import parse_json, sealed, unsealed
from megacompile.own_files import replace_text
from megacompile.text_files import read_text


def cached_file(folder: str, code: str, *given: object) -> Path:
    """The file in a cache's ``folder`` for what ``code`` (:func:`code_digest`) finds of these things, which
    are told apart by their ``repr``."""
    key = "\n".join([code, *map(repr, given)])
    return cache_folder() / folder / f"{_text_digest(key)}.json"


def read_cached(path: Path) -> dict[str, Any] | None:
    """The values in a file, if it is whole."""
    with suppress(MegacompileError):
        return unsealed(parse_json(read_text(path), str(path)), str(path))
    return None


def write_cached(path: Path, values: dict[str, Any], most: int) -> None:
    """Keep these values, and the newest ``most`` files of the folder; where it cannot be written, nothing
    happens."""
    with suppress(OSError):
        replace_text(path, json.dumps(sealed(values)))
        files = list(path.parent.glob("*.json"))
        if len(files) > most:
            for file in sorted(files, key=lambda file: file.stat().st_mtime)[:-most]:
                file.unlink(missing_ok=True)


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def code_digest(*packages: ModuleType) -> str:
    """A hash of the code of these packages: what other code found is not what this would find."""
    folders = [Path(folder) for package in packages for folder in package.__path__]
    return _text_digest(
        "\n".join(file.read_text() for folder in folders for file in sorted(folder.glob("*.py")))
    )
