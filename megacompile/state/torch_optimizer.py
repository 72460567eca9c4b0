"""Any torch optimizer on the host: its own class steps over the masters, one parameter at a time.

In:  an optimizer, or :class:`~megacompile.state.several_optimizers.Several`. Out: :class:`TorchOptimizer`,
which stands where a format of the state does. It is read by trials (:mod:`~megacompile.state.param_group`),
its state lies in flat arrays (:mod:`~megacompile.state.optimizer_state`), and clones of it step over these
(:mod:`~megacompile.state.optimizer_step`).

Adam and AdamW beside other optimizers take the host's own steps, as where they are the only one.

Invariant: parameters, state and settings become bitwise what the optimizer's own ``step`` makes of them; of
Adam and AdamW what torch's fused kernel does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megacompile.blocks.weight_groups import GroupLayout, Parameter
from megacompile.schedule.workload import MatrixUpdates
from megacompile.state import muon
from megacompile.state.master_layout import owned
from megacompile.state.param_group import GroupSettings, ParamGroup, Work, changed_settings, copied_settings
from megacompile.state.several_optimizers import members_of


class TorchOptimizer:
    """An optimizer whose own class keeps the state, as a format of the host's state.

    ``param_groups`` are what is known of those of the optimizer, in their order. Raises
    :class:`MegacompileError` for one that cannot step over single parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        members = [member for member in members_of(optimizer) for _ in member.param_groups]
        groups = zip(members, optimizer.param_groups, strict=True)
        self.param_groups = tuple(ParamGroup(member, group) for member, group in groups)

    def __str__(self) -> str:
        return "+".join(dict.fromkeys(group.kind for group in self.param_groups))

    __repr__ = __str__

    @property
    def writes_settings(self) -> bool:
        """Return whether ``step`` changes settings of its param groups."""
        return any(group.writes_settings for group in self.param_groups)

    def settings(self) -> list[GroupSettings]:
        """Return each param group's settings as they are now; refuse what needs state that is not there."""
        groups = zip(self.param_groups, self._optimizer.param_groups, strict=True)
        return [known.read(group) for known, group in groups]

    def advance(self, settings: Sequence[GroupSettings]) -> None:
        """Give the param groups what a step by these settings writes to them."""
        for group, taken in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(taken.written)

    def called(self, member: torch.optim.Optimizer, method: str) -> list[GroupSettings]:
        """Call a method of an optimizer, whose parameters hold no values; returns each param group's settings
        before and what the call wrote."""
        before = [copied_settings(group) for group in self._optimizer.param_groups]
        getattr(type(member), method)(member)
        now = [copied_settings(group) for group in self._optimizer.param_groups]
        return [GroupSettings(old, changed_settings(new, old)) for old, new in zip(before, now, strict=True)]

    def cuts(self, parameter: Parameter) -> bool:
        """Return whether a parameter may be cut: each of its elements is stepped alone."""
        return parameter.param_group < 0 or self.param_groups[parameter.param_group].elementwise

    def matrices(self, group: GroupLayout, rank: int = 0) -> tuple[int, ...]:
        """Return the slots of a trained group whose updates a rank's device makes orthogonal."""
        if not group.trainable:
            return ()
        own = owned(group, rank)
        return tuple(i for i, slot, _ in own if self.param_groups[slot.parameter.param_group].orthogonal)

    def matrix_updates(self, group: GroupLayout) -> MatrixUpdates | None:
        """Return what devices and links have to do for those; None where there are none."""
        of_ranks = [
            [group.slots[i].parameter for i in self.matrices(group, rank)] for rank in range(group.ranks)
        ]
        if not any(of_ranks):
            return None
        owners = [tuple(_as_it_lies(p) for p in parameters) for parameters in of_ranks]
        known = self.param_groups
        iterations = max(known[p.param_group].values["ns_steps"] for own in of_ranks for p in own)
        mean = -(-sum(p.numel for own in of_ranks for p in own) // group.ranks)
        return MatrixUpdates.of(owners, iterations, (muon.MOMENTUM_BYTES + _gradient_bytes(group)) * mean)

    def scratch_bytes(self, group: GroupLayout) -> int:
        """Return the most bytes that the step of one parameter of a trained group takes beside its state:
        master and gradient in FP32, and the temporaries of ``step``."""
        works = (work for rank in range(group.ranks) for _, work in self._works(group, rank))
        return max((work.scratch for work in works), default=0)

    def update_work(self, group: GroupLayout) -> tuple[int, int]:
        """Return the bytes that the host reads and writes for a step of all parameters of a trained group,
        and the FLOPs of its products there; of shards the mean, as whole parameters go to ranks so that each
        has about as much in all."""
        works = [work for rank in range(group.ranks) for work in self._works(group, rank)]
        gradient = _gradient_bytes(group)
        moved = sum(gradient * elements + work.moved for elements, work in works)
        return -(-moved // group.ranks), -(-sum(work.flops for _, work in works) // group.ranks)

    def _works(self, group: GroupLayout, rank: int) -> Iterator[tuple[int, Work]]:
        """Yield, for each parameter that a rank has part of, its elements there and their step's work."""
        for _, slot, elements in owned(group, rank):
            yield elements, self.param_groups[slot.parameter.param_group].work(slot.parameter, elements)


def _as_it_lies(matrix: Parameter) -> tuple[int, int]:
    """Return how many rows of how many elements lie one after another."""
    rows, columns = matrix.shape
    return (columns, rows) if matrix.stride[0] < matrix.stride[1] else (rows, columns)


def _gradient_bytes(group: GroupLayout) -> int:
    """Return the bytes of an element of a group's gradient where it is stepped by: sums over ranks are in
    FP32."""
    return group.dtype.itemsize if group.ranks == 1 else 4
