"""Checkpoints of a trainer: the model's files as transformers writes them, and the program's state beside.

``checkpoint-N/program`` is what :meth:`~megacompile.program.Program.save` writes. The trainer's own
``trainer_state.json`` is written last: where it is whole, so is the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals

from megacompile.errors import MegacompileError
from megacompile.program import Program
from megacompile.storage.checkpoint import read_manifest
from megacompile.storage.durable import is_of_disk

STATE = "program"
_LAST = "trainer_state.json"
_PICKLED = ("scheduler.pt", "rng_state.pth")


def save_state(program: Program, scheduler: Any, folder: Path) -> None:
    """The program's state and the schedule's, into a checkpoint of a trainer."""
    program.save(folder / STATE)
    # a plain trainer would go on with fresh moments, and say nothing, where this file is missing
    torch.save({"moments": "of a megacompile program, in the folder program"}, folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")


@contextlib.contextmanager
def written_or_removed(folder: Path, state: TrainerState) -> Iterator[None]:
    """Where the disk does not take a checkpoint, remove what is there of it, warn, and let training go on."""
    best = state.best_model_checkpoint
    try:
        (folder / _LAST).unlink(missing_ok=True)  # of an earlier run, whose files are now overwritten
        yield
    except Exception as error:
        if not is_of_disk(error) or is_whole(folder):  # what failed came after it
            raise
        shutil.rmtree(folder, ignore_errors=True)
        state.best_model_checkpoint = best
        warnings.warn(
            f"The disk did not take {folder}, which was removed; training goes on: {error}", stacklevel=2
        )


def check_checkpoint(folder: Path) -> Path:
    """The program's part of a trainer's checkpoint; an error where that is damaged, or of another trainer.

    Reads everything but tensors, and nothing that could run code.
    """
    lacks = next((name for name in (STATE, _LAST, *_PICKLED) if not (folder / name).exists()), None)
    if lacks is not None:
        raise MegacompileError(
            f"Can't find a valid checkpoint at {folder}: it has no {lacks}. Load its weights by "
            "from_pretrained to start from them."
        )
    for name in (_LAST, *_PICKLED):
        try:
            _read(folder / name)
        except Exception as error:  # whatever a damaged pickle leads to
            raise MegacompileError(
                f"{folder / name} is damaged, or of another version of transformers: {error}"
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
    """Whether a checkpoint was written to its end: no beginning of a JSON object is one."""
    try:
        json.loads((folder / _LAST).read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _number(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"checkpoint-(\d+)", path.name)
