"""Step a torch optimizer over a weight group on the host: clones of it, Muon's passes, or the Adam kernel.

In:  a group's flat arrays and its gradient. Out: the same arrays, one step later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.blocks.weight_groups import GroupLayout, Slot
from megacompile.capture.trace import TRACING
from megacompile.errors import MegacompileError
from megacompile.state import adam, muon
from megacompile.state.master_layout import own_part, owned, strided
from megacompile.state.optimizer_state import PREFIX, KeptState, Numbers, optimizer_views
from megacompile.state.param_group import (
    GroupSettings,
    ParamGroup,
    changed_settings,
    clone_settings,
    same_values,
)
from megacompile.state.torch_optimizer import TorchOptimizer


class OptimizerStep:
    """Takes a rank's steps of an optimizer; ``_buffers`` hold a parameter's master, and its gradient."""

    def __init__(self, optimizer: TorchOptimizer, rank: int) -> None:
        self._optimizer, self._rank = optimizer, rank
        self._buffers = [torch.empty(0), torch.empty(0)]

    def add_momentum(
        self,
        group: GroupLayout,
        arrays: Mapping[str, Tensor],
        grad: Tensor,
        settings: Sequence[GroupSettings],
        steps: Sequence[int],
        slots: Collection[int],
        threads: int | None,
    ) -> None:
        """Add the gradients of the matrices in ``slots`` to their momenta; their updates then lie in the
        gradients' place."""
        matrices = self._optimizer.matrices(group, self._rank)
        with _threads(threads):
            for index, views in enumerate(optimizer_views(self._optimizer, group, arrays, self._rank)):
                if index not in slots or index not in matrices:
                    continue
                slot, momentum = group.slots[index], views[f"{PREFIX}momentum_buffer"]
                own = settings[slot.parameter.param_group]
                if steps[index] == 0:
                    momentum.zero_()
                buffer = self._buffer(0, min(muon.CHUNK, momentum.numel()))
                gradient = grad[own_part(group, slot, self._rank)[1]]
                muon.add_momentum(gradient, momentum, own.values, own.grad_scale, buffer, threads)

    def update(
        self,
        group: GroupLayout,
        arrays: Mapping[str, Tensor],
        grad: Tensor | None,
        settings: Sequence[GroupSettings],
        steps: Sequence[int],
        numbers: list[Numbers],
        slots: Collection[int],
        threads: int | None,
        method: str = "step",
    ) -> None:
        """Take a step of what the rank has of a group's parameters in ``slots``; ``steps`` counts those that
        were taken of each.

        Without a gradient call another ``method``, which changes parameters by their state. The place of the
        gradient holds the updates of matrices, once the device has made them orthogonal.
        """
        views = list(optimizer_views(self._optimizer, group, arrays, self._rank))
        for index, slot, _ in owned(group, self._rank):
            if index not in slots:
                continue
            number = slot.parameter.param_group
            owner, own, first = self._optimizer.param_groups[number], settings[number], steps[index] == 0
            part = own_part(group, slot, self._rank)[1]
            masters = [arrays[name][part] for name in ("weights", "low") if name in arrays]
            gradient = None if grad is None else grad[part]
            if owner.orthogonal:
                assert gradient is not None, "Muon has no other method"
                self._step_by_muon(slot, masters, muon.updates_in(gradient), own, threads)
            elif owner.by_adam and gradient is not None:
                _step_by_adam(owner, masters, gradient, views[index], own, steps[index], threads)
                numbers[index] = {}
            else:
                kept = KeptState(owner, slot, views[index], None if first else numbers[index])
                numbers[index] = self._step_by_clones(kept, masters, gradient, own, threads, method)

    def _step_by_clones(
        self,
        kept: KeptState,
        masters: Sequence[Tensor],
        grad: Tensor | None,
        settings: GroupSettings,
        threads: int | None,
        method: str,
    ) -> Numbers:
        """Call a method of clones over a parameter, one piece after another; returns the numbers that they
        keep of it."""
        after: dict[str, Any] = {}
        with _threads(threads if kept.owner.elementwise else None):
            elements = masters[0].numel()
            for piece in kept.owner.pieces(elements):
                halves = [master[piece] for master in masters]
                gradient = None if grad is None else grad[piece]
                after = self._call(method, kept, halves, gradient, settings, kept.read(piece))
                kept.write(piece, after, last=piece.stop == elements)
        return {name: value for name, value in after.items() if not isinstance(value, Tensor)}

    def _step_by_muon(
        self,
        slot: Slot,
        masters: Sequence[Tensor],
        factor: Tensor,
        settings: GroupSettings,
        threads: int | None,
    ) -> None:
        """Take the step of a matrix along its orthogonal update."""
        rows, columns = slot.parameter.shape
        buffer = self._buffer(0, muon.scratch_bytes((rows, columns)) // 8)
        with _threads(threads):
            muon.step(masters, factor, (rows, columns), settings.values, buffer, threads)

    def _call(
        self,
        method: str,
        kept: KeptState,
        masters: Sequence[Tensor],
        grad: Tensor | None,
        settings: GroupSettings,
        state: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Call a method of a clone over what these masters are of, flat; returns its state."""
        slot, alone = kept.slot, kept.owner.elementwise
        flat, low = masters[0], masters[1:]
        if low:
            flat = adam.join(flat, low[0], self._buffer(0, flat.numel()))
        value = flat if alone else strided(flat, 0, slot)
        parameter = nn.Parameter(value)
        if grad is not None:
            gradient = self._buffer(1, grad.numel()).copy_(grad)
            if settings.grad_scale != 1:
                gradient.mul_(settings.grad_scale)
            parameter.grad = gradient if alone else strided(gradient, 0, slot)
        clone = kept.owner.clone(settings.values, parameter, state=state)
        with TRACING:  # meanwhile torch's optimizers would compute as in a graph, and round otherwise
            getattr(clone, method)()
        if parameter.data_ptr() != value.data_ptr():
            value.copy_(parameter.detach())
        if not same_values(changed_settings(clone_settings(clone), settings.values), settings.written):
            raise MegacompileError(
                f"{kept.owner.kind} writes other settings for {slot.parameter.name} than for another "
                "parameter, so its parameters depend on each other: use another optimizer."
            )
        if low:
            adam.split(flat, masters[0], low[0])
        after: dict[str, Any] = clone.state[parameter]
        return after

    def _buffer(self, which: int, elements: int) -> Tensor:
        """Return memory in FP32 for the master or the gradient of a step; it stays for the next of that size,
        as the first touch of a page costs as much as a pass over it."""
        if self._buffers[which].numel() != elements:
            self._buffers[which] = torch.empty(0)
            self._buffers[which] = torch.empty(elements)
        return self._buffers[which]


def _step_by_adam(
    owner: ParamGroup,
    masters: Sequence[Tensor],
    grad: Tensor,
    views: Mapping[str, Tensor],
    settings: GroupSettings,
    steps: int,
    threads: int | None,
) -> None:
    """Take a step of Adam or AdamW by the host's kernel, as where it is the only optimizer."""
    first, second = (views[PREFIX + name] for name in ("exp_avg", "exp_avg_sq"))
    if steps == 0:
        first.zero_(), second.zero_()
    hyper = replace(owner.hyper(settings.values), step=steps + 1, grad_scale=settings.grad_scale)
    master = masters[0] if len(masters) == 1 else (masters[0], masters[1])
    adam.adamw_step(master, first, second, grad, hyper, threads)
    views[f"{PREFIX}step"].fill_(steps + 1)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Compute on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
