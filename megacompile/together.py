"""What the ranks of a program compare before they do anything together: programs, batches, settings.

In: what one rank has. Out: plain descriptions of it, equal only where the ranks may go on together, and what
follows for each of them: its micro-batches' numbers and everyone's loss weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megacompile.assemble.plan import Mode
from megacompile.capture.batch import Batch
from megacompile.compiler import Compiler, Scheduled
from megacompile.errors import MegacompileError
from megacompile.host.optimizer import hypers
from megacompile.runtime.step_io import step_seed
from megacompile.settings import Settings
from megacompile.world.control import World

if TYPE_CHECKING:
    from megacompile.session import Session

Read = Callable[[], tuple[list[Batch], list[float]]]
"""Gives the micro-batches of a step and the weights of their losses, or refuses them."""


def agreed_program(compiler: Compiler, batch: Batch, mode: Mode, settings: Settings) -> Scheduled:
    """The program for a kind of batch, the same on all ranks; refused on all where one refuses it."""
    world = settings.world
    if world.size > 1 and compiler.number(batch, mode) < 0:
        fresh = world.agree(lambda: compiler.schedule(batch, mode))
        world.compare(lambda: _described_program(fresh, settings))
    return compiler.schedule(batch, mode)


def _described_program(scheduled: Scheduled, settings: Settings) -> dict[str, Any]:
    """A program that all ranks run: who made it, of what, and a digest of every operation."""
    compiled, step = scheduled.compiled, scheduled.planned.step
    slots = [(g.name, str(g.dtype), g.elements, g.trainable, g.slots) for g in compiled.assembly.groups]
    moved = [(op.event, op.nbytes, op.offset) for op in step.ops]
    return {
        "version": f"torch {torch.__version__}",
        "settings": (
            f"max_grad_norm={settings.max_grad_norm}, on_nonfinite={settings.on_nonfinite!r}, "
            f"seed={settings.seed}, optimizer_state={settings.optimizer_state!r}"
        ),
        "layout": _digest(str(slots)),
        "source": _digest(f"{scheduled.source}{moved}{step.shards}{step.exchange_bytes}"),
    }


def agreed_batches(session: Session, read: Read, kind: str) -> tuple[list[Batch], list[float], list[float]]:
    """The micro-batches of a step of this kind, their weights, and those of all ranks' micro-batches.

    Refused on all ranks where one's are refused, or are unlike rank 0's.
    """
    world = session.world
    if world.size == 1:
        micro, weights = read()
        return micro, weights, weights
    found: list[tuple[list[Batch], list[float]]] = []

    def describe() -> dict[str, Any]:
        found.append(read())
        return _described_batches(session, *found[0], kind)

    said = world.compare(describe)
    ((micro, weights),) = found
    return micro, weights, [rank["weights"][m] for m in range(len(micro)) for rank in said]


def _described_batches(
    session: Session, micro: list[Batch], weights: Sequence[float], kind: str
) -> dict[str, Any]:
    if len({batch.key for batch in micro}) > 1:
        raise MegacompileError(
            "Micro-batches of several kinds in a step are not there for several devices: pad them alike."
        )
    mode = Mode("evaluate") if kind == "evaluate" else session.training(micro)
    counts = [batch.kwargs.get("num_items_in_batch") for batch in micro]
    return {
        "micro": len(micro),
        "shapes": ", ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in micro[0].tensors),
        "program": [kind, micro[0].key[0], str(micro[0].key[1]), session.compiler.number(micro[0], mode)],
        "optimizer": ", ".join(str(hyper) for hyper in hypers(session.optimizer)),
        "place": [session.seed, session.calls],
        "count": [None if count is None else float(count) for count in counts],
        "weights": list(weights),
    }


def micro_seeds(seed: int, call: int, count: int, world: World) -> list[int]:
    """The seeds of a rank's micro-batches, by their numbers among those of all ranks, which take turns."""
    return [step_seed(seed, call, number) for number in range(world.rank, count * world.size, world.size)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
