"""Files and folders under names that megacompile chooses: no link in their place is followed.

A folder that a user names may be a link, to a larger disk perhaps. A link inside of it, under a name that the
user has not given, may have been put there by others, and leads to what is not theirs to change.
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """A path to write to, of the same name; the file there takes the place of ``path``, or of a link that is
    there, when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        written = Path(folder, path.name)
        yield written
        written.replace(path)


def replace_text(path: Path, text: str) -> None:
    """Write a whole file in UTF-8 or nothing, so that processes may race."""
    with replacing_file(path) as written:
        written.write_text(text, encoding="utf-8")


def make_own_folder(folder: Path) -> None:
    """Create a folder unless there is one; OSError for a link in its place."""
    refuse_link(folder)
    folder.mkdir(parents=True, exist_ok=True)


def refuse_link(path: Path) -> None:
    """Raise OSError where a path is a link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, which is not followed: remove it", str(path))
