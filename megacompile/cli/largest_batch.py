"""The largest batch and the longest sequences that fit the device: about, or exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megacompile.capture.padded_length import reach
from megacompile.cli.estimator import Study
from megacompile.cli.models import Model
from megacompile.cli.plan_answer import Answer, Question
from megacompile.cli.workload_flops import map_calls
from megacompile.planner.min_feasible_budget import least
from megacompile.schedule.workload import Call, Workload


@dataclass(frozen=True)
class Largest:
    """The largest batch at the asked length and the longest sequence at the asked batch; 0: none.

    Not ``exact``: from the bytes of the asked batch, as if all activations grew with its tokens.
    """

    batch: int
    seq: int
    seq_step: int
    seq_limit: int | None
    exact: bool = True


def estimate_largest(answer: Answer) -> Largest:
    """About the largest that fits, at no further capture: a line through the bytes of the asked tokens and of
    twice as many, then one through those of as many as the first line says."""
    q, here = answer.question, answer.least.device_bytes
    grown = 2.0
    for _ in range(2):
        there = least(enlarged(answer.work, grown), q.mode(True)).nbytes
        grown = max(0.0, 1 + (grown - 1) * (q.hbm_budget - here) / max(1, there - here))
        if grown <= 1:
            break
    limit, step = _lengths(answer.model, q)
    seq = int(q.seq * grown) // step * step
    return Largest(int(q.batch * grown), min(seq, limit or seq), step, limit, exact=False)


def enlarged(work: Workload, factor: float) -> Workload:
    """The workload with ``factor`` times the tokens; weights and their gradients stay as they are."""

    def grown(call: Call, fixed: int) -> Call:
        peak, end = (round(fixed + (n - fixed) * factor) for n in (call.peak_bytes, call.end_bytes))
        return replace(call, peak_bytes=peak, end_bytes=end)

    work = map_calls(work, grown)
    blocks = tuple(
        replace(b, policies=tuple(replace(c, saved_bytes=round(c.saved_bytes * factor)) for c in b.policies))
        for b in work.blocks
    )
    return replace(
        work, blocks=blocks, values=tuple(replace(v, nbytes=round(v.nbytes * factor)) for v in work.values)
    )


def _lengths(model: Model, question: Question) -> tuple[int | None, int]:
    """The longest sequence that the model knows, if it says so, and the step in which lengths are tried."""
    return reach(model.module), 1024 if question.seq >= 1024 else 64


def largest(study: Study, question: Question) -> Largest:
    """By bisection on the least device bytes; every candidate is captured, so it takes a while."""
    limit, step = _lengths(study.model, question)

    def excess(asked: Question) -> int:
        return study.least(asked)[0].device_bytes - question.hbm_budget

    batch = _most(lambda n: excess(replace(question, batch=n)), question.batch, 1 << 14)
    most = limit // step if limit else 1 << 14
    seq = _most(lambda n: excess(replace(question, seq=n * step)), max(question.seq // step, 1), most)
    return Largest(batch, seq * step, step, limit)


def _most(excess: Callable[[int], int], start: int, top: int) -> int:
    """The largest n in [0, top] with excess(n) <= 0, which grows about linearly; few evaluations."""
    known: dict[int, int] = {}
    low, high, n = 0, top + 1, min(start, top)
    while high - low > 1:
        known[n] = excess(n)
        low, high = (n, high) if known[n] <= 0 else (low, n)
        n = _guess(known, low, high)
    return low


def _guess(known: dict[int, int], low: int, high: int) -> int:
    """Return where the line through the last two points crosses zero, inside (low, high)."""
    if len(known) < 2:
        ((n, value),) = known.items()
        return max(low + 1, min(high - 1, 2 * n if value <= 0 else n // 2))
    (a, fa), (b, fb) = list(known.items())[-2:]
    guess = a - fa * (b - a) / (fb - fa) if fb != fa else 2 * b
    if low in known and guess < low + 1 and len(known) > 3:
        return low + 1
    return max(low + 1, min(high - 1, round(guess)))
