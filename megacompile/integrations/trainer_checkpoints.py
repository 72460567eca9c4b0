"""Checkpoint folders of a trainer: which one to go on from, and what Ctrl-C does to a training."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import SaveStrategy

from megacompile.errors import MegacompileError
from megacompile.integrations.training_arguments import NO_EFFECT
from megacompile.json_codec import from_plain, parse_json, sealed, to_plain, unsealed
from megacompile.own_files import make_own_folder
from megacompile.state.atomic_folder import sync
from megacompile.state.checkpoint import UNSEALED, read_manifest
from megacompile.text_files import read_text

# ------------------------------------------------------------------------------------------------------------
# Checkpoints of a trainer: the model's files as transformers writes them, and the program's state beside.
#
# ``checkpoint-N/program`` is what :meth:`~megacompile.api.program.Program.save` writes. While anything is
# missing there is a file ``unfinished`` in the folder. ``checksums.json`` has the checksums of what resuming
# reads beside ``program``: the trainer's state, that of its scheduler, and those of random numbers.


STATE = "program"
_UNFINISHED = "unfinished"
_LAST = "trainer_state.json"
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
    lacks = next((name for name in (STATE, _LAST, _SCHEDULER) if not (folder / name).exists()), None)
    if lacks is None and present == {_LAST, _SCHEDULER}:
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
        _read(file)
    manifest, _ = read_manifest(folder / STATE)
    if not checked and manifest.version > UNSEALED:  # else loading it says so
        warnings.warn(f"{folder} has no {_CHECKSUMS}: its small files are unchecked.", stacklevel=2)
    return folder / STATE


@dataclasses.dataclass(frozen=True)
class Checksums:
    """The contents of ``checksums.json``: the SHA-256 of files beside it, by their names."""

    version: int
    sha256: dict[str, str]


def _small(folder: Path) -> list[Path]:
    """The files that are there of those which resuming reads beside the program's."""
    found = [folder / _LAST, folder / _SCHEDULER, *sorted(folder.glob(_RANDOM_OF_RANKS))]
    return [file for file in found if file.is_file()]


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _check_sums(folder: Path) -> bool:
    """Refuse files that are not those which were written; False where nothing says what these were, as in a
    checkpoint of an older version."""
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


def _read(file: Path) -> Any:
    """What a small file holds: a pickle of plain values, or a trainer's state, of which what we read is
    checked."""
    try:
        if file.name != _LAST:
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


# ------------------------------------------------------------------------------------------------------------
# Choose the checkpoint that ``megacompile train`` goes on from: the newest, if it is of this same training.
#
# In: the parsed keys. Out: a checkpoint's folder, or a refusal that says what differs. Each checkpoint's
# trainer_state.json keeps the keys that decide what is learned, and digests of the files that they name.


_NAME = "megacompile train"  # among the callbacks' states of a checkpoint
_WHOLE = 256 << 20  # bytes of a file that is read whole; of a larger one both ends
_END = 1 << 20
_NAMES_FILES = ("model_name_or_path", "data", "dataset_name", "chat_template_path")
# what may differ: where it runs, what is told and kept, how rows are read
_FREE_KINDS = (
    "dataloader_", "dataset_num_", "disable_", "eval_", "hub_", "include_", "log_", "logging_", "push_to_",
    "report_", "resume_", "run_", "sample_", "save_", "skip_memory_", "trackio_",
)  # fmt: skip
_FREE = {
    "output_dir", "hbm_budget", "host_budget", "offload_dir", "device", "use_cpu", "dry_run", "do_eval",
    "do_train", "do_predict", "project", "per_device_eval_batch_size", "auto_find_batch_size", "local_rank",
    "prediction_loss_only", "batch_eval_metrics", "restore_callback_states_from_checkpoint",
    "enable_jit_checkpoint", *NO_EFFECT,
}  # fmt: skip
_DECIDES = {"dataloader_drop_last", "disable_dropout"}


