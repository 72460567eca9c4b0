"""A compiled program, the whole class: train, evaluate, predict, generate, save, load, inspect.

It is what :func:`megacompile.compile` returns and what a training loop talks to. It keeps the promises about
faults: state is never half updated without saying so, nothing is silent, and whoever asks for the state first
gets every update that is under way. Programs are compiled and run by its
:class:`~megacompile.api.session.Session`. Forwards without training run by programs of the forward alone,
over the same state and under the same budget as training.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from megacompile.api.block_timer import calibrated
from megacompile.api.decisions import Scheduled
from megacompile.api.device_weights import DeviceWeights
from megacompile.api.generate_with_cache import Rollout
from megacompile.api.generate_without_cache import generate, refuse_no_generator
from megacompile.api.merged_weights import MergedWeights
from megacompile.api.outside_loss import LossOfOutputs
from megacompile.api.program_set import PlannedError
from megacompile.api.rank_agreement import agreed_batches, described_optimizer
from megacompile.api.session import CLOSED, Session
from megacompile.capture.attempts import Attempts, OwnLoss
from megacompile.capture.batch import Batch, micro_weights
from megacompile.capture.loss_cut import LossCall, warning
from megacompile.distributed.world import World
from megacompile.errors import (
    BudgetError,
    CaptureError,
    DeviceLostError,
    DiskError,
    MegacompileError,
    ProgramError,
    UntraceableError,
)
from megacompile.graph.forward_outputs import OutputsFn, all_outputs
from megacompile.graph.fusion_report import Fusions
from megacompile.hardware.machine import Machine
from megacompile.hardware.measured_step import align
from megacompile.report.schedule import Schedule
from megacompile.runtime.call_context import alone, exclusive
from megacompile.runtime.memory_report import Memory
from megacompile.runtime.step_output import StepOutput
from megacompile.runtime.step_results import StepResults
from megacompile.schedule.plan import Mode, Plan
from megacompile.state.background_save import BackgroundSave, Then
from megacompile.state.checkpoint import Checkpoint, checked_folder, save_checkpoint
from megacompile.state.checkpoint_manifest import RunProgress
from megacompile.state.host_arena import resident_peak_bytes
from megacompile.state.masters import HostState
from megacompile.state.model_export import describe, export_model
from megacompile.state.model_values import Lending
from megacompile.state.optimizer import check_settings, restore_settings, settings_of
from megacompile.state.saved_values import saved_masters
from megacompile.state.snapshot import Snapshot
from megacompile.user_warning import warn_user

_Owner = TypeVar("_Owner", bound=DeviceWeights)


M = TypeVar("M", bound=Callable[..., Any])


def cuts_loss(method: M) -> M:
    """Wrap a method that compiles for a batch: it cuts off the model's own loss if tracing that fails."""

    @functools.wraps(method)
    def call(program: Program, /, batch: Any, **options: Any) -> Any:
        session = program._session
        ours = session.reader.cut is not None or session.world.size > 1
        if ours or options.get("outputs") or options.get("loss"):
            return method(program, batch, **options)
        attempts: Attempts[OwnLoss, Any] = Attempts(OwnLoss())
        for loss in attempts:
            session.reader.cut = loss.cut
            try:
                attempts.outcome = method(program, batch, **options)
            except BaseException as error:
                session.reader.cut = None  # nothing says yet that this cut is the right one
                if isinstance(error, BudgetError) or not isinstance(error, MegacompileError):
                    raise
                if not (loss.cut or isinstance(error, UntraceableError)):
                    raise
                attempts.outcome = loss.failed(error, lambda: session.reader.cuts(batch))
        result, loss = attempts.get(), attempts.how
        if loss.cut is not None and loss.why is not None:
            warn_user(warning(program.model, loss.cut, loss.why))
        return result

    return cast("M", call)


