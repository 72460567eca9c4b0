"""Save and resume in a trainer: what is small at once, what is large by a thread as training goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import rotate_checkpoints

from megacompile.api.program import Program
from megacompile.distributed.world import World
from megacompile.errors import DiskError
from megacompile.integrations.peft_adapters import Within, save_adapters
from megacompile.integrations.trainer_checkpoints import STATE, begin, finish, is_whole
from megacompile.integrations.trainer_steps import TrainerSteps
from megacompile.state.atomic_folder import adding_to, is_of_disk
from megacompile.state.model_export import Description, describe, export_model
from megacompile.state.saved_values import saved_values
from megacompile.user_warning import warn_user


class Writing:
    """A checkpoint that is being written to ``folder``; ``limit`` is how many of them are kept. Each of
    several ranks of a ``world`` writes its part of the state, and the first all else."""

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
        """Write small files; the error of a full disk is raised in :meth:`agree`, because the other ranks
        reach it too."""
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
        """Start a thread that writes the program's state, and the weights of the model that is described."""
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
            warn_user(text)

    def wait(self) -> None:
        """Return when it is over, and told."""
        if self._program is not None:
            self._program.finish_saving()  # which hurries it
        self._over.wait()
        self.tell()


class TrainerSaving:
    """Writes the checkpoints of a trainer, one at a time, and its model."""

    def __init__(self, trainer: Any, steps: TrainerSteps) -> None:
        self._trainer, self._steps = trainer, steps
        self._writing: Writing | None = None
        self._in_part = False  # upstream saves what is small

    def finish(self) -> None:
        """Return when no checkpoint is being written; tell of one that was not."""
        if self._writing is not None:
            self._writing.wait()
            self._writing = None

    def tell(self) -> None:
        """Tell of a checkpoint that is being written what is known so far."""
        if self._writing is not None:
            self._writing.tell()

    @contextlib.contextmanager
    def all_kept(self) -> Iterator[None]:
        """Keep upstream from removing checkpoints."""
        arguments = self._trainer.args
        limit, arguments.save_total_limit = arguments.save_total_limit, None
        try:
            yield
        finally:
            arguments.save_total_limit = limit

    def save_checkpoint(
        self, folder: Path, save_small: Callable[[], None], push: Callable[[str], None]
    ) -> None:
        """Write a checkpoint: ``save_small`` writes what upstream does, a thread what is large.

        The thread says at last that the folder is whole; upstream's ``push`` sends it to a hub.
        """
        self.finish()
        trainer, program = self._trainer, self._steps.program
        assert program is not None
        limit, world = trainer.args.save_total_limit, program.world
        self._writing = writing = Writing(folder, trainer.state, limit, world)
        self._in_part = True
        failed = False
        try:
            writing.begin()
            with writing.small(), self.all_kept():
                save_small()
            self._save_large(writing, program)
        except BaseException as error:
            failed = True
            writing.end(error)
        finally:
            self._in_part = False
        if trainer.args.push_to_hub or any(map(_reads_checkpoints, trainer.callback_handler.callbacks)):
            self.finish()
        if trainer.args.push_to_hub and is_whole(folder):
            push(os.fspath(folder))
        if failed or world.size == 1:  # several ranks hear of it where they wait, at one point
            writing.tell()

    def _save_large(self, writing: Writing, program: Program) -> None:
        arguments = self._trainer.args
        with writing.small():
            self._trainer._save_beside(writing.folder)
            if arguments.should_save:
                torch.save(arguments, writing.folder / "training_args.bin")
        writing.agree()
        if arguments.save_only_model:
            writing.end()
        else:
            model = None if hasattr(self._trainer.model, "peft_config") else describe(program.model)
            writing.go_on(program, model)

    def save_model(self, program: Program, folder: str) -> None:
        """Write the model as ``from_pretrained`` loads it, with its tokenizer."""
        if not self._in_part:
            self.finish()
        kept = self._writing.small() if self._in_part and self._writing else contextlib.nullcontext()
        with kept:  # upstream's ranks may wait for each other next
            self._write_model(program, folder)

    def _write_model(self, program: Program, folder: str) -> None:
        trainer = self._trainer
        # no link is left in a checkpoint that is begun, and a thread sees to it that all of it is on disk
        within: Within = contextlib.nullcontext if self._in_part else adding_to
        if hasattr(trainer.model, "peft_config"):
            save_adapters(trainer.model, program, Path(folder), within)
        elif not self._in_part or trainer.args.save_only_model:
            program.export(folder, dtype=None, beside=True)
        if not trainer.args.should_save:
            return
        tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        with within(Path(folder)) as fresh:
            if tokenizer is not None:
                tokenizer.save_pretrained(os.fspath(fresh))
            if not self._in_part:  # where save_total_limit is not what was given
                torch.save(trainer.args, fresh / "training_args.bin")

    def save_scheduler(self, folder: Path) -> None:
        """Write the scheduler, and a file in the place of the optimizer's."""
        # a plain trainer would go on with fresh moments, and say nothing, where this file is missing
        torch.save({"moments": "of a megacompile program, in the folder program"}, folder / "optimizer.pt")
        torch.save(self._trainer.lr_scheduler.state_dict(), folder / "scheduler.pt")


def _reads_checkpoints(callback: TrainerCallback) -> bool:
    """Return whether a callback may read a checkpoint's files in its ``on_save``; one that does not says so
    by ``reads_checkpoints = False``."""
    if type(callback).on_save is TrainerCallback.on_save:
        return False
    uploads = getattr(callback, "_log_model", None) != "false"  # of Weights & Biases
    return uploads and getattr(callback, "reads_checkpoints", True)
