"""Alternatives to what ``megacompile plan`` was asked: sweeps along an axis, meshes, ways to cut a batch into
micro-batches, the largest batch or length that fits, and remedies where a step does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from megacompile.capture.padding import reach
from megacompile.cli.estimator import Answer, Prediction, Question, Study, least_host, map_calls
from megacompile.cli.models import Model
from megacompile.hardware.catalog import PROFILES, MachineProfile
from megacompile.planner.min_feasible_budget import least_alike
from megacompile.planner.plan_program import plan_program
from megacompile.planner.tiling import TilingCandidate
from megacompile.schedule.workload import Call, Workload
from megacompile.state.host_budget import host_bytes
from megacompile.state.moment_formats import Form, StateFormat
from megacompile.state.torch_optimizer import Foreign
from megacompile.units import format_bytes

# ------------------------------------------------------------------------------------------------------------
# Series of answers from one study: along an axis, or over the ways to cut a batch into micro-batches.


_ANY = 1 << 60  # bytes: no machine, and no drive, has more
_NUMBERS = {"batch": 6, "seq": 6, "gpus": 4}  # how many are usual, each twice the one before
_PATIENCE = 2  # slower splits in a row after which smaller ones are not tried

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

    Of several machines the faster mesh counts, as ``clip`` says.
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
        asked = replace(question, profile=value, hbm_budget=value.device_bytes or _ANY)
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
    high = max(low, min(question.profile.device_bytes or _ANY, max(question.hbm_budget, 2 * low)))
    return [low + (high - low) * i // 6 for i in range(7)]


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
    return study.answer(best.question, known=best), tuple(_tried(a, clip) for a in answers)


def _tried(answer: Answer, clip: bool) -> Mesh:
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


# ------------------------------------------------------------------------------------------------------------
# The largest batch and the longest sequences that fit the device: about, or exactly.


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
        there = least_alike(enlarged(answer.work, grown), q.mode(True))
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


# ------------------------------------------------------------------------------------------------------------
# Ways out, where a step does not fit: what to change, what that saves, and how fast the step then is.
#
# Each is a further answer from one :class:`~megacompile.cli.estimator.Study`. What a change saves is taken
# from the least bytes before and after it: another plan fits where the one of other terms does not.


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


@dataclass(frozen=True)
class Fit:
    """The question with changes that together make the step fit the same machine, and how fast it then is."""

    question: Question
    clip: bool
    tokens_per_second: float


def ways_out(study: Study, answer: Answer, clip: bool) -> tuple[tuple[WayOut, ...], tuple[Fit, ...]]:
    """List what to change so that the step fits, each by itself, the fastest first among those that are
    enough; and the least changes that make it fit the same machine, one or two, the fastest first."""
    study.progress("looking for what would fit")
    q = answer.question
    on_device = [] if answer.fits_device() else list(_for_device(study, answer))
    bases = [q] if answer.fits_device() else [
        asked for way, asked in on_device if way.enough and asked and asked.profile == q.profile
    ]  # fmt: skip
    if answer.fits_device() and q.micro_batches > 1:
        bases.append(replace(q, micro_batches=1))
    fits = next(filter(None, (_least_changes(study, base, clip) for base in bases)), ())
    ways: list[WayOut] = []
    for way, asked in on_device:
        if way.enough and asked is not None:
            way = replace(way, tokens_per_second=_speed(fits, asked, clip))
            if way.tokens_per_second is None:
                planned = study.answer(asked, both=False, clip=clip).prediction(clip)
                way = replace(way, tokens_per_second=planned.tokens_per_second if planned else None)
        ways.append(way)
    if not answer.fits_host(clip):
        ways += _for_host(answer, clip, fits)
    return tuple(sorted(ways, key=lambda w: (not w.enough, -(w.tokens_per_second or 0), -w.saves))), fits


def _least_changes(study: Study, question: Question, clip: bool) -> tuple[Fit, ...]:
    """The least changes of clipping and of the moments' format with which both tiers have room: of formats
    with which they have it, the one that changes training least."""
    _, compiled = study.least(question)
    forms = _formats(question)
    fits: list[Fit] = []
    last = len(forms)
    for clipping in (True, False) if clip else (False,):
        for number in range(last):
            asked = replace(question, optimizer_state=forms[number])
            if not _has_room(least_host(compiled, asked, asked.mode(clipping)).total, asked):
                continue
            answer = study.answer(asked, both=False, clip=clipping)
            planned = answer.prediction(clipping)
            if planned is not None and answer.fits(clipping):
                fits.append(Fit(asked, clipping, planned.tokens_per_second))
                last = number
                break
    return tuple(sorted(fits, key=lambda fit: -fit.tokens_per_second))


def _formats(question: Question) -> tuple[Form, ...]:
    """The format of the state that was asked for, and those of Adam's moments that take less."""
    asked, known = question.optimizer_state, get_args(StateFormat)
    return (asked,) if isinstance(asked, Foreign) else known[known.index(asked) :]


def _speed(fits: Sequence[Fit], question: Question, clip: bool) -> float | None:
    return next((f.tokens_per_second for f in fits if (f.question, f.clip) == (question, clip)), None)


def _has_room(nbytes: int, question: Question) -> bool:
    return question.host_budget is None or nbytes <= question.host_budget


