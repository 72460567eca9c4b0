"""Count what each treatment of a block or of a weight group takes of a step, for the program over counts.

In: a workload, a mode, a machine, an order. Out: kinds of interchangeable blocks and groups, and per
treatment of a kind the seconds, device bytes and host bytes of one of its members.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Literal, NamedTuple, TypeVar

from megacompile.hardware.machine import Machine
from megacompile.hardware.simulate import call_seconds, duration
from megacompile.planner.simplex import Array
from megacompile.schedule.plan import Mode, norm_bytes
from megacompile.schedule.step import Op
from megacompile.schedule.workload import CheckpointPolicy, Workload

Order = Literal["depth", "breadth"]
Treatment = tuple[str, str]  # of a block: (policy, place); of a group: ("", residency) or ("", "resident")
T = TypeVar("T", float, Array)


class Takes(NamedTuple, Generic[T]):
    """The rows of the program: seconds of each stream in the forward phase and in the backward phase, device
    bytes at the turn, host bytes of offloaded activations, and seconds that state on the device takes from
    (so below 0) all updates, norms and pushes of the host. Of one treatment numbers, of all treatments
    arrays.
    """

    compute_forward: T
    h2d_forward: T
    d2h_forward: T
    compute_backward: T
    h2d_backward: T
    d2h_backward: T
    device: T
    host: T
    adam: T
    norm: T
    push: T

    @property
    def forward(self) -> tuple[T, ...]:
        """Each stream's work in the first phase."""
        return self.compute_forward, self.h2d_forward, self.d2h_forward

    @property
    def backward(self) -> tuple[T, ...]:
        return self.compute_backward, self.h2d_backward, self.d2h_backward


_NOTHING = Takes(*(0.0,) * 11)


@dataclass(frozen=True)
class Kind:
    """Interchangeable blocks, or weight groups, and what each treatment of one of them takes."""

    members: tuple[int, ...]
    treatments: tuple[Treatment, ...]
    takes: tuple[Takes[float], ...]  # per treatment


