"""The program: what :func:`megacompile.compile` returns and what a training loop talks to.

It keeps the promises about faults: state is never half updated without saying so, nothing is silent, and
whoever asks for the state first gets every update that is under way. Programs are compiled and run by its
:class:`~megacompile.session.Session`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from megacompile.assemble.plan import Mode
from megacompile.capture.batch import Batch, micro_weights
from megacompile.capture.outputs import OutputsFn, all_outputs
from megacompile.errors import MegacompileError, ProgramError
from megacompile.forward import Forward
from megacompile.host.optimizer import check_settings, restore_settings, settings_of
from megacompile.host.state import HostState
from megacompile.outside import LossOfOutputs
from megacompile.runtime.calls import alone
from megacompile.runtime.results import StepOutput
from megacompile.runtime.step_io import StepResults
from megacompile.session import Session
from megacompile.storage.background import BackgroundSave, Then
from megacompile.storage.checkpoint import Checkpoint, Progress, save_checkpoint
from megacompile.storage.export import describe, export_model


class Program(Forward):
    """A model compiled for training under a memory budget; made by :func:`megacompile.compile`.

    ``model`` and ``optimizer`` are those that were given; a learning-rate scheduler takes ``optimizer``. Used
    as ``with program:``, it is closed at the end.
    """

    def __init__(self, session: Session) -> None:
        self.model = session.model
        self.optimizer = session.optimizer
        self._session = session
        self._closed = False

    # ---- training --------------------------------------------------------------------------------

    @alone
    def train_step(
        self,
        batch: Any,
        *,
        weights: Sequence[float] | None = None,
        loss: LossOfOutputs | None = None,
        outputs: OutputsFn | None = None,
    ) -> StepOutput:
        """One optimizer step on a batch (a dict, a tuple or a tensor), or on a list of micro-batches.

        A list trains on the mean of the micro-batches' losses (their sum where the batches carry
        ``num_items_in_batch``), or on the sum weighted by ``weights``. Returns at once when the last
        block's backward is done; updates go on in the background.

        ``loss(i, output)`` is computed outside of the program, by any code, from what the forward returns for
        micro-batch i: tensors on the host, whose gradients by this scalar the backward starts from. It is
        called once for each, between forward and backward. ``outputs(output, batch)`` is compiled with the
        model, as for :meth:`predict`, and what it returns comes in the place of the output.
        """
        self._ready()
        session = self._session
        if session.runtime is not None and session.runtime.has_gradients:
            raise ProgramError(
                "Gradients of forward_backward are waiting: call optimizer_step() or drop_gradients() first."
            )
        micro = session.micro_batches(batch, outputs=_outputs_for(loss, outputs))
        if weights is None:
            session.check_counts(micro)
        weights = micro_weights(micro, weights)
        if len({m.key for m in micro}) > 1:
            return self._step_by_accumulation(micro, weights, loss)
        try:
            results = session.run(micro, session.training(micro), weights, loss=loss)
        except BaseException:
            session.drop_gradients()
            raise
        return StepOutput(self._session, results, weights)

    @alone
    def forward_backward(
        self,
        batch: Any,
        *,
        weight: float | None = None,
        loss: LossOfOutputs | None = None,
        outputs: OutputsFn | None = None,
    ) -> StepOutput:
        """Add the gradient of ``weight`` (None: 1) times the batch's loss to those that wait on the host.

        Parameters have no ``.grad``: ``max_grad_norm`` clips, when :meth:`optimizer_step` applies them.
        ``loss`` and ``outputs`` are those of :meth:`train_step`.
        """
        self._ready()
        micro = self._session.micro_batches(batch, outputs=_outputs_for(loss, outputs))
        if weight is None:
            self._session.check_counts(micro)
        weights = [1.0 if weight is None else weight] * len(micro)
        return StepOutput(self._session, StepResults(self._accumulate(micro, weights, loss)), weights)

    @alone
    def optimizer_step(self) -> StepOutput:
        """Apply the gradients that :meth:`forward_backward` has gathered, clipped as compiled."""
        self._ready()
        runtime = self._session.runtime
        if runtime is not None and runtime.lost_gradients:
            runtime.drop_gradients()
            raise ProgramError(
                "A forward_backward failed in the middle of its backward, and all gradients gathered since "
                "the last update were dropped with it: repeat those micro-batches."
            )
        if runtime is None or not runtime.has_gradients:
            raise ProgramError("No gradient is waiting: call forward_backward(batch) first.")
        self._session.check_model()
        return StepOutput(self._session, self._session.update(), ())

    @alone
    def drop_gradients(self) -> None:
        """Forget the gradients that :meth:`forward_backward` has gathered."""
        self._session.synchronize()
        self._session.drop_gradients()

    @alone
    def synchronize(self) -> None:
        """Return when all transfers, updates and checkpoints are done; ``out.loss`` needs no such call."""
        self._session.synchronize()
        self._session.finish_saving()
        self._session.report_skipped()

    @alone
    def close(self) -> None:
        """Finish what is under way and end the worker threads; the state can still be read."""
        session = self._session
        session.synchronize()
        if session.runtime is not None:
            session.runtime.close()
        self._closed = True
        session.inconsistent = (
            session.inconsistent or "The program was closed: compile the model again to train on."
        )
        session.finish_saving()
        session.report_skipped()

    @alone
    def release(self) -> nn.Module:
        """Give the model its values back, free the program's own, moments too, and close it.

        Returns the model, an ordinary one again. Its values need host memory beside the state until that is
        freed.
        """
        self.close()
        self._session.release()
        return self.model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:  # otherwise what went wrong first is what to tell
                raise

    # ---- state -----------------------------------------------------------------------------------

    @alone
    def state_dict(self, *, trained: bool = False) -> dict[str, Tensor]:
        """FP32 masters and persistent buffers under the model's own names, tied weights as one tensor:
        what the plain model's ``load_state_dict`` takes. ``trained``: only what requires a gradient."""
        self.synchronize()
        return self._session.values.state_dict(trained=trained)

    @alone
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set the masters; names and shapes must be those of :meth:`state_dict`.

        Moments and step counts stay as they are, except after a step that stopped in the middle: those of
        some groups are of that step, so all start from zero.
        """
        self.synchronize()
        session = self._session
        session.values.check(state)
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

        ``wait=False``: a thread writes it while training goes on. Updates copy what is not written yet, if
        ``host_budget`` has room, or wait. :meth:`synchronize`, :meth:`close` and the next ``save`` return
        when it is whole; an error is raised there or by the next step. With state on NVMe it always waits.

        ``then`` is called when it is whole, in the thread that wrote it, with None; in the background also
        with an error, which is then not raised.
        """
        self.synchronize()
        session = self._session
        if session.inconsistent:
            raise ProgramError(session.inconsistent)
        settings = settings_of(self.optimizer, self.model)
        progress = Progress(type(self.model).__name__, session.seed, session.calls, settings)
        state, loose = self._allocated_state("save"), session.values.loose()
        source = state if state.passing else session.snapshot()
        if wait or isinstance(source, HostState):
            save_checkpoint(Path(folder), source, loose, progress)
            if then is not None:
                then(None)
            return
        session.saving = BackgroundSave(Path(folder), source, loose, progress, then)
        session.saving.start(state)

    @alone
    def load(self, folder: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint of :meth:`save`, of the same model in the same formats; budgets may differ.

        Takes no more memory than training does. What does not fit, or is damaged, is named.
        """
        session = self._session
        if self._closed:
            raise ProgramError(session.inconsistent)
        self.synchronize()
        checkpoint = Checkpoint(Path(folder), self._allocated_state("load"), session.values.loose())
        progress = checkpoint.progress
        check_settings(self.optimizer, self.model, progress.param_groups)
        session.inconsistent = "A checkpoint was read in part only: load a whole one."
        checkpoint.read()
        restore_settings(self.optimizer, progress.param_groups)
        session.seed, session.calls = progress.seed, progress.calls
        session.forget_faults()

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
        it, of which an earlier export's weights and config are replaced.
        """
        self.synchronize()
        session = self._session
        if session.inconsistent and not self._closed:
            raise ProgramError(session.inconsistent)
        values = itertools.chain(session.values.parameters(), session.values.buffers().items())
        export_model(Path(folder), describe(self.model), values, dtype, beside=beside)

    @alone
    def sync_to(self, model: nn.Module) -> None:
        """Copy the masters into a model of the same shape, which is then an ordinary one again.

        So is the program's own model, with its optimizer, without moments.

        The program keeps its own values: what is changed in the model later is trained only after
        ``load_state_dict(model.state_dict())``.
        """
        self.synchronize()
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

    def __getstate__(self) -> Any:
        raise ProgramError("A program cannot be pickled: save program.state_dict() instead.")

    # ---- inside ---------------------------------------------------------------------------------

    def _accumulate(
        self, micro: list[Batch], weights: list[float], loss: LossOfOutputs | None
    ) -> list[Tensor]:
        losses: list[Tensor] = []
        for i, (one, weight) in enumerate(zip(micro, weights, strict=True)):
            of_one = _numbered(loss, i)
            losses += self._session.run([one], Mode("accumulate"), [weight], loss=of_one).losses
        return losses

    def _step_by_accumulation(
        self, micro: list[Batch], weights: list[float], loss: LossOfOutputs | None
    ) -> StepOutput:
        try:
            losses = self._accumulate(micro, weights, loss)
        except BaseException:
            self._session.drop_gradients()
            raise
        results = self._session.update()
        results.losses = losses
        return StepOutput(self._session, results, weights)

    def _allocated_state(self, what: str) -> HostState:
        runtime = self._session.runtime
        if runtime is None:
            raise ProgramError(f"No state is allocated yet: compile with example_batch, then {what}.")
        if runtime.has_gradients:
            raise ProgramError(
                f"Gradients are waiting: call optimizer_step() or drop_gradients(), then {what}."
            )
        return runtime.state


def _outputs_for(loss: LossOfOutputs | None, outputs: OutputsFn | None) -> OutputsFn | None:
    """What a program computes in the place of the loss, where that is computed outside."""
    if loss is not None:
        return outputs or all_outputs
    if outputs is not None:
        raise MegacompileError(
            "outputs= is given without loss=, which would be computed from them: give both."
        )
    return None


def _numbered(loss: LossOfOutputs | None, number: int) -> LossOfOutputs | None:
    """The loss for a run of this micro-batch alone."""
    return None if loss is None else lambda _, outputs: loss(number, outputs)