def _for_device(study: Study, answer: Answer) -> Iterator[tuple[WayOut, Question | None]]:
    q, need = answer.question, answer.least.device_bytes

    def way(change: str, nbytes: int, note: str) -> WayOut:
        return WayOut(change, need - nbytes, nbytes <= q.hbm_budget, note)

    linked = {n: p for n, p in PROFILES.items() if q.ranks == 1 or p.machine.fabric_bandwidth}
    sizes = {name: p.device_bytes or 0 for name, p in linked.items()}
    large = min((n for n in sizes if sizes[n] >= need), key=lambda n: sizes[n], default=None)
    if need <= (q.profile.device_bytes or 0):
        enough = -(-need // 10**8) * 10**8
        more = way(f"--hbm-budget {size_text(need)}", q.hbm_budget, "the card has it")
        yield more, replace(q, hbm_budget=enough)
    elif large is not None:
        other = way(f"--machine {large}", q.hbm_budget, f"{sizes[large] / 1e9:g} GB")
        yield other, replace(q, profile=PROFILES[large], hbm_budget=sizes[large])
    if q.batch > 1:
        batch, nbytes = _just_fitting(study, answer, q.batch, lambda n: replace(q, batch=n))
        count = -(-q.batch * q.micro_batches // batch)
        note = "about the same tokens per step, weights travel more often"
        smaller = way(f"--batch {batch} --micro-batches {count}", nbytes, note)
        yield smaller, replace(q, batch=batch, micro_batches=count)
    longest = answer.too_long() or q.seq
    unit = 1024 if longest >= 2048 else 64
    if longest >= 2 * unit:
        most = longest // unit
        seq, nbytes = _just_fitting(study, answer, q.seq // unit, lambda n: replace(q, seq=n * unit), most)
        yield way(f"--seq {seq * unit}", nbytes, "shorter context"), replace(q, seq=seq * unit)
    if q.dtype == "fp32":  # another capture: the question must be asked anew
        yield way("--dtype bf16", need // 2, "about half; FP32 masters stay"), None


def _just_fitting(
    study: Study, answer: Answer, high: int, ask: Callable[[int], Question], most: int | None = None
) -> tuple[int, int]:
    """The number in [1, high), ``most`` at most, that should just fit, bytes being linear in it, and its true
    bytes."""
    q, high_bytes = answer.question, answer.least.device_bytes
    low_bytes = least_alike(enlarged(answer.work, 1 / high), q.mode(True))
    if low_bytes <= q.hbm_budget and high_bytes > low_bytes:
        n = 1 + (q.hbm_budget - low_bytes) * (high - 1) // (high_bytes - low_bytes)
        n = min(n, n if most is None else most)
        for candidate in (n, n - 1):
            if 1 < candidate < high:
                nbytes = study.least(ask(candidate))[0].device_bytes
                if nbytes <= q.hbm_budget:
                    return candidate, nbytes
    return 1, study.least(ask(1))[0].device_bytes


def _for_host(answer: Answer, clip: bool, fits: Sequence[Fit]) -> Iterator[WayOut]:
    q, host, here = answer.question, answer.host(clip), answer.prediction(clip)
    least = answer.least_host(clip)
    assert q.host_budget is not None

    def way(change: str, asked: Question, clipping: bool, note: str) -> WayOut:
        nbytes = least_host(answer.compiled, asked, asked.mode(clipping)).total
        speed = _speed(fits, asked, clipping)
        return WayOut(change, least - nbytes, _has_room(nbytes, q), note, speed)

    speed = here.tokens_per_second if here else None
    more, note = f"--host-budget {size_text(host.total)}", "more memory, as much as the plan below takes"
    if here is not None and least < host.total:
        note += f"; from {size_text(least)} on a slower one fits"
    yield WayOut(more, host.total - q.host_budget, True, note, speed)
    if clip and q.micro_batches == 1:
        yield way("--no-clip", q, False, "gradients are not kept")
    if here is not None:
        yield from _to_drive(here)
    for form in _formats(q)[1:]:
        note = "moments in blocks of codes; training differs a little"
        yield way(f"--optimizer-state {form}", replace(q, optimizer_state=form), clip, note)
    waiting = answer.least.hosts[clip].offloaded
    if waiting and here is not None:
        change, note = "a smaller batch or shorter sequences", "no activations wait on the host"
        yield WayOut(change, waiting, _has_room(least - waiting, q), note)


def _to_drive(here: Prediction) -> Iterator[WayOut]:
    q = replace(here.question, nvme_budget=_ANY)
    compiled, planned = plan_program([TilingCandidate(0, lambda: here.compiled)], here.mode, q.terms)
    if any(group.state in ("nvme", "nvme-all") for group in planned.plan.groups):
        host = host_bytes(compiled.assembly, q.optimizer_state, planned.plan, planned.step).of_ranks(q.gpus)
        saves = here.least_host - least_host(compiled, q, here.mode).total
        yield WayOut(f"--nvme-budget {size_text(host.nvme)}", saves, _has_room(host.total, q),
                     "state on a drive", q.tokens / planned.seconds)  # fmt: skip


def size_text(nbytes: int) -> str:
    """The bytes as an option takes them, rounded up."""
    return f"{-(-nbytes // 10**8) / 10:g}GB"
