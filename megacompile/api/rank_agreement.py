"""Compare what the ranks of a program must have alike before they do anything together: programs, batches,
settings.

In: what one rank has. Out: plain descriptions of it, equal only where the ranks may go on together, and what
follows for each of them: its micro-batches' numbers and everyone's loss weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megacompile.api.decisions import Decisions, Scheduled
from megacompile.api.padder import OfRanks
from megacompile.api.pipeline import Compiler
from megacompile.api.settings import Settings
from megacompile.capture.batch import Batch
from megacompile.capture.padding import pad_batch
from megacompile.distributed.world import World
from megacompile.graph.forward_outputs import OutputsFn
from megacompile.graph.right_padding import is_padded_right
from megacompile.planner.too_small import TooSmall
from megacompile.runtime.step_results import step_seed
from megacompile.schedule.plan import Mode
from megacompile.state.adam import Kernel, backend
from megacompile.state.optimizer import hypers
from megacompile.state.torch_optimizer import TorchOptimizer

if TYPE_CHECKING:
    from megacompile.api.session import Session

Weigh = Callable[[list[Batch]], list[float]]
"""Gives the weights of micro-batches' losses, or refuses them."""


def agreed_program(
    compiler: Compiler, decided: Decisions, batch: Batch, mode: Mode, settings: Settings
) -> Decisions | TooSmall:
    """The decisions with the program for a kind of batch, the same on all ranks; refused on all where one
    refuses it."""
    world = settings.world
    if world.size == 1 or decided.number(batch, mode) >= 0:
        return compiler.schedule(decided, batch, mode)
    found = world.agree(lambda: compiler.schedule(decided, batch, mode))
    if not isinstance(found, TooSmall):
        program = found.program(batch, mode)
        world.compare(lambda: _described_program(program, settings))
    return found


def _described_program(scheduled: Scheduled, settings: Settings) -> dict[str, Any]:
    """A program that all ranks run: what it was made of, and a digest of every operation."""
    compiled, step = scheduled.compiled, scheduled.planned.step
    slots = [(g.name, str(g.dtype), g.elements, g.trainable, g.slots) for g in compiled.assembly.groups]
    moved = [(op.event, op.nbytes, op.offset) for op in step.ops]
    return {
        "settings": (
            f"max_grad_norm={settings.max_grad_norm}, on_nonfinite={settings.on_nonfinite!r}, "
            f"seed={settings.seed}, optimizer_state={settings.optimizer_state!r}"
        ),
        "updates": _updates(settings),
        "layout": _digest_of_text(str(slots)),
        "source": _digest_of_text(
            f"{scheduled.source}{moved}{step.resident}{step.shards}{step.exchange_bytes}"
        ),
    }


def _updates(settings: Settings) -> str:
    """Describe what updates a state that other ranks update too, where its bits depend on it."""
    if settings.world.ranks.replicas == 1:
        return ""
    gpu = torch.cuda.get_device_name(settings.device) if settings.device.type == "cuda" else "no GPU"
    form = settings.optimizer_state
    kernel: Kernel = "muon" if isinstance(form, TorchOptimizer) else form
    code = {"c": "the C kernel", "torch": "torch"}[backend(kernel)]
    if isinstance(form, TorchOptimizer):
        code += f", torch for {torch.backends.cpu.get_cpu_capability()}"
    return f"{code} on the host, and {gpu}"


def agreed_batches(
    session: Session, given: Any, kind: str, weigh: Weigh, outputs: OutputsFn | None = None
) -> tuple[list[Batch], list[float], list[float]]:
    """The micro-batches of a step of this kind, their weights, and those of all ranks' micro-batches.

    Several ranks pad to one length, if theirs differ. Refused on all where one's are refused, or are unlike
    rank 0's otherwise.
    """
    world, evaluate = session.world, kind == "evaluate"
    micro: list[Batch] = []
    weights: list[float] = []

    def read() -> dict[str, Any]:
        micro[:] = session.read(given, evaluate=evaluate, outputs=outputs)
        ranks = _of_one_rank(session, micro)
        return ranks | (settle() if session.decided.knows(micro[0]) and ranks["one_kind"] else {})

    def settle() -> dict[str, Any]:
        weights[:] = weigh(micro)
        return _described_batches(session, micro, weights, kind)

    def pad() -> dict[str, Any]:
        micro[:] = session.padded(micro, _of_ranks(said))
        return settle()

    if world.size == 1:
        micro = session.padded(session.read(given, evaluate=evaluate, outputs=outputs))
        weights = weigh(micro)
        return micro, weights, weights
    said = world.hear(read)
    known = all("program" in rank for rank in said) and _of_ranks(said).alike
    said = world.alike(said) if known else world.compare(pad)
    return micro, weights, [rank["weights"][m] for m in range(len(micro)) for rank in said]


def _of_one_rank(session: Session, micro: list[Batch]) -> dict[str, Any]:
    """Describe what padding depends on, of one rank."""
    kinds = {_digest_of_text(f"{batch.key.structure}{batch.key.leaves}{batch.key.padded}") for batch in micro}
    lengths = session.reader.padder.lengths(micro)
    masked = [pad_batch(batch.kwargs, length) for batch, length in zip(micro, lengths, strict=False)]
    return {
        "kind": min(kinds),
        "one_kind": len(kinds) == 1,
        "lengths": lengths,
        "right": all(map(is_padded_right, masked)),
    }


def _of_ranks(said: Sequence[Mapping[str, Any]]) -> OfRanks:
    paddable = all(rank["lengths"] for rank in said)
    return OfRanks(
        alike=all(rank["one_kind"] and rank["kind"] == said[0]["kind"] for rank in said),
        lengths=tuple(length for rank in said for length in rank["lengths"]) if paddable else (),
        right=all(rank["right"] for rank in said),
    )


def _described_batches(
    session: Session, micro: list[Batch], weights: Sequence[float], kind: str
) -> dict[str, Any]:
    one_kind = len({batch.key for batch in micro}) == 1
    mode = Mode("evaluate") if kind == "evaluate" else session.training(micro)
    if kind == "accumulate" or not one_kind:
        mode = Mode("accumulate")  # one after the other
    first = {batch.key: batch for batch in reversed(micro)}.values()  # of each kind
    counts = [batch.kwargs.get("num_items_in_batch") for batch in micro]
    return {
        "micro": len(micro),
        "shapes": "; ".join(map(_shapes, micro if not one_kind else micro[:1])),
        "program": [
            [kind, of.key.structure, str(of.key.leaves), session.decided.number(of, mode)] for of in first
        ],
        "optimizer": described_optimizer(session),
        "place": [session.seed, session.calls],
        "count": [None if count is None else float(count) for count in counts],
        "weights": list(weights),
    }


def described_optimizer(session: Session) -> str:
    """The settings of all param groups."""
    return ", ".join(str(hyper) for hyper in hypers(session.optimizer, session.settings.optimizer_state))


def _shapes(batch: Batch) -> str:
    return ", ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in batch.tensors)


def micro_seeds(seed: int, call: int, count: int, world: World) -> list[int]:
    """The seeds of a rank's micro-batches, by their numbers among those of all ranks, which take turns."""
    return [step_seed(seed, call, number) for number in range(world.rank, count * world.size, world.size)]


def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
