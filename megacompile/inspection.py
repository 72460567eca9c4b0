"""What a program tells of itself: plan, schedule, source, kernels, memory.

In: a :class:`~megacompile.session.Session`, of the programs that it compiled and ran. Out: frozen values.
"""

from __future__ import annotations

from dataclasses import replace

from megacompile.assemble.plan import Plan
from megacompile.bench.calibrate import calibrated
from megacompile.compiler import Scheduled
from megacompile.errors import ProgramError
from megacompile.fuse.report import Fusions
from megacompile.host.arena import resident_peak_bytes
from megacompile.machine.measured import align
from megacompile.machine.rates import Machine
from megacompile.runtime.calls import alone
from megacompile.runtime.results import Memory
from megacompile.schedule.schedule import Schedule
from megacompile.session import Session


class Inspection:
    """The part of :class:`~megacompile.program.Program` that changes nothing."""

    _session: Session

    @property
    def plan(self) -> Plan:
        """What was decided for the training program that ran last."""
        scheduled = self._session.scheduled()
        planned, work = scheduled.planned, scheduled.compiled.assembly.work
        names = tuple(b.name for b in work.blocks), tuple(g.name for g in work.groups)
        return replace(planned.plan, names=names, loops=work.loops)

    @property
    def schedule(self) -> Schedule:
        """The scheduled step of the training program that ran last, with the times of a recent run.

        Print it, write it as a page (``to_html``) or a trace (``to_chrome_trace``), or read its fx graph.
        """
        return self._schedule_on(self._session.compiler.measured_machine)

    @property
    def largest_schedule(self) -> Schedule:
        """As ``schedule``, of the training program that computes most: the last batch of an epoch is often a
        small one."""
        compiler = self._session.compiler
        largest = max(
            compiler.training, key=lambda s: sum(op.flops for op in s.planned.step.ops), default=None
        )
        return self._schedule_on(compiler.measured_machine, largest)

    def _schedule_on(self, machine: Machine, scheduled: Scheduled | None = None) -> Schedule:
        runtime, scheduled = self._session.runtime, scheduled or self._session.scheduled()
        traces = reversed(runtime.traces) if runtime else iter(())
        trace = next((trace for step, trace in traces if step is scheduled.planned.step), None)
        ran = align(scheduled.planned.step, list(trace)) if trace is not None else None
        return self._session.compiler.schedule_of(scheduled, machine, ran)

    @alone
    def profile(self) -> Schedule:
        """The schedule with times predicted from each block function's own, measured now on the CPU backend.

        Takes some runs of every function on made-up values. What ``schedule`` predicts comes from
        rates and is farther off.
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
        """Which fused kernels the program that ran last holds, where, and what was left alone and why."""
        return self._session.scheduled().compiled.fusions

    @property
    def source(self) -> str:
        """The emitted Python of the training program that ran last."""
        return self._session.scheduled().source

    @property
    def budget_bytes(self) -> int:
        """Device bytes of the budget, with what the device's driver and libraries take of them."""
        room = self._session.compiler.room
        return room.budget_bytes + room.reserved_bytes

    @property
    def memory(self) -> Memory:
        """The device's peak, measured and predicted, and host bytes by kind, of all programs so far."""
        session, runtime = self._session, self._session.runtime
        host = runtime.state.nbytes() | runtime.buffers.nbytes() if runtime else {}
        offload = runtime.state.offload if runtime else None
        return Memory(
            budget_bytes=session.compiler.budget_bytes,
            device_peak_bytes=runtime.peak_bytes if runtime else 0,
            predicted_peak_bytes=session.predicted_peak,
            host_bytes=host,
            host_budget_bytes=session.settings.host_budget_bytes,
            resident_peak_bytes=resident_peak_bytes(),
            storage_bytes=offload.storage.nbytes if offload else 0,
            traffic=self._schedule_on(session.compiler.machine).traffic if offload else "",
            page_locked_bytes=runtime.device.page_locked_bytes() if runtime else 0,
            staged_bytes=runtime.device.staged_bytes() if runtime else 0,
        )
