"""Keep plans that were found: the second run of a script does not search.

In: all that a search depends on. Out: the plan that it found. A plan that is read is lowered, measured and
proven like any other.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from megacompile import blocks, hardware, passes, planner, schedule, state
from megacompile.errors import MegacompileError
from megacompile.file_cache import cached_file, code_digest, read_cached, write_cached
from megacompile.json_codec import from_plain
from megacompile.schedule.plan import Plan

_MOST = 256  # files; the newest stay
_STAGES = (blocks, hardware, passes, planner, schedule, state)  # whose code decides what is found


def place_of(*given: object) -> Path:
    """The file of a search over these things, which are told apart by their ``repr``."""
    return cached_file("plans", _code(), *given)


def read(path: Path) -> Plan | None:
    """The plan in a file, if it is whole."""
    with suppress(MegacompileError):
        if (found := read_cached(path)) is not None:
            return Plan.from_json(from_plain(str, found.get("plan"), str(path)), str(path))
    return None


def write(path: Path, found: Plan) -> None:
    """Keep a plan."""
    write_cached(path, {"plan": found.to_json()}, _MOST)


def _code() -> str:
    return code_digest(*_STAGES)
