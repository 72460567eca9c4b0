"""Count what each treatment of a block or of a weight group takes of a step, for the program over counts.

In: what the parts of a step cost, an order. Out: kinds of interchangeable blocks and groups, and per
treatment of a kind the seconds, device bytes and host bytes of one of its members.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Literal, NamedTuple, TypeVar

from megacompile.hardware.simulate import call_seconds
from megacompile.planner.offload_windows import SHORTEST, OffloadWindows, Windows
from megacompile.planner.simplex import Array
from megacompile.planner.step_costs import StepCosts, seconds_by_part
from megacompile.schedule.op_table import SPECS, Part, ResidentGrad, Stream
from megacompile.schedule.step import Op

Order = Literal["depth", "breadth"]
Treatment = tuple[str, str]  # of a block: (policy, place); of a group: ("", residency) or ("", "resident")
T = TypeVar("T", float, Array)
_STREAMS: tuple[Stream, ...] = ("compute", "h2d", "d2h", "host")


class Takes(NamedTuple, Generic[T]):
    """The rows of the program: seconds of each stream in the forward phase and in the backward phase, device
    bytes at the turn, and host bytes of offloaded activations. One treatment: numbers; all treatments:
    arrays.
    """

    compute_forward: T
    h2d_forward: T
    d2h_forward: T
    host_forward: T
    compute_backward: T
    h2d_backward: T
    d2h_backward: T
    host_backward: T
    device_bytes: T
    host_bytes: T

    @property
    def forward(self) -> tuple[T, T, T, T]:
        """Each stream's work in the first phase."""
        return self.compute_forward, self.h2d_forward, self.d2h_forward, self.host_forward

    @property
    def backward(self) -> tuple[T, T, T, T]:
        return self.compute_backward, self.h2d_backward, self.d2h_backward, self.host_backward


_NOTHING = Takes(*(0.0,) * 10)


@dataclass(frozen=True)
class Kind:
    """Interchangeable blocks, or weight groups, and what each treatment of one of them takes."""

    members: tuple[int, ...]
    treatments: tuple[Treatment, ...]
    takes: tuple[Takes[float], ...]  # per treatment


class Treatments:
    """The kinds of one workload's blocks and groups. The state of the groups ``resident`` is on the device,
    that of other residents of ``costs`` may be. No window of what blocks offload is above the ``longest``.
    """

    def __init__(
        self, costs: StepCosts, order: Order, resident: Iterable[int] = (), longest: Windows = SHORTEST
    ) -> None:
        self.costs, self.resident, self.longest = costs, frozenset(resident), longest
        self.windows = OffloadWindows(costs)
        self.work, self.mode, self.machine = costs.work, costs.mode, costs.machine
        self.breadth = order == "breadth"
        m = self.mode.micro_batches
        self.forwards = (m, 0) if self.breadth else (1, m - 1)  # in the first phase, in the second
        self.blocks = _interchangeable([self._block(b) for b in range(len(self.work.blocks))])
        self.groups = _interchangeable([self._group(g) for g in range(len(self.work.groups))])

    def _block(self, b: int) -> dict[Treatment, Takes[float]]:
        ahead, later = self.forwards
        m = self.mode.micro_batches
        takes: dict[Treatment, Takes[float]] = {}
        for policy in self.work.blocks[b].policies:
            forward = call_seconds(policy.forward, self.machine)
            backward = call_seconds(policy.backward, self.machine)
            back = call_seconds(policy.recompute, self.machine) + backward
            compute = _NOTHING._replace(
                compute_forward=ahead * forward, compute_backward=later * forward + m * back
            )
            moves = self.costs.offload(b, policy.name)
            saved = moves[0].nbytes if moves else 0
            takes[policy.name, "device"] = compute._replace(
                device_bytes=float(saved * (m if self.breadth else 1))
            )
            if moves:
                away, home = (seconds_by_part([op], self.machine) for op in moves)
                # a window's operations run beside activations on their way; compute waits for the rest
                ahead_of, behind = self.windows.of(b, policy.name, self.longest)
                out = max(0.0, sum(away.values()) - behind * forward)
                back_in = max(0.0, sum(home.values()) - ahead_of * backward)
                waits = _NOTHING._replace(
                    compute_forward=ahead * out,
                    compute_backward=later * out + m * back_in,
                    host_bytes=float(saved * m),
                )
                takes[policy.name, "host"] = _total(
                    compute, self._takes(moves, {"offload": (ahead, later), "reload": (0, m)}), waits
                )
        return takes

    def _group(self, g: int) -> dict[Treatment, Takes[float]]:
        m, again = self.mode.micro_batches, g in self._wanted_again
        nbytes = float(self.work.groups[g].nbytes)
        later = m - 1 if not self.breadth else 0
        updates = (1, 0) if self.mode.keeps_gradients else (0, 1)
        phases: dict[Part, tuple[int, int]]
        phases = {"gradient": (0, 1), "norm": (0, 1), "update": updates, "rest": (0, 1)}

        def takes(fetches: int, held: float) -> Takes[float]:
            """``fetches`` beside that of the forward."""
            found = self._takes(self.costs.on_host[g], phases | {"fetch": (1, fetches)})
            return found._replace(device_bytes=held)

        resident = {("", "resident"): self._resident(g, phases)} if g in self.costs.residents else {}
        if g in self.resident:
            return resident
        fetched = any(SPECS[op.kind].part == "fetch" for op in self.costs.on_host[g])
        if not fetched or (not again and m == 1):
            return {("", "stream"): takes(0, 0.0), **resident}
        found = {("", "stream"): takes(later + (m if not self.breadth else 1) * again, 0.0)}
        if m > 1 and not self.breadth:
            found["", "micro"] = takes(later, nbytes)
        found["", "step"] = takes(0, nbytes)
        return found | resident

    def _resident(self, g: int, phases: Mapping[Part, tuple[int, int]]) -> Takes[float]:
        """State on the device: updated there, nothing of it on the link or the host."""
        group, ops = self.work.groups[g], self.costs.on_device[g]
        waits = any(isinstance(token, ResidentGrad) for op in ops for token in op.writes)
        held = group.resident_bytes + waits * group.gradient_bytes
        return self._takes(ops, phases)._replace(device_bytes=float(held))

    def _takes(self, ops: Iterable[Op], phases: Mapping[Part, tuple[int, int]]) -> Takes[float]:
        """Seconds of operations whose parts come so often in the forward phase and in the backward phase."""
        seconds = seconds_by_part(ops, self.machine)
        rows = (
            sum(times[phase] * seconds[part, stream] for part, times in phases.items())
            for phase in (0, 1)
            for stream in _STREAMS
        )
        return Takes._make((*rows, 0.0, 0.0))

    @cached_property
    def _wanted_again(self) -> set[int]:
        """Groups that a backward wants after other blocks have run since their forward."""
        last = len(self.work.blocks) - 1
        return {g for b, block in enumerate(self.work.blocks) if b < last for c in block.policies
                for call in (c.recompute, c.backward) if call is not None for g in call.groups}  # fmt: skip


def _total(*takes: Takes[float]) -> Takes[float]:
    return Takes(*map(sum, zip(*takes, strict=True)))


def _interchangeable(items: list[dict[Treatment, Takes[float]]]) -> tuple[Kind, ...]:
    found: dict[tuple[tuple[Treatment, Takes[float]], ...], list[int]] = defaultdict(list)
    for index, takes in enumerate(items):
        found[tuple(takes.items())].append(index)
    return tuple(
        Kind(tuple(members), tuple(t for t, _ in key), tuple(v for _, v in key))
        for key, members in found.items()
    )
