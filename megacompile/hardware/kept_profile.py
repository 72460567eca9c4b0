"""Keep the profile that ``megacompile profile`` measured of this machine's GPU for ``compile``."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

from megacompile.cache_dir import cache_folder
from megacompile.errors import MegacompileError
from megacompile.hardware.catalog import MachineProfile, profile_json, read_profile
from megacompile.own_files import replace_text


def keep_profile(profile: MachineProfile) -> Path:
    """Keep it for programs of this machine and GPU; the file."""
    path = _path(profile.name)
    replace_text(path, profile_json(profile, seal=True) + "\n")
    return path


def kept_profile(gpu: str, processors: int) -> MachineProfile | None:
    """The profile that was kept for a GPU of this name and number of multiprocessors, if there is one.

    One that this version cannot read is left out, and said.
    """
    path = _path(gpu)
    if not path.is_file():
        return None
    try:
        profile = read_profile(path)
    except MegacompileError as error:
        print(f"megacompile: plans go by built-in figures: {error}", file=sys.stderr)
        return None
    return profile if profile.machine.processors == processors else None


def _path(gpu: str) -> Path:
    """Caches may be shared by machines, which have links and host memory of their own."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{platform.node()} {gpu}".lower()).strip("-")
    return cache_folder() / "machines" / f"{name}.json"
