"""Formats of the state: which flat arrays the host keeps of a weight group, where a parameter lies in them.

"fp32" keeps both Adam moments in FP32. "int8" and "int4" keep them as codes with one FP32 scale per block:
block-wise dynamic 8 bits (Dettmers et al. 2021, arXiv:2110.02861), and 4 bits with a signed dynamic first
and a linear second moment that has no zero (Li et al. 2023, arXiv:2309.01507). Parameters of at most
``SMALL`` elements keep FP32 moments in both, as in those papers. Masters are FP32 in every format.

Invariant: blocks of codes begin anew at every parameter, so what a parameter's codes are does not depend on
its neighbours in the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from megacompile.blocks.weight_groups import GroupLayout, padded_elements
from megacompile.errors import MegacompileError
from megacompile.state import adam
from megacompile.state.optimizer_state import optimizer_arrays
from megacompile.state.torch_optimizer import TorchOptimizer
from megacompile.units import format_bytes

StateFormat = Literal["fp32", "int8", "int4"]
Form = StateFormat | TorchOptimizer
"""A format of Adam's moments, or what another optimizer keeps."""
_DTYPES = {"low": torch.int16, "exp_avg_codes": torch.uint8, "exp_avg_sq_codes": torch.uint8}
SMALL = 4096  # elements; bitsandbytes and the 4-bit authors draw the same line


