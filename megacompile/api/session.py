"""A session: one model's programs, compiled as kinds of batches come, over one runtime and one state.

In: batches, modes and loss weights from the :class:`~megacompile.api.program.Program`. Out: results of
runs. The first program allocates the state and takes over the model's values; all later ones share both.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from megacompile.api.allocate_state import allocate
from megacompile.api.batch_reader import BatchReader
from megacompile.api.bound_programs import Bindings
from megacompile.api.choose_mesh import settle_mesh
from megacompile.api.decisions import Decisions, Scheduled
from megacompile.api.device_budget import DeviceRoom
from megacompile.api.forked_child import refuse_forked_child
from megacompile.api.outside_loss import LossOfOutputs, OutsideLoss
from megacompile.api.padder import OfRanks
from megacompile.api.pipeline import Compiler
from megacompile.api.program_set import PlannedError, ProgramSet, settle
from megacompile.api.rank_agreement import agreed_program, micro_seeds
from megacompile.api.settings import Settings
from megacompile.capture.batch import Batch
from megacompile.capture.changes_after_compile import Frozen
from megacompile.capture.loss_cut import LossCut
from megacompile.errors import BudgetError, DeviceFullError, DeviceLostError, ProgramError
from megacompile.graph.forward_outputs import OutputsFn
from megacompile.hardware.machine import Machine
from megacompile.hardware.measured_step import Measured
from megacompile.planner.too_small import TooSmall, fitting
from megacompile.report.schedule import Schedule
from megacompile.runtime.bound_step import BoundStep
from megacompile.runtime.call_context import exclusive, refuse_autocast, whole_step
from megacompile.runtime.device import Device
from megacompile.runtime.device_failures import naming_failures
from megacompile.runtime.executor import Runtime
from megacompile.runtime.step_output import StepOutput
from megacompile.runtime.step_results import StepInputs, StepResults, raise_skipped
from megacompile.schedule.plan import Mode
from megacompile.state.background_save import BackgroundSave
from megacompile.state.checkpoint_manifest import RunProgress
from megacompile.state.masters import HostState, Weights
from megacompile.state.model_values import ModelValues
from megacompile.state.optimizer import hypers
from megacompile.state.param_group import GroupSettings
from megacompile.state.plain_loop import watch_plain_loop
from megacompile.state.several_optimizers import members_of
from megacompile.state.torch_optimizer import TorchOptimizer
from megacompile.units import format_bytes
from megacompile.user_warning import warn_user

CLOSED = "The program was closed: compile the model again to train on."
_LOG = logging.getLogger("megacompile.compiler")  # trainers show what the compiler tells


class Session:
    """Compiles, binds and runs the programs of one model.

    ``decided`` is the state of the compile: planning replaces it by another value, here and nowhere else.
    ``inconsistent`` says, once a fault has left some weights updated and others not, what to do about it.
    ``current`` is the training program that ran last; ``calls`` counts the runs that drew a seed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compiler: Compiler,
        settings: Settings,
        weights: Weights | None = None,
    ) -> None:
        self.model, self.optimizer, self.compiler, self.settings = model, optimizer, compiler, settings
        self.world = settings.world
        self.decided = Decisions(settings.measure_room()).on_mesh(self.world.ranks)
        self._frozen = Frozen(model, optimizer)
        self.values = ModelValues(model, optimizer, weights)
        self._plain_loop = watch_plain_loop(model)
        weakref.finalize(self, self._plain_loop.remove)
        self.runtime: Runtime | None = None
        self.current: Scheduled | None = None
        self.predicted_peak = 0
        self.seed, self.calls = settings.seed, 0
        self.inconsistent = ""
        self.planning: ProgramSet | None = None  # what is planned together, while nothing runs
        self.lock = threading.RLock()  # of all calls of the program
        self._pid = os.getpid()
        self.reader = BatchReader(model, compiler.frontend, settings.max_seq_len)
        self._bindings = Bindings(compiler)
        self._ran_last: BoundStep | None = None
        self._last_batch: Batch | None = None
        self._told: set[str] = set()  # reasons for another program, and else, that were said
        self.unreported: list[StepResults] = []  # steps whose gradient norm was not there yet
        self.saving: BackgroundSave | None = None  # the last one
        self.outside: OutsideLoss | None = None  # of the last run
        self.laid_out_for_forwards = False  # by a program that no training asked for

    def updates_by(self, optimizer: Any) -> bool:
        """Return whether an optimizer, or one of several, is one of this training's own."""
        own = {id(each) for each in (self.optimizer, *members_of(self.optimizer))}
        return any(
            id(each) in own for each in (optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])
        )

    def is_new(self, what: str) -> bool:
        """Return whether this was not said before; from now on it was."""
        known = what in self._told
        self._told.add(what)
        return not known

    def training(self, micro: list[Batch]) -> Mode:
        """The mode of a whole step on these micro-batches."""
        return Mode("train", len(micro), self.settings.defers_updates)

    def scheduled(self) -> Scheduled:
        """The training program that ran last."""
        if self.current is None:
            raise ProgramError("Nothing is compiled yet: run a step, or compile with example_batch.")
        return self.current

    def read(self, batch: Any, *, evaluate: bool = False, outputs: OutputsFn | None = None) -> list[Batch]:
        """Read a batch, or a list of them."""
        refuse_autocast()
        self.check_model(trains=not evaluate)
        return self.reader.read(batch, evaluate=evaluate, outputs=outputs)

    def padded(self, micro: list[Batch], ranks: OfRanks | None = None) -> list[Batch]:
        """Return what was read, padded where that saves compiling, or as several ranks need it, with what the
        host computes of it."""
        micro = self.reader.padder.padded(micro, self.decided, first=self.current is None, ranks=ranks)
        frontend = self.compiler.frontend
        seeds = micro_seeds(self.seed, self.calls, len(micro), self.world)
        return [frontend.with_host_values(batch, seed=seed) for batch, seed in zip(micro, seeds, strict=True)]

    def check_model(self, *, trains: bool = True) -> None:
        """Refuse what was changed at the model or its param groups since it was compiled, and matters."""
        with torch._C.DisableTorchFunctionSubclass():  # many microseconds for each owned parameter
            self._frozen.check(trains=trains)

    def schedule(self, batch: Batch, mode: Mode, *, resumed: Path | None = None) -> Scheduled:
        """The program for a kind of batch; the first one takes over the model's storage. ``resumed`` is the
        checkpoint that is loaded next."""
        if self.planning is not None:
            return self._planned(self.planning, batch, mode, resumed)
        if self.decided.programs and not self.decided.knows(batch) and mode.kind != "evaluate":
            if not self.laid_out_for_forwards:
                self._tell_of_another(batch)
            self.laid_out_for_forwards = False
        if self.runtime is None:
            together = bool(self.decided.programs)  # planned by plan_all, which has settled the rest
            scheduled = self._taken(self._first_program(batch, mode, resumed), batch, mode)
            try:
                self._take_over(scheduled)
            except BaseException:
                if not together:
                    self.decided = self.decided.anew(self.decided.room)
                raise
        else:
            if self.decided.number(batch, mode) < 0 and (room := self._shorter_room()) is not None:
                ran = self.decided.only(lambda known: known in self._bindings or known is self.current)
                self.decided = ran.within(room)
            scheduled = self._taken(self._with_programs([batch], mode), batch, mode)
            state = self.runtime.state
            self.world.agree(lambda: self._bindings.admit(scheduled, state, self.settings))
        if mode.kind != "evaluate" or self.current is None:
            self.current = scheduled
        self.predicted_peak = max(self.predicted_peak, scheduled.planned.peak_bytes)
        return scheduled

    def plan_all(self, calls: Mapping[str, Callable[[], object]]) -> list[tuple[str, Scheduled]]:
        """Plan the programs of all calls, and run none; see :meth:`Program.plan_all`."""
        before, current, self.planning = self.decided, self.current, ProgramSet(self.decided.room)
        try:
            for name, call in calls.items():
                self.planning = replace(self.planning, name=name)
                with suppress(PlannedError):
                    call()
            with self.world.together(), self._agreeing():
                self.decided = settle(self.planning, self.decided, self.compiler, self.settings, self.runtime)
            return list(self.planning.scheduled(self.decided))
        except BaseException:
            # the mesh stays chosen, and the room as small as it was found
            self.decided = before if self.runtime is not None else self.decided.anew(self.planning.room)
            raise
        finally:
            self.planning, self.current = None, current

    def _planned(self, asked: ProgramSet, batch: Batch, mode: Mode, resumed: Path | None) -> Scheduled:
        """The program for a kind of batch as a part of those that are planned together."""
        first = self.runtime is None and not asked.members
        if first and mode.kind == "evaluate":
            raise ProgramError("The first program of plan_all has to train: call program.prepare in it.")
        if first and (longest := self.reader.longest(batch)) is not None:
            asked = asked.adding(longest, mode)
        self.planning = asked = asked.adding(batch, mode)

        def plan() -> Decisions | TooSmall:
            return self._first_program(batch, mode, resumed) if first else self._with_programs([batch], mode)

        while isinstance(found := plan(), TooSmall):
            with self._agreeing():
                asked, self.decided = asked.grown(self.decided, found)
            self.planning = asked
        scheduled = self._taken(found, batch, mode)
        if first:
            self.planning = asked.laid_out(self.decided)
            self.decided = self.decided.laid_out(scheduled)
        if mode.kind != "evaluate" or self.current is None:
            self.current = scheduled
        return scheduled

    def _tell_of_another(self, batch: Batch) -> None:
        """Say, once for each reason, that another program is compiled, and what would save that."""
        last = self._last_batch
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in batch.tensors)
        why, way_out = (
            ", as each kind of batch has one",
            "pad batches to few lengths, or drop the last short one",
        )
        if last is not None and last.settings != batch.settings:
            why = ", as modes or attributes of the model's modules changed"
            way_out = "leave them as they are between steps"
        elif any(key._replace(read=batch.key.read) == batch.key for key in self.decided.keys):
            why = ", as sizes that the forward reads from its values are others, such as those of images"
            way_out = "give batches of few combinations of sizes"
        if not self.is_new(why):
            return
        text = f"Compiling another program, for a batch of {shapes}{why}: {way_out}, to compile less."
        warn_user(text)

    def _first_program(self, batch: Batch, mode: Mode, resumed: Path | None) -> Decisions | TooSmall:
        """The decisions with the program for a kind of batch, its kernels loaded; planned again as long as
        these took more of the device than was left to them."""
        self._find_exact()
        longest = self.reader.longest(batch)
        self.decided = settle_mesh(
            self.compiler, self.decided, longest or batch, mode, self.settings, resumed
        )
        while True:
            # first the longest: how far weights are cut must suffice for it
            found = self._with_programs([batch] if longest is None else [longest, batch], mode)
            if isinstance(found, TooSmall):
                return found
            if self.planning is not None and not self.planning.fits:  # this room is another budget's
                return found
            scheduled = found.program(batch, mode)
            self.world.agree(partial(self._bindings.make_ready, scheduled, self.settings.device))
            room = self._shorter_room()
            if room is None:
                return found
            self.decided = self.decided.anew(room)

    def _with_programs(self, batches: Sequence[Batch], mode: Mode) -> Decisions | TooSmall:
        """The decisions with the programs of these kinds of batches, planned in this order."""
        decided = self.decided
        for batch in batches:
            found = agreed_program(self.compiler, decided, batch, mode, self.settings)
            if isinstance(found, TooSmall):
                return found
            decided = found
        return decided

    def _taken(self, found: Decisions | TooSmall, batch: Batch, mode: Mode) -> Scheduled:
        """Go on by these decisions, which have a program for a kind of batch; refused where they have not."""
        with self._agreeing():
            self.decided = fitting(found)
        return self.decided.program(batch, mode)

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        """All ranks raise the same budget errors inside, and can go on together after them."""
        try:
            yield
        except BudgetError as error:
            self.world.agreed(error)
            raise

    def _find_exact(self) -> None:
        """Look which frozen weights need no FP32 masters, by the values that the first rank has now."""
        frontend = self.compiler.frontend

        def look() -> bytes:
            self.values.refuse_taken()
            return json.dumps(self.values.exact(frontend.rounded)).encode()

        anew = self.decided.anew(self.decided.room)
        exact = frozenset(json.loads(self.world.from_first(look)))
        anew = replace(anew, layout=replace(anew.layout, exact=exact))
        if frontend.laid_out(anew.layout) != frontend.laid_out(self.decided.layout):
            self.decided = anew

    def _shorter_room(self) -> DeviceRoom | None:
        """Measure what plans may use of the device now; None unless it is less than they were made for by
        more than was left to the driver."""
        planned = self.decided.room
        with naming_failures(self.settings.device):
            room = self.settings.measure_room()
        if not room.short_of(planned):
            return None
        _LOG.info(
            "the GPU's driver took %s more than was planned for: planning within so much less",
            format_bytes(planned.budget_bytes - room.budget_bytes),
        )
        return room

    def forget_programs(self) -> None:
        """Capture and compile every kind of batch anew, over the same state."""
        self.compiler.frontend.forget()
        self.decided = self.decided.only(lambda known: False)
        self._bindings.clear()
        self._ran_last = None
        self.reader = BatchReader(self.model, self.compiler.frontend, self.settings.max_seq_len)

    def close(self) -> None:
        """End the runtime's threads. The state stays, until the model or another program has the values."""
        self._plain_loop.remove()
        if self.runtime is not None:
            self.runtime.close()

    def hand_over(self, optimizer: Any) -> None:
        """Release the model of a closed program to another one, which updates by ``optimizer``."""
        if self.inconsistent not in ("", CLOSED):
            raise ProgramError(self.inconsistent)
        if self.calls and self.updates_by(optimizer):
            warn_user(
                "The moments of this optimizer went with the closed program that held them, and start from "
                "zero: program.save before, and load after, carry them over."
            )
        with self.world.together():
            self.release()
        self.refuse_training(
            "Another program has taken over the model of this one: use that one, or make another trainer."
        )

    def release(self) -> None:
        """Leave the values to the model alone, and free the state."""
        self.values.release()
        self._bindings.clear()
        self.runtime, self._ran_last = None, None

    def _take_over(self, scheduled: Scheduled) -> None:
        def allocated() -> tuple[HostState, Device]:
            self.values.refuse_taken()
            return allocate(scheduled, self.settings)

        assembly = scheduled.compiled.assembly
        # what may be refused comes before the model is taken
        state, device = self.world.agree(allocated)
        self._plain_loop.remove()
        self.values.take_over(state, assembly.homes, self)
        self.decided = self.decided.laid_out(scheduled)
        self.runtime = Runtime(state, device)
        self._follow_modes()
        if self.world.rank == 0:
            _announce(self.compiler.frontend.compute_dtype)

    def _follow_modes(self) -> None:
        """Call the optimizers' own eval() and train() on the masters, for classes that change parameters by
        them."""
        switch = weakref.WeakMethod(self._switch)

        def call(member: torch.optim.Optimizer, method: str) -> None:
            switched = switch()
            if switched is None:
                raise ProgramError(
                    f"The program that held what {method}() changes is gone: compile it again."
                )
            switched(member, method)

        for member in members_of(self.optimizer):
            for method in ("eval", "train"):
                if callable(getattr(type(member), method, None)):
                    setattr(member, method, partial(call, member, method))

    def _switch(self, member: torch.optim.Optimizer, method: str) -> None:
        form = self.settings.optimizer_state
        assert isinstance(form, TorchOptimizer) and self.runtime is not None
        with exclusive(self, f"optimizer.{method}"), self.values.in_call():
            self.world.note_call()
            settings = form.called(member, method)
            if any(group.written for group in settings):
                self.synchronize()
                self.values.take_back()
                self.values.changed()
                self.runtime.state.call(method, settings)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """No call of the program is running, and no update is under way."""
        with exclusive(self, "A copy or state_dict of the model"):
            self.synchronize()
            yield

    def run(
        self, micro: list[Batch], mode: Mode, weights: Sequence[float], *, loss: LossOfOutputs | None = None
    ) -> StepResults:
        """One run of the program for these micro-batches in a mode; ``loss`` is computed outside of it.

        Where the device's memory runs out before anything is changed, once more, planned within less. So it
        is before a first run where the driver has taken what plans were made for.
        """
        scheduled = self.schedule(micro[0], mode)
        if self.runtime is not None and self.runtime.device.unsettled:
            room = self._shorter_room()
            if room is not None:
                self._plan_within(room, scheduled)
                scheduled = self.schedule(micro[0], mode)
        try:
            return self._run(scheduled, micro, mode, weights, loss)
        except DeviceFullError as error:
            scheduled = self._within_less(error, scheduled, micro[0], mode)
        return self._run(scheduled, micro, mode, weights, loss)

    def _within_less(self, error: Exception, scheduled: Scheduled, batch: Batch, mode: Mode) -> Scheduled:
        """The program with more room for the device's allocator."""
        assert self.runtime is not None
        trains = mode.kind == "train"
        if self.world.ended or self.runtime.inconsistent or (self.runtime.lost_gradients and not trains):
            raise error
        if trains:
            self.runtime.drop_gradients()  # of the step that is repeated
        before = self.decided.room
        try:
            room = min(before.less(), self.settings.measure_room(), key=lambda room: room.budget_bytes)
            more = format_bytes(before.budget_bytes - room.budget_bytes)
            warn_user(
                f"{error} The program is planned again within {more} less, and the step repeated: please "
                "report this."
            )
            self._plan_within(room, scheduled)
            return self.schedule(batch, mode)
        except BudgetError as least:
            raise error from least

    def _plan_within(self, room: DeviceRoom, scheduled: Scheduled) -> None:
        """Forget a program, to plan it again within other room."""
        self.decided = self.decided.only(lambda known: known is not scheduled).within(room)

    def _run(
        self,
        scheduled: Scheduled,
        micro: list[Batch],
        mode: Mode,
        weights: Sequence[float],
        loss: LossOfOutputs | None,
    ) -> StepResults:
        runtime = self.runtime
        assert runtime is not None
        if scheduled not in self._bindings:
            self.finish_saving()
            runtime.state.copies.free()  # where this program's buffers may want to be
        bound = self._bindings.bind(scheduled, self.decided, runtime.device)
        if bound is not self._ran_last:
            runtime.synchronize()
            self._ran_last = bound
        if mode.kind != "evaluate":
            self._last_batch = micro[0]  # whose program an update by hand belongs to
        if mode.computes_gradients and isinstance(micro[0].outputs, LossCut):
            loss = lambda i, call: call.run(micro[i].withheld)  # noqa: E731
        self.outside = OutsideLoss(loss, scheduled.compiled, micro, weights) if loss is not None else None
        updates = mode.kind in ("train", "update")
        inputs = StepInputs(
            leaves=[m.leaves for m in micro],
            seeds=micro_seeds(self.seed, self.calls, len(micro), self.world),
            loss_weights=list(weights),
            hypers=hypers(self.optimizer, self.settings.optimizer_state) if updates else (),
            max_grad_norm=self.settings.max_grad_norm,
            check_loss=mode.kind == "train" and not mode.keeps_gradients,
            losses_count=self.settings.on_nonfinite is not None,
            outside=self.outside,
        )
        if updates:
            self.values.changed()
        with whole_step(), self._noting_faults(), self.world.together():
            results = runtime.run(bound, inputs)
        if updates and isinstance(self.settings.optimizer_state, TorchOptimizer):
            self.settings.optimizer_state.advance(cast("Sequence[GroupSettings]", inputs.hypers))
        self.calls += mode.computes_gradients
        if results.takes_norm:
            self.unreported.append(results)
        return results

    def update(self) -> StepResults:
        """Apply all gradients that wait, whichever kinds of batch they are of."""
        assert self._last_batch is not None and self.runtime is not None
        landed = self.runtime.landed
        work = self.compiler.frontend.build(self._last_batch, self.decided.division).assembly.work
        mode = Mode("update", landed=() if set(landed) == set(work.contributions) else landed)
        results = self.run([self._last_batch], mode, [])
        assert not self.runtime.has_gradients
        return results

    @property
    def planned_machine(self) -> Machine:
        """The machine that is planned for."""
        return self.compiler.machine(self.decided)

    @property
    def measured_machine(self) -> Machine:
        """The machine that times are predicted for."""
        return self.compiler.measured_machine(self.decided)

    def schedule_of(
        self, scheduled: Scheduled, machine: Machine, measured: Measured | None = None
    ) -> Schedule:
        """A program as something to look at, with times predicted for ``machine``."""
        return self.compiler.schedule_of(self.decided, scheduled, machine, measured)

    def output(self, results: StepResults, weights: Sequence[float]) -> StepOutput:
        """The results of a run, as the caller of a step has them."""
        return StepOutput(results, weights, self.await_losses, self.await_norm)

    def same_process(self) -> None:
        """Refuse a forked child."""
        refuse_forked_child(self._pid)

    def await_losses(self) -> None:
        """Return when the losses of all steps so far can be read."""
        self._await(lambda runtime: runtime.await_losses())

    def await_norm(self) -> None:
        """Return when the norm of the last gradient is known; raise for one that was not finite."""
        self._await(lambda runtime: runtime.await_norm())
        self.report_skipped()

    def synchronize(self) -> None:
        """Return when every transfer and update that is under way is over."""
        self._await(lambda runtime: runtime.synchronize())

    def vacate(self) -> None:
        """Give all memory of the device back until the next run; what is under way ends first."""
        self._await(lambda runtime: runtime.vacate())

    def _await(self, over: Callable[[Runtime], object]) -> None:
        self.same_process()
        if self.runtime is not None:
            with self._noting_faults(Exception), self.world.together():
                over(self.runtime)

    def save_behind(self, saving: BackgroundSave, state: HostState) -> None:
        """Begin to write a checkpoint while training goes on."""
        self.saving = saving
        saving.start(state)

    def finish_saving(self) -> None:
        """Return when no checkpoint is being written any more; raise why one was not written."""
        if self.saving is not None:
            self.saving.finish()

    def go_on_from(self, progress: RunProgress) -> None:
        """Draw the seeds that come after those of a run, whose values were read."""
        self.values.changed()
        self.seed, self.calls = progress.seed, progress.calls

    def refuse_training(self, reason: str) -> None:
        """End all training, for a reason that says what to do."""
        self.inconsistent = reason

    def forget_faults(self, inconsistent: str = "") -> None:
        """The state is whole again; ``inconsistent`` is what still keeps it from being trained on."""
        if self.runtime is not None:
            self.runtime.forget_faults()
        self.inconsistent = inconsistent

    @property
    def has_gradients(self) -> bool:
        """Return whether gradients wait for an update, or were lost while they did."""
        return self.runtime is not None and (self.runtime.has_gradients or self.runtime.lost_gradients)

    def zero_grad(self) -> None:
        """Forget the gradients that wait, between two calls of the program."""
        with exclusive(self, "zero_grad"), self.values.in_call():
            self.world.note_call()
            self.synchronize()
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget gradients that belong to a step that is not made."""
        self.values.forget_dropped()
        if self.runtime is not None:
            self.runtime.drop_gradients()

    def report_skipped(self) -> None:
        """Raise for a step whose update was not applied; steps without a verdict yet are kept in mind."""
        known = [r for r in self.unreported if r.grad_norm is not None]
        self.unreported = [r for r in self.unreported if r.grad_norm is None]
        if self.settings.on_nonfinite != "skip":
            raise_skipped(known)

    @contextmanager
    def _noting_faults(self, kind: type[BaseException] = BaseException) -> Iterator[None]:
        """An exception inside may have left the state half updated; who only waits may be interrupted."""
        try:
            with naming_failures(self.settings.device):
                yield
        except kind as error:
            if self.runtime is not None and isinstance(error, DeviceLostError):
                with suppress(Exception):  # which the caller is told now, and not by the next call again
                    self.runtime.synchronize()
            if self.runtime is not None and self.runtime.inconsistent:
                self.inconsistent = (
                    f"A step stopped in the middle ({type(error).__name__}: {error}) after some weights were "
                    "updated and before others: load a checkpoint with program.load, or weights with "
                    "program.load_state_dict, which then sets Adam's moments to zero."
                )
            raise


@functools.cache
def _announce(compute_dtype: torch.dtype) -> None:
    """Say once per process how to get more precision, where there is more."""
    if compute_dtype == torch.float32:
        return
    text = (
        "computing in bfloat16 over FP32 master weights and moments; compute_dtype=torch.float32, or "
        "bf16=False of a trainer, is full precision from end to end"
    )
    print(f"megacompile: {text}", file=sys.stderr)
