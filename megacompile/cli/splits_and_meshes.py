"""The fastest way to cut a batch into micro-batches, and the fastest mesh of several machines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megacompile.cli.estimator import Study
from megacompile.cli.plan_answer import Answer, Question

_PATIENCE = 2  # slower splits in a row after which smaller ones are not tried


@dataclass(frozen=True)
class Mesh:
    """One state that all cards share, or ``replicated`` in each machine: the seconds of a step, what binds
    it, and the host bytes of a machine; None where it does not fit."""

    replicated: bool
    seconds: float | None = None
    binding: str | None = None
    host_bytes: int | None = None


def best_mesh(study: Study, question: Question, clip: bool) -> tuple[Answer, tuple[Mesh, ...]]:
    """The answer to the question with the state on the mesh that makes the faster step, and what was tried;
    nothing but the question's own where there is one machine, or a card in each."""
    if question.nodes == 1 or question.gpus == 1:
        return study.answer(question), ()
    answers = [
        study.answer(replace(question, replicated=replicated), both=False, clip=clip)
        for replicated in (False, True)
    ]
    fitting = [a for a in answers if a.fits(clip)] or answers[:1]  # shared by all it takes least
    best = min(fitting, key=lambda a: p.seconds if (p := a.prediction(clip)) else math.inf)
    return study.answer(best.question, known=best), tuple(_tried_mesh(a, clip) for a in answers)


def _tried_mesh(answer: Answer, clip: bool) -> Mesh:
    planned, replicated = answer.prediction(clip), answer.question.replicated
    if planned is None or not answer.fits(clip):
        return Mesh(replicated)
    return Mesh(replicated, planned.seconds, planned.bound.binding, planned.host.total)


@dataclass(frozen=True)
class Split:
    """So many micro-batches of so many sequences; ``seconds`` of a step, None where it does not fit."""

    micro_batches: int
    batch: int
    seconds: float | None


def best_split(study: Study, question: Question, clip: bool) -> tuple[Answer, tuple[Split, ...]]:
    """The answer to the question with its batch cut into the micro-batches that make the fastest step, and
    what was tried.

    From the whole batch to single sequences. Each is planned as if it were asked for by itself, the winner
    then in the other mode too; where none fits, the batch is cut into single sequences, which need least.
    """
    found: list[Split] = []
    best: Answer | None = None
    for count in (n for n in range(1, question.batch + 1) if question.batch % n == 0):
        batch = question.batch // count
        asked = replace(question, batch=batch, micro_batches=count * question.micro_batches)
        answer = study.answer(asked, both=False, clip=clip)
        planned = answer.prediction(clip) if answer.fits(clip) else None
        times = [s.seconds for s in found if s.seconds is not None]
        found.append(Split(asked.micro_batches, batch, planned.seconds if planned else None))
        if planned is None:
            best = best if times else answer
            continue
        if planned.seconds < min(times, default=math.inf):
            best = answer
        times.append(planned.seconds)
        if len(times) > _PATIENCE and min(times[-_PATIENCE:]) > min(times):
            break
    assert best is not None
    return study.answer(best.question, known=best), tuple(found)
