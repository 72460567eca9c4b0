"""Plans that were found before: the second run of a script does not search.

In: all that a search depends on. Out: the plan that it found, from a file in the user's cache folder. The
name of the file is a hash of these things and of the code that plans; in it stands a checksum and the plan.
What cannot be read, is damaged or was written by other code is as if it were not there, and a plan that is
read is lowered, measured and proven like any other.
"""

from __future__ import annotations

import functools
import hashlib
from contextlib import suppress
from pathlib import Path

from megacompile import assemble, host, machine, passes, plan, step
from megacompile.assemble.plan import Plan
from megacompile.errors import MegacompileError
from megacompile.user_cache import cache_folder, replace_text

_MOST = 256  # files; the newest stay
_STAGES = (assemble, host, machine, passes, plan, step)  # whose code decides what is found


def place_of(*given: object) -> Path:
    """The file of a search over these things, which are told apart by their ``repr``."""
    key = "\n".join([_code(), *map(repr, given)])
    return cache_folder() / "plans" / f"{_digest(key)}.json"


def read(path: Path) -> Plan | None:
    """The plan in a file, if it is whole."""
    with suppress(OSError, ValueError, MegacompileError):
        digest, _, text = path.read_text().partition("\n")
        if digest == _digest(text):
            return Plan.from_json(text)
    return None


def write(path: Path, found: Plan) -> None:
    """Keep a plan, and the newest files beside it; where the folder cannot be written, nothing happens."""
    text = found.to_json()
    with suppress(OSError):
        replace_text(path, f"{_digest(text)}\n{text}")
        files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-_MOST]:
            file.unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _code() -> str:
    """A hash of the code of these stages: what other code found is not what this would find."""
    folders = [Path(folder) for stage in _STAGES for folder in stage.__path__]
    return _digest("\n".join(file.read_text() for folder in folders for file in sorted(folder.glob("*.py"))))
