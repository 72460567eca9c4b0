"""Around one answer: ways out when it does not fit, the largest that fits, and sweeps.

Each is a series of answers from one :class:`~megacompile.cli_plan.Study`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megacompile.cli_plan import Answer, Question, Study, find_least
from megacompile.errors import MegacompileError
from megacompile.machines import PROFILES
from megacompile.units import format_bytes, parse_bytes

SWEEPS = ("hbm-budget", "batch", "seq", "machine")
_ANY = 1 << 60  # no machine has more


@dataclass(frozen=True)
class WayOut:
    """A change, the bytes it saves on the tier that is short, and whether it is enough by itself."""

    change: str
    saves: int
    enough: bool
    cost: str = ""


def ways_out(study: Study, answer: Answer, clip: bool) -> list[WayOut]:
    """What to change so that the step fits, most bytes saved first among those that are enough."""
    ways: list[WayOut] = []
    if not answer.fits_device():
        ways += _for_device(study, answer)
    if not answer.fits_host(clip):
        ways += _for_host(answer, clip)
    return sorted(ways, key=lambda w: (not w.enough, -w.saves))


def _for_device(study: Study, answer: Answer) -> Iterator[WayOut]:
    q, need = answer.question, answer.least.device_bytes
    if need <= (q.profile.device_bytes or 0):
        yield WayOut(f"--hbm-budget {_round_up(need)}", need - q.hbm_budget, True, "the card has it")
    else:
        sizes = {name: p.device_bytes or 0 for name, p in PROFILES.items()}
        large = min((n for n in sizes if sizes[n] >= need), key=lambda n: sizes[n], default=None)
        if large is not None:
            yield WayOut(f"--machine {large}", need - q.hbm_budget, True, f"{sizes[large] / 1e9:g} GB")
    if q.batch > 1:
        batch, size = _fitting(lambda n: _least(study, replace(q, batch=n)), 1, q.batch, need, q.hbm_budget)
        count = -(-q.batch * q.micro_batches // batch)
        yield WayOut(f"--batch {batch} --micro-batches {count}", need - size, size <= q.hbm_budget,
                     "same tokens per step, weights travel more often")  # fmt: skip
    unit = 1024 if q.seq >= 2048 else 64
    if q.seq >= 2 * unit:
        seq, size = _fitting(
            lambda n: _least(study, replace(q, seq=n * unit)), 1, q.seq // unit, need, q.hbm_budget
        )
        yield WayOut(f"--seq {seq * unit}", need - size, size <= q.hbm_budget, "shorter context")
    if q.dtype == "fp32":
        yield WayOut("--dtype bf16", need // 2, need // 2 <= q.hbm_budget, "about half; FP32 masters stay")


def _least(study: Study, question: Question) -> int:
    compiled, work, _ = study.captured(question.batch, question.seq)
    return find_least(compiled, work, question.micro_batches).device_bytes


def _fitting(
    least: Callable[[int], int], low: int, high: int, high_bytes: int, budget: int
) -> tuple[int, int]:
    """The n in [low, high) that should just fit, bytes being linear in n, and its true bytes."""
    low_bytes = least(low)
    if low_bytes > budget or high_bytes <= low_bytes:
        return low, low_bytes
    n = low + (budget - low_bytes) * (high - low) // (high_bytes - low_bytes)
    for candidate in (n, n - 1):
        if low < candidate < high:
            size = least(candidate)
            if size <= budget:
                return candidate, size
    return low, low_bytes


def _for_host(answer: Answer, clip: bool) -> Iterator[WayOut]:
    q, need = answer.question, answer.host_need(clip)
    assert q.host_budget is not None
    yield WayOut(f"--host-budget {_round_up(need)}", need - q.host_budget, True, "a machine with more memory")
    if clip and q.micro_batches == 1:
        less = answer.host_need(False)
        if less < need:
            yield WayOut("--no-clip", need - less, less <= q.host_budget, "gradients are not kept")
    planned = answer.prediction(clip)
    if planned is not None and planned.host.stash:
        stash = planned.host.stash
        yield WayOut("a smaller batch or shorter sequences", stash, need - stash <= q.host_budget,
                     "no activations wait on the host")  # fmt: skip


def _round_up(nbytes: int) -> str:
    return f"{-(-nbytes // 10**8) / 10:g}GB"


@dataclass(frozen=True)
class Largest:
    """The largest batch at the asked length and the longest sequence at the asked batch; 0: none."""

    batch: int
    seq: int
    seq_step: int
    seq_limit: int | None


def largest(study: Study, question: Question) -> Largest:
    """By bisection on the least device bytes; every candidate is captured, so it takes a while."""
    config = study.model.config
    limit = getattr(config, "max_position_embeddings", None)
    step = 1024 if question.seq >= 1024 else 64

    def excess(**change: int) -> int:
        return _least(study, replace(question, **change)) - question.hbm_budget  # type: ignore[arg-type]

    batch = _most(lambda n: excess(batch=n), question.batch, 1 << 14)
    most = limit // step if isinstance(limit, int) else 1 << 14
    seq = _most(lambda n: excess(seq=n * step), max(question.seq // step, 1), most)
    return Largest(batch, seq * step, step, limit if isinstance(limit, int) else None)


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
    """Where the line through the last two points crosses zero, inside (low, high)."""
    if len(known) < 2:
        ((n, value),) = known.items()
        return max(low + 1, min(high - 1, 2 * n if value <= 0 else n // 2))
    (a, fa), (b, fb) = list(known.items())[-2:]
    guess = a - fa * (b - a) / (fb - fa) if fb != fa else 2 * b
    if low in known and guess < low + 1 and len(known) > 3:
        return low + 1
    return max(low + 1, min(high - 1, round(guess)))


@dataclass(frozen=True)
class Point:
    """One row of a sweep; ``answer`` is None where the question has no answer, as ``note`` says."""

    label: str
    value: float
    answer: Answer


def sweep(study: Study, question: Question, over: str, values: Sequence[str]) -> Iterator[Point]:
    """Answers along one axis, as they come."""
    if over == "hbm-budget":
        yield from _sweep_budget(study, question, values)
    elif over == "machine":
        names = values or list(PROFILES)
        for index, name in enumerate(names):
            profile = PROFILES.get(name)
            if profile is None or profile.device_bytes is None:
                raise MegacompileError(f"--values: {name!r} is no built-in machine.")
            asked = replace(question, profile=profile, hbm_budget=profile.device_bytes)
            yield Point(name, float(index), study.answer(asked))
    else:
        start = {"batch": 1, "seq": 1024}[over]
        numbers = [_count(v, over) for v in values] or [start << i for i in range(6)]
        for number in numbers:
            asked = replace(question, **{over: number})  # type: ignore[arg-type]
            answer = study.answer(asked)
            yield Point(str(number), float(number), answer)
            if not values and not answer.fits_device():
                return


def _sweep_budget(study: Study, question: Question, values: Sequence[str]) -> Iterator[Point]:
    budgets = [parse_bytes(_number(v), what="--values", available=_ANY) for v in values]
    if not budgets:
        low = _least(study, question)
        card = question.profile.device_bytes or _ANY
        high = max(low, min(card, max(question.hbm_budget, 2 * low)))
        budgets = [low + (high - low) * i // 6 for i in range(7)]
    for budget in budgets:
        answer = study.answer(replace(question, hbm_budget=budget))
        yield Point(format_bytes(budget), budget / 1e9, answer)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _count(text: str, what: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise MegacompileError(f"--values: {text!r} is no {what}; give whole numbers, as 1,2,4.")
    return int(text)
