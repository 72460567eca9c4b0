"""Save and resume in a trainer: what is small at once, what is large by a thread as training goes on."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import rotate_checkpoints

from megacompile.api.program import Program
from megacompile.distributed.world import World
from megacompile.errors import DiskError
from megacompile.integrations.interruption import Interruption
from megacompile.integrations.peft_adapters import Within, save_adapters
from megacompile.integrations.progress import TrainingProgress
from megacompile.integrations.trainer_checkpoints import (
    STATE,
    begin,
    check_checkpoint,
    finish,
    is_whole,
    last_checkpoint,
)
from megacompile.state.atomic_folder import adding_to, is_of_disk
from megacompile.state.model_export import Description, describe, export_model
from megacompile.state.model_ownership import is_owned
from megacompile.state.model_values import Lending
from megacompile.state.saved_values import saved_values

_Upstream: Any = transformers.Trainer if TYPE_CHECKING else object  # every mixin's next class


class Writing:
    """A checkpoint that is being written to ``folder``; ``limit`` is how many of them are kept. Of several
    ranks of a ``world`` each writes its part of the state, and the first all else."""

    def __init__(self, folder: Path, state: TrainerState, limit: int | None, world: World) -> None:
        self.folder = folder
        self._state, self._limit, self._world = state, limit, world
        self._best_before = state.best_model_checkpoint
        self._model: Description | None = None  # whose weights are still to be written
        self._program: Program | None = None  # that writes
        self._refused: Exception | None = None  # a file that is small
        self._error: BaseException | None = None
        self._goes_on = False  # training, although the disk did not take it
        self._over = threading.Event()

    def begin(self) -> None:
        """From now on the folder is there, and not whole."""
        with self.small():
            if self._world.rank == 0:
                begin(self.folder)
        self.agree()

    @contextlib.contextmanager
    def small(self) -> Iterator[None]:
        """Write small files; that the disk did not take one is raised where ranks :meth:`agree`, which the
        others reach too."""
        try:
            yield
        except Exception as error:
            if not is_of_disk(error):
                raise
            self._refused = self._refused or error

    def agree(self) -> None:
        """All small files so far are written, of every rank, or all ranks raise why one is not."""
        self._world.agree(self._raise_refused)

    def _raise_refused(self) -> None:
        if self._refused is not None:
            raise DiskError(str(self._refused)) from self._refused  # as all ranks hear it

    def go_on(self, program: Program, model: Description | None) -> None:
        """Let a thread write the program's state, and the weights of the model that is described."""
        self._model, self._program = model, program
        program.save(self.folder / STATE, wait=False, then=self.end)

    def end(self, error: BaseException | None = None) -> None:
        """Write what the state is still needed for, and remove older checkpoints; where the disk did not take
        this one, remove it. In either thread; of several ranks all do, or one where it fails alone."""
        try:
            if error is not None:
                raise error
            with self._world.together():
                self._world.agree(self._complete, saving=True)
        except BaseException as failure:  # for the thread that trains
            of_disk = is_of_disk(failure) if self._world.size == 1 else isinstance(failure, DiskError)
            self._goes_on = of_disk and (self._world.rank > 0 or not is_whole(self.folder))
            if self._goes_on and self._world.rank == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
            self._error = failure
        finally:
            self._over.set()

    def _complete(self) -> None:
        if self._world.rank > 0:
            return
        with self.small():
            if self._model is not None:
                values = saved_values(self.folder / STATE, self._model)
                export_model(self.folder, self._model, values, None, beside=True)
            finish(self.folder)
        self._raise_refused()
        best = self._state.best_model_checkpoint
        rotate_checkpoints(os.fspath(self.folder.parent), self._limit, best, use_mtime=True)

    def tell(self) -> None:
        """Warn where the disk did not take it, if that is known, and raise what else kept it from its end."""
        error, self._error = self._error, None
        if error is None:
            return
        if not self._goes_on:
            raise error
        self._state.best_model_checkpoint = self._best_before
        if self._world.rank == 0:
            text = f"The disk did not take {self.folder}, which was removed; training goes on: {error}"
            warnings.warn(text, stacklevel=2)

    def wait(self) -> None:
        """Return when it is over, and told."""
        if self._program is not None:
            self._program.finish_saving()  # which hurries it
        self._over.wait()
        self.tell()