class Treatments:
    """The kinds of one workload's blocks and groups. The state of the groups ``residents`` may be on the
    device, that of ``resident`` is.
    """

    def __init__(
        self,
        work: Workload,
        mode: Mode,
        machine: Machine,
        order: Order,
        residents: Collection[int] = (),
        resident: Collection[int] = (),
    ) -> None:
        self.work, self.mode, self.machine = work, mode, machine
        self.residents, self.resident = frozenset(residents), frozenset(resident)
        self.breadth = order == "breadth"
        m = mode.micro_batches
        self.forwards = (m, 0) if self.breadth else (1, m - 1)  # in the first phase, in the second
        self.blocks = _interchangeable([self._block(b) for b in range(len(work.blocks))])
        self.groups = _interchangeable([self._group(g) for g in range(len(work.groups))])

    def _block(self, b: int) -> dict[Treatment, Takes[float]]:
        ahead, later = self.forwards
        m = self.mode.micro_batches
        takes: dict[Treatment, Takes[float]] = {}
        for policy in self.work.blocks[b].policies:
            forward = call_seconds(policy.forward, self.machine)
            backward = call_seconds(policy.backward, self.machine)
            back = call_seconds(policy.recompute, self.machine) + backward
            saved_on = self.offloaded_bytes(b, policy)
            alive = saved_on * (m if self.breadth else 1)
            here = _NOTHING._replace(
                compute_forward=ahead * forward,
                compute_backward=later * forward + m * back,
                device=float(alive),
            )
            takes[policy.name, "device"] = here
            if saved_on:
                out = duration(Op("offload", "d2h", nbytes=saved_on), self.machine)
                back_in = duration(Op("reload", "h2d", nbytes=saved_on), self.machine)
                # one operation may run beside offloaded activations on its way; compute waits for the rest
                away, home = max(0.0, out - forward), max(0.0, back_in - backward)
                takes[policy.name, "host"] = here._replace(
                    compute_forward=here.compute_forward + ahead * away,
                    compute_backward=here.compute_backward + later * away + m * home,
                    d2h_forward=ahead * out,
                    h2d_backward=m * back_in,
                    d2h_backward=later * out,
                    device=0.0,
                    host=float(saved_on * m),
                )
        return takes

    def _group(self, g: int) -> dict[Treatment, Takes[float]]:
        if g not in self.work.used:
            return {("", "stream"): _NOTHING}
        m, again = self.mode.micro_batches, g in self._wanted_again
        whole = Op("prefetch", "h2d", nbytes=self.work.groups[g].nbytes, ranks=self.work.ranks)
        fetch = duration(whole, self.machine)
        later = m - 1 if not self.breadth else 0
        nbytes = float(self.work.groups[g].nbytes)

        def takes(second: int, held: float) -> Takes[float]:
            return _NOTHING._replace(h2d_forward=fetch, h2d_backward=second * fetch, device=held)

        resident = {("", "resident"): self._resident(g)} if g in self.residents else {}
        if g in self.resident:
            return resident
        if not again and m == 1:
            return {("", "stream"): takes(0, 0.0), **resident}
        found = {("", "stream"): takes(later + (m if not self.breadth else 1) * again, 0.0)}
        if m > 1 and not self.breadth:
            found["", "micro"] = takes(later, nbytes)
        found["", "step"] = takes(0, nbytes)
        return found | resident

    def _resident(self, g: int) -> Takes[float]:
        """State on the device: updated there, nothing of it on the link or the host."""
        group, m, ranks = self.work.groups[g], self.mode.micro_batches, self.work.ranks
        waits = self.mode.keeps_gradients or len(self.work.contributions[g]) > 1 or ranks > 1
        held = group.resident_bytes + waits * group.gradient_bytes
        update = group.update_bytes / self.machine.memory_bandwidth
        pushes = [n for block in self.work.blocks for other, n in block.grad_groups if other == g]
        norm = norm_bytes(self.work, self.mode, g)
        if waits:
            update += (m * sum(pushes) + 2 * norm) / self.machine.memory_bandwidth
        return _NOTHING._replace(
            compute_backward=update,
            device=float(held),
            adam=-duration(Op("adam", "host", nbytes=group.update_bytes), self.machine),
            norm=-duration(Op("norm", "host", nbytes=norm), self.machine),
            push=-m
            * sum(duration(Op("push_grad", "d2h", nbytes=n, ranks=ranks), self.machine) for n in pushes),
        )

    def offloaded_bytes(self, b: int, policy: CheckpointPolicy) -> int:
        """Bytes that wait from a block's forward for its own backward alone."""
        calls = [c for c in (policy.recompute, policy.backward) if c is not None]
        reads = {v for call in calls for v in call.reads}
        own = [v for v in reads if self._readers[v] == {b} and not self.work.values[v].batch]
        saved = policy.saved_bytes if policy.recompute is None and policy.backward is not None else 0
        return saved + sum(self.work.values[v].nbytes for v in own)

    @cached_property
    def _readers(self) -> dict[int, set[int]]:
        """Per value the blocks that read it again after their forward."""
        readers: dict[int, set[int]] = defaultdict(set)
        for b, block in enumerate(self.work.blocks):
            for policy in block.policies:
                for call in (policy.recompute, policy.backward):
                    for v in call.reads if call is not None else ():
                        readers[v].add(b)
        return readers

    @cached_property
    def _wanted_again(self) -> set[int]:
        """Groups that a backward wants after other blocks have run since their forward."""
        last = len(self.work.blocks) - 1
        return {g for b, block in enumerate(self.work.blocks) if b < last for c in block.policies
                for call in (c.recompute, c.backward) if call is not None for g in call.groups}  # fmt: skip


def _interchangeable(items: list[dict[Treatment, Takes[float]]]) -> tuple[Kind, ...]:
    found: dict[tuple[tuple[Treatment, Takes[float]], ...], list[int]] = defaultdict(list)
    for index, takes in enumerate(items):
        found[tuple(takes.items())].append(index)
    return tuple(
        Kind(tuple(members), tuple(t for t, _ in key), tuple(v for _, v in key))
        for key, members in found.items()
    )
