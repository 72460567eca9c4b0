"""Keep plans that were found: the second run of a script does not search.

In: all that a search depends on. Out: the plan that it found, from a file in the user's cache folder. The
name of the file is a hash of these things and of the code that plans; the plan in it is sealed.
What cannot be read, is damaged or was written by other code is as if it were not there, and a plan that is
read is lowered, measured and proven like any other.
"""

from __future__ import annotations

import functools
import hashlib
import json
from contextlib import suppress
from pathlib import Path

from megacompile import blocks, hardware, passes, planner, schedule, state
from megacompile.cache_dir import cache_folder
from megacompile.errors import MegacompileError
from megacompile.json_codec import from_plain, parse_json, sealed, unsealed
from megacompile.own_files import replace_text
from megacompile.schedule.plan import Plan
from megacompile.text_files import read_text

_MOST = 256  # files; the newest stay
_STAGES = (blocks, hardware, passes, planner, schedule, state)  # whose code decides what is found


def place_of(*given: object) -> Path:
    """The file of a search over these things, which are told apart by their ``repr``."""
    key = "\n".join([_code(), *map(repr, given)])
    return cache_folder() / "plans" / f"{_text_digest(key)}.json"


def read(path: Path) -> Plan | None:
    """The plan in a file, if it is whole."""
    with suppress(MegacompileError):
        found = unsealed(parse_json(read_text(path), str(path)), str(path))
        return Plan.from_json(from_plain(str, found.get("plan"), str(path)), str(path))
    return None


def write(path: Path, found: Plan) -> None:
    """Keep a plan, and the newest files beside it; where the folder cannot be written, nothing happens."""
    with suppress(OSError):
        replace_text(path, json.dumps(sealed({"plan": found.to_json()})))
        files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-_MOST]:
            file.unlink(missing_ok=True)


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _code() -> str:
    """A hash of the code of these stages: what other code found is not what this would find."""
    folders = [Path(folder) for stage in _STAGES for folder in stage.__path__]
    return _text_digest(
        "\n".join(file.read_text() for folder in folders for file in sorted(folder.glob("*.py")))
    )
