"""Plan the programs that a run will need, before its state is allocated: all fit, or one least budget.

In: a :class:`ProgramSet`, the programs that were asked for. Out: the
:class:`~megacompile.api.decisions.Decisions` by which all of them are planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megacompile.api.allocate_state import check_beside, check_state
from megacompile.api.decisions import Decisions, Scheduled
from megacompile.api.device_budget import DeviceRoom
from megacompile.api.pipeline import Compiler
from megacompile.api.rank_agreement import agreed_program
from megacompile.api.settings import Settings
from megacompile.capture.batch import Batch
from megacompile.errors import BudgetError
from megacompile.planner.min_feasible_budget import describe_peak
from megacompile.planner.too_small import TooSmall
from megacompile.runtime.executor import Runtime
from megacompile.schedule.plan import Mode
from megacompile.state.host_budget import host_states, storage_window
from megacompile.state.nvme_offload import host_state_bytes, place_groups
from megacompile.units import format_bytes

_ROUNDS = 32  # within a larger room, or with other cuts


class PlannedError(Exception):
    """A forward was planned, and is not to run: it leaves the code that called it, such as a trainer's."""


@dataclass(frozen=True)
class Member:
    """A program of the set; ``name`` says what it is for."""

    name: str
    batch: Batch
    mode: Mode

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for members that are one program."""
        return self.batch.key, self.mode


Planning = Callable[[Decisions, Member], Decisions | TooSmall]
"""Plans a member beside the programs that there are."""


@dataclass(frozen=True)
class ProgramSet:
    """The programs that were asked for so far, each planned within the room that the ones before it needed.

    ``room`` is that of the user's budget; ``name`` says what the next programs are for. ``lays_out`` is the
    member that lays the state out; None: it is allocated already. ``refused`` are the members that needed a
    larger room, once for each time.
    """

    room: DeviceRoom
    name: str = ""
    members: tuple[Member, ...] = ()
    refused: tuple[Member, ...] = ()
    lays_out: Member | None = None

    @property
    def fits(self) -> bool:
        """Return whether all members so far fit the budget."""
        return not self.refused

    def adding(self, batch: Batch, mode: Mode) -> ProgramSet:
        """Ask for a program, which is planned next."""
        return replace(self, members=(*self.members, Member(self.name, batch, mode)))

    def laid_out(self, decided: Decisions) -> ProgramSet:
        """Plan what comes next for the state as the last member has it."""
        # less room than before where kernels took more
        room = decided.room if self.fits else self.room
        return replace(self, room=room, lays_out=self.members[-1])

    def grown(self, decided: Decisions, small: TooSmall) -> tuple[ProgramSet, Decisions]:
        """Go on within the room that the last member needs."""
        if len(self.refused) == _ROUNDS:
            raise small.error
        refused = (*self.refused, self.members[-1])
        return replace(self, refused=refused), decided.within(_larger(decided.room, small))

    def scheduled(self, decided: Decisions) -> Iterator[tuple[str, Scheduled]]:
        """Yield each program once, with what it is for."""
        once: dict[tuple[object, ...], Member] = {}
        for member in self.members:
            once.setdefault(member.key, member)
        for member in once.values():
            yield member.name, decided.program(member.batch, member.mode)


def settle(
    asked: ProgramSet,
    decided: Decisions,
    compiler: Compiler,
    settings: Settings,
    runtime: Runtime | None,
) -> Decisions:
    """All programs planned within the budget.

    Raises :class:`BudgetError` with the least that suffices for all of them, or where the host has no room.
    """

    def plan(decided: Decisions, member: Member) -> Decisions | TooSmall:
        return agreed_program(compiler, decided, member.batch, member.mode, settings)

    if asked.refused:
        worst = asked.refused[-1]
        if runtime is None and len({member.key for member in asked.members}) > 1:
            # else how far weights are cut was decided, or by this program alone
            decided, worst = _within_least(asked, decided, plan)
        if decided.room.device_bytes > asked.room.device_bytes:
            raise _refusal(asked, decided, worst, compiler)
    _check_host(asked, decided, settings, runtime)
    return decided


def _within_least(asked: ProgramSet, decided: Decisions, plan: Planning) -> tuple[Decisions, Member]:
    """All members planned within the room that suffices for them, and the one that needs it.

    How far weights are cut is decided by the first member that was refused, as for it alone; a member
    that this leaves too little room decides then, each once. After that rooms grow.
    """
    member, worst = asked.refused[0], asked.refused[-1]
    small = TooSmall("No program is planned yet.")
    decided = decided.anew(asked.room)
    decide: set[tuple[object, ...]] = set()
    for _ in range(_ROUNDS):
        before = decided
        if member.key in decide:
            decided = before.anew(_larger(before.room, small), before.cuts)
        else:
            decide.add(member.key)
            alone = _alone(member, before.anew(before.room), plan)
            decided = alone.anew(alone.room, alone.cuts)
        worst = member if decided.room.device_bytes > before.room.device_bytes else worst
        found = _all(asked, decided, plan)
        if isinstance(found, Decisions):
            return found, worst
        member, small = found
    raise small.error


def _alone(member: Member, decided: Decisions, plan: Planning) -> Decisions:
    """A program planned by itself, within the room that it needs, this one at least."""
    for _ in range(_ROUNDS):
        found = plan(decided, member)
        if isinstance(found, Decisions):
            return found
        decided = decided.within(_larger(decided.room, found))
    return decided


def _all(asked: ProgramSet, decided: Decisions, plan: Planning) -> Decisions | tuple[Member, TooSmall]:
    """All members planned, or the first one that has no room, and why."""
    for member in asked.members:
        found = plan(decided, member)
        if isinstance(found, TooSmall):
            return member, found
        decided = found
        if member is asked.lays_out:
            decided = decided.laid_out(decided.program(member.batch, member.mode))
    return decided


def _refusal(asked: ProgramSet, decided: Decisions, worst: Member, compiler: Compiler) -> BudgetError:
    scheduled, least = decided.program(worst.batch, worst.mode), decided.room.device_bytes
    why = describe_peak(scheduled.planned.step, scheduled.compiled.assembly.work)
    ways = [*compiler.ways_out(decided, worst.batch)]
    names = list(dict.fromkeys(member.name for member in asked.members))
    of_all = f", the least that suffices for all of {', '.join(names)}" if len(names) > 1 else ""
    return BudgetError(
        f"hbm_budget={format_bytes(asked.room.device_bytes)} is too small: {worst.name} needs {least} "
        f"bytes ({format_bytes(least)}){of_all}; {why}. "
        + " ".join([*ways, "Raise the budget, or make the batch or the sequences smaller."]),
        least_bytes=least,
    )


def _check_host(asked: ProgramSet, decided: Decisions, settings: Settings, runtime: Runtime | None) -> None:
    """Refuse what the host has no room for: the state, and what programs keep beside it."""
    form, budget = settings.optimizer_state, settings.host_budget_bytes
    if runtime is not None:
        stored = runtime.state.total_bytes
    elif asked.lays_out is not None:
        first = decided.program(asked.lays_out.batch, asked.lays_out.mode)
        plan, assembly = first.planned.plan, first.compiled.assembly
        check_state(first.planned.step, plan, assembly, form, settings.offload_dirs, budget, settings.world)
        places = place_groups(assembly.groups, form, host_states(plan))
        stored = host_state_bytes(places, storage_window(plan))
    for _, scheduled in asked.scheduled(decided):
        check_beside(stored, scheduled.planned.step, scheduled.compiled.assembly.work, budget)


def _larger(room: DeviceRoom, small: TooSmall) -> DeviceRoom:
    """The room that was too small, as large as it has to be."""
    if small.least_bytes is None or small.least_bytes <= room.device_bytes:
        raise small.error
    return room.within(small.least_bytes)
