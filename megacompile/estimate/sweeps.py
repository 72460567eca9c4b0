"""Series of answers from one study: along an axis, or over the ways to cut a batch into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megacompile.estimate.study import Answer, Question, Study
from megacompile.machine.catalog import PROFILES, MachineProfile
from megacompile.units import format_bytes

_ANY = 1 << 60  # no machine has more
_PATIENCE = 2  # slower splits in a row after which smaller ones are not tried


@dataclass(frozen=True)
class Point:
    """One row of a sweep."""

    label: str
    value: float
    answer: Answer


def sweep(
    study: Study, question: Question, over: str, values: Sequence[int | MachineProfile]
) -> Iterator[Point]:
    """Answers along one axis, as they come: at these budgets, numbers or machines, else at usual ones."""
    for index, value in enumerate(values or _usual(study, question, over)):
        if isinstance(value, MachineProfile):
            asked = replace(question, profile=value, hbm_budget=value.device_bytes or _ANY)
            yield Point(value.name, float(index), study.answer(asked))
        elif over == "hbm-budget":
            yield Point(format_bytes(value), value / 1e9, study.answer(replace(question, hbm_budget=value)))
        else:
            answer = study.answer(replace(question, **{over: value}))  # type: ignore[arg-type]
            yield Point(str(value), float(value), answer)
            if not values and not answer.fits_device():
                return


def _usual(study: Study, question: Question, over: str) -> Sequence[int | MachineProfile]:
    if over == "machine":
        return [p for p in PROFILES.values() if question.ranks == 1 or p.machine.fabric_bandwidth]
    if over != "hbm-budget":
        return [{"batch": 1, "seq": 1024, "gpus": 1}[over] << i for i in range(4 if over == "gpus" else 6)]
    low = study.least(replace(question, hbm_budget=0))[0].device_bytes
    high = max(low, min(question.profile.device_bytes or _ANY, max(question.hbm_budget, 2 * low)))
    return [low + (high - low) * i // 6 for i in range(7)]


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
