"""Ways out, where a step does not fit: what to change, what that saves, and how fast the step then is.

Each is a further answer from one :class:`~megacompile.cli.estimator.Study`. What a change saves is taken
from the least bytes before and after it: another plan fits where the one of other terms does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megacompile.cli.check_plan_arguments import ANY_BYTES
from megacompile.cli.estimator import Study
from megacompile.cli.largest_batch import enlarged
from megacompile.cli.plan_answer import Answer, Prediction, Question, least_host
from megacompile.hardware.catalog import PROFILES
from megacompile.planner.min_feasible_budget import least
from megacompile.planner.plan_program import plan_program
from megacompile.planner.tiling import TilingCandidate
from megacompile.planner.too_small import fitting
from megacompile.state.host_budget import host_bytes
from megacompile.state.moment_formats import smaller_formats


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
    """List single changes to fit the step, the fastest first among those that are enough; and the one or two
    least changes to fit it on the same machine, the fastest first."""
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
            way = replace(way, tokens_per_second=_speed_of_fit(fits, asked, clip))
            if way.tokens_per_second is None:
                planned = study.answer(asked, both=False, clip=clip).prediction(clip)
                way = replace(way, tokens_per_second=planned.tokens_per_second if planned else None)
        ways.append(way)
    if not answer.fits_host(clip):
        ways += _for_host(answer, clip, fits)
    return tuple(sorted(ways, key=lambda w: (not w.enough, -(w.tokens_per_second or 0), -w.saves))), fits


def _least_changes(study: Study, question: Question, clip: bool) -> tuple[Fit, ...]:
    """Return the least changes of clipping and of the moments' format with which both tiers have room, by the
    format that changes training least."""
    _, compiled = study.least(question)
    forms = (question.optimizer_state, *smaller_formats(question.optimizer_state))
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


def _speed_of_fit(fits: Sequence[Fit], question: Question, clip: bool) -> float | None:
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
    low_bytes = least(enlarged(answer.work, 1 / high), q.mode(True)).nbytes
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
        speed = _speed_of_fit(fits, asked, clipping)
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
    for form in smaller_formats(q.optimizer_state):
        note = "moments in blocks of codes; training differs a little"
        yield way(f"--optimizer-state {form}", replace(q, optimizer_state=form), clip, note)
    waiting = answer.least.hosts[clip].offloaded
    if waiting and here is not None:
        change, note = "a smaller batch or shorter sequences", "no activations wait on the host"
        yield WayOut(change, waiting, _has_room(least - waiting, q), note)


def _to_drive(here: Prediction) -> Iterator[WayOut]:
    q = replace(here.question, nvme_budget=ANY_BYTES)
    compiled, planned = fitting(plan_program([TilingCandidate(0, lambda: here.compiled)], here.mode, q.terms))
    if any(group.state in ("nvme", "nvme-all") for group in planned.plan.groups):
        host = host_bytes(compiled.assembly, q.optimizer_state, planned.plan, planned.step).of_ranks(q.gpus)
        saves = here.least_host - least_host(compiled, q, here.mode).total
        yield WayOut(f"--nvme-budget {size_text(host.nvme)}", saves, _has_room(host.total, q),
                     "state on a drive", q.tokens / planned.seconds)  # fmt: skip


def size_text(nbytes: int) -> str:
    """The bytes as an option takes them, rounded up."""
    return f"{-(-nbytes // 10**8) / 10:g}GB"
