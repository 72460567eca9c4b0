"""Checkpoints of a trainer: the model's files as transformers writes them, and the program's state beside.

``checkpoint-N/program`` is what :meth:`~megacompile.program.Program.save` writes. While anything is missing
there is a file ``unfinished`` in the folder.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals

from megacompile.errors import MegacompileError
from megacompile.storage.durable import sync
from megacompile.storage.manifest import read_manifest

STATE = "program"
_UNFINISHED = "unfinished"
_LAST = "trainer_state.json"
_SCHEDULER, _RANDOM = "scheduler.pt", "rng_state.pth"
_RANDOM_OF_RANKS = "rng_state*.pth"  # of several ranks rng_state_0.pth, and so on


def begin(folder: Path) -> None:
    """From now on, until :func:`finish`, the checkpoint in this folder is not whole."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _UNFINISHED).touch()
    sync(folder)


def finish(folder: Path) -> None:
    """The checkpoint is whole, once all of it is on disk."""
    for file in folder.iterdir():
        sync(file)
    (folder / _UNFINISHED).unlink()
    sync(folder)


def check_checkpoint(folder: Path) -> Path:
    """The program's part of a trainer's checkpoint; an error where that is damaged, or of another trainer.

    Reads everything but tensors, and nothing that could run code.
    """
    pickled = [folder / _SCHEDULER, *sorted(folder.glob(_RANDOM_OF_RANKS))]
    lacks = next((name for name in (STATE, _LAST, _SCHEDULER) if not (folder / name).exists()), None)
    if lacks is None and len(pickled) == 1:
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
    for file in (folder / _LAST, *pickled):
        try:
            _read(file)
        except Exception as error:  # whatever a damaged pickle leads to
            raise MegacompileError(
                f"{file} is damaged, or of another version of transformers: {error}"
            ) from error
    read_manifest(folder / STATE)
    return folder / STATE


def _read(file: Path) -> None:
    if file.name == _LAST:
        step = TrainerState.load_from_json(os.fspath(file)).global_step
        if not isinstance(step, int) or step < 1:
            raise TypeError(f"global_step is {step!r}")
    else:
        with safe_globals():
            torch.load(file, weights_only=True)


def last_checkpoint(folder: str) -> str | None:
    """The newest checkpoint in a trainer's output folder that was written to its end."""
    found = [(int(m[1]), path) for path in Path(folder).glob("checkpoint-*") if (m := _number(path))]
    return next((os.fspath(path) for _, path in sorted(found, reverse=True) if is_whole(path)), None)


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint was written to its end."""
    if (folder / _UNFINISHED).exists():
        return False
    try:
        json.loads((folder / _LAST).read_text())  # no beginning of a JSON object is one
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _number(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"checkpoint-(\d+)", path.name)
