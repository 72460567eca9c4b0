"""Choose how far to cut weights: untiled where that fits and is not slower, else pieces small enough for the
budget.

In: what can be cut, or one kind of batch at ever smaller pieces. Out: the cuts to try, or the choice.
The cuts that are tried depend on the model alone, so that a larger budget never needs smaller pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from megacompile.blocks.weight_groups import Assembly
from megacompile.graph.tile_cuts import LEAST_PIECE, Cuts, Family, choose_cuts
from megacompile.planner.lowest_bytes import activations_bytes, lowest_bytes
from megacompile.planner.min_feasible_budget import least
from megacompile.planner.plan_evaluator import Planned
from megacompile.planner.too_small import TooSmall
from megacompile.schedule.plan import Mode

_WORSE = 2  # tilings in a row that need no less than one before: finer ones are not tried
_GAIN = 0.98  # finer cuts must be faster by this
_ROOM = 50  # the part of the budget that they must leave free for that


class _Cut(Protocol):
    """A kind of batch with weights cut in one way."""

    @property
    def assembly(self) -> Assembly: ...


Tiling = TypeVar("Tiling", bound=_Cut)


@dataclass(frozen=True)
class TilingCandidate(Generic[Tiling]):
    """A tiling that need not be built where its step holds too much: it needs at least ``floor_bytes``."""

    floor_bytes: int
    build: Callable[[], Tiling]


def tiling_candidates(found: Sequence[Family], tables: Cuts | None = None) -> Iterator[Cuts]:
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


def tried(
    candidates: Iterable[TilingCandidate[Tiling]],
    mode: Mode,
    budget_bytes: int,
    *,
    enough: int,
    most: int = sys.maxsize,
) -> Iterator[tuple[Tiling, int]]:
    """Each tiling with the least device bytes of its step, or with some that are no more than ``enough``, or
    are over the budget and no less than what one before needs, until two in a row need no less than that.

    Finer pieces need less for weights, but more for what waits between the blocks that they make. None are
    tried where activations alone take more than ``most`` bytes, and those that hold more than the budget and
    than one before needs are not built.
    """
    tightest, worse = sys.maxsize, 0
    for candidate in candidates:
        need = candidate.floor_bytes
        if need <= budget_bytes or need < tightest:
            tiling = candidate.build()
            need = lowest_bytes(tiling.assembly.work, mode)
            if need <= budget_bytes or need < tightest:
                need = least(tiling.assembly.work, mode, enough).nbytes
            yield tiling, need
            if activations_bytes(tiling.assembly.work, mode) > most:
                return
        worse = worse + 1 if tightest <= need else 0
        tightest = min(tightest, need)
        if worse == _WORSE:
            return


def choose(
    candidates: Iterable[TilingCandidate[Tiling]],
    mode: Mode,
    budget_bytes: int,
    plan: Callable[[Tiling], Planned | TooSmall],
    *,
    gathers: bool = False,
    resides: bool = False,
    most: int = sys.maxsize,
    fits_host: Callable[[Tiling, Planned], bool] = lambda tiling, planned: True,
) -> tuple[Tiling, Planned] | TooSmall:
    """Return the faster of the first tiling that fits and its successor, or TooSmall; candidates come
    coarsest first. Tilings without room on the host count only if there is none with room.

    If the first needs no more than half of the budget, it is taken as it is, unless finer cuts might make
    room for state on the device (``resides``). Cuts that leave hardly any more room are hardly faster, and
    not planned. ``gathers`` says that the second tiling gathers rows of tables, whose state then stays with
    the host. It moves fewer bytes, so it is the first, unless all state has room on the device, where tables
    are best. Where other blocks read a table too, as a tied head does, either may be faster, and both are
    planned. Where none fits, what ``plan`` gives for the tiling of the least budget, of the tilings up to one
    whose activations alone take more than ``most`` bytes.
    """
    best: tuple[Tiling, Planned] | None = None
    tightest: tuple[int, Tiling] | None = None
    coarser, best_roomy = 0, False
    needs = tried(candidates, mode, budget_bytes, enough=budget_bytes // 2, most=most)
    for number, (tiling, need) in enumerate(needs):
        whole, rows = gathers and number == 0, gathers and number == 1
        if tightest is None or need < tightest[0]:
            tightest = need, tiling
        if whole and not (resides and _is_shared(tiling)):
            need = _with_all_state(tiling, mode, need, budget_bytes)
        if need > budget_bytes:
            continue
        if best is not None and not rows and (coarser - need) * _ROOM < budget_bytes:
            return best
        planned = plan(tiling)
        if isinstance(planned, TooSmall):
            return planned
        last = best is not None and not rows  # finer cuts, of which one is planned
        roomy = fits_host(tiling, planned)
        gain = _GAIN if last else 1
        if best is None or (roomy, gain * best[1].seconds) >= (best_roomy, planned.seconds):
            best, best_roomy = (tiling, planned), roomy
        if last:
            return best
        coarser = need
        if 2 * need <= budget_bytes and not (resides and _travels(tiling, planned)):
            return best
    if best is not None:
        return best
    assert tightest is not None
    planned = plan(tightest[1])
    return planned if isinstance(planned, TooSmall) else (tightest[1], planned)


def _travels(tiling: _Cut, planned: Planned) -> bool:
    """Return whether the state of any group that is trained has no place on the device."""
    return any(planned.plan.groups[g].state != "device" for g in tiling.assembly.work.contributions)


def _is_shared(tiling: _Cut) -> bool:
    """Return whether several blocks read a group that is trained, as the head of a tied table does."""
    return any(len(blocks) > 1 for blocks in tiling.assembly.work.contributions.values())


def _with_all_state(tiling: _Cut, mode: Mode, need: int, budget_bytes: int) -> int:
    """Device bytes with all state there, or more than the budget."""
    work = tiling.assembly.work
    state = sum(work.groups[g].nbytes + work.groups[g].state_bytes for g in work.used)
    return state + (need if state > budget_bytes else least(work, mode).nbytes)