class Program:
    """A model compiled for training under a memory budget; made by :func:`megacompile.compile`.

    Each of several ranks has one, and calls its methods together with the others.

    ``model`` is the given model without torch's wrappers, ``optimizer`` the given optimizer; a learning-rate
    scheduler takes it. Used as ``with program:``, it is closed at the end.
    """

    def __init__(self, session: Session) -> None:
        self.model = session.model
        self.optimizer = session.optimizer
        self._session = session
        self._closed = self._rolls_out = False

    @property
    def world(self) -> World:
        """The ranks that train the model together; a process alone is one of one."""
        return self._session.world

    @alone
    @cuts_loss
    def train_step(
        self,
        batch: Any,
        *,
        weights: Sequence[float] | None = None,
        loss: LossOfOutputs | None = None,
        outputs: OutputsFn | None = None,
    ) -> StepOutput:
        """One optimizer step on a batch (a dict, a tuple, a tensor, or a list of tensors), or on a list of
        micro-batches.

        A list trains on the mean of the micro-batches' losses (their sum if the batches carry
        ``num_items_in_batch``), or on the sum weighted by ``weights``. Returns at once when the last block's
        backward is done; updates go on in the background. Each of several ranks brings as many micro-batches,
        and trains on those of all: ``out.losses`` are all ranks', ``out.loss`` is one number.

        ``loss(i, output)`` is computed outside of the program, by any code, from the forward's results for
        micro-batch i, tensors on the host. It returns a scalar, and the backward starts from the results'
        gradients. It is called once for each micro-batch, between forward and backward. ``outputs(output,
        batch)`` is compiled with the model, as for :meth:`predict`, and what it returns comes in the place of
        the output.
        """
        self._ready()
        session = self._session
        if session.runtime is not None and session.runtime.has_gradients:
            raise ProgramError(
                "Gradients of forward_backward are waiting: call optimizer_step() or drop_gradients() first."
            )

        def weigh(micro: list[Batch]) -> list[float]:
            if weights is None:
                session.reader.check_counts(micro)
            return micro_weights(micro, weights, ranks=session.world.size)

        given = _outputs_for(loss, outputs)
        with session.world.together():
            micro, own, everyone = agreed_batches(session, batch, "train", weigh, given)
            if len({m.key for m in micro}) > 1:
                return self._step_by_accumulation(micro, own, loss)
            try:
                results = session.run(micro, session.training(micro), own, loss=loss)
            except BaseException:
                session.drop_gradients()
                raise
        return session.output(results, everyone)

    @alone
    @cuts_loss
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
        session = self._session
        session.values.refuse_dropped()

        def weigh(micro: list[Batch]) -> list[float]:
            if weight is None:
                session.reader.check_counts(micro)
            return [1.0 if weight is None else weight] * len(micro)

        with session.world.together():
            given = _outputs_for(loss, outputs)
            micro, own, everyone = agreed_batches(session, batch, "accumulate", weigh, given)
            return session.output(StepResults(self._accumulate(micro, own, loss)), everyone)

    @alone
    def optimizer_step(self) -> StepOutput:
        """Apply the gradients that :meth:`forward_backward` has gathered, clipped as compiled."""
        self._ready()
        with self.world.together():
            self.world.compare(self._described_update)
            return self._session.output(self._session.update(), ())

    @alone
    def drop_gradients(self) -> None:
        """Forget the gradients that :meth:`forward_backward` has gathered, as ``zero_grad()`` of the model or
        of its optimizers does."""
        self.world.note_call()
        self._session.synchronize()
        self._session.drop_gradients()

    @alone
    def close(self) -> None:
        """Finish all work under way and end the worker threads; the state can still be read. The model keeps
        the program's values, so the next program of this model takes them from there.
        """
        session = self._session
        lost: DeviceLostError | None = None
        try:
            if not self.world.ended:  # then the step was left that said so
                session.synchronize()
        except DeviceLostError as error:
            lost = error
        session.close()
        self.world.disconnect()
        self._closed = True
        session.refuse_training(session.inconsistent or CLOSED)
        session.values.given_up_by(session.hand_over)
        try:
            session.finish_saving()
        finally:
            self.world.close()
        if lost is not None:
            raise lost
        session.report_skipped()

    @alone
    def release(self) -> nn.Module:
        """Give the model its values back, free the program's own, moments too, and close it.

        Returns the model, an ordinary one again, with the values of the last step, even after an earlier
        :meth:`sync_to`. Its values need host memory beside the state until the state is freed.
        """
        self.close()
        with self.world.together():
            self._session.release()
        return self.model

    def lend(self, lending: Lending) -> None:
        """Lend the model to other code between calls of this program, as to the trainers' callbacks. A
        parameter that is touched gets its value, on the host, until the next call takes it back, changed or
        not. For one process; call it before the first step."""
        self._session.values.lend_by(lending, self._give_up)

    def expect_mixing(self) -> None:
        """Keep frozen weights so that :meth:`mix` can change them; call it before the first step."""
        self._session.values.expect_mixing()

    @alone
    def mix(self, other: Program, share: float) -> None:
        """Mix weights, as a reference that follows a policy does: each becomes ``share`` of the other
        program's and the rest of its own, frozen ones too, in the model's dtype. For one process."""
        self.synchronize()
        other.synchronize()
        self._session.values.mix(other._session.values, share)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:  # otherwise what went wrong first is what to tell
                raise

    def __getstate__(self) -> Any:
        raise ProgramError("A program cannot be pickled: save program.state_dict() instead.")

    def _give_up(self, optimizer: Any) -> None:
        self.close()
        self._session.hand_over(optimizer)

    def _described_update(self) -> dict[str, Any]:
        """Describe what all ranks must have alike to update by what waits; refused where nothing does."""
        runtime = self._session.runtime
        if runtime is not None and runtime.lost_gradients:
            runtime.drop_gradients()
            raise ProgramError(
                "A forward_backward failed in the middle of its backward, and all gradients gathered since "
                "the last update were dropped with it: repeat those micro-batches."
            )
        if runtime is None or not runtime.has_gradients:
            raise ProgramError("No gradient is waiting: call forward_backward(batch) first.")
        self._session.values.refuse_dropped()
        self._session.check_model()
        return {"optimizer": described_optimizer(self._session)}

    def _accumulate(
        self, micro: list[Batch], weights: list[float], loss: LossOfOutputs | None
    ) -> list[Tensor]:
        losses: list[Tensor] = []
        for i, (one, weight) in enumerate(zip(micro, weights, strict=True)):
            results = self._session.run([one], Mode("accumulate"), [weight], loss=_of_micro_batch(loss, i))
            if self.world.size > 1:
                self._session.await_losses()  # then there are those of all ranks
            losses += results.losses
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
        results.take_losses(losses)
        return self._session.output(results, weights)

    @alone
    def synchronize(self) -> None:
        """Return when all transfers, updates and checkpoints are done; ``out.loss`` needs no such call."""
        self._session.synchronize()
        self._session.values.take_back()
        self._session.finish_saving()
        self._session.report_skipped()

    @alone
    def vacate(self) -> None:
        """Give the device's memory back, to another program, until this one is called next."""
        self._session.vacate()

    @alone
    def finish_saving(self) -> None:
        """Return when no checkpoint is being written; raise the error of one that failed. Steps may be under
        way."""
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

        Moments and step counts stay as they are, except after a step that stopped in the middle: then all
        start from zero, because some groups have taken that step. Several ranks call it together, each with
        the whole state; the first one's values count.
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
        session.refuse_training(
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

        ``then(None)`` is called when it is whole, in the thread that wrote it; in the background also
        ``then(error)``, and the error is not raised.

        Several ranks call it together, for one folder that all see. Each writes its part of the state; any
        number of ranks goes on from it. The error of one rank is raised on all, when they wait for the
        checkpoint.
        """
        self.synchronize()
        session = self._session
        if session.inconsistent:
            raise ProgramError(session.inconsistent)
        state, buffers = self._allocated_state("save"), session.values.buffers()
        source = state if state.passing else self._snapshot(state)
        with session.world.together():
            session.world.agree(lambda: checked_folder(Path(folder)))
            settings = settings_of(self.optimizer, self.model, state.named_numbers())
            progress = RunProgress(type(self.model).__name__, session.seed, session.calls, settings)
            if not wait and not isinstance(source, HostState):
                saving = BackgroundSave(Path(folder), source, buffers, progress, session.world, then)
                session.save_behind(saving, state)
                return
            save_checkpoint(Path(folder), source, buffers, progress, session.world)
        if then is not None:
            then(None)

    @alone
    def resume(self, folder: str | os.PathLike[str]) -> None:
        """Give a rollout before the first step the values of a checkpoint; give the same one to :meth:`load`
        afterwards."""
        self._session.values.resume_from(saved_masters(Path(folder)))

    @alone
    def load(self, folder: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint of :meth:`save`, of the same model in the same formats; budgets may differ.

        Takes no more memory than training does. Files that do not fit, or are damaged, are named. Several
        ranks call it together, as many as there are now: each reads its part.
        """
        session = self._session
        if self._closed:
            raise ProgramError(session.inconsistent)
        self.synchronize()
        state, buffers = self._allocated_state("load"), session.values.buffers()
        with session.world.together():
            found = session.world.agree(lambda: self._open(Path(folder), state, buffers))
            session.refuse_training("A checkpoint was read in part only: load a whole one.")
            session.world.agree(found.read)
        progress = found.progress
        state.take_numbers(restore_settings(self.optimizer, progress.param_groups))
        session.go_on_from(progress)
        session.forget_faults()

    def _open(self, folder: Path, state: HostState, buffers: Mapping[str, Tensor]) -> Checkpoint:
        found = Checkpoint(folder, state, buffers)
        check_settings(self.optimizer, self.model, found.progress.param_groups, folder)
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

        None: in the dtypes that the model's parameters have. The files of its tokenizer and processor are
        copied from the folder that the model was loaded from. ``beside`` allows a folder with other files in
        it, and replaces an earlier export's weights and config there. Several ranks call it together, and the
        first one writes.
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

        The program's own model works too, with its optimizer, but without moments.

        The program keeps its own values: it trains changes in the model only after
        ``load_state_dict(model.state_dict())``, and :meth:`release` replaces them once the program has
        trained on. Buffers are the model's own, in both. Several ranks call it together, and each gets the
        values.
        """
        self.synchronize()
        with self._session.world.together():
            self._session.values.copy_to(model)

    @alone
    def recompile(self) -> None:
        """Forget all captures, so that the next step looks anew at the model and at the values that its code
        reads. For changes that no program follows: globals, closures, classes, the environment. State,
        moments, step counts and seeds stay as they are.
        """
        self.synchronize()
        if self._session.runtime is not None:
            self._allocated_state("recompile")
        self.world.note_call()
        self._session.forget_programs()

    def _snapshot(self, state: HostState) -> Snapshot:
        """The state as it is, for a checkpoint; copies get what the host budget leaves."""
        session, runtime = self._session, self._session.runtime
        assert runtime is not None
        ops = session.scheduled().planned.step.ops
        updated = [op.group for op in ops if op.kind in ("adam", "adam_rest")]
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

    def plan_all(self, calls: Mapping[str, Callable[[], object]]) -> list[tuple[str, Schedule]]:
        """Plan the programs of all calls, by what they are for, and run none; the first prepares training.

        A call of :meth:`prepare` plans and takes nothing over. A call that runs a forward ends at its first
        forward, which is planned. If any program does not fit, the error names the least budget that suffices
        for all of them. Returns each program with what it is for. Several ranks call it together.
        """
        self._ready()
        session = self._session
        with session.lock:  # a step of another thread would be planned with them, and not run
            found = session.plan_all(calls)
        return [(name, session.schedule_of(scheduled, session.planned_machine)) for name, scheduled in found]

    @property
    def plans_only(self) -> bool:
        """Return whether a :meth:`plan_all` is under way."""
        return self._session.planning is not None

    @alone
    @cuts_loss
    def evaluate(self, batch: Any) -> Tensor:
        """The loss of a batch in eval mode, under the same budget; no gradient, no update. Each of several
        ranks gets that of its own batch."""
        loss: Tensor = self._forward("evaluate", batch, None)
        return loss

    @alone
    def predict(self, batch: Any, *, outputs: OutputsFn | None = None) -> Any:
        """Return the forward's outputs for a batch in eval mode, on the host, under the same budget as
        training.

        A tensor, a tuple, a dict or a transformers output comes back as the model returns it, without a cache
        of keys and values. The batch needs no labels. It is padded to one of few lengths if all outputs are
        numbers or [rows, positions, ...]; padding is cut off the outputs again. Each of several ranks gets
        the outputs of its own batch.

        ``outputs(output, batch)`` is compiled with the model, and its result comes in the place of the
        output: with ``lambda out, batch: out.logits.argmax(-1)`` no logits reach the host. It may read
        entries of the batch that the forward does not take. Its attribute ``inputs`` names entries for it
        alone. Another function, or the same one over other values, is another program.
        """
        return self._forward("predict", batch, outputs or all_outputs)

    @contextlib.contextmanager
    def rollout(self) -> Iterator[Any]:
        """Lend a copy of the model with the whole budget to generate in: ``with program.rollout() as model``.
        The copy is in eval mode, with weights on the device, as programs compute with them, and room for a
        cache of keys and values. Its ``generate`` and its call are the model's own; they take and return
        tensors of the host. If the cache of all rows has no room, ``generate`` makes one part of the rows
        after the other. If all weights have no room, a block's weights come when it runs, in each forward.
        Steps go on after the context, bit for bit as without it, even after an exception. Inside, the program
        itself runs nothing. Refused for several ranks.
        """
        with self._given_back("rollout", Rollout, "use program.generate") as rollout:
            yield rollout.model

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight under its name, on the device, as programs compute with it, for a server. PEFT's
        adapters are merged into them, under the names of the model without adapters. They come one by one,
        whatever the model's size; the weights that the caller keeps have to fit ``hbm_budget`` together. The
        program runs nothing until the last one was taken. Refused for several ranks.
        """
        kind = MergedWeights if hasattr(self.model, "get_base_model") else DeviceWeights
        with self._given_back("named_weights", kind, "use program.state_dict") as weights:
            yield from weights.each()

    @contextlib.contextmanager
    def _given_back(self, name: str, kind: type[_Owner], way_out: str) -> Iterator[_Owner]:
        """Within, the device belongs to what ``kind`` makes of the session."""
        session = self._session
        with exclusive(session, name), session.values.in_call():
            self._ready()
            if self.world.size > 1:
                raise MegacompileError(
                    f"program.{name} is for one process, and several ranks train here: {way_out}."
                )
            owner = kind(session)
            self._rolls_out = True
        try:
            yield owner
        finally:
            with exclusive(session, name):
                self._rolls_out = False
                owner.end()

    @alone
    def generate(self, /, input_ids: Tensor, **options: Any) -> Any:
        """Generate samples between steps, as ``model.generate(input_ids, **options)`` of transformers does.

        The model is in eval mode, the result on the host, and the budget that of training.

        ``options`` are those of transformers: ``max_new_tokens``, ``do_sample``, ``temperature``,
        ``num_beams``, ``stopping_criteria``, an ``attention_mask`` of prompts padded on the left. Random
        numbers come from torch's generator, so a seed gives the same tokens as there.

        The model generates in a :meth:`rollout`. Without room for one in the budget, and on several ranks,
        each token takes a forward over the whole row, without a cache, by a program. Then several rows cost
        little more than one, because weights take as long to come for a token as for a few hundred; rows are
        padded to few lengths, so that few programs are compiled. Several ranks call it together, with the
        same prompts, and with the same seed if they sample.
        """
        refuse_no_generator(self._session.model, input_ids)
        # planned is what generates where a rollout has no room
        if self.world.size == 1 and not self.plans_only:
            with contextlib.suppress(BudgetError), self.rollout() as model:
                return model.generate(input_ids, **options)
        return generate(self._session.model, self.predict, input_ids, **options)

    @alone
    @cuts_loss
    def prepare(
        self,
        batch: Any,
        *,
        outputs: OutputsFn | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        """Compile the training program for an example batch and take over the model's storage; for a list of
        micro-batches of several kinds, the program of each.

        ``outputs``: the program of a ``loss`` that is computed outside; see :meth:`Program.train_step`.
        ``checkpoint``: the folder of the next :meth:`Program.load`. Ranks on several machines take its mesh,
        if they are as many.
        """
        session = self._session
        self._refuse_in_rollout()
        resumed = None if checkpoint is None else Path(checkpoint)

        with session.world.together():
            micro, _, _ = agreed_batches(session, batch, "train", lambda micro: [1.0] * len(micro), outputs)
            kinds = {of.key: of for of in reversed(micro)}
            mode = session.training(micro) if len(kinds) == 1 else Mode("accumulate")  # one after the other
            for of in reversed(kinds.values()):
                session.schedule(of, mode, resumed=resumed)
            if len(kinds) > 1 and self.plans_only:
                session.schedule(micro[-1], Mode("update"))

    def _forward(self, name: str, batch: Any, outputs: OutputsFn | None) -> Any:
        self._ready()
        session = self._session

        def weigh(micro: list[Batch]) -> list[float]:
            if len(micro) > 1:
                raise MegacompileError(
                    f"{name} takes one batch, not a list of {len(micro)}: call it for each."
                )
            return [1.0]

        with session.world.together():
            micro, weights, _ = agreed_batches(session, batch, "evaluate", weigh, outputs)
            if self.plans_only:
                session.schedule(micro[0], Mode("evaluate"))
            else:
                if session.runtime is None:
                    self._allocate(batch, outputs)
                results = session.run(micro, Mode("evaluate"), weights)
        if self.plans_only:
            raise PlannedError
        session.await_losses()
        compiled = session.decided.program(micro[0], Mode("evaluate")).compiled
        found = [micro[0].own(results.outputs[v, 0]) for v in compiled.part.results]
        output = compiled.captured.structure.around(found)
        if isinstance(output, LossCall):
            with torch.no_grad():
                return output.run(micro[0].withheld)
        return output

    def _allocate(self, batch: Any, outputs: OutputsFn | None) -> None:
        """Lay out and allocate the state as for training. The loss is that of predict's batch; if the batch
        gives none, one of all results of the forward, as with ``train_step(loss=...)``."""
        try:
            self.prepare(batch)
        except CaptureError as error:
            if outputs is None:
                raise
            try:
                self.prepare(batch, outputs=all_outputs)
                self._session.laid_out_for_forwards = True
            except MegacompileError:
                raise ProgramError(
                    "Nothing is compiled yet, and no training program can be compiled for the batch that "
                    "predict was given: call program.prepare(batch) with one that gives a loss first, or "
                    f"compile with example_batch. ({error})"
                ) from error

    def _ready(self) -> None:
        session = self._session
        session.same_process()
        self._refuse_in_rollout()
        if session.saving is not None and session.world.size == 1:  # several hear of it at one point
            session.saving.raise_failure()
        if session.inconsistent:
            raise ProgramError(session.inconsistent)
        raises = (
            session.settings.on_nonfinite == "raise" or session.world.size > 1
        )  # at one step on all ranks
        if raises and session.settings.on_nonfinite != "skip" and session.unreported:
            session.await_norm()  # no step runs after a faulty one, whatever the timing
        session.report_skipped()
        if session.values.lent:
            session.synchronize()
            session.values.take_back()

    def _refuse_in_rollout(self) -> None:
        if self._rolls_out:
            raise ProgramError(
                "The model of a rollout has the device: call the program after the with block of its rollout."
            )

    @property
    def plan(self) -> Plan:
        """The decisions for the training program that ran last."""
        scheduled = self._session.scheduled()
        planned, work = scheduled.planned, scheduled.compiled.assembly.work
        names = tuple(b.name for b in work.blocks), tuple(g.name for g in work.groups)
        return replace(planned.plan, names=names, loops=work.loops)

    @property
    def schedule(self) -> Schedule:
        """The scheduled step of the training program that ran last, with the times of a recent run.

        Print it, write it as a page (``to_html``) or a trace (``to_chrome_trace``), or read its fx graph.
        """
        return self._schedule_on(self.machine)

    @property
    def machine(self) -> Machine:
        """The machine that times are predicted for; a CPU as it is now, measured."""
        return self._session.measured_machine

    @property
    def largest_schedule(self) -> Schedule:
        """As ``schedule``, for the training program that computes most, because the last batch of an epoch is
        often a small one."""
        training = self._session.decided.training
        largest = max(training, key=lambda s: sum(op.flops for op in s.planned.step.ops), default=None)
        return self._schedule_on(self.machine, largest)

    def _schedule_on(self, machine: Machine, scheduled: Scheduled | None = None) -> Schedule:
        runtime, scheduled = self._session.runtime, scheduled or self._session.scheduled()
        traces = reversed(runtime.traces) if runtime else iter(())
        trace = next((trace for step, trace in traces if step is scheduled.planned.step), None)
        ran = align(scheduled.planned.step, list(trace)) if trace is not None else None
        return self._session.schedule_of(scheduled, machine, ran)

    @alone
    def profile(self) -> Schedule:
        """Return the schedule with times from each block function's own, measured now on the CPU backend.

        Takes some runs of every function on made-up values. Predictions of ``schedule`` come from rates and
        are farther off.
        """
        self._session.synchronize()
        self._session.report_skipped()
        schedule = self.schedule
        if not schedule.machine.shared_cores:
            raise ProgramError(
                "program.profile() is for the CPU backend: on a GPU, run `megacompile profile` instead."
            )
        work, machine = calibrated(self._session.scheduled().compiled, schedule.machine)
        return replace(schedule, work=work, machine=machine)

    @property
    def fusions(self) -> Fusions:
        """The fused kernels of the program that ran last, with their places, and the subgraphs that were left
        alone, with the reasons."""
        return self._session.scheduled().compiled.fusions

    @property
    def source(self) -> str:
        """The emitted Python of the training program that ran last."""
        return self._session.scheduled().source

    @property
    def budget_bytes(self) -> int:
        """Device bytes of the budget, including the share of the device's driver and libraries."""
        return self._session.decided.room.device_bytes

    @property
    def memory(self) -> Memory:
        """The device's peak, measured and predicted, and host bytes by kind, of all programs so far."""
        session, runtime = self._session, self._session.runtime
        host = runtime.state.nbytes() | runtime.buffers.nbytes() if runtime else {}
        offload = runtime.state.offload if runtime else None
        return Memory(
            budget_bytes=session.decided.room.budget_bytes,
            device_peak_bytes=runtime.peak_bytes if runtime else 0,
            predicted_peak_bytes=session.predicted_peak,
            host_bytes=host,
            host_budget_bytes=session.settings.host_budget_bytes,
            resident_peak_bytes=resident_peak_bytes(),
            storage_bytes=offload.storage.nbytes if offload else 0,
            traffic=self._schedule_on(session.planned_machine).traffic if offload else "",
            page_locked_bytes=runtime.device.host.page_locked_bytes if runtime else 0,
            staged_bytes=runtime.device.host.staged_bytes if runtime else 0,
        )


def _outputs_for(loss: LossOfOutputs | None, outputs: OutputsFn | None) -> OutputsFn | None:
    """Return what a program computes in the place of the loss, where that is computed outside."""
    if loss is not None:
        return outputs or all_outputs
    if outputs is not None:
        raise MegacompileError(
            "outputs= is given without loss=, which would be computed from them: give both."
        )
    return None


def _of_micro_batch(loss: LossOfOutputs | None, number: int) -> LossOfOutputs | None:
    """The loss for a run of this micro-batch alone."""
    return None if loss is None else lambda _, outputs: loss(number, outputs)
