"""Plan the programs that a run will need, before its state is allocated: all fit, or one least budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megacompile.api.allocate_state import check_beside, check_state
from megacompile.api.device_budget import DeviceRoom
from megacompile.api.pipeline import Compiler, Scheduled
from megacompile.api.rank_agreement import agreed_program
from megacompile.api.settings import Settings
from megacompile.capture.batch import Batch
from megacompile.errors import BudgetError
from megacompile.graph.tile_cuts import Cuts
from megacompile.planner.min_feasible_budget import describe_peak
from megacompile.runtime.executor import Runtime
from megacompile.schedule.plan import Mode
from megacompile.state.host_budget import host_states, storage_window
from megacompile.state.nvme_offload import host_state_bytes, place_groups
from megacompile.units import format_bytes

_ROUNDS = 32  # within a larger room, or with other cuts


class PlannedError(Exception):
    """A forward was planned, and is not to run."""


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


class ProgramSet:
    """The programs that were asked for so far, each planned within the room that the ones before it needed.

    The first one lays the state out, unless it is allocated already.
    """

    def __init__(self, compiler: Compiler, settings: Settings, runtime: Runtime | None) -> None:
        self._compiler, self._settings, self._runtime = compiler, settings, runtime
        self._room, self._before = compiler.room, compiler.programs
        self._refused: list[Member] = []
        self._lays_out: Member | None = None
        self._name = ""
        self.members: list[Member] = []

    @property
    def fits(self) -> bool:
        """Return whether all members so far fit the budget."""
        return not self._refused

    def begin(self, name: str) -> None:
        """Note what the next programs are for."""
        self._name = name

    def add(self, batch: Batch, mode: Mode) -> None:
        """Ask for a program, which is planned next."""
        self.members.append(Member(self._name, batch, mode))

    def refuse(self, error: BudgetError) -> None:
        """Go on within the room that the last member needs."""
        if len(self._refused) == _ROUNDS:
            raise error
        self._refused.append(self.members[-1])
        self._compiler.take_room(_larger(self._compiler.room, error))

    def lay_out(self, scheduled: Scheduled) -> None:
        """Plan what comes next for the state as the last member has it."""
        if self.fits:
            self._room = self._compiler.room  # less than before where kernels took more
        self._lays_out = self.members[-1]
        self._compiler.lay_out(scheduled)

    def settle(self) -> None:
        """Have all members planned within the budget; raise :class:`BudgetError` with the least that suffices
        for all of them, else."""
        if self._refused:
            room, worst = self._room_of_all()
            if room.device_bytes > self._room.device_bytes:
                error = self._refusal(room, worst)
                self.forget()
                raise self._settings.world.agreed(error)
        self._check_host()

    def forget(self) -> None:
        """Leave the compiler as it was before."""
        if self._runtime is None:
            self._compiler.begin_again(self._room)
        else:
            self._compiler.go_back(self._room, self._before)

    def scheduled(self) -> Iterator[tuple[str, Scheduled]]:
        """Yield each program once, with what it is for."""
        seen: set[tuple[object, ...]] = set()
        for member in self.members:
            if member.key not in seen:
                seen.add(member.key)
                yield member.name, self._planned(member)

    def _room_of_all(self) -> tuple[DeviceRoom, Member]:
        """The room that suffices for all members, and the one that needs it.

        How far weights are cut is decided by the first member that was refused, as for it alone; a member
        that this leaves too little room decides then, each once. After that rooms grow.
        """
        room, worst = self._room, self._refused[-1]
        if self._runtime is not None or len({member.key for member in self.members}) == 1:
            # how far weights are cut was decided, or by this program alone
            return self._compiler.room, worst
        cuts: Cuts | None = None
        decided: set[tuple[object, ...]] = set()
        member, error = self._refused[0], BudgetError("No program is planned yet.")
        for _ in range(_ROUNDS):
            before = room
            if member.key in decided:
                room = _larger(room, error)
            else:
                decided.add(member.key)
                room, cuts = self._alone(member, room)
            worst = member if room.device_bytes > before.device_bytes else worst
            refused = self._first_refused(room, cuts)
            if refused is None:
                return room, worst
            member, error = refused
        raise error

    def _alone(self, member: Member, room: DeviceRoom) -> tuple[DeviceRoom, Cuts | None]:
        """The room that a program needs by itself, this one at least, and how far weights are cut then."""
        for _ in range(_ROUNDS):
            self._compiler.begin_again(room)
            try:
                self._planned(member)
                break
            except BudgetError as error:
                room = _larger(room, error)
        return room, self._compiler.decided.cuts

    def _first_refused(self, room: DeviceRoom, cuts: Cuts | None) -> tuple[Member, BudgetError] | None:
        """Plan all members anew; the first one that has no room, and why."""
        self._compiler.begin_again(room, cuts)
        for member in self.members:
            try:
                scheduled = self._planned(member)
            except BudgetError as error:
                return member, error
            if member is self._lays_out:
                self._compiler.lay_out(scheduled)
        return None

    def _planned(self, member: Member) -> Scheduled:
        return agreed_program(self._compiler, member.batch, member.mode, self._settings)

    def _refusal(self, room: DeviceRoom, worst: Member) -> BudgetError:
        scheduled, least = self._planned(worst), room.device_bytes
        why = describe_peak(scheduled.planned.step, scheduled.compiled.assembly.work)
        ways = [*self._compiler.ways_out(worst.batch, evaluate=worst.mode.kind == "evaluate")]
        names = list(dict.fromkeys(member.name for member in self.members))
        of_all = f", the least that suffices for all of {', '.join(names)}" if len(names) > 1 else ""
        return BudgetError(
            f"hbm_budget={format_bytes(self._room.device_bytes)} is too small: {worst.name} needs {least} "
            f"bytes ({format_bytes(least)}){of_all}; {why}. "
            + " ".join([*ways, "Raise the budget, or make the batch or the sequences smaller."]),
            least_bytes=least,
        )

    def _check_host(self) -> None:
        """Refuse what the host has no room for: the state, and what programs keep beside it."""
        settings = self._settings
        form, budget, world = settings.optimizer_state, settings.host_budget_bytes, settings.world
        try:
            if self._runtime is not None:
                stored = self._runtime.state.total_bytes
            elif self._lays_out is not None:
                first = self._planned(self._lays_out)
                plan, assembly = first.planned.plan, first.compiled.assembly
                check_state(first.planned.step, plan, assembly, form, settings.offload_dirs, budget, world)
                places = place_groups(assembly.groups, form, host_states(plan))
                stored = host_state_bytes(places, storage_window(plan))
            for _, scheduled in self.scheduled():
                check_beside(stored, scheduled.planned.step, scheduled.compiled.assembly.work, budget)
        except BudgetError as error:
            self.forget()
            world.agreed(error)
            raise


def _larger(room: DeviceRoom, error: BudgetError) -> DeviceRoom:
    """The room that the error asks for."""
    if error.least_bytes is None or error.least_bytes <= room.device_bytes:
        raise error
    return room.within(error.least_bytes)
