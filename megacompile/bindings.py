"""From scheduled programs to what can run: the state and device that all share, and each one's functions.

In: a :class:`~megacompile.compiler.Scheduled` program, settings. Out: what a
:class:`~megacompile.runtime.runtime.Runtime` is made of, and the bound steps that it runs.
"""

from __future__ import annotations

import torch

from megacompile.compiler import Compiler, Scheduled
from megacompile.host.offload import Placement
from megacompile.host.state import HostState
from megacompile.kernels import _triton
from megacompile.runtime.allocation import allocate_host_state, check_beside
from megacompile.runtime.compiled_kernels import compile_kernels, launches_of
from megacompile.runtime.device import Device
from megacompile.settings import Settings
from megacompile.step.bind import BoundStep

Allocated = tuple[HostState, Placement, Device]


def allocate(scheduled: Scheduled, settings: Settings) -> Allocated:
    """The state that a model's first program asks for, where it lies, and the device, opened."""
    state, placement = allocate_host_state(
        scheduled.planned.step,
        scheduled.planned.plan,
        scheduled.compiled.assembly,
        settings.optimizer_state,
        settings.offload_dirs,
        settings.host_budget_bytes,
        settings.world,
    )
    return state, placement, settings.open_device()


class Bindings:
    """The programs that were bound to their functions and constants; ``last`` is the one that ran last."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._bound: dict[int, BoundStep] = {}  # by the program's id
        self._ready: set[int] = set()  # programs, by their ids
        self.last: BoundStep | None = None

    def __contains__(self, scheduled: Scheduled) -> bool:
        return id(scheduled) in self._bound

    def admit(self, scheduled: Scheduled, state: HostState, settings: Settings) -> None:
        """Refuse a further program that the host has no room for, or the GPU no kernels."""
        work = scheduled.compiled.assembly.work
        check_beside(state, scheduled.planned.step, work, settings.host_budget_bytes)
        self.make_ready(scheduled, settings.device)

    def make_ready(self, scheduled: Scheduled, device: torch.device) -> None:
        """Compile the Triton kernels that a program launches; once."""
        if device.type != "cuda" or not _triton.HAS_TRITON or id(scheduled) in self._ready:
            return
        compiled = scheduled.compiled
        step, mode = scheduled.planned.step, compiled.fused.fake_mode
        launches = launches_of(step, compiled.part, compiled.templates, compiled.assembly, mode, device)
        compile_kernels(launches, device)
        self._ready.add(id(scheduled))

    def bind(self, scheduled: Scheduled, device: Device) -> BoundStep:
        """A program as it runs on this device, bound once."""
        found = self._bound.get(id(scheduled))
        if found is None:
            compiled = scheduled.compiled
            found = self._bound[id(scheduled)] = BoundStep(
                scheduled.planned.step,
                scheduled.source,
                compiled.part,
                compiled.templates,
                compiled.assembly,
                self._compiler.frontend.constants(compiled.captured),
                list(self._compiler.pieces),
                device.torch_device,
            )
        return found

    def drop(self, scheduled: Scheduled) -> None:
        """Forget a program that is scheduled anew."""
        self._bound.pop(id(scheduled), None)
        self._ready.discard(id(scheduled))

    def clear(self) -> None:
        """Forget all of them."""
        self._bound.clear()
        self._ready.clear()
        self.last = None
