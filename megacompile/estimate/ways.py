"""Ways out, where a step does not fit: what to change, what that saves, and how fast the step then is.

Each is a further answer from one :class:`~megacompile.estimate.study.Study`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megacompile.estimate.answer import Answer, Prediction, Question
from megacompile.estimate.largest import enlarged
from megacompile.estimate.study import Study
from megacompile.host.formats import CODINGS, state_bytes
from megacompile.host.needs import host_bytes
from megacompile.machine.catalog import PROFILES
from megacompile.plan.least import least_alike
from megacompile.plan.plan_program import plan_program
from megacompile.plan.tiling import TilingCandidate

_ANY = 1 << 60  # no drive has more


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
        study.progress("looking for what would fit")
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

    def way(change: str, nbytes: int, note: str) -> WayOut:
        return WayOut(change, need - nbytes, nbytes <= q.hbm_budget, note)

    linked = {n: p for n, p in PROFILES.items() if q.ranks == 1 or p.machine.fabric_bandwidth}
    sizes = {name: p.device_bytes or 0 for name, p in linked.items()}
    large = min((n for n in sizes if sizes[n] >= need), key=lambda n: sizes[n], default=None)
    if need <= (q.profile.device_bytes or 0):
        enough = -(-need // 10**8) * 10**8
        more = way(f"--hbm-budget {_round_up(need)}", q.hbm_budget, "the card has it")
        yield more, replace(q, hbm_budget=enough)
    elif large is not None:
        other = way(f"--machine {large}", q.hbm_budget, f"{sizes[large] / 1e9:g} GB")
        yield other, replace(q, profile=PROFILES[large], hbm_budget=sizes[large])
    if q.batch > 1:
        batch, nbytes = _fitting(study, answer, q.batch, lambda n: replace(q, batch=n))
        count = -(-q.batch * q.micro_batches // batch)
        note = "about the same tokens per step, weights travel more often"
        smaller = way(f"--batch {batch} --micro-batches {count}", nbytes, note)
        yield smaller, replace(q, batch=batch, micro_batches=count)
    unit = 1024 if q.seq >= 2048 else 64
    if q.seq >= 2 * unit:
        seq, nbytes = _fitting(study, answer, q.seq // unit, lambda n: replace(q, seq=n * unit))
        yield way(f"--seq {seq * unit}", nbytes, "shorter context"), replace(q, seq=seq * unit)
    if q.dtype == "fp32":  # another capture: the question must be asked anew
        yield way("--dtype bf16", need // 2, "about half; FP32 masters stay"), None


def _fitting(study: Study, answer: Answer, high: int, ask: Callable[[int], Question]) -> tuple[int, int]:
    """The number in [1, high) that should just fit, bytes being linear in it, and its true bytes."""
    q, high_bytes = answer.question, answer.least.device_bytes
    low_bytes = least_alike(enlarged(answer.work, 1 / high), q.mode(True))
    if low_bytes <= q.hbm_budget and high_bytes > low_bytes:
        n = 1 + (q.hbm_budget - low_bytes) * (high - 1) // (high_bytes - low_bytes)
        for candidate in (n, n - 1):
            if 1 < candidate < high:
                nbytes = study.least(ask(candidate))[0].device_bytes
                if nbytes <= q.hbm_budget:
                    return candidate, nbytes
    return 1, study.least(ask(1))[0].device_bytes


def _for_host(answer: Answer, clip: bool) -> Iterator[WayOut]:
    q, host, here = answer.question, answer.host(clip), answer.prediction(clip)
    assert q.host_budget is not None

    def way(change: str, saves: int, note: str, planned: Prediction | None = None) -> WayOut:
        speed = planned.tokens_per_second if planned else None
        return WayOut(change, saves, host.total - saves <= (q.host_budget or 0), note, speed)

    more = f"--host-budget {_round_up(host.total)}"
    yield way(more, host.total - q.host_budget, "a machine with more memory", here)
    saved = host.total - answer.host(False).total
    if clip and q.micro_batches == 1 and saved > 0:
        yield way("--no-clip", saved, "gradients are not kept", answer.prediction(False))
    if here is not None:
        yield from _to_drive(here)
    groups = answer.compiled.assembly.groups
    for form in CODINGS if q.ranks == 1 else ():
        saved = sum(state_bytes(groups, "fp32").values()) - sum(state_bytes(groups, form).values())
        note = "moments in blocks of codes; training differs a little"
        yield way(f'optimizer_state="{form}" on compile', saved, note)
    if host.offloaded and here is not None:
        yield way("a smaller batch or shorter sequences", host.offloaded, "no activations wait on the host")


def _to_drive(here: Prediction) -> Iterator[WayOut]:
    q = replace(here.question, nvme_budget=_ANY)
    compiled, found = plan_program([TilingCandidate(0, lambda: here.compiled)], here.mode, q.terms)
    if any(group.state in ("nvme", "nvme-all") for group in found.plan.groups):
        host = host_bytes(compiled.assembly, "fp32", found.plan, found.step).of_ranks(q.gpus)
        enough = host.total <= (q.host_budget or 0)
        yield WayOut(f"--nvme-budget {_round_up(host.nvme)}", here.host.total - host.total, enough,
                     "state on a drive", q.tokens / found.seconds)  # fmt: skip


def _round_up(nbytes: int) -> str:
    return f"{-(-nbytes // 10**8) / 10:g}GB"
