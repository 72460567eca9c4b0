"""The runtime: runs emitted steps, one after another, over one state on one device.

A run's operations are in :class:`~megacompile.runtime.step_run.StepRun`. Here is what lies between runs:
state and waiting gradients where the next step wants them, and what is left after a fault.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from dataclasses import replace

import torch

from megacompile.errors import DeviceFullError, ProgramError
from megacompile.runtime.block_calls import Blocks
from megacompile.runtime.bound_step import BoundStep
from megacompile.runtime.device import Device, Trace
from megacompile.runtime.device_state import ResidentState
from megacompile.runtime.gradient_sums import Fabric
from megacompile.runtime.host_buffers import HostBuffers
from megacompile.runtime.step_results import NonFiniteError, StepInputs, StepResults
from megacompile.runtime.step_run import Held, StepRun
from megacompile.schedule.op_table import HostGrad, ResidentGrad
from megacompile.schedule.step import Step
from megacompile.state.masters import HostState


class Runtime:
    """Runs steps, and keeps what they leave behind, for one compiled program set.

    ``traces`` says of the last two runs what ran when. ``lost_gradients`` says that some that waited were
    dropped when a later micro-batch failed.
    """

    def __init__(self, state: HostState, device: Device) -> None:
        self.state = state
        self.device = device
        device.own([*state.traveling, state.arena.rest])
        self.resident = ResidentState(state, device)
        self.buffers = HostBuffers(state.arena, device, state.offload.storage if state.offload else None)
        self.traces: deque[tuple[Step, Trace]] = deque(maxlen=2)
        self.lost_gradients = False
        fabric = Fabric(state.world, device)
        self._held = Held(state, device, self.resident, self.buffers, Blocks(device, self.resident), fabric)
        state.world.tell_failures(device.fail)
        self._end = weakref.finalize(self, _end, self._held)
        self._end.atexit = False

    def run(self, program: BoundStep, inputs: StepInputs) -> StepResults:
        """Run one emitted step; device values never outlive it.

        Where updates do not wait for the norm and the loss is not finite, the gradients are looked at in the
        place of the updates. Only where all are finite, as those of a mean over nothing, is the step run
        again, with them. Buffers of the model that it changes change when it is over.
        """
        results = self._run(program, inputs)
        if inputs.check_loss and self._stopped(results):
            results = self._run(program, replace(inputs, check_loss=False))
        if program.changed:
            with self.device.computing():
                self.device.store(program.constants[name] for name in sorted(program.changed))
        return results

    def _run(self, program: BoundStep, inputs: StepInputs) -> StepResults:
        held, offload = self._held, self.state.offload
        if offload is not None and offload.needs_write_back:
            self.synchronize()
            held.guarded(offload.begin)
        trace: Trace = []
        self.traces.append((program.step, trace))
        run = StepRun(held, program, inputs)
        with self.device.computing():
            try:
                self._prepare(program, inputs)
                with self.device.start(trace):
                    held.progress.begin(self.device.step, program.updates)
                    program.function(run)
                    self._await_collectives(program.step)
                    if inputs.check_loss and self.state.world.size > 1:
                        self.device.wait([("agree",)])
            except BaseException as error:
                self._abandon(error, pushed=run.pushed)
                raise
        assert not held.blocks.values, f"left on the device: {list(held.blocks.values)}"
        if program.updates:
            held.gathered.clear()
        elif "backward" in program.kinds:
            held.gathered.append(run.results)
        return run.results

    @property
    def peak_bytes(self) -> int:
        """The most device bytes that any step so far held."""
        return self.device.peak_bytes

    def await_losses(self) -> None:
        """Return when the losses of all steps so far are there."""
        self.device.await_reads()
        if self.state.world.size > 1:
            self.device.wait([("agree",)])

    def await_norm(self) -> None:
        """Return when the norm of the last gradient that updates waited for is known."""
        self.device.wait([("clip_scale",)])

    def synchronize(self) -> None:
        """Wait for all transfers and updates that are under way."""
        self.device.synchronize()

    def vacate(self) -> None:
        """Give all memory of the device back, for others, until the next step."""
        self.synchronize()
        self.resident.vacate()
        self.device.vacate()

    def close(self) -> None:
        """End the backend's threads."""
        self._end.detach()
        _close(self._held)

    def forget_faults(self) -> None:
        """The state was set anew: what earlier steps left undone no longer matters."""
        self._held.progress.clear()
        self.lost_gradients = False

    @property
    def inconsistent(self) -> bool:
        """Return whether, with nothing under way, some step updated a part of the weights only, or lost
        some."""
        return self._held.progress.inconsistent

    @property
    def landed(self) -> tuple[int, ...]:
        """The weight groups whose gradients wait for an update."""
        return tuple(sorted({*self._held.landed, *self.resident.landed}))

    @property
    def has_gradients(self) -> bool:
        """Return whether gradients wait for an update."""
        return bool(self.landed)

    def drop_gradients(self) -> None:
        """Forget the gradients that wait."""
        self.lost_gradients = False
        self._held.landed.clear()
        self._held.gathered.clear()
        self.resident.landed.clear()

    def _await_collectives(self, step: Step) -> None:
        """Another program of this process may run next: on no rank may its collectives come before these."""
        last = next((op.event for op in reversed(step.ops) if op.stream == "comm"), None)
        if last is not None and not self.device.immediate:
            self.device.wait([last])  # until it is issued

    def _stopped(self, results: StepResults) -> bool:
        """Return whether a loss kept the updates of a step, on all ranks, from being made; raise
        :class:`NonFiniteError` where some gradient is not finite either."""
        if results.stopped_by is None:
            return False
        world = self.state.world
        self.synchronize()
        if all(rank["finite"] for rank in world.hear(lambda: {"finite": results.finite})):
            return True
        losses = ", ".join(f"{float(loss)}" for loss in results.losses)
        which, where = ("losses of the ranks are", " on any of them") if world.size > 1 else ("loss is", "")
        raise world.agreed(
            NonFiniteError(
                f"The {which} {losses}, and not all gradients are finite: no parameter was changed{where}."
                f"{results.origin}"
            )
        )

    def _prepare(self, program: BoundStep, inputs: StepInputs) -> None:
        if self.resident.in_place(program.step):
            self.resident.prepare(program.step)
        else:
            self.synchronize()
            self._move(program)
        constants = self.device.prepare(program.step, program.constants, program.changed)
        self._held.blocks.begin(program, inputs, constants)
        self.buffers.prepare(program.step, self.synchronize)
        self._held.fabric.prepare(program.step, self.synchronize)

    def _move(self, program: BoundStep) -> None:
        """At rest: state to where a step wants it, and with it the FP32 gradients that wait for an update."""
        held = self._held
        stays, landed = set(program.step.resident), self.resident.landed
        gone, coming = landed.keys() - stays, held.landed.keys() & stays
        carried = {group: self.resident.gradient(group, ResidentGrad(group)).cpu() for group in gone}
        self.resident.move(program.step)
        for group in coming:
            landed[group] = held.landed.pop(group)
        for group in gone:
            held.landed[group] = landed.pop(group)
        self.resident.prepare(program.step)
        for group, gradient in carried.items():
            self.buffers.gradient(program, group, HostGrad(group)).copy_(gradient)
        for group in coming:
            waiting = self.buffers.gradients[group][: 4 * program.assembly.groups[group].share]
            self.resident.gradient(group, ResidentGrad(group)).copy_(waiting.view(torch.float32))

    def _abandon(self, error: BaseException, *, pushed: bool) -> None:
        """After an exception: let the queues run dry and forget everything on the device.

        Gradients that wait on the host stay only if nothing of this step can be among them.
        """
        whole = isinstance(error, (ProgramError, NonFiniteError, DeviceFullError)) and not pushed
        try:
            self.device.synchronize()
        except BaseException:
            whole = False
            self.device.raise_failure()
        finally:
            self._held.blocks.clear()
            if not whole:
                lost = self.lost_gradients or self.has_gradients
                self.drop_gradients()
                self.lost_gradients = lost


def _end(held: Held) -> None:
    """Close the device of a runtime that was dropped, before its memory goes.

    One of the threads that shall end may have dropped it: another one waits for them, the process for that.
    """
    if not sys.is_finalizing():  # then nothing runs any more
        threading.Thread(target=_close, args=(held,)).start()


def _close(held: Held) -> None:
    held.device.close()
    held.world.disconnect()