class Resume(TrainerCallback):
    """The keys of a training, which every checkpoint of it keeps."""

    def __init__(self, parsed: Any) -> None:
        self._arguments = parsed[2]
        self._chosen: str | None = None  # by resume_from_checkpoint, whatever it was trained with
        keys = {name: value for part in parsed for name, value in _fields(part) if _decides(name)}
        read = {name: _digest(keys[name]) for name in _NAMES_FILES if isinstance(keys.get(name), str)}
        # as they are when they have been written and read again
        self._kept = json.loads(json.dumps({"args": keys, "attributes": {"read": read}}, default=str))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._chosen and state.global_step >= state.max_steps:
            raise MegacompileError(
                f"{self._chosen} has made {state.global_step} updates, and {state.max_steps} are asked for: "
                "give more (num_train_epochs, max_steps), or start from its weights (model_name_or_path)."
            )
        state.stateful_callbacks[_NAME] = self._kept

    def checkpoint(self) -> str | None:
        """The checkpoint to go on from; refused where the newest is of another training, unless
        ``resume_from_checkpoint`` asks for it by name."""
        newest = last_checkpoint(self._arguments.output_dir)
        differences = self._differences(newest) if newest else []
        asked = self._arguments.resume_from_checkpoint
        if isinstance(asked, str) and asked.lower() not in ("true", "false") and (differences or not newest):
            self._chosen = asked
            return asked
        if differences:
            raise MegacompileError(
                f"{newest} is of another training: {'; '.join(differences)}. Another output_dir starts anew, "
                f"and --resume_from_checkpoint {newest} goes on from there with what is given."
            )
        return newest

    def is_finished(self, checkpoint: str | None) -> bool:
        """Return whether the training ended with this checkpoint, and its model and report were written."""
        if checkpoint is None or not (Path(self._arguments.output_dir) / "report.md").is_file():
            return False
        state = _state(checkpoint)
        return state.global_step >= state.max_steps and not self._differences(checkpoint)

    @staticmethod
    def steps(checkpoint: str | None) -> int:
        """Return the updates up to a checkpoint."""
        return 0 if checkpoint is None else _state(checkpoint).global_step

    def _differences(self, checkpoint: str) -> list[str]:
        before = _state(checkpoint).stateful_callbacks.get(_NAME)
        if before is None:
            return ["it does not say by which settings it was trained"]
        what = f"{Path(checkpoint) / _LAST}: {_NAME}"
        kept = from_plain(dict[str, dict[str, Any]], before, what)
        old, new = kept.get("args", {}), self._kept["args"]
        found = [
            f"{name} was {_shown(old[name])}, and is {_shown(new[name])}"
            for name in new
            if name in old and old[name] != new[name]
        ]
        were = from_plain(dict[str, str], kept.get("attributes", {}).get("read", {}), what)
        are = self._kept["attributes"]["read"]
        changed = [n for n in are if n in were and were[n] != are[n] and old.get(n) == new.get(n)]
        return found + [f"what is in {name}, {new[name]}, has changed" for name in changed]


def _state(checkpoint: str) -> TrainerState:
    _check_sums(Path(checkpoint))
    state: TrainerState = _read(Path(checkpoint) / _LAST)
    return state


def _fields(part: Any) -> Iterator[tuple[str, Any]]:
    values = part.to_dict() if hasattr(part, "to_dict") else vars(part)
    return ((field.name, values.get(field.name)) for field in dataclasses.fields(part))


def _decides(name: str) -> bool:
    return name in _DECIDES or not (name in _FREE or name.startswith(_FREE_KINDS))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _digest(name: str) -> str:
    """A digest of the file, the folder's files or the files of a pattern; "" of what is not here."""
    path = Path(name).expanduser()
    if path.is_dir():
        files = [file for file in path.iterdir() if file.is_file()]
    elif path.is_file():
        files = [path]
    else:
        files = [file for file in path.parent.glob(path.name) if file.is_file()]
    digest = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            if size <= _WHOLE:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
            else:
                digest.update(opened.read(_END))
                opened.seek(-_END, 2)
                digest.update(opened.read(_END))
    return digest.hexdigest() if files else ""
