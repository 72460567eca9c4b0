"""The user's cache folder: where what was built or found once lies for the next run.

What lies there is believed, so nobody else may write to it.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import stat
import tempfile
from pathlib import Path

from megacompile.user_warning import warn_user


def cache_folder() -> Path:
    """Return megacompile's own folder there, created if need be: the user's, mode 0700.

    Where the user has no home, or no folder can be made, or others own it or may write to it, another folder
    takes its place, which this process removes at its end.
    """
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "megacompile"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_own(folder):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: no HOME, and no entry in passwd
        pass
    return _folder_of(os.getpid())


def _is_own(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid():
            return _is_not_used(folder, "belongs to another user")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return _is_not_used(folder, "may be written to by others")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            os.fchmod(handle, stat.S_IRWXU)
        return True
    finally:
        os.close(handle)


@functools.cache  # so that it is said once
def _is_not_used(folder: Path, why: str) -> bool:
    warn_user(f"{folder} {why}, so nothing is kept in it: remove it, or name your own by XDG_CACHE_HOME.")
    return False


@functools.cache
def _folder_of(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="megacompile-"))
    atexit.register(_remove, folder, process)
    return folder


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a child that it forked
        shutil.rmtree(folder, ignore_errors=True)
