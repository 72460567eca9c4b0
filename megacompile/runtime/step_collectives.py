"""What several ranks do together in one run of a step: gathers, sums, shards to the host, the losses of all.

:class:`~megacompile.runtime.step_run.StepRun` adds what blocks read and write.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megacompile.runtime.step_updates import StepUpdates
from megacompile.step.operations import Event
from megacompile.step.spec import Shard, Token, WeightGrad, typed


class StepCollectives(StepUpdates):
    """The operations of an emitted step that exist for several ranks alone."""

    def all_gather(self, *, group: int, after: Sequence[Event] = ()) -> None:
        place, world = self._blocks.slot_of(group), self._held.world
        self._device.submit("comm", ("all_gather", group), after, lambda: world.all_gather(place))

    def reduce(self, *, group: int, block: int, micro: int, to: Token, after: Sequence[Event] = ()) -> None:
        parts: list[tuple[int, torch.Tensor]] = self._blocks.values[WeightGrad(group, block, micro)]
        layout, fabric, place = self._bound.assembly.groups[group], self._held.fabric, typed(to)
        assert isinstance(place, Shard)
        self._summed[group, block, micro] = [slot for slot, _ in parts]
        event = ("reduce", group, block, micro)
        self._device.submit("comm", event, after, lambda: fabric.reduce(layout, parts, place))

    def all_reduce(
        self, *, group: int, block: int, micro: int, shard: Token, after: Sequence[Event] = ()
    ) -> None:
        layout, fabric, place = self._bound.assembly.groups[group], self._held.fabric, typed(shard)
        assert isinstance(place, Shard)
        event = ("all_reduce", group, block, micro)
        self._device.submit("comm", event, after, lambda: fabric.all_reduce(layout, place))

    def push_shard(
        self, *, group: int, block: int, micro: int, shard: Token, to: Token, after: Sequence[Event] = ()
    ) -> None:
        source, landed = self._shard(group, shard), self._held.landed
        home = self._held.buffers.gradient(self._bound, group, typed(to))
        fresh = group not in landed
        self._land(landed, group, self._summed.pop((group, block, micro)))

        def use(landed: list[torch.Tensor]) -> None:
            home.copy_(landed[0]) if fresh else home.add_(landed[0])

        device = self._device
        event = ("push_shard", group, block, micro)
        device.submit("d2h", event, after, lambda: device.land([source], use))

    def add_shard(
        self, *, group: int, block: int, micro: int, shard: Token, to: Token, after: Sequence[Event] = ()
    ) -> None:
        source, resident = self._shard(group, shard), self._held.resident
        home, landed = resident.gradient(group, typed(to)), resident.landed
        fresh = group not in landed
        self._land(landed, group, self._summed.pop((group, block, micro)))

        def add() -> None:
            home.copy_(source) if fresh else home.add_(source)

        self._device.submit("comm", ("add_shard", group, block, micro), after, add)

    def _shard(self, group: int, shard: Token) -> torch.Tensor:
        """The sum that this rank owns of the group's gradients."""
        place = typed(shard)
        assert isinstance(place, Shard)
        return self._held.fabric.shard(self._bound.assembly.groups[group], place)

    def agree(self, *, after: Sequence[Event] = ()) -> None:
        results, world = self.results, self._held.world
        own = list(results.losses)

        def listen() -> None:
            heard = world.all_numbers([float(loss) for loss in own])
            everyone = [numbers[m] for m in range(len(own)) for numbers in heard]
            results.losses = [torch.tensor(x, dtype=own[0].dtype) for x in everyone]
            if self._inputs.check_loss:
                results.judge(results.losses)

        self._device.submit("host", ("agree",), after, listen)