@dataclass(frozen=True, slots=True)
class MomentCoding:
    """The coding of moments in one format: bits, elements per scale, the code books."""

    bits: int
    block: int
    first_book: str
    second_book: str

    def code_bytes(self, elements: int) -> int:
        return elements * self.bits // 8

    def blocks(self, elements: int) -> int:
        return -(-elements // self.block)


# 256 per scale is what bitsandbytes uses since 0.44 (2048 before it): 3 % more bytes, 8 times fewer
# elements that share an outlier's scale. 128 is the 4-bit authors' choice.
CODINGS: dict[StateFormat, MomentCoding] = {
    "int8": MomentCoding(8, 256, "dynamic8", "dynamic8_unsigned"),
    "int4": MomentCoding(4, 128, "dynamic4", "linear4_unsigned"),
}


@dataclass(frozen=True, slots=True)
class FlatArray:
    """One flat host array of a group: its name, what it is part of, dtype and number of elements."""

    name: str
    kind: Literal["masters", "moments"]
    dtype: torch.dtype
    elements: int

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class MomentPlace:
    """The place of moments: ``elements`` from ``offset`` on in the FP32 arrays, or, ``coded``, as codes.

    ``block`` is the first of their scales.
    """

    coded: bool
    elements: int
    offset: int
    block: int


@dataclass(frozen=True, slots=True)
class Run:
    """A range of a bucket that one Adam call updates: one param group, one kind of moments.

    ``slot`` is the first of the parameters in it.
    """

    start: int
    param_group: int
    place: MomentPlace
    slot: int

    @property
    def stop(self) -> int:
        return self.start + self.place.elements


def check_format(name: str) -> StateFormat:
    """The format of that name, or a :class:`MegacompileError` that lists them."""
    if name not in get_args(StateFormat):
        raise MegacompileError(f"optimizer_state={name!r} is none of {', '.join(get_args(StateFormat))}.")
    return name  # type: ignore[return-value]


def group_arrays(group: GroupLayout, form: Form) -> tuple[FlatArray, ...]:
    """Every flat array of a group's state, in a fixed order; arrays without elements are left out.

    "weights" is what is streamed: bf16 high halves (then "low" holds the low ones, unless the group is exact,
    so that all are zero), or FP32 masters. Where ranks share the group, these are the shards of one of them,
    all as long as the longest.
    """
    sizes = [array_sizes(group, form, rank) for rank in range(group.ranks)]
    found = []
    for name in sizes[0]:
        kind: Literal["masters", "moments"] = "masters" if name in ("weights", "low") else "moments"
        dtype = group.dtype if name == "weights" else _DTYPES.get(name, torch.float32)
        found.append(FlatArray(name, kind, dtype, max(size[name] for size in sizes)))
    if isinstance(form, TorchOptimizer) and group.trainable:
        arrays = optimizer_arrays(form, group).items()
        found += [FlatArray(name, "moments", dtype, size) for name, (dtype, size) in arrays]
    return tuple(a for a in found if a.elements)


def array_sizes(group: GroupLayout, form: Form, rank: int) -> dict[str, int]:
    """Return how many entries of each array of masters, and of Adam's moments, of a group are a rank's."""
    sizes = {"weights": group.share}
    if group.dtype == torch.bfloat16 and not group.exact:
        sizes["low"] = group.share
    if not group.trainable or isinstance(form, TorchOptimizer):
        return sizes
    places = [run.place for run in shard_runs(group, form, rank)]
    plain = sum(place.elements for place in places if not place.coded)
    sizes |= dict.fromkeys(moment_names(False), plain)
    if form in CODINGS:
        coded, coding = [place.elements for place in places if place.coded], CODINGS[form]
        codes, scales = coding.code_bytes(sum(coded)), sum(map(coding.blocks, coded))
        sizes |= dict(zip(moment_names(True), (codes, scales, codes, scales), strict=True))
    return sizes


def moment_names(coded: bool) -> tuple[str, ...]:
    """The arrays of both moments, in a fixed order."""
    if coded:
        return ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales")
    return ("exp_avg", "exp_avg_sq")


def moment_places(group: GroupLayout, form: StateFormat) -> tuple[MomentPlace, ...]:
    """Return for each slot of a trainable group where its moments begin in their arrays."""
    places: list[MomentPlace] = []
    offsets, block = {False: 0, True: 0}, 0
    for slot in group.slots:
        coded = is_coded(slot.parameter.numel, form)
        elements = padded_elements(slot.parameter.numel, 1 if coded else group.ranks)
        places.append(MomentPlace(coded, elements, offsets[coded], block if coded else 0))
        offsets[coded] += elements
        block += CODINGS[form].blocks(elements) if coded else 0
    return tuple(places)


def shard_places(group: GroupLayout, form: StateFormat, rank: int) -> tuple[tuple[int, MomentPlace], ...]:
    """Return for each slot of a trainable group the first of its elements whose moments a rank has, counted
    from the slot's first, and where in the rank's arrays they are."""
    shard, found, offsets, block = group.shard(rank), [], {False: 0, True: 0}, 0
    for slot, place in zip(group.slots, moment_places(group, form), strict=True):
        start = max(slot.offset, shard.start)
        elements = max(0, min(slot.offset + place.elements, shard.stop) - start)
        own = MomentPlace(place.coded, elements, offsets[place.coded], block if place.coded else 0)
        found.append((start - slot.offset, own))
        offsets[place.coded] += elements
        block += CODINGS[form].blocks(elements) if place.coded else 0
    return tuple(found)


def shard_runs(
    group: GroupLayout, form: StateFormat, rank: int, steps: Sequence[int | None] | None = None
) -> tuple[Run, ...]:
    """Runs of a rank's shard of a trainable group in the bucket's order, counted from the shard's beginning,
    as few as param groups and blocks allow.

    ``steps`` are counts by slot, alike in each run; slots of None are left out.
    """
    runs: list[Run] = []
    begin = group.shard(rank).start
    for index, (start, place) in enumerate(shard_places(group, form, rank)):
        if not place.elements or (steps is not None and steps[index] is None):
            continue
        slot = group.slots[index]
        run = Run(slot.offset + start - begin, slot.parameter.param_group, place, index)
        last = runs[-1] if runs else None
        if last and _goes_on(last, run, form) and (steps is None or steps[last.slot] == steps[index]):
            whole = replace(last.place, elements=last.place.elements + place.elements)
            runs[-1] = replace(last, place=whole)
        else:
            runs.append(run)
    return tuple(runs)


def _goes_on(last: Run, run: Run, form: StateFormat) -> bool:
    """Return whether one Adam call can update both, in whole blocks of codes."""
    alike = (last.param_group, last.place.coded) == (run.param_group, run.place.coded)
    whole = not last.place.coded or last.place.elements % CODINGS[form].block == 0
    return alike and whole and last.stop == run.start


def is_coded(elements: int, form: StateFormat) -> bool:
    """Return whether the moments of a parameter of so many elements are codes."""
    return form in CODINGS and elements > SMALL


def array_range(array: str, coding: MomentCoding | None, start: int, stop: int) -> tuple[int, int]:
    """Return which entries of a parameter's flat array hold its elements from ``start`` to ``stop``.

    Both must be ends of blocks where the array holds codes or scales.
    """
    if coding is None or not array.endswith(("_codes", "_scales")):
        return start, stop
    count = coding.code_bytes if array.endswith("_codes") else coding.blocks
    return count(start), count(stop)


def state_bytes(groups: tuple[GroupLayout, ...], form: Form) -> dict[str, int]:
    """Host bytes of a model's state by kind: "masters" and "moments"."""
    arrays = [a for g in groups for a in group_arrays(g, form)]
    return {kind: sum(a.nbytes for a in arrays if a.kind == kind) for kind in ("masters", "moments")}


def smaller_formats(form: Form) -> tuple[StateFormat, ...]:
    """Return the formats of Adam's moments below ``form``; the state of another optimizer has none."""
    known = get_args(StateFormat)
    return () if isinstance(form, TorchOptimizer) else known[known.index(form) + 1 :]


def describe_savings(groups: tuple[GroupLayout, ...], form: Form) -> str:
    """A clause for error messages: what the formats below ``form`` would save, and frozen weights in bf16; ""
    where that is nothing."""
    now = sum(state_bytes(groups, form).values())
    saved = {f: now - sum(state_bytes(groups, f).values()) for f in smaller_formats(form)}
    clauses = [f'optimizer_state="{f}" saves {format_bytes(n)}' for f, n in saved.items() if n > 0]
    low = sum(a.nbytes for g in groups if not g.trainable for a in group_arrays(g, form) if a.name == "low")
    clauses += [f"casting the frozen weights to bfloat16 saves {format_bytes(low)}"] if low else []
    return "; " + ", ".join(clauses) if clauses else ""


assert all(adam.TILE % coding.block == 0 for coding in CODINGS.values())
