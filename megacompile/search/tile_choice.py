"""How far to cut: untiled where that fits and is not slower, else pieces small enough for the budget.

In: what can be cut, or one kind of batch at ever smaller pieces. Out: the cuts to try, or the choice.
The cuts that are tried depend on the model alone, so that a larger budget never needs smaller pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from megacompile.passes import lower
from megacompile.plan.assemble import Assembly
from megacompile.plan.plan import BlockPlan, GroupPlan, Mode, Plan
from megacompile.plan.workload import Workload
from megacompile.search.candidates import Planned
from megacompile.step.operations import Step, peak_bytes
from megacompile.tile.cuts import LEAST_PIECE, Family, choose_cuts
from megacompile.tile.rewrite import Cuts

_WORSE = 2  # rungs in a row that need no less than one before: finer ones are not tried
_GAIN = 0.98  # finer cuts must be faster by this


class _Rung(Protocol):
    """A kind of batch with weights cut in one way."""

    @property
    def assembly(self) -> Assembly: ...


R = TypeVar("R", bound=_Rung)


def ladder(found: Sequence[Family], tables: Cuts | None = None) -> Iterator[Cuts]:
    """Nothing cut; rows of ``tables`` gathered, if there are any; then, beside that, pieces of a half, a
    quarter, ... of the largest family.
    """
    last: Cuts = {}
    yield last
    if tables:
        last = tables
        yield last
    piece = found[0].nbytes if found else 0
    while piece > LEAST_PIECE:
        piece //= 2
        cuts = {**(tables or {}), **choose_cuts(found, piece)}
        if cuts != last:
            yield cuts
        last = cuts


def tried(rungs: Iterable[R], mode: Mode) -> Iterator[tuple[R, int]]:
    """Each rung with the least device bytes of its step, until two in a row need no less than one before.

    Finer pieces need less for weights, but more for what waits between the blocks that they make.
    """
    tightest, worse = -1, 0
    for rung in rungs:
        need = least_step(rung.assembly.work, mode)[0]
        yield rung, need
        worse = worse + 1 if 0 <= tightest <= need else 0
        tightest = min(tightest, need) if tightest >= 0 else need
        if worse == _WORSE:
            return


def choose(
    rungs: Iterable[R],
    mode: Mode,
    budget_bytes: int,
    plan: Callable[[R], Planned],
    *,
    gathers: bool = False,
    resides: bool = False,
) -> tuple[R, Planned]:
    """The faster of the first rung that fits and the one after it; rungs come coarsest first.

    Where the first needs no more than half of the budget, it is taken as it is, unless finer cuts might leave
    room on the device for more of the state, where that may be (``resides``). ``gathers`` says that the
    second rung gathers rows of tables: it moves fewer bytes, so it is the first, unless all state has room
    on the device, where tables are best. Raises what ``plan`` does for the rung of the least budget where
    none fits.
    """
    best: tuple[R, Planned] | None = None
    tightest: tuple[int, R] | None = None
    for number, (rung, need) in enumerate(tried(rungs, mode)):
        if tightest is None or need < tightest[0]:
            tightest = need, rung
        if gathers and not number:
            need += sum(g.nbytes + g.state_bytes for g in rung.assembly.work.groups)
        if need > budget_bytes:
            continue
        planned = plan(rung)
        if best is not None:
            slower = planned.timeline.step_seconds > _GAIN * best[1].timeline.step_seconds
            return best if slower else (rung, planned)
        best = rung, planned
        if 2 * need <= budget_bytes and not (resides and _travels(rung, planned)):
            return best
    assert tightest is not None
    return best or (tightest[1], plan(tightest[1]))


def _travels(rung: _Rung, planned: Planned) -> bool:
    """Whether the state of any group that is trained has no place on the device."""
    return any(planned.plan.groups[g].state != "device" for g in rung.assembly.work.contributions)


def least_step(work: Workload, mode: Mode) -> tuple[int, Plan, Step]:
    """(device bytes, plan, step): the least that plans with one choice for all blocks need."""
    found = []
    for stash in ("device", "host"):
        for choice in ("none", "some", "least"):
            plan = Plan(
                blocks=(BlockPlan(choice, stash),) * len(work.blocks),
                groups=(GroupPlan("stream", 0),) * len(work.groups),
                grad_lag=0,
            )
            step = lower(work, plan, mode)
            found.append((peak_bytes(step), plan, step))
    return min(found, key=lambda f: f[0])
