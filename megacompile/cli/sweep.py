"""A sweep: answers from one study along an axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megacompile.cli.check_plan_arguments import ANY_BYTES
from megacompile.cli.estimator import Study
from megacompile.cli.plan_answer import Answer, Question
from megacompile.cli.splits_and_meshes import best_mesh
from megacompile.hardware.catalog import PROFILES, MachineProfile
from megacompile.units import format_bytes

_NUMBERS = {"batch": 6, "seq": 6, "gpus": 4}  # how many are usual, each twice the one before

_Asked = tuple[str, float, Question]
"""A point before its answer: label, value, what to ask."""


@dataclass(frozen=True)
class Point:
    """One row of a sweep."""

    label: str
    value: float
    answer: Answer


def sweep(
    study: Study, question: Question, over: str, values: Sequence[int | MachineProfile], clip: bool
) -> Iterator[Point]:
    """Answers along one axis, as they come: at these budgets, numbers or machines, else at usual ones.

    For several machines the faster mesh counts, with clipping or without as ``clip`` says.
    """
    points = [
        _point(question, over, index, value)
        for index, value in enumerate(values or _usual(study, question, over))
    ]
    for label, at, asked in points:
        answer, _ = best_mesh(study, asked, clip)
        yield Point(label, at, answer)
        if not values and over in _NUMBERS and not answer.fits_device():
            return


def _point(question: Question, over: str, index: int, value: int | MachineProfile) -> _Asked:
    if isinstance(value, MachineProfile):
        asked = replace(question, profile=value, hbm_budget=value.device_bytes or ANY_BYTES)
        return value.name, float(index), asked
    if over == "hbm-budget":
        return format_bytes(value), value / 1e9, replace(question, hbm_budget=value)
    return str(value), float(value), replace(question, **{over: value})  # type: ignore[arg-type]


def _usual(study: Study, question: Question, over: str) -> Sequence[int | MachineProfile]:
    if over == "machine":
        return [p for p in PROFILES.values() if question.ranks == 1 or p.machine.fabric_bandwidth]
    if over != "hbm-budget":
        return [(1024 if over == "seq" else 1) << i for i in range(_NUMBERS[over])]
    low = study.least(question)[0].device_bytes  # as the plan itself says
    high = max(low, min(question.profile.device_bytes or ANY_BYTES, max(question.hbm_budget, 2 * low)))
    return [low + (high - low) * i // 6 for i in range(7)]
