"""Checkpoint folders of a trainer, and what Ctrl-C does to a training."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import SaveStrategy

from megacompile.errors import MegacompileError
from megacompile.state.atomic_folder import sync
from megacompile.state.checkpoint import read_manifest

# ------------------------------------------------------------------------------------------------------------
# Checkpoints of a trainer: the model's files as transformers writes them, and the program's state beside.
#
# ``checkpoint-N/program`` is what :meth:`~megacompile.api.program.Program.save` writes. While anything is
# missing there is a file ``unfinished`` in the folder.


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
    """Return whether a checkpoint was written to its end."""
    if (folder / _UNFINISHED).exists():
        return False
    try:
        json.loads((folder / _LAST).read_text())  # no beginning of a JSON object is one
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _number(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"checkpoint-(\d+)", path.name)


# ------------------------------------------------------------------------------------------------------------
# Ctrl-C and SIGTERM during a training: the update is finished, a checkpoint saved, and ``train`` returns.


_DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}


class Interruption(TrainerCallback):
    """Stops a training behind the update in which a signal came; ``stopped`` says that it did, and
    ``stopped_by`` which.

    At the end of an epoch it stops behind what is due there, so that a resumed run misses none of it.
    """

    def __init__(self) -> None:
        self._trainer: Any = None
        self.stopped = False
        self._signal: signal.Signals | None = None

    @property
    def stopped_by(self) -> signal.Signals | None:
        """The signal that stopped the training, if any did."""
        return self._signal if self.stopped else None

    @contextlib.contextmanager
    def handled(self, trainer: Any) -> Iterator[None]:
        """Take the signals for which the script has no handler of its own; only the main thread can."""
        self._trainer, self._signal, self.stopped = trainer, None, False
        main = threading.current_thread() is threading.main_thread()
        taken = [n for n, default in _DEFAULTS.items() if main and signal.getsignal(n) == default]
        process = os.getpid()
        saving = "" if trainer.args.save_strategy == SaveStrategy.NO else ", then saving a checkpoint"
        text = f"\nFinishing the update{saving}; Ctrl-C again stops now.\n".encode()

        def note(number: int, frame: object) -> None:
            if os.getpid() != process:
                return  # a worker of the data loader, a fork, whose batches the update may still need
            if self._signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._signal = signal.Signals(number)
            os.write(2, text)  # print may be under way

        for number in taken:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, _DEFAULTS[number])
        if self.stopped and trainer.is_world_process_zero():
            print(self._told(trainer.args, trainer.state), file=sys.stderr)

    def _told(self, args: Any, state: Any) -> str:
        assert self._signal is not None
        saved = last_checkpoint(args.output_dir) if args.save_strategy != SaveStrategy.NO else None
        way = (
            f"train(resume_from_checkpoint=True) goes on from {saved}" if saved else "no checkpoint was saved"
        )
        return f"{self._signal.name} stopped the training after update {state.global_step}: {way}."

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.epoch.is_integer():
            self._stop(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stopped:  # in the middle of the epoch: nothing is due yet
            control.should_log = control.should_evaluate = control.should_save = False
        else:
            self._stop(args, state, control)

    def _stop(self, args: Any, state: Any, control: Any) -> None:
        self._hear(state)
        if self._signal is not None and not control.should_training_stop:
            self.stopped = control.should_training_stop = True
            control.should_save = args.save_strategy != SaveStrategy.NO

    def _hear(self, state: Any) -> None:
        """Take a signal that came to any rank: all stop behind the same update."""
        world, own = self._trainer.program.world, int(self._signal or 0)
        if world.size > 1:
            said = world.compare(lambda: {"trained": state.global_step, "signal": own})
            number = own or max(rank["signal"] for rank in said)
            self._signal = signal.Signals(number) if number else None
