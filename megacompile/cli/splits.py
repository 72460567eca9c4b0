"""How to cut a batch into micro-batches: ``--micro-batches auto``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megacompile.cli.plan import Answer, Question, Study

_PATIENCE = 2  # slower splits in a row after which smaller ones are not tried


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
    for count in _divisors(question.batch):
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


def _divisors(number: int) -> Iterator[int]:
    return (n for n in range(1, number + 1) if number % n == 0)
