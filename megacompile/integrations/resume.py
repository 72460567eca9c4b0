"""Choose the checkpoint that ``megacompile train`` goes on from: the newest, if it is of this same training.

In: the parsed keys. Out: a checkpoint's folder, or a refusal that says what differs. Each checkpoint's
trainer_state.json keeps the keys that decide what is learned, and digests of the files that they name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from megacompile.errors import MegacompileError
from megacompile.integrations.trainer_checkpoints import TRAINER_STATE, last_checkpoint, trainer_state
from megacompile.integrations.training_arguments import NO_EFFECT
from megacompile.json_codec import from_plain

_STATE_NAME = "megacompile train"  # among the callbacks' states of a checkpoint
_READ_WHOLE = 256 << 20  # bytes of a file that is read whole; of a larger one both ends
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
        read = {
            name: _digest_of_files(keys[name]) for name in _NAMES_FILES if isinstance(keys.get(name), str)
        }
        # as they are when they have been written and read again
        self._kept = json.loads(json.dumps({"args": keys, "attributes": {"read": read}}, default=str))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._chosen and state.global_step >= state.max_steps:
            raise MegacompileError(
                f"{self._chosen} has made {state.global_step} updates, and {state.max_steps} are asked for: "
                "give more (num_train_epochs, max_steps), or start from its weights (model_name_or_path)."
            )
        state.stateful_callbacks[_STATE_NAME] = self._kept

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
        state = trainer_state(checkpoint)
        return state.global_step >= state.max_steps and not self._differences(checkpoint)

    @staticmethod
    def steps(checkpoint: str | None) -> int:
        """Return the updates up to a checkpoint."""
        return 0 if checkpoint is None else trainer_state(checkpoint).global_step

    def _differences(self, checkpoint: str) -> list[str]:
        before = trainer_state(checkpoint).stateful_callbacks.get(_STATE_NAME)
        if before is None:
            return ["it does not say by which settings it was trained"]
        what = f"{Path(checkpoint) / TRAINER_STATE}: {_STATE_NAME}"
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


def _fields(part: Any) -> Iterator[tuple[str, Any]]:
    values = part.to_dict() if hasattr(part, "to_dict") else vars(part)
    return ((field.name, values.get(field.name)) for field in dataclasses.fields(part))


def _decides(name: str) -> bool:
    return name in _DECIDES or not (name in _FREE or name.startswith(_FREE_KINDS))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _digest_of_files(name: str) -> str:
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
            if size <= _READ_WHOLE:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
            else:
                digest.update(opened.read(_END))
                opened.seek(-_END, 2)
                digest.update(opened.read(_END))
    return digest.hexdigest() if files else ""
