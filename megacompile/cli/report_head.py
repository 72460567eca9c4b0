"""The first lines of the printed answer: what is planned, where its state is, and what else was tried.

In: an :class:`~megacompile.estimate.answer.Answer` and the splits and meshes that were tried. Out: text.
"""

from __future__ import annotations

from megacompile.estimate.answer import Answer, Prediction, Question
from megacompile.estimate.sweeps import Mesh, Split
from megacompile.units import format_bytes, format_count, format_seconds


def head(answer: Answer, shown: Prediction | None) -> str:
    """The model, the cards, and the tokens of a step."""
    q, m = answer.question, answer.model
    active = f", {format_count(m.active_parameters)} active" if m.active_parameters < m.parameters else ""
    if m.lora:
        kept = ", the rest frozen and kept in bfloat16, as a checkpoint in it is" if q.dtype == "bf16" else ""
        active += f", {format_count(m.trained_parameters)} trained (LoRA of rank {m.lora.rank}){kept}"
    title = q.profile.title or q.profile.name
    times = f"{q.micro_batches} micro-batches of " if q.micro_batches > 1 else ""
    moments = "Adam state" if q.optimizer_state == "fp32" else f"{q.optimizer_state} moments"
    if q.ranks > 1:
        times = f"on each card {times}"
    return (
        f"{m.name} on {_cards(q)}{title}\n"
        f"{format_count(m.parameters)} parameters{active}; {q.dtype} blocks, FP32 masters and {moments} "
        f"{_state_at(answer, shown)}\n{times}{q.batch} × {q.seq:,} tokens: {q.tokens:,} tokens per step"
    )


def _state_at(answer: Answer, shown: Prediction | None) -> str:
    """Where masters and moments are, by the plan shown."""
    host = "on NVMe and in host memory" if shown is not None and shown.host.nvme else "in host memory"
    if shown is None:
        return host
    trained = [g for g in answer.compiled.assembly.groups if g.trainable]
    there = sum(g.elements for g in trained if shown.planned.plan.groups[g.index].state == "device")
    share = there / max(1, sum(g.elements for g in trained))
    devices = "on the devices" if answer.question.ranks > 1 else "on the device"
    if share in (0, 1):
        return devices if share else host
    return f"{share:.0%} {devices}, the rest {host}"


def _cards(question: Question) -> str:
    """``4 machines of 8 × ``; nothing for a single card."""
    cards = f"{question.gpus} × " if question.ranks > 1 else ""
    return f"{question.nodes} machines of {cards}" if question.nodes > 1 else cards


def splits_text(splits: tuple[Split, ...]) -> str:
    """What other numbers of micro-batches would take."""
    if not splits:
        return ""
    tried = (
        f"{s.micro_batches}: {format_seconds(s.seconds) if s.seconds else 'does not fit'}" for s in splits
    )
    return f"\nmicro-batches tried, the fastest is taken: {', '.join(tried)}"


def meshes_text(answer: Answer, meshes: tuple[Mesh, ...]) -> str:
    """One state of all machines beside a copy in each."""
    q, lines = answer.question, []
    for mesh in meshes:
        name = "state shared by all cards"
        if mesh.replicated:
            name = f"      copied to each machine, mesh=({q.nodes}, {q.gpus})"
        if mesh.seconds is None or mesh.host_bytes is None:
            lines.append(f"\n{name}: does not fit")
            continue
        taken = ", taken" if mesh.replicated == q.replicated else ""
        host = format_bytes(mesh.host_bytes)
        found = f"{format_seconds(mesh.seconds)}, {host} a host, bound by {mesh.binding}"
        lines.append(f"\n{name}{taken}: {found}")
    return "".join(lines)
