"""Choose the mesh of ranks on several machines where none is given.

All ranks share one state, or each machine has a copy of it. In: the kind of batch that the first program is
for, and the checkpoint that will be loaded, if there is one. Out: the mesh, the same on all ranks, and a
sentence that says why. A checkpoint's mesh goes on, as another would add up gradients in another order. Else
rank 0 plans for both, as ``megacompile plan`` does, and the faster is taken of those that fit the devices and
host memory. Its times are those of the machine that plans are made for, not of a stopwatch, so the same run
chooses the same mesh again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megacompile.api.decisions import Decisions
from megacompile.api.pipeline import Compiler
from megacompile.api.settings import Settings
from megacompile.capture.batch import Batch
from megacompile.distributed.ranks import Ranks
from megacompile.errors import MegacompileError
from megacompile.planner.too_small import TooSmall
from megacompile.schedule.plan import Mode
from megacompile.state.checkpoint_manifest import read_manifest
from megacompile.state.host_budget import host_bytes
from megacompile.units import format_bytes, format_seconds

_LOG = logging.getLogger("megacompile.compiler.mesh")  # trainers show what the compiler tells


@dataclass(frozen=True)
class Tried:
    """A mesh, the predicted seconds of a step on it, None where no plan fits the devices, and the host bytes
    that a machine then needs, and has."""

    ranks: Ranks
    seconds: float | None = None
    host_bytes: int = 0
    host_budget_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Return whether devices and host memory are large enough."""
        return self.seconds is not None and self.host_bytes <= self.host_budget_bytes

    @property
    def state(self) -> str:
        """The holder of the state, in words."""
        return "one state of all ranks" if self.ranks.replicas == 1 else "a copy of the state in each machine"

    @property
    def verdict(self) -> str:
        """The seconds that it takes, or why it does not fit, in words."""
        if self.seconds is None:
            return f"{self.state} does not fit the devices"
        takes = f"{self.state} takes {format_seconds(self.seconds)}"
        if self.fits:
            return takes
        need, budget = format_bytes(self.host_bytes), format_bytes(self.host_budget_bytes)
        return f"{takes} and {need} of a machine's host memory, which gives {budget}"


def settle_mesh(
    compiler: Compiler,
    decided: Decisions,
    batch: Batch,
    mode: Mode,
    settings: Settings,
    checkpoint: Path | None,
) -> Decisions:
    """Choose, where that is still to be done, and return the decisions for this mesh; all ranks call it
    together, before any group is laid out."""
    world = settings.world
    if not world.ranks.undecided:
        return decided

    def planned_on(shards: int) -> Tried:
        ranks = replace(world.ranks, shards=shards)
        try:
            found = compiler.plan(decided.on_mesh(ranks), batch, mode)
        except MegacompileError:  # a plan that was given is for the other
            return Tried(ranks)
        if isinstance(found, TooSmall):
            return Tried(ranks)
        compiled, planned = found
        need = host_bytes(compiled.assembly, settings.optimizer_state, planned.plan, planned.step).total
        of_machine = (ranks.local * nbytes for nbytes in (need, settings.host_budget_bytes))
        return Tried(ranks, planned.seconds, *of_machine)

    def decide() -> bytes:
        chosen = _of_checkpoint(world.ranks, checkpoint)
        if chosen is None:
            compiler.frontend.captured(batch)  # refused once, where it is
            chosen = _faster([planned_on(world.size), planned_on(world.local)])
        return json.dumps(chosen).encode()

    shards, why = json.loads(world.from_first(decide))
    world.settle(shards, why)
    settled = decided.on_mesh(world.ranks)
    if world.ranks.replicas > 1:
        settled = settled.within(settings.measure_room())  # other collectives hold other memory of a device
    if world.rank == 0:
        _LOG.info("%s", why)
    return settled


def _of_checkpoint(ranks: Ranks, checkpoint: Path | None) -> tuple[int, str] | None:
    """Return the number of ranks that share the state in a checkpoint of as many ranks, and why."""
    if checkpoint is None:
        return None
    replicas, shards = read_manifest(checkpoint.resolve())[0].mesh
    if replicas * shards != ranks.size:
        return None
    return shards, f"mesh=({replicas}, {shards}) as in the checkpoint."


def _faster(tried: Sequence[Tried]) -> tuple[int, str]:
    """Return the number of ranks that share the state, and why."""
    best, other = _ranked(tried)
    took, seconds = best.ranks, format_seconds(best.seconds or 0.0)
    mesh = f"mesh=({took.replicas}, {took.shards})"
    return took.shards, f"{mesh}, {best.state}, for {seconds} a step as predicted: {other.verdict}."


def _ranked(tried: Sequence[Tried]) -> list[Tried]:
    """The fastest that fits first; where none does, they stay as they are."""
    fitting = sorted((t for t in tried if t.fits), key=lambda t: t.seconds or 0.0)
    return fitting + [t for t in tried if not t.fits]
