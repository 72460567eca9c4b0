"""The updates of the relaxation: what lies between gradients' arrival on the host and the next step's use.

In: the step, and per backward with gradients the variable of the time when they have left, and their bytes.
Out: rows of its program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property

from benchmarks.linear import Row, total
from benchmarks.relaxed_step import RelaxedStep
from megacompile.hardware.simulate import call_seconds
from megacompile.schedule.plan import LONGEST_WINDOW, named_bytes


def limit_updates(step: RelaxedStep, pushed: Mapping[int, tuple[int, int]]) -> None:
    """Add the rows of updates at once, or of norms and then updates where whole gradients are kept."""
    updates = _Updates(step, pushed)
    if step.mode.keeps_gradients:
        updates.deferred()
    else:
        updates.immediate()


class _Updates:
    def __init__(self, step: RelaxedStep, pushed: Mapping[int, tuple[int, int]]) -> None:
        self._step, self._pushed = step, pushed
        self._program, self._work, self._spans = step.program, step.work, step.spans

    @cached_property
    def _first_use(self) -> dict[int, int]:
        """Per trained group the first operation of a step that wants it."""
        found: dict[int, int] = {}
        for index, span in enumerate(self._spans):
            if not span.backward:
                policies = self._work.blocks[span.block].policies
                for g in set.intersection(*(set(c.forward.groups) for c in policies)):
                    if g in self._work.contributions:
                        found.setdefault(g, index)
        return found

    @cached_property
    def _last_given(self) -> dict[int, list[int]]:
        """Per backward the groups whose gradient is whole with it."""
        last: dict[int, int] = {}
        for index in self._pushed:
            last |= {g: index for g, _ in self._work.blocks[self._spans[index].block].grad_groups}
        found: dict[int, list[int]] = defaultdict(list)
        for g, index in last.items():
            found[index].append(g)
        return found

    def _left_behind(self, use: int) -> Row:
        """Bytes of offloaded activations that have left when an operation starts."""
        gone = self._spans[: max(0, use - LONGEST_WINDOW)]
        return total(*(self._step.offloaded_bytes(s.block) for s in gone if not s.backward))

    def _way(self, group: int, use: int) -> float:
        """Seconds from a group's update to an operation after its first use: its fetch, forwards between."""
        between = self._spans[self._first_use[group] : use]
        policies = (self._work.blocks[s.block].policies for s in between)
        return self._step.fetch(group) + sum(
            min(call_seconds(c.forward, self._step.machine) for c in cs) for cs in policies
        )

    def immediate(self) -> None:
        """Between a gradient's arrival and the forward that wants the last of what comes after it."""
        groups: list[int] = []
        after = 0.0  # bytes of gradients that leave later
        reloads: Row = {}  # that start later
        order = sorted(self._pushed, reverse=True)
        for index in order:
            pushed, nbytes = self._pushed[index]
            groups += [g for g in self._last_given[index] if g in self._first_use]
            if groups:
                use = max(self._first_use[g] for g in groups)
                wanted = self._step.next(self._spans[use])
                interval = total(wanted, {pushed: -1.0})
                updates = sum(self._work.groups[g].update_bytes for g in groups)
                fetched = sum(self._work.groups[g].nbytes for g in groups)
                self._program.at_least(
                    interval, self._step.seconds("adam", updates) + min(self._way(g, use) for g in groups)
                )
                self._step.host_moves(interval, updates + fetched + after, self._left_behind(use))
                whole = total(wanted, {self._spans[index].end: -1.0})
                self._step.host_moves(
                    whole, updates + fetched + after + nbytes, total(self._left_behind(use), reloads)
                )
            after += nbytes
            later = index + LONGEST_WINDOW
            if later < len(self._spans) and self._spans[later].backward:
                reloads = total(reloads, self._step.offloaded_bytes(self._spans[later].block))

    def deferred(self) -> None:
        """All norms, then all updates in the order of the groups, then what wants them."""
        normed: int | None = None
        for index in sorted(self._pushed):
            pushed, _ = self._pushed[index]
            nbytes = self._step.norm_bytes(self._last_given[index])
            over, seconds = self._program.variable(), self._step.seconds("norm", nbytes)
            self._program.at_least({over: 1.0, pushed: -1.0}, seconds)
            if normed is not None:
                self._program.at_least({over: 1.0, normed: -1.0}, seconds)
            normed = over
        if normed is None:
            return
        updates = fetched = 0
        for g in sorted(self._work.contributions):
            group, named = self._work.groups[g], named_bytes(self._work, self._step.mode, g)
            updates += group.update_bytes * (named or group.nbytes) // group.nbytes
            fetched += self._work.groups[g].nbytes
            if g in self._first_use:
                use = self._first_use[g]
                interval = total(self._step.next(self._spans[use]), {normed: -1.0})
                self._program.at_least(interval, self._step.seconds("adam", updates) + self._step.fetch(g))
                self._step.host_moves(interval, updates + fetched, self._left_behind(use))
        self._before_norms(normed)

    def _before_norms(self, normed: int) -> None:
        """From each backward on that completes gradients: those and the later ones leave and are normed."""
        begin = (
            max(i for i, s in enumerate(self._spans) if not s.backward) if self._step.order == "depth" else 0
        )
        pushes: list[float] = []
        normed_bytes = 0
        reloads: Row = {}  # that start later
        for index in sorted((i for i in self._pushed if i > begin), reverse=True):
            block = self._work.blocks[self._spans[index].block]
            pushes += [n for _, n in block.grad_groups]
            normed_bytes += self._step.norm_bytes(self._last_given[index])
            interval = {normed: 1.0, self._spans[index].end: -1.0}
            self._step.host_moves(interval, sum(pushes) + normed_bytes, reloads)
            seconds, draw = self._step.beside("push_grad", pushes)
            self._program.at_least(interval, seconds + draw * self._step.seconds("norm", normed_bytes))
            if (later := index + LONGEST_WINDOW) < len(self._spans):
                reloads = total(reloads, self._step.offloaded_bytes(self._spans[later].block))
