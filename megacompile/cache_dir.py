"""The user's cache folder: where what was built or found once lies for the next run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Megacompile's own folder there; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megacompile"


def replace_text(path: Path, text: str) -> None:
    """Write a whole file or nothing, so that processes may race."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder, path.name)
        written.write_text(text)
        written.replace(path)
