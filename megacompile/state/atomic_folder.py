"""Folders that are written whole or not at all, whatever kills the process in between."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megacompile.errors import DiskError, ProgramError
from megacompile.own_files import make_own_folder

_TORCH_SAVE = ("inline_container.cc", "iostream error")  # of what torch.save raises where a write failed
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its place when the block ends without an error.

    Everything in it is on disk before it is renamed. Where the system can, the two swap their names in one
    step; elsewhere what ``folder`` was before is ``.NAME.previous`` for the moment between two renames, from
    where :func:`recover` brings it back.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    recover(folder)
    fresh, previous = _beside(folder, "saving"), _beside(folder, "previous")
    with _locked(fresh):
        try:
            yield fresh
            for file in fresh.iterdir():
                sync(file)
            sync(fresh)
            with _renaming_in(folder.parent):
                if not (folder.exists() and _exchange(fresh, folder)):
                    if folder.exists():
                        _remove(previous)
                        folder.rename(previous)
                    fresh.rename(folder)
                sync(folder.parent)
            _remove(fresh)  # the folder that was swapped out
            _remove(previous)
        except BaseException:
            _remove(fresh)
            recover(folder)
            raise


@contextlib.contextmanager
def adding_to(folder: Path) -> Iterator[Path]:
    """A temporary folder whose files go into ``folder``, beside what is there, when the block ends without
    an error: one by one, and ``config.json``, which says that a model is there, last. One that takes the
    place of a link leaves alone what that leads to."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / ".saving"
    with _locked(fresh):
        try:
            yield fresh
            files = [file for file in fresh.rglob("*") if not file.is_dir()]
            for file in sorted(files, key=lambda file: file == fresh / "config.json"):
                target = folder / file.relative_to(fresh)
                if target.parent != folder:
                    make_own_folder(target.parent)
                sync(file)
                file.replace(target)
            sync(folder)
        finally:
            _remove(fresh)


def recover(folder: Path) -> None:
    """Put back what a writer that was killed had moved aside and not yet replaced."""
    previous = _beside(folder, "previous")
    if not previous.exists() or previous.is_symlink():
        return
    with _renaming_in(folder.parent):  # a writer that is alive may stand between its renames
        if previous.exists() and not folder.exists():
            previous.rename(folder)


def is_of_disk(error: BaseException) -> bool:
    """Return whether a disk did not take what was to be written, in whichever words the writer says so."""
    from safetensors import SafetensorError

    if any(isinstance(e, (OSError, SafetensorError, DiskError)) for e in (error, error.__cause__)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _TORCH_SAVE)


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")


@contextlib.contextmanager
def _locked(fresh: Path) -> Iterator[None]:
    """An empty folder that this process alone writes; what a killed writer left in it is removed.

    Raises OSError where a link is in its place, or a folder of another user, who could change what is in it.
    """
    make_own_folder(fresh)
    handle = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check_owner(handle, fresh)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ProgramError(f"Another process is writing {fresh}: save to different folders.") from error
        if not _leads_to(handle, fresh):
            raise ProgramError(f"Another process has just written {fresh}: save to different folders.")
        for entry in fresh.iterdir():
            _remove(entry)
        yield
    finally:
        _unlock(handle)


def _check_owner(handle: int, folder: Path) -> None:
    """Whoever has the folder above can do as they like in it, and some file systems know one owner alone."""
    if os.fstat(handle).st_uid not in (os.geteuid(), folder.parent.stat().st_uid):
        raise OSError(errno.EPERM, "it belongs to another user: remove it", str(folder))


def _leads_to(handle: int, folder: Path) -> bool:
    """Return whether an open folder has still this name; a writer that ends moves its own to another."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(folder))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _renaming_in(parent: Path) -> Iterator[None]:
    """One at a time, over all processes, renames folders in here."""
    handle = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        _unlock(handle)


def _unlock(handle: int) -> None:
    fcntl.flock(handle, fcntl.LOCK_UN)  # for processes too that were forked meanwhile and hold it open
    os.close(handle)


def _exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders in one step; False if the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
