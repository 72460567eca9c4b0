"""Bind scheduled programs to one state and one device: block functions, constants, compiled kernels.

In: a :class:`~megacompile.api.decisions.Scheduled` program, settings. Out: the bound steps that a
:class:`~megacompile.runtime.executor.Runtime` runs.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

import torch

from megacompile.api.allocate_state import check_beside
from megacompile.api.decisions import Decisions, Scheduled
from megacompile.api.pipeline import Compiler
from megacompile.api.settings import Settings
from megacompile.kernels import _triton
from megacompile.runtime.bound_step import BoundStep
from megacompile.runtime.device import Device
from megacompile.runtime.precompile_kernels import compile_kernels, launches_of
from megacompile.state.masters import HostState


class Bindings:
    """The programs that were bound to their functions and constants, as long as anyone has them."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._bound: WeakKeyDictionary[Scheduled, BoundStep] = WeakKeyDictionary()
        self._ready: WeakSet[Scheduled] = WeakSet()

    def __contains__(self, scheduled: Scheduled) -> bool:
        return scheduled in self._bound

    def admit(self, scheduled: Scheduled, state: HostState, settings: Settings) -> None:
        """Refuse a further program that the host has no room for, or the GPU no kernels."""
        work = scheduled.compiled.assembly.work
        check_beside(state.total_bytes, scheduled.planned.step, work, settings.host_budget_bytes)
        self.make_ready(scheduled, settings.device)

    def make_ready(self, scheduled: Scheduled, device: torch.device) -> None:
        """Compile the Triton kernels that a program launches; once."""
        if device.type != "cuda" or not _triton.HAS_TRITON or scheduled in self._ready:
            return
        compiled = scheduled.compiled
        step, mode = scheduled.planned.step, compiled.fused.fake_mode
        launches = launches_of(step, compiled.part, compiled.templates, compiled.assembly, mode, device)
        compile_kernels(launches, device)
        self._ready.add(scheduled)

    def bind(self, scheduled: Scheduled, decided: Decisions, device: Device) -> BoundStep:
        """A program as it runs on this device, bound once."""
        found = self._bound.get(scheduled)
        if found is None:
            compiled = scheduled.compiled
            found = self._bound[scheduled] = BoundStep(
                scheduled.planned.step,
                scheduled.source,
                compiled.part,
                compiled.templates,
                compiled.assembly,
                self._compiler.frontend.constants(compiled.captured),
                list(self._compiler.pieces(decided)),
                device.torch_device,
            )
        return found

    def clear(self) -> None:
        """Forget all of them."""
        self._bound.clear()
        self._ready.clear()
