"""Checkpoints of a trainer: the model's files as transformers writes them, and the program's state beside.

``checkpoint-N/program`` is what :meth:`~megacompile.api.program.Program.save` writes. While anything is
missing there is a file ``unfinished`` in the folder. ``checksums.json`` has the checksums of what resuming
reads beside ``program``: the trainer's state, that of its scheduler, and those of random numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals

from megacompile.errors import MegacompileError
from megacompile.json_codec import from_plain, parse_json, sealed, to_plain, unsealed
from megacompile.own_files import make_own_folder
from megacompile.state.atomic_folder import sync
from megacompile.state.checkpoint_manifest import UNSEALED, read_manifest
from megacompile.text_files import read_text
from megacompile.user_warning import warn_user

STATE = "program"
_UNFINISHED = "unfinished"
TRAINER_STATE = "trainer_state.json"
_CHECKSUMS = "checksums.json"
_SCHEDULER, _RANDOM = "scheduler.pt", "rng_state.pth"
_RANDOM_OF_RANKS = "rng_state*.pth"  # of several ranks rng_state_0.pth, and so on


def begin(folder: Path) -> None:
    """From now on, until :func:`finish`, the checkpoint in this folder is not whole.

    Links in it are removed, as files of the checkpoint would be written to where they lead.
    """
    make_own_folder(folder)
    for link in (entry for entry in folder.iterdir() if entry.is_symlink()):
        link.unlink()
    (folder / _UNFINISHED).touch()
    sync(folder)


def finish(folder: Path) -> None:
    """The checkpoint is whole, once all of it is on disk."""
    sums = {file.name: _checksum(file) for file in _small(folder)}
    (folder / _CHECKSUMS).write_text(json.dumps(sealed(to_plain(Checksums(1, sums))), indent=1))
    for file in folder.iterdir():
        sync(file)
    (folder / _UNFINISHED).unlink()
    sync(folder)


def check_checkpoint(folder: Path) -> Path:
    """The program's part of a trainer's checkpoint; an error where that is damaged, or of another trainer.

    Reads everything but tensors, and nothing that could run code.
    """
    present = {file.name for file in _small(folder)}
    lacks = next((name for name in (STATE, TRAINER_STATE, _SCHEDULER) if not (folder / name).exists()), None)
    if lacks is None and present == {TRAINER_STATE, _SCHEDULER}:
        lacks = _RANDOM
    if lacks is not None:
        raise MegacompileError(
            f"Can't find a valid checkpoint at {folder}: it has no {lacks}. Load its weights by "
            "from_pretrained to start from them."
        )
    if (folder / _UNFINISHED).exists():
        raise MegacompileError(
            f"Can't find a valid checkpoint at {folder}: it was not written to its end. Resume from another."
        )
    checked = _check_sums(folder)
    for file in _small(folder):
        _read_small(file)
    manifest, _ = read_manifest(folder / STATE)
    if not checked and manifest.version > UNSEALED:  # else loading it says so
        warn_user(f"{folder} has no {_CHECKSUMS}: its small files are unchecked.")
    return folder / STATE


@dataclasses.dataclass(frozen=True)
class Checksums:
    """The contents of ``checksums.json``: the SHA-256 of files beside it, by their names."""

    version: int
    sha256: dict[str, str]


def _small(folder: Path) -> list[Path]:
    """The files that are there of those which resuming reads beside the program's."""
    found = [folder / TRAINER_STATE, folder / _SCHEDULER, *sorted(folder.glob(_RANDOM_OF_RANKS))]
    return [file for file in found if file.is_file()]


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _check_sums(folder: Path) -> bool:
    """Refuse files that differ from those that were written; False if nothing tells, as in a checkpoint of an
    older version."""
    path = folder / _CHECKSUMS
    if not path.exists():
        return False
    given = unsealed(parse_json(read_text(path), str(path)), str(path))
    known: Checksums = from_plain(Checksums, given, str(path))
    if known.version != 1:
        raise MegacompileError(f"{path} has version {known.version}; this megacompile reads version 1.")
    for file in _small(folder):
        if known.sha256.get(file.name) != _checksum(file):
            raise MegacompileError(
                f"{file} is damaged, or was changed: its checksum is not that in {_CHECKSUMS}, which you may "
                "delete if you changed it."
            )
    missing = [name for name in known.sha256 if not (folder / name).is_file()]
    if missing:
        raise MegacompileError(f"{folder} lacks {missing[0]}, which was written with it.")
    return True


def _read_small(file: Path) -> Any:
    """What a small file holds: a pickle of plain values, or a trainer's state, of which what we read is
    checked."""
    try:
        if file.name != TRAINER_STATE:
            with safe_globals():
                return torch.load(file, weights_only=True)
        state = TrainerState.load_from_json(os.fspath(file))
        if type(state.global_step) is not int or state.global_step < 1:
            raise TypeError(f"global_step is {state.global_step!r}")
        if type(state.max_steps) is not int or not isinstance(state.stateful_callbacks, dict):
            raise TypeError("max_steps or stateful_callbacks is missing")
        return state
    except Exception as error:  # whatever a damaged pickle leads to
        raise MegacompileError(
            f"{file} is damaged, or of another version of transformers: {error}"
        ) from error


def last_checkpoint(folder: str) -> str | None:
    """The newest checkpoint in a trainer's output folder that was written to its end."""
    found = [(int(m[1]), path) for path in Path(folder).glob("checkpoint-*") if (m := _number(path))]
    return next((os.fspath(path) for _, path in sorted(found, reverse=True) if is_whole(path)), None)


def is_whole(folder: Path) -> bool:
    """Return whether a checkpoint was written to its end."""
    if (folder / _UNFINISHED).exists():
        return False
    try:
        json.loads((folder / TRAINER_STATE).read_text())  # no beginning of a JSON object is one
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _number(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"checkpoint-(\d+)", path.name)


def trainer_state(checkpoint: str) -> TrainerState:
    """Return the state of a checkpoint's trainer; :class:`MegacompileError` where it is damaged."""
    _check_sums(Path(checkpoint))
    state: TrainerState = _read_small(Path(checkpoint) / TRAINER_STATE)
    return state
