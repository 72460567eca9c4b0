"""Keep what a torch optimizer's class keeps of parameters: in a weight group's flat arrays, between steps.

Tensors lie in the arrays, one for each name, where checkpoints and storage find them. Numbers are the host
state's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import GroupLayout, Slot, padded_elements
from megacompile.errors import MegacompileError
from megacompile.state.master_layout import own_part, strided
from megacompile.state.param_group import Entry, ParamGroup
from megacompile.state.torch_optimizer import TorchOptimizer

PREFIX = "state."  # of the names of arrays, so that none is "weights" or "low"
Numbers = dict[str, Any]
"""What a parameter's state holds beside tensors."""


def optimizer_arrays(optimizer: TorchOptimizer, group: GroupLayout) -> dict[str, tuple[torch.dtype, int]]:
    """Return dtype and elements of each flat array that a trained group has beside its masters; of a shard as
    many as the largest of them has."""
    dtypes: dict[str, torch.dtype] = {}
    most: dict[str, int] = defaultdict(int)
    for rank in range(group.ranks):
        sizes: dict[str, int] = defaultdict(int)
        for slot in group.slots:
            for entry, elements in _kept(optimizer, group, slot, rank):
                dtype = dtypes.setdefault(entry.name, entry.dtype)
                if dtype != entry.dtype:
                    raise MegacompileError(
                        f"{optimizer} keeps {entry.name} in {dtype}, and of {slot.parameter.name} in "
                        f"{entry.dtype}: use optimizers that keep one name in one dtype."
                    )
                sizes[entry.name] += padded_elements(elements)
        most |= {name: max(most[name], elements) for name, elements in sizes.items()}
    return {PREFIX + name: (dtype, most[name]) for name, dtype in dtypes.items()}


def optimizer_views(
    optimizer: TorchOptimizer, group: GroupLayout, arrays: Mapping[str, Tensor], rank: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Yield by slot, by array's name, the flat views of what a rank keeps of it."""
    offsets: dict[str, int] = defaultdict(int)
    for slot in group.slots:
        views = {}
        for entry, elements in _kept(optimizer, group, slot, rank):
            name = PREFIX + entry.name
            views[name] = arrays[name][offsets[name] :][:elements]
            offsets[name] += padded_elements(elements)
        yield views


def _kept(
    optimizer: TorchOptimizer, group: GroupLayout, slot: Slot, rank: int
) -> Iterator[tuple[Entry, int]]:
    """Yield the tensors that ``step`` keeps of a parameter, and how many elements a rank has of each; of an
    empty parameter the first rank has what is kept beside."""
    part = own_part(group, slot, rank)[0]
    none = part.start == part.stop and (rank > 0 or slot.parameter.numel > 0)
    for entry in optimizer.param_groups[slot.parameter.param_group].entries(slot.parameter):
        elements = part.stop - part.start if entry.like else 0 if none else entry.numel
        yield entry, elements


def shared_by_pieces(form: str | TorchOptimizer, array: str) -> bool:
    """Return whether an array holds of each piece of a parameter what it holds of the whole one, as no format
    of Adam's moments does."""
    if isinstance(form, str):
        return False
    known = (entry for group in form.param_groups for entry in group.known_entries)
    return array.startswith(PREFIX) and not any(PREFIX + e.name == array and e.like for e in known)


@dataclass(frozen=True)
class KeptState:
    """What is kept of one parameter: its flat ``views``, and ``numbers``; None before its first step."""

    owner: ParamGroup
    slot: Slot
    views: Mapping[str, Tensor]
    numbers: Numbers | None

    def read(self, piece: slice) -> dict[str, Any] | None:
        """Return the state that a clone of the parameter, or of a piece of it, goes on with."""
        if self.numbers is None:
            return None
        state = dict(self.numbers)
        for entry in self.owner.entries(self.slot.parameter):
            place = self._place(piece, entry)
            # a copy of what pieces share, as each of them changes it
            state[entry.name] = place.clone() if self.owner.elementwise and not entry.like else place
        return state

    def write(self, piece: slice, after: Mapping[str, Any], *, last: bool) -> None:
        """Put the tensors of a clone's state where they lie between steps; what pieces share comes from the
        last one, as each goes on from what was before."""
        entries, name = self.owner.entries(self.slot.parameter), self.slot.parameter.name
        if {n for n, v in after.items() if isinstance(v, Tensor)} != {e.name for e in entries}:
            raise MegacompileError(
                f"The optimizer keeps {', '.join(after)} of {name}, and kept "
                f"{', '.join(e.name for e in entries)} in a trial: use another optimizer."
            )
        for entry in entries:
            place, new = self._place(piece, entry), after[entry.name]
            if (new.shape, new.dtype) != (place.shape, place.dtype):
                raise MegacompileError(
                    f"The optimizer keeps {entry.name} of {name} as {tuple(new.shape)} in {new.dtype}, and "
                    "not as in a trial: use another optimizer."
                )
            if new.data_ptr() != place.data_ptr() and (entry.like or last):
                place.copy_(new)

    def _place(self, piece: slice, entry: Entry) -> Tensor:
        """Return where a tensor of the parameter's state, or of a piece's, lies, in its own shape."""
        view = self.views[PREFIX + entry.name]
        if not entry.like:
            return view.view(entry.shape)
        return view[piece] if self.owner.elementwise else strided(view, 0, self.slot)
