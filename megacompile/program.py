"""The program: what :func:`megacompile.compile` returns and what a training loop talks to.

It owns the model's values, runs steps, and keeps the promises about faults: state is never half
updated without saying so, nothing is silent, and whoever asks for the state first gets every update
that is under way.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.bench.calibrate import calibrated
from megacompile.capture.batch import Batch, bucketed, check_signature, micro_weights, pad_batch, read_batch
from megacompile.compiler import Compiler, Scheduled
from megacompile.errors import MegacompileError, ProgramError
from megacompile.fuse.report import Fusions
from megacompile.host.arena import resident_peak_bytes
from megacompile.host.formats import StateFormat
from megacompile.host.optimizer import check_settings, hypers, restore_settings, settings_of
from megacompile.host.state import HostState, Weights
from megacompile.machine.measured import align
from megacompile.machine.rates import Machine
from megacompile.plan.plan import Mode, Plan
from megacompile.runtime import ownership
from megacompile.runtime.device import Device
from megacompile.runtime.lay_out import lay_out
from megacompile.runtime.results import Memory, StepOutput
from megacompile.runtime.runtime import Runtime
from megacompile.runtime.step_io import NonFiniteError, StepInputs, StepResults
from megacompile.runtime.values import ModelValues
from megacompile.schedule.schedule import Schedule
from megacompile.step.bind import BoundStep
from megacompile.storage.checkpoint import Checkpoint, Progress, save_checkpoint
from megacompile.storage.export import export_model


@dataclass(frozen=True)
class Settings:
    """What :func:`megacompile.compile` was told of how to train; see there."""

    open_device: Callable[[], Device]
    host_budget_bytes: int
    max_grad_norm: float | None
    on_nonfinite: str | None
    seed: int
    max_seq_len: int | None
    optimizer_state: StateFormat
    offload_dirs: tuple[str, ...]

    @property
    def defers_updates(self) -> bool:
        """Whether updates wait for the end of the backward, in every mode."""
        return self.max_grad_norm is not None or self.on_nonfinite is not None


class Program:
    """A model compiled for training under a memory budget; made by :func:`megacompile.compile`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compiler: Compiler,
        settings: Settings,
        weights: Weights | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._compiler = compiler
        self._settings = settings
        self._seed = settings.seed
        self._values = ModelValues(model, weights)
        self._closed = False
        self._runtime: Runtime | None = None
        self._bound: dict[int, BoundStep] = {}
        self._current: Scheduled | None = None
        self._previous: BoundStep | None = None
        self._unjudged: list[StepResults] = []  # steps whose gradient norm was not there yet
        self._pid = os.getpid()
        self._torn = ""
        self._calls = 0
        self._predicted_peak = 0

    # ---- training --------------------------------------------------------------------------------

    def train_step(self, batch: Any, *, weights: Sequence[float] | None = None) -> StepOutput:
        """One optimizer step on a batch, or on a list of micro-batches.

        A list trains on the mean of the micro-batches' losses (their sum where the batches carry
        ``num_items_in_batch``), or on the sum weighted by ``weights``. Returns at once when the last
        block's backward is done; updates go on in the background.
        """
        self._ready()
        if self._runtime is not None and self._runtime.has_gradients:
            raise ProgramError("Gradients of forward_backward are waiting: call optimizer_step() first.")
        micro = self._micro_batches(batch)
        weights = micro_weights(micro, weights)
        if len({m.key for m in micro}) > 1:
            return self._step_by_accumulation(micro, weights)
        try:
            results = self._run(micro, self._training(micro), weights)
        except BaseException:
            if self._runtime is not None:
                self._runtime.drop_gradients()  # they belong to a step that is not made
            raise
        return StepOutput(self, results, weights)

    def forward_backward(self, batch: Any, *, weight: float = 1.0) -> StepOutput:
        """Add the gradient of ``weight`` times the batch's loss to those that wait on the host."""
        self._ready()
        micro = self._micro_batches(batch)
        weights = [weight] * len(micro)
        losses: list[Tensor] = []
        for one in micro:
            losses += self._run([one], Mode("accumulate"), [weight]).losses
        return StepOutput(self, StepResults(losses), weights)

    def optimizer_step(self) -> StepOutput:
        """Apply the gradients that :meth:`forward_backward` has gathered, clipped as compiled."""
        self._ready()
        if self._runtime is not None and self._runtime.lost_gradients:
            self._runtime.drop_gradients()
            raise ProgramError(
                "A forward_backward failed in the middle of its backward, and all gradients gathered since "
                "the last update were dropped with it: repeat those micro-batches."
            )
        if self._runtime is None or self._current is None or not self._runtime.has_gradients:
            raise ProgramError("No gradient is waiting: call forward_backward(batch) first.")
        return StepOutput(self, self._run([self._last_batch], Mode("update"), []), ())

    def evaluate(self, batch: Any) -> Tensor:
        """The loss of a batch in eval mode, under the same budget; no gradient, no update."""
        self._ready()
        if self._runtime is None:
            self.prepare(batch)  # the state is laid out for training
        (micro,) = self._micro_batches(batch, evaluate=True)
        results = self._run([micro], Mode("evaluate"), [1.0])
        self.settle()
        return results.losses[0]

    def settle(self) -> None:
        """Return when the losses of all steps so far can be read."""
        self._same_process()
        if self._runtime is not None:
            self._runtime.settle()

    def wait(self) -> None:
        """Return when every transfer and update that is under way is over."""
        self._same_process()
        if self._runtime is not None:
            try:
                self._runtime.finish()
            except BaseException as error:
                self._note_torn(error)
                raise
        self._report_skipped()

    def close(self) -> None:
        """Finish what is under way and end the worker threads; the state can still be read."""
        self._same_process()
        if self._runtime is not None:
            self._runtime.finish()
            self._runtime.close()
        self._closed = True
        self._torn = self._torn or "The program was closed: compile the model again to train on."

    # ---- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """FP32 masters and persistent buffers under the model's own names, tied weights once."""
        self.wait()
        return dict(self._values.parameters()) | {n: b.clone() for n, b in self._values.buffers().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set the masters; names and shapes must be those of :meth:`state_dict`."""
        self.wait()
        self._values.load(state)
        if self._runtime is not None:
            self._runtime.forget_faults()
        self._torn = self._torn if self._closed else ""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint from which :meth:`load` goes on bit for bit.

        The state after every update so far: masters, moments in their format, step counts, buffers,
        the optimizer's settings, the place in the sequence of seeds. A checkpoint of an earlier call
        in the same folder stays until this one is whole on disk; deleting old folders is the caller's.
        """
        self.wait()
        if self._torn:
            raise ProgramError(self._torn)
        settings = settings_of(self.optimizer, self.model)
        progress = Progress(type(self.model).__name__, self._seed, self._calls, settings)
        save_checkpoint(Path(folder), self._laid_out("save"), self._values.loose(), progress)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint of :meth:`save`, of the same model in the same formats; budgets may differ.

        Takes no more memory than training does. What does not fit, or is damaged, is named.
        """
        if self._closed:
            raise ProgramError(self._torn)
        self.wait()
        checkpoint = Checkpoint(Path(folder), self._laid_out("load"), self._values.loose())
        progress = checkpoint.progress
        check_settings(self.optimizer, self.model, progress.param_groups)
        self._torn = "A checkpoint was read in part only: load a whole one."
        checkpoint.read()
        restore_settings(self.optimizer, progress.param_groups)
        self._seed, self._calls = progress.seed, progress.calls
        assert self._runtime is not None
        self._runtime.forget_faults()
        self._torn = ""

    def export(self, folder: str | os.PathLike[str], dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the trained values in ``dtype`` as a folder that ``transformers`` loads."""
        self.wait()
        if self._torn and not self._closed:
            raise ProgramError(self._torn)
        values = itertools.chain(self._values.parameters(), self._values.buffers().items())
        export_model(Path(folder), self.model, values, dtype)

    def sync_to(self, model: nn.Module) -> None:
        """Copy the masters into a model of the same shape, which is then an ordinary model again."""
        self.wait()
        self._values.copy_to(model)

    # ---- inspection ------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What was decided for the training program that ran last."""
        planned, work = self._scheduled().planned, self._scheduled().compiled.assembly.work
        names = tuple(b.name for b in work.blocks), tuple(g.name for g in work.groups)
        return replace(planned.plan, names=names)

    @property
    def schedule(self) -> Schedule:
        """The scheduled step of the training program that ran last, with its times if it was the last to run.

        Print it, write it as a page (``to_html``) or a trace (``to_chrome_trace``), or read its fx graph.
        """
        return self._schedule_on(self._compiler.measured_machine)

    def _schedule_on(self, machine: Machine) -> Schedule:
        scheduled = self._scheduled()
        step, trace = self._runtime.traces[-1] if self._runtime and self._runtime.traces else (None, [])
        ran = align(scheduled.planned.step, list(trace)) if step is scheduled.planned.step else None
        return self._compiler.schedule_of(scheduled, machine, ran)

    def profile(self) -> Schedule:
        """The schedule with times predicted from each block function's own, measured now on the CPU backend.

        Takes some runs of every function on made-up values. What ``schedule`` predicts comes from
        rates and is farther off.
        """
        self.wait()
        schedule = self.schedule
        if not schedule.machine.shared_cores:
            raise ProgramError(
                "program.profile() is for the CPU backend: on a GPU, run `megacompile profile` instead."
            )
        work, machine = calibrated(self._scheduled().compiled, schedule.machine)
        return replace(schedule, work=work, machine=machine)

    @property
    def fusions(self) -> Fusions:
        """Which fused kernels the program that ran last holds, where, and what was left alone and why."""
        return self._scheduled().compiled.fusions

    @property
    def source(self) -> str:
        """The emitted Python of the training program that ran last."""
        return self._scheduled().source

    @property
    def memory(self) -> Memory:
        """Measured and predicted bytes over all programs that ran so far."""
        runtime = self._runtime
        host = runtime.state.nbytes() | runtime.buffers.nbytes() if runtime else {}
        offload = runtime.state.offload if runtime else None
        return Memory(
            budget_bytes=self._compiler.budget_bytes,
            device_peak_bytes=self._runtime.peak_bytes if self._runtime else 0,
            predicted_peak_bytes=self._predicted_peak,
            host_bytes=host,
            host_budget_bytes=self._settings.host_budget_bytes,
            resident_peak_bytes=resident_peak_bytes(),
            storage_bytes=offload.storage.nbytes if offload else 0,
            traffic=self._schedule_on(self._compiler.machine).traffic if offload else "",
        )

    def __getstate__(self) -> Any:
        raise ProgramError("A program cannot be pickled: save program.state_dict() instead.")

    # ---- inside ----------------------------------------------------------------------------------

    def prepare(self, batch: Any) -> None:
        """Compile the training program for an example batch and take over the model's storage."""
        micro = self._micro_batches(batch)
        self._schedule(micro[0], self._training(micro))

    def _training(self, micro: list[Batch]) -> Mode:
        return Mode("train", len(micro), self._settings.defers_updates)

    def _scheduled(self) -> Scheduled:
        if self._current is None:
            raise ProgramError("Nothing is compiled yet: run a step, or compile with example_batch.")
        return self._current

    def _same_process(self) -> None:
        if os.getpid() != self._pid:
            raise ProgramError(
                "This program was made in another process, whose worker threads a fork does not copy: use it "
                "there, or compile in this process."
            )

    def _ready(self) -> None:
        self._same_process()
        if self._torn:
            raise ProgramError(self._torn)
        if self._settings.on_nonfinite == "raise" and self._unjudged:
            self.wait()  # no step runs after a faulty one, whatever the timing
        self._report_skipped()

    def _report_skipped(self) -> None:
        """Raise for a step whose gradient was not finite; steps without a verdict yet are kept in mind."""
        known = [r for r in self._unjudged if r.grad_norm is not None]
        self._unjudged = [r for r in self._unjudged if r.grad_norm is None]
        if self._settings.on_nonfinite == "skip":
            return
        for results in known:
            if results.skipped:
                raise NonFiniteError(
                    f"The gradient's norm was {float(results.grad_norm or 0.0)}: the update was not applied, "
                    "and all parameters are as before that step."
                )

    def _micro_batches(self, batch: Any, *, evaluate: bool = False) -> list[Batch]:
        items = batch if isinstance(batch, list) else [batch]
        if not items:
            raise MegacompileError("The list of micro-batches is empty.")
        return [self._read(item, evaluate) for item in items]

    def _read(self, item: Any, evaluate: bool) -> Batch:
        own_loss = self._compiler.has_loss_fn
        batch = read_batch(item, self.model, evaluate=evaluate, keep_mask=own_loss)
        if not (self._compiler.knows(batch) or self._current is None or own_loss):
            longer = bucketed(item, batch, self.model, longest=self._settings.max_seq_len)
            if longer is not None:
                batch = read_batch(longer, self.model, evaluate=evaluate)
        check_signature(self.model, batch)
        return batch

    def _step_by_accumulation(self, micro: list[Batch], weights: list[float]) -> StepOutput:
        losses: list[Tensor] = []
        try:
            for one, weight in zip(micro, weights, strict=True):
                losses += self._run([one], Mode("accumulate"), [weight]).losses
        except BaseException:
            if self._runtime is not None:
                self._runtime.drop_gradients()  # they are a part of a step that is not made
            raise
        results = self._run([micro[-1]], Mode("update"), [])
        results.losses = losses
        return StepOutput(self, results, weights)

    def _schedule(self, batch: Batch, mode: Mode) -> Scheduled:
        first = self._runtime is None
        known = self._compiler.knows(batch)
        if not first and not known and mode.kind != "evaluate":
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in batch.tensors)
            warnings.warn(f"Compiling another program, for a batch of {shapes}.", stacklevel=4)
        if first:
            self._prove_longest(batch, mode)  # first: how far weights are cut must suffice for it
        scheduled = self._compiler.schedule(batch, mode)
        if first:
            self._take_over(scheduled)
        if mode.kind != "evaluate" or self._current is None:
            self._current = scheduled
        self._predicted_peak = max(self._predicted_peak, scheduled.planned.peak_bytes)
        return scheduled

    def _prove_longest(self, batch: Batch, mode: Mode) -> None:
        ids = batch.kwargs.get("input_ids")
        if self._settings.max_seq_len is None or not isinstance(ids, Tensor):
            return
        if ids.shape[1] < self._settings.max_seq_len:
            longest = read_batch(pad_batch(batch.kwargs, self._settings.max_seq_len), self.model)
            self._compiler.schedule(longest, mode)

    def _take_over(self, scheduled: Scheduled) -> None:
        if ownership.is_owned(self.model):
            raise MegacompileError("Another program has taken over this model: use that one.")
        assembly, settings = scheduled.compiled.assembly, self._settings
        state, self._compiler.placement = lay_out(
            scheduled.planned.step,
            scheduled.planned.plan,
            assembly.groups,
            settings.optimizer_state,
            settings.offload_dirs,
            settings.host_budget_bytes,
        )
        self._values.take_over(state, assembly.homes)
        self._compiler.layouts = assembly.groups
        self._runtime = Runtime(state, settings.open_device())

    def _bind(self, scheduled: Scheduled) -> BoundStep:
        found = self._bound.get(id(scheduled))
        if found is None:
            assert self._runtime is not None
            compiled = scheduled.compiled
            found = BoundStep(
                scheduled.planned.step,
                scheduled.source,
                compiled.part,
                compiled.templates,
                compiled.assembly,
                self._compiler.constants(compiled.captured),
                list(self._compiler.pieces),
                self._runtime.device.torch_device,
            )
            self._bound[id(scheduled)] = found
        return found

    def _run(self, micro: list[Batch], mode: Mode, weights: Sequence[float]) -> StepResults:
        bound = self._bind(self._schedule(micro[0], mode))
        runtime = self._runtime
        assert runtime is not None
        if bound is not self._previous:
            runtime.finish()
            self._previous = bound
        if mode.kind != "evaluate":
            self._last_batch = micro[0]  # whose program an update by hand belongs to
        inputs = StepInputs(
            leaves=[m.leaves for m in micro],
            seeds=[step_seed(self._seed, self._calls, i) for i in range(len(micro))],
            loss_weights=list(weights),
            hypers=hypers(self.optimizer, runtime.state.steps) if mode.kind in ("train", "update") else [],
            max_grad_norm=self._settings.max_grad_norm,
            check_loss=mode.kind == "train" and not mode.keeps_gradients,
        )
        try:
            results = runtime.run(bound, inputs)
        except BaseException as error:
            self._note_torn(error)
            raise
        self._calls += mode.kind in ("train", "accumulate")
        if results.takes_norm:
            self._unjudged.append(results)
        return results

    def _note_torn(self, error: BaseException) -> None:
        if self._runtime is not None and self._runtime.torn:
            self._torn = (
                f"A step stopped in the middle ({type(error).__name__}: {error}) after some weights were "
                "updated and before others: load a saved state with load_state_dict."
            )

    def _laid_out(self, what: str) -> HostState:
        if self._runtime is None:
            raise ProgramError(f"Nothing is laid out yet: compile with example_batch, then {what}.")
        if self._runtime.has_gradients:
            raise ProgramError(f"Gradients are waiting: call optimizer_step(), then {what}.")
        return self._runtime.state


def step_seed(seed: int, step: int, micro: int) -> int:
    """The 63-bit seed of all random calls in one micro-batch of one step."""
    mixed = seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + micro * 0x94D049BB133111EB
    mixed &= (1 << 64) - 1
    mixed ^= mixed >> 31
    return (mixed * 0xD6E8FEB86659FD93) & ((1 << 63) - 1)
