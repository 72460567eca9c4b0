"""View what the host keeps of single parameters, in a group's flat arrays.

In: a group's layout and its arrays by name. Out: by parameter, its masters and moments by array's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megacompile.blocks.weight_groups import GroupLayout, padded_elements
from megacompile.state.master_layout import (
    own_part,
)
from megacompile.state.moment_formats import (
    CODINGS,
    Form,
    MomentPlace,
    StateFormat,
    group_arrays,
    moment_names,
    shard_places,
)
from megacompile.state.optimizer_state import optimizer_views
from megacompile.state.torch_optimizer import TorchOptimizer


def shapes_of(groups: Sequence[GroupLayout], form: Form) -> Iterator[dict[str, dict[str, Tensor]]]:
    """Return what :meth:`HostState.parts` gives of such groups, without values, on the meta device."""
    for group in groups:
        arrays = {
            a.name: torch.empty(a.elements, dtype=a.dtype, device="meta") for a in group_arrays(group, form)
        }
        yield parts_of(group, arrays, form)


def parts_of(
    group: GroupLayout, arrays: Mapping[str, Tensor], form: Form, rank: int = 0
) -> dict[str, dict[str, Tensor]]:
    """Each parameter's name with flat views of all that is kept of it, by array's name; of what a rank keeps.

    The ranks' views one after another are those of a whole group, whose moments end with less padding.
    """
    named = {}
    if isinstance(form, TorchOptimizer):
        kept = optimizer_views(form, group, arrays, rank) if group.trainable else ({} for _ in group.slots)
        masters = {n: arrays[n] for n in ("weights", "low") if n in arrays}
        return {
            slot.parameter.name: {n: flat[own_part(group, slot, rank)[1]] for n, flat in masters.items()}
            | views
            for slot, views in zip(group.slots, kept, strict=True)
        }
    places = shard_places(group, form, rank) if group.trainable else [None] * len(group.slots)
    for slot, moments in zip(group.slots, places, strict=True):
        _, own = own_part(group, slot, rank)
        found = {n: arrays[n][own] for n in ("weights", "low") if n in arrays}
        if moments is not None:
            start, place = moments
            left = max(0, padded_elements(slot.parameter.numel) - start)
            place = replace(place, elements=min(place.elements, left))
            found |= dict(zip(moment_names(place.coded), moments_of(arrays, place, form), strict=True))
        named[slot.parameter.name] = found
    return named


def moments_of(arrays: Mapping[str, Tensor], place: MomentPlace, form: StateFormat) -> list[Tensor]:
    """Views of a place's moments, in the order of :func:`~megacompile.state.moment_formats.moment_names`."""
    start, stop = place.offset, place.offset + place.elements
    if not place.coded:
        return [arrays[name][start:stop] for name in moment_names(False)]
    coding = CODINGS[form]
    codes = slice(coding.code_bytes(start), coding.code_bytes(stop))
    scales = slice(place.block, place.block + coding.blocks(place.elements))
    parts = (codes, scales, codes, scales)
    return [arrays[name][part] for name, part in zip(moment_names(True), parts, strict=True)]
