"""Around one answer: ways out when it does not fit, the largest that fits, and sweeps.

Each is a series of answers from one :class:`~megacompile.cli.plan.Study`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megacompile.cli.plan import Answer, Prediction, Question, Study, drive_for, find_least
from megacompile.errors import MegacompileError
from megacompile.host.formats import CODINGS, state_bytes
from megacompile.host.needs import host_bytes
from megacompile.machine.catalog import PROFILES
from megacompile.plan.workload import Call, Choice, Workload
from megacompile.search.planner import search
from megacompile.units import format_bytes, parse_bytes

SWEEPS = ("hbm-budget", "batch", "seq", "machine")
_ANY = 1 << 60  # no machine has more


@dataclass(frozen=True)
class WayOut:
    """A change, the bytes it saves on the tier that is short, and whether it is enough by itself.

    ``tokens_per_second`` is predicted where the change is enough, as the price of the way.
    """

    change: str
    saves: int
    enough: bool
    note: str = ""
    tokens_per_second: float | None = None


def ways_out(study: Study, answer: Answer, clip: bool) -> list[WayOut]:
    """What to change so that the step fits, the fastest first among those that are enough."""
    ways: list[WayOut] = []
    if not answer.fits_device():
        for way, question in _for_device(study, answer):
            if way.enough and question is not None:
                found = study.answer(question, both=False, clip=clip).prediction(clip)
                way = replace(way, tokens_per_second=found.tokens_per_second if found else None)
            ways.append(way)
    if not answer.fits_host(clip):
        ways += _for_host(answer, clip)
    return sorted(ways, key=lambda w: (not w.enough, -(w.tokens_per_second or 0), -w.saves))


def _for_device(study: Study, answer: Answer) -> Iterator[tuple[WayOut, Question | None]]:
    q, need = answer.question, answer.least.device_bytes
    if need <= (q.profile.device_bytes or 0):
        way = WayOut(f"--hbm-budget {_round_up(need)}", need - q.hbm_budget, True, "the card has it")
        yield way, replace(q, hbm_budget=-(-need // 10**8) * 10**8)
    else:
        sizes = {name: p.device_bytes or 0 for name, p in PROFILES.items()}
        large = min((n for n in sizes if sizes[n] >= need), key=lambda n: sizes[n], default=None)
        if large is not None:
            way = WayOut(f"--machine {large}", need - q.hbm_budget, True, f"{sizes[large] / 1e9:g} GB")
            yield way, replace(q, profile=PROFILES[large], hbm_budget=sizes[large])
    if q.batch > 1:
        batch, size = _fitting(lambda n: _least(study, replace(q, batch=n)), 1, q.batch, need, q.hbm_budget)
        count = -(-q.batch * q.micro_batches // batch)
        way = WayOut(f"--batch {batch} --micro-batches {count}", need - size, size <= q.hbm_budget,
                     "about the same tokens per step, weights travel more often")  # fmt: skip
        yield way, replace(q, batch=batch, micro_batches=count)
    unit = 1024 if q.seq >= 2048 else 64
    if q.seq >= 2 * unit:
        seq, size = _fitting(
            lambda n: _least(study, replace(q, seq=n * unit)), 1, q.seq // unit, need, q.hbm_budget
        )
        way = WayOut(f"--seq {seq * unit}", need - size, size <= q.hbm_budget, "shorter context")
        yield way, replace(q, seq=seq * unit)
    if q.dtype == "fp32":
        half = WayOut("--dtype bf16", need // 2, need // 2 <= q.hbm_budget, "about half; FP32 masters stay")
        yield half, None  # another capture: the question must be asked anew


def _least(study: Study, question: Question) -> int:
    return study.least(question)[0].device_bytes


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
    here, other = answer.prediction(clip), answer.streamed
    yield WayOut(
        f"--host-budget {_round_up(need)}", need - q.host_budget, True, "a machine with more memory",
        here.tokens_per_second if here else None,
    )  # fmt: skip
    if clip and q.micro_batches == 1:
        less = answer.host_need(False)
        if less < need:
            speed = other.tokens_per_second if other else None
            yield WayOut("--no-clip", need - less, less <= q.host_budget, "gradients are not kept", speed)
    if here is not None:
        yield from _to_drive(answer, here)
    groups = answer.compiled.assembly.groups
    for form in CODINGS:
        saved = sum(state_bytes(groups, "fp32").values()) - sum(state_bytes(groups, form).values())
        yield WayOut(f'optimizer_state="{form}" on compile', saved, need - saved <= q.host_budget,
                     "moments in blocks of codes; training differs a little")  # fmt: skip
    planned = answer.prediction(clip)
    if planned is not None and planned.host.stash:
        stash = planned.host.stash
        yield WayOut("a smaller batch or shorter sequences", stash, need - stash <= q.host_budget,
                     "no activations wait on the host")  # fmt: skip


def _to_drive(answer: Answer, here: Prediction) -> Iterator[WayOut]:
    asked = replace(answer.question, nvme_budget=_ANY)
    compiled, q = here.compiled, answer.question
    drive = drive_for(compiled, asked)
    found = search(compiled.assembly.work, here.mode, q.machine, q.hbm_budget, drive=drive)
    if any(group.state in ("nvme", "nvme-all") for group in found.plan.groups):
        host = host_bytes(compiled.assembly, "fp32", found.plan, found.step)
        enough = host.total <= (q.host_budget or 0)
        yield WayOut(f"--nvme-budget {_round_up(host.nvme)}", here.host.total - host.total, enough,
                     "state on a drive", asked.tokens / found.seconds)  # fmt: skip


def _round_up(nbytes: int) -> str:
    return f"{-(-nbytes // 10**8) / 10:g}GB"


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
    """About the largest that fits, at no further capture: two points of bytes over tokens, and a line."""
    q = answer.question
    twice = find_least(answer.compiled, enlarged(answer.work, 2), q.micro_batches).device_bytes
    here = answer.least.device_bytes
    grown = max(0.0, 1 + (q.hbm_budget - here) / max(1, twice - here))
    limit = getattr(answer.model.config, "max_position_embeddings", None)
    limit, step = (limit if isinstance(limit, int) else None), (1024 if q.seq >= 1024 else 64)
    seq = int(q.seq * grown) // step * step
    return Largest(int(q.batch * grown), min(seq, limit or seq), step, limit, exact=False)


def enlarged(work: Workload, factor: int) -> Workload:
    """The workload with ``factor`` times the tokens; weights and their gradients stay as they are."""

    def call(given: Call | None, fixed: int) -> Call | None:
        return given and replace(
            given,
            peak_bytes=fixed + (given.peak_bytes - fixed) * factor,
            end_bytes=fixed + (given.end_bytes - fixed) * factor,
        )

    def choice(given: Choice, weights: int) -> Choice:
        return replace(
            given,
            forward=call(given.forward, 0) or given.forward,
            recompute=call(given.recompute, 0),
            backward=call(given.backward, weights),
            saved_bytes=given.saved_bytes * factor,
        )

    blocks = tuple(
        replace(b, choices=tuple(choice(c, sum(n for _, n in b.grad_groups)) for c in b.choices))
        for b in work.blocks
    )
    values = tuple(replace(v, nbytes=v.nbytes * factor) for v in work.values)
    return replace(work, blocks=blocks, values=values)


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
        low = _least(study, replace(question, hbm_budget=0))
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