class Saving(_Upstream):
    """The part of the mixin that saves and resumes."""

    program: Program | None
    _interruption: Interruption
    _lending: Lending
    _progress: TrainingProgress
    _checkpoint: Path | None = None  # to be loaded once the state is laid out
    _writing: Writing | None = None
    _in_part = False  # upstream saves what is small

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As upstream; ``resume_from_checkpoint=True`` takes the newest checkpoint that is whole, if any.

        On SIGINT or SIGTERM it finishes the update, saves a checkpoint and returns. When it has returned, or
        raised, no checkpoint is being written any more.
        """
        self._checkpoint = None
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None and self.is_world_process_zero():
                text = f"{self.args.output_dir} has no whole checkpoint: training starts from the beginning."
                warnings.warn(text, stacklevel=2)
        with self._interruption.handled(self), self._progress.told(), self._named(), self._lending.training():
            try:
                return super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self._drop_update()  # which never came
                self._finish_saving()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """The other ranks hear why this one fails, and this one says which of them did."""
        try:
            yield
        except BaseException:
            if self.program is None or self.program.world.ended:
                raise
            with self.program.world.together():
                raise

    def _finish_saving(self) -> None:
        """Return when no checkpoint is being written; tell of one that was not."""
        if self._writing is not None:
            self._writing.wait()
            self._writing = None

    @contextlib.contextmanager
    def _all_kept(self) -> Iterator[None]:
        """Upstream removes no checkpoint."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield
        finally:
            self.args.save_total_limit = limit

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As upstream, but a thread writes what is large, and then says that the folder is whole."""
        self._finish_saving()
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        assert self.program is not None
        limit, world = self.args.save_total_limit, self.program.world
        self._writing = writing = Writing(folder, self.state, limit, world)
        self._in_part = True
        failed = False
        try:
            writing.begin()
            with writing.small(), self._all_kept():
                super()._save_checkpoint(model, trial)
            self._save_large(writing)
        except BaseException as error:
            failed = True
            writing.end(error)
        finally:
            self._in_part = False
        if self.args.push_to_hub or any(map(_reads_checkpoints, self.callback_handler.callbacks)):
            self._finish_saving()
        if self.args.push_to_hub and is_whole(folder):
            super()._push_from_checkpoint(os.fspath(folder))
        if failed or world.size == 1:  # several ranks hear of it where they wait, at one point
            writing.tell()

    def _save_large(self, writing: Writing) -> None:
        assert self.program is not None
        with writing.small():
            if self.args.should_save:
                torch.save(self.args, writing.folder / "training_args.bin")
        writing.agree()
        if self.args.save_only_model:
            writing.end()
        else:
            model = None if hasattr(self.model, "peft_config") else describe(self.program.model)
            writing.go_on(self.program, model)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing: it is not whole yet."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.args.should_save:
            return
        folder = Path(output_dir)
        # a plain trainer would go on with fresh moments, and say nothing, where this file is missing
        torch.save({"moments": "of a megacompile program, in the folder program"}, folder / "optimizer.pt")
        torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the model as ``from_pretrained`` loads it, with its tokenizer."""
        if self.program is None or not is_owned(self.model):
            super()._save(output_dir, state_dict)
            return
        folder = output_dir if output_dir is not None else self.args.output_dir
        if not self._in_part:
            self._finish_saving()
        kept = self._writing.small() if self._in_part and self._writing else contextlib.nullcontext()
        with kept:  # upstream's ranks may wait for each other next
            self._write_model(self.program, folder)

    def _write_model(self, program: Program, folder: str) -> None:
        # no link is left in a checkpoint that is begun, and a thread sees to it that all of it is on disk
        within: Within = contextlib.nullcontext if self._in_part else adding_to
        if hasattr(self.model, "peft_config"):
            save_adapters(self.model, program, Path(folder), within)
        elif not self._in_part or self.args.save_only_model:
            program.export(folder, dtype=None, beside=True)
        if not self.args.should_save:
            return
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        with within(Path(folder)) as fresh:
            if tokenizer is not None:
                tokenizer.save_pretrained(os.fspath(fresh))
            if not self._in_part:  # where save_total_limit is not what was given
                torch.save(self.args, fresh / "training_args.bin")

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        """As upstream, which compares the numbers of updates of a checkpoint with what may be shares here."""
        names = ("logging_steps", "eval_steps", "save_steps")
        given = {name: getattr(self.args, name) for name in names}
        shares = {name: steps for name, steps in given.items() if steps is not None and steps < 1}
        self.args.__dict__.update({name: math.ceil(max_steps * share) for name, share in shares.items()})
        try:
            return super()._init_training_state(max_steps, *args, **kwargs)
        finally:
            self.args.__dict__.update(shares)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Only look whether it is whole: the state is read when it has been laid out, at the first update."""
        self._checkpoint = check_checkpoint(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
            self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        assert self.program is not None
        self.program.load(check_checkpoint(Path(self.state.best_model_checkpoint)))

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        best = super()._determine_best_metric(*args, **kwargs)
        return best or self._interruption.stopped  # save_strategy="best" saves where this is true


def _reads_checkpoints(callback: TrainerCallback) -> bool:
    """Return whether a callback may read a checkpoint's files in its ``on_save``; one that does not says so
    by ``reads_checkpoints = False``."""
    if type(callback).on_save is TrainerCallback.on_save:
        return False
    uploads = getattr(callback, "_log_model", None) != "false"  # of Weights & Biases
    return uploads and getattr(callback, "reads_checkpoints", True)
