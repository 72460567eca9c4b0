"""The state of a program: values, checkpoints, exports, and what a recompilation keeps.

In: folders, state dicts, models. Out: the same. Whoever asks first gets every update that is under way.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import DiskError, MegacompileError, ProgramError
from megacompile.forward import Forward
from megacompile.host.optimizer import check_settings, restore_settings, settings_of
from megacompile.host.snapshot import Snapshot
from megacompile.host.state import HostState
from megacompile.runtime.calls import alone
from megacompile.storage.background import BackgroundSave, Then
from megacompile.storage.checkpoint import Checkpoint, checked_folder, save_checkpoint
from megacompile.storage.export import describe, export_model
from megacompile.storage.manifest import Progress


class Persistence(Forward):
    """The part of :class:`~megacompile.program.Program` that reads and writes its state."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    _closed: bool

    @alone
    def synchronize(self) -> None:
        """Return when all transfers, updates and checkpoints are done; ``out.loss`` needs no such call."""
        self._session.synchronize()
        self._session.values.take_back()
        self._session.finish_saving()
        self._session.report_skipped()

    @alone
    def finish_saving(self) -> None:
        """Return when no checkpoint is being written; raise why one was not. Steps may be under way."""
        self._session.finish_saving()

    @alone
    def state_dict(self, *, trained: bool = False) -> dict[str, Tensor]:
        """FP32 masters and persistent buffers under the model's own names, tied weights as one tensor:
        what the plain model's ``load_state_dict`` takes. ``trained``: only what requires a gradient. Several
        ranks call it together; the first gets the values, the others an empty dict."""
        self.synchronize()
        with self._session.world.together():
            values = self._session.values.state_dict(trained=trained)
        return values if self._session.world.rank == 0 else {}

    @alone
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set the masters; names and shapes must be those of :meth:`state_dict`.

        Moments and step counts stay as they are, except after a step that stopped in the middle: those of
        some groups are of that step, so all start from zero. Several ranks call it together, each with the
        whole state; the first one's values count.
        """
        self.synchronize()
        session = self._session

        def described() -> dict[str, Any]:
            session.values.check(state)
            return {"names": [[name, list(v.shape), str(v.dtype)] for name, v in state.items()]}

        with session.world.together():
            session.world.compare(described)
            self._load(state)

    def _load(self, state: Mapping[str, Tensor]) -> None:
        session = self._session
        inconsistent = session.inconsistent
        session.inconsistent = (
            "A state was loaded in part only: load a checkpoint, or a whole state, which then sets Adam's "
            "moments to zero."
        )
        session.values.load(state)
        if session.runtime is not None and inconsistent and not self._closed:
            session.runtime.state.reset_moments()
        session.forget_faults(inconsistent if self._closed else "")

    @alone
    def save(self, folder: str | os.PathLike[str], *, wait: bool = True, then: Then | None = None) -> None:
        """Write a checkpoint from which :meth:`load` goes on bit for bit.

        The state after every update so far: masters, moments in their format, step counts, buffers, the
        optimizer's settings, the place in the sequence of seeds. A checkpoint in the same folder stays until
        this one is whole on disk; deleting folders and a scheduler's ``state_dict()`` are the caller's.

        ``wait=False``: a thread writes it while training goes on, slowly, with 1 % of the machine's processor
        time, or as fast as it can while somebody waits. Updates copy what is not written yet, if
        ``host_budget`` has room, or wait. :meth:`finish_saving`, :meth:`synchronize`, :meth:`close` and the
        next ``save`` return when it is whole; an error is raised there or by the next step. With state on
        NVMe it always waits.

        ``then`` is called when it is whole, in the thread that wrote it, with None; in the background also
        with an error, which is then not raised.

        Several ranks call it together, for one folder that all see. Each writes its part of the state; any
        number of ranks goes on from it. What kept one from that is raised on all, where they wait for it.
        """
        self.synchronize()
        session = self._session
        if session.inconsistent:
            raise ProgramError(session.inconsistent)
        state, buffers = self._allocated_state("save"), session.values.buffers()
        settings = settings_of(self.optimizer, self.model, state.named_numbers())
        progress = Progress(type(self.model).__name__, session.seed, session.calls, settings)
        source = state if state.passing else self._snapshot(state)
        with session.world.together():
            session.world.agree(lambda: checked_folder(Path(folder)))
            if not wait and not isinstance(source, HostState):
                session.saving = BackgroundSave(Path(folder), source, buffers, progress, session.world, then)
                session.saving.start(state)
                return
            save_checkpoint(Path(folder), source, buffers, progress, session.world)
        if then is not None:
            then(None)

    @alone
    def load(self, folder: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint of :meth:`save`, of the same model in the same formats; budgets may differ.

        Takes no more memory than training does. What does not fit, or is damaged, is named. Several ranks
        call it together, as many as there are now: each reads its part.
        """
        session = self._session
        if self._closed:
            raise ProgramError(session.inconsistent)
        self.synchronize()
        state, buffers = self._allocated_state("load"), session.values.buffers()
        with session.world.together():
            found = session.world.agree(lambda: self._open(Path(folder), state, buffers))
            session.inconsistent = "A checkpoint was read in part only: load a whole one."
            session.world.agree(found.read)
        progress = found.progress
        state.take_numbers(restore_settings(self.optimizer, progress.param_groups))
        session.seed, session.calls = progress.seed, progress.calls
        session.forget_faults()

    def _open(self, folder: Path, state: HostState, buffers: Mapping[str, Tensor]) -> Checkpoint:
        found = Checkpoint(folder, state, buffers)
        check_settings(self.optimizer, self.model, found.progress.param_groups)
        return found

    @alone
    def export(
        self,
        folder: str | os.PathLike[str],
        dtype: torch.dtype | None = torch.bfloat16,
        *,
        beside: bool = False,
    ) -> None:
        """Write the trained values in ``dtype`` as a folder that ``transformers`` loads.

        None: in the dtypes that the model's parameters have. ``beside`` allows a folder with other files in
        it, of which an earlier export's weights and config are replaced. Several ranks call it together, and
        the first one writes.
        """
        self.synchronize()
        session = self._session
        if session.inconsistent and not self._closed:
            raise ProgramError(session.inconsistent)
        values = itertools.chain(session.values.parameters(), session.values.buffers().items())
        failures: list[Exception] = []

        def settle() -> None:
            if failures:
                raise failures[0]

        with session.world.together():
            if session.world.rank == 0:
                try:
                    export_model(Path(folder), describe(self.model), values, dtype, beside=beside)
                except (DiskError, MegacompileError) as error:
                    failures.append(error)
            deque(values, maxlen=0)  # all give what the first one did not take
            session.world.agree(settle)

    @alone
    def sync_to(self, model: nn.Module) -> None:
        """Copy the masters into a model of the same shape, which is then an ordinary one again.

        So is the program's own model, with its optimizer, without moments.

        The program keeps its own values: what is changed in the model later is trained only after
        ``load_state_dict(model.state_dict())``. Several ranks call it together, and each gets the values.
        """
        self.synchronize()
        with self._session.world.together():
            self._session.values.copy_to(model)

    @alone
    def recompile(self) -> None:
        """Forget what was captured, so that the next step looks anew at the model and at what its code reads.

        For changes that no program follows: globals, closures, classes, the environment. State, moments, step
        counts and seeds stay as they are.
        """
        self.synchronize()
        if self._session.runtime is not None:
            self._allocated_state("recompile")
        self._session.forget_programs()

    def _snapshot(self, state: HostState) -> Snapshot:
        """The state as it is, for a checkpoint; copies get what the host budget leaves."""
        session, runtime = self._session, self._session.runtime
        assert runtime is not None
        updated = [op.group for op in session.scheduled().planned.step.ops if op.kind == "adam"]
        taken = state.arena.nbytes + state.scratch_bytes + runtime.buffers.beside_bytes
        return state.snapshot(updated, session.settings.host_budget_bytes - taken)

    def _allocated_state(self, what: str) -> HostState:
        runtime = self._session.runtime
        if runtime is None:
            raise ProgramError(f"No state is allocated yet: compile with example_batch, then {what}.")
        if runtime.has_gradients:
            raise ProgramError(
                f"Gradients are waiting: call optimizer_step() or drop_gradients(), then {what}."
            )
        return runtime.state
