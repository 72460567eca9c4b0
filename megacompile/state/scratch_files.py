"""Create scratch files for the storage engine: their directories, their locks, the space that they take.

In:  directories. Out: their absolute paths, a lock on each, and files whose space is taken at once. An
error names the directory as ``offload_dir`` has it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path

from megacompile.distributed.world import World
from megacompile.errors import BudgetError, MegacompileError
from megacompile.own_files import make_own_folder, refuse_link
from megacompile.printable import printable
from megacompile.text_files import path_of
from megacompile.units import format_bytes
from megacompile.user_warning import warn_user

_LOCK = "megacompile.lock"
_PATTERN = "megacompile-*.scratch"


def check_directories(directories: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Absolute paths, or :class:`MegacompileError` for one that is missing or named twice."""
    folders = [path_of(d, "offload_dir").resolve() for d in directories]
    for given, folder in zip(directories, folders, strict=True):
        if not folder.is_dir():
            raise MegacompileError(f"offload_dir={os.fspath(given)!r} is no directory: make it first.")
        if folders.count(folder) > 1:
            raise MegacompileError(f"offload_dir names {folder} twice: name each directory once.")
    return folders


def folders_of(world: World, directories: Sequence[str]) -> tuple[str, ...]:
    """The directories themselves; of several ranks a folder of this one's own in each."""
    if world.size == 1:
        return tuple(directories)
    own = [Path(directory) / f"rank-{world.rank}" for directory in directories]
    for folder in own:
        try:
            make_own_folder(folder)
        except OSError as error:
            raise _unusable(folder, error) from error
    return tuple(str(folder) for folder in own)


def _unusable(folder: Path, error: OSError, what: str = "") -> MegacompileError:
    return MegacompileError(f"offload_dir={str(folder)!r} cannot be used: {what}{error.strerror}.")


class FolderLock:
    """A folder that this process has, for as long as any of its programs holds this."""

    def __init__(self, folder: Path) -> None:
        weakref.finalize(self, os.close, _locked(folder))


_LOCKS: weakref.WeakValueDictionary[tuple[int, Path], FolderLock] = weakref.WeakValueDictionary()


def lock_folder(folder: Path) -> FolderLock:
    """Take the folder for this process, or say which one has it; what a dead process left is removed."""
    key = os.getpid(), folder
    lock = _LOCKS.get(key)
    if lock is None:
        lock = _LOCKS[key] = FolderLock(folder)
    return lock


def _locked(folder: Path) -> int:
    try:
        refuse_link(folder / _LOCK)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise _unusable(folder, error, f"{_LOCK} in it: ") from error
    status = os.fstat(lock)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # what has another name may be anybody's
        os.close(lock)
        raise MegacompileError(
            f"offload_dir={str(folder)!r} cannot be used: {_LOCK} in it is no file of its own: remove it."
        )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = printable(os.read(lock, 32).decode(errors="replace").strip())
        os.close(lock)
        raise MegacompileError(
            f"offload_dir={str(folder)!r} is in use by process {owner}: give each process its own directory."
        ) from error
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    for stale in folder.glob(_PATTERN):
        stale.unlink(missing_ok=True)
    return lock


def create_file(path: Path, nbytes: int) -> int:
    """A new file whose space is taken at once, opened past the page cache where that is possible."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    folder = path.parent
    try:
        file = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise _unusable(folder, error) from error
        path.unlink(missing_ok=True)
        file = os.open(path, flags, 0o600)
        warn_user(
            f"offload_dir={str(folder)!r} has no direct I/O: transfers pass the page cache and are slower."
        )
    if _file_system(folder) in ("tmpfs", "ramfs"):
        warn_user(f"offload_dir={str(folder)!r} is kept in RAM, so that it saves none.")
    try:
        take_space(file, folder, nbytes)
    except BudgetError:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return file


def take_space(file: int, folder: Path, nbytes: int) -> None:
    """Extend a file to at least this length, with its space taken at once."""
    status = os.fstatvfs(file)
    free = status.f_bavail * status.f_frsize
    try:
        if nbytes > os.fstat(file).st_size:
            os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        raise BudgetError(
            f"offload_dir={str(folder)!r} needs {nbytes} bytes ({format_bytes(nbytes)}) and has {free} "
            f"({format_bytes(free)}): {error.strerror}. Free some space, or name further directories."
        ) from error


def _file_system(folder: Path) -> str:
    """The type of the file system that a folder is on, "" where the system does not say."""
    mounts = Path("/proc/self/mounts")
    best = ("", "")
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        _, place, kind, *_ = line.split(" ")
        if folder.is_relative_to(place) and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]
