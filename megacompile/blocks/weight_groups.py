"""Assemble: bind blocks to weight groups and reduce everything to the numbers that planning needs.

In: a partition and its differentiated templates. Out: :class:`Assembly`, which holds the layout of
each weight group's flat bucket and the :class:`~megacompile.schedule.workload.Workload`. Parameters belong to
one group exactly if they are used by the same blocks, get gradients from the same blocks, compute in one
dtype, and are all trained or all frozen; inside one, those of one optimizer param group are adjacent. What no
block uses, but those of later programs may, is grouped by modules.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megacompile.blocks.block_functions import BlockFunction
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.partition import Block, BlockValue, Input, Partition
from megacompile.printable import printable
from megacompile.schedule.workload import (
    BlockWork,
    Call,
    CheckpointPolicy,
    GroupWork,
    KernelWork,
    ValueWork,
    Workload,
)

SEED_BYTES = 16  # the seed and base site of dropout, int64 [2], on the device
_ALIGN = 32  # elements between parameters of a bucket: 64 bytes of bf16
SQUARED = 1 << 20  # elements of a gradient that are squared in FP64 at a time
_SHARD = 256  # elements that a rank's shard of a bucket, and parameters there, are multiples of
_NUMBERED = re.compile(r".*\.\d+(?=\.)")  # the innermost of a list's modules, as layers are


@dataclass(frozen=True, slots=True)
class Parameter:
    """The facts of a parameter that the layout needs: its dense shape and strides and who updates it.

    ``param_group`` is its index in ``optimizer.param_groups``, -1 where no optimizer owns it. A piece holds
    the rows of the model's parameter ``whole`` from ``first_row`` on. ``trained``: batches may give it
    gradients, now or later. ``exact``: it is frozen, computes in bfloat16, and loses nothing there.
    ``undivided``: its update needs all of it in one place.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    param_group: int
    whole: str = ""
    first_row: int = 0
    trained: bool = True
    exact: bool = False
    undivided: bool = False

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def cut_parameters(
    parameters: Mapping[str, Parameter], cuts: Mapping[str, tuple[int, ...]]
) -> dict[str, Parameter]:
    """The parameters, those in ``cuts`` replaced by their pieces, all in the model's order."""
    found: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        if name not in cuts:
            found[name] = parameter
            continue
        for start, stop in itertools.pairwise(cuts[name]):
            shape = (stop - start, *parameter.shape[1:])
            piece = replace(
                parameter, name=f"{name}[{start}:{stop}]", shape=shape, whole=name, first_row=start
            )
            found[piece.name] = piece
    return found


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place in its group's flat bucket; ``offset`` counts elements."""

    parameter: Parameter
    offset: int


@dataclass(frozen=True)
class GroupLayout:
    """One weight group: a flat bucket of ``elements`` (with padding) in ``dtype`` on the device.

    Where ``ranks`` share it, each holds the state of a shard, an equal part of the bucket; no shard ends
    within an undivided parameter. ``exact``: all of its parameters are, so that the host needs nothing of it
    but what is streamed.
    """

    index: int
    name: str
    dtype: torch.dtype
    trainable: bool
    slots: tuple[Slot, ...]
    elements: int
    ranks: int = 1
    exact: bool = False

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def share(self) -> int:
        """Elements of one rank's shard."""
        return self.elements // self.ranks

    def shard(self, rank: int) -> slice:
        """The elements of the bucket that are a rank's."""
        return slice(rank * self.share, (rank + 1) * self.share)


@dataclass(frozen=True)
class Assembly:
    """Layouts of all groups, where each parameter lives, and the numbers for planning."""

    groups: tuple[GroupLayout, ...]
    places: dict[str, tuple[int, int]]  # parameter or piece -> (group, index of its slot)
    work: Workload

    @property
    def homes(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """The places of each of the model's parameters, of all its pieces in the order of their rows."""
        found: dict[str, list[tuple[int, tuple[int, int]]]] = defaultdict(list)
        for group in self.groups:
            for i, slot in enumerate(group.slots):
                parameter = slot.parameter
                found[parameter.whole or parameter.name].append((parameter.first_row, (group.index, i)))
        return {name: tuple(place for _, place in sorted(rows)) for name, rows in found.items()}


def assemble(
    part: Partition,
    templates: tuple[DifferentiatedTemplate, ...],
    parameters: Mapping[str, Parameter],
    constant_bytes: int,
    groups: tuple[GroupLayout, ...] = (),
    *,
    outside: bool = False,
    ranks: int = 1,
    replicas: int = 1,
) -> Assembly:
    """Group the parameters and describe every block by numbers.

    ``constant_bytes`` is what buffers take on the device all the time. ``groups`` are layouts to keep, of an
    earlier program. ``outside``: see :class:`Workload`. ``ranks`` share them, in each of ``replicas``.
    """
    groups = groups or _group(part, templates, parameters, ranks)
    places = {s.parameter.name: (g.index, i) for g in groups for i, s in enumerate(g.slots)}
    owner = {name: group for name, (group, _) in places.items()}
    blocks = tuple(_block_work(b, templates[b.template], part, owner) for b in part.blocks)
    work = Workload(
        blocks=blocks,
        values=tuple(
            ValueWork(
                v.nbytes,
                v.requires_grad,
                v.producer < 0,
                tuple(owner[p] for p in part.rows[v.id].pieces) if v.id in part.rows else (),
                _sum_bytes(v, sum(v.id in block.grad_values for block in blocks)),
            )
            for v in part.values
        ),
        groups=tuple(
            GroupWork(g.name, g.nbytes, sum(s.parameter.numel for s in g.slots), g.trainable, ranks=g.ranks)
            for g in groups
        ),
        loss=part.results[0],
        constant_bytes=constant_bytes + SEED_BYTES,
        results=part.results,
        outside=outside,
        loops=max((t.loops for t in templates if t.loops), default=(0, 0), key=lambda loops: loops[1]),
        replicas=replicas,
        changes=_changed_buffer_users(part, templates),
    )
    return Assembly(groups, places, work)


def _changed_buffer_users(
    part: Partition, templates: tuple[DifferentiatedTemplate, ...]
) -> tuple[tuple[int, ...], ...]:
    """For buffers that forwards change, the blocks that use them; those of the same blocks are one."""
    users: dict[str, list[int]] = {name: [] for name in part.changed}
    for block in part.blocks if users else ():
        for name in {i.name for i in block.inputs if i.kind == "buffer"} & users.keys():
            users[name].append(block.index)
        for policy in templates[block.template].policies.values():
            for function in (policy.recompute, policy.backward):
                read = {
                    block.inputs[i].name for kind, i in (function.inputs if function else ()) if kind == "in"
                }
                assert not read & users.keys(), f"{block.name} would read {read} when it has changed"
    for name, blocks in users.items():
        assert name in part.written(part.blocks[blocks[-1]]), f"{name} is read when it has changed"
    return tuple(sorted(set(map(tuple, users.values()))))


def _sum_bytes(value: BlockValue, givers: int) -> int:
    """Bytes of a gradient's sum in FP32, where that is more exact: one of two in 16 bits is rounded once."""
    return 4 * math.prod(value.shape) if givers > 2 and value.dtype.itemsize == 2 else 0


def _group(
    part: Partition,
    templates: tuple[DifferentiatedTemplate, ...],
    parameters: Mapping[str, Parameter],
    ranks: int,
) -> tuple[GroupLayout, ...]:
    users: dict[str, list[int]] = defaultdict(list)
    givers: dict[str, list[int]] = defaultdict(list)
    for block in part.blocks:
        for item in block.inputs:
            for weight in _weights(item, part):
                users[weight].append(block.index)
        backward = templates[block.template].policies["none"].backward
        for kind, i in backward.outputs if backward else ():
            for weight in _weights(block.inputs[i], part) if kind == "grad" else ():
                givers[weight].append(block.index)
    keyed: dict[tuple[object, ...], list[Parameter]] = defaultdict(list)
    key: tuple[object, ...]
    for name, blocks in users.items():
        key = (tuple(blocks), tuple(givers[name]), parameters[name].dtype, parameters[name].trained)
        keyed[key].append(parameters[name])
    for name in (name for name in parameters if name not in users):
        key = (_module_of(name), parameters[name].dtype, parameters[name].trained)
        keyed[key].append(parameters[name])
    names = [block.name for block in part.blocks]
    owned = [0] * ranks
    return tuple(
        lay_out(i, _group_name(key[0], members, names), members, owned)  # type: ignore[arg-type]
        for i, (key, members) in enumerate(keyed.items())
    )


def _module_of(name: str) -> str:
    """The module by which a parameter without users is grouped: the innermost numbered one, or its own."""
    numbered = _NUMBERED.match(name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def _group_name(users: str | tuple[int, ...], members: list[Parameter], blocks: list[str]) -> str:
    """The name of a group that blocks use, by their numbers, or of what else a module has."""
    if isinstance(users, str):
        users = printable(users)
        return users if users not in blocks else f"{users} (rest)"
    names = [blocks[b] for b in users]
    if len(names) == 1:
        return names[0]
    whole = members[0].whole or members[0].name
    rows = members[0].name.removeprefix(whole)  # of a piece
    return f"{printable(whole.rsplit('.', 1)[0])}{rows} (×{len(names)})"


def _weights(item: Input, part: Partition) -> tuple[str, ...]:
    """The parameters that a block reads by one of its inputs: itself, or as rows that the host gathers."""
    if item.kind == "weight":
        return (item.name,)
    return part.rows[item.value].pieces if item.value in part.rows else ()


def lay_out(index: int, name: str, members: list[Parameter], owned: list[int]) -> GroupLayout:
    """A group's layout; ``owned`` are the elements of undivided parameters, and of those beside them, that
    each rank has of the groups so far."""
    ranks, ordered = len(owned), sorted(members, key=lambda p: p.param_group)
    if ranks > 1 and any(p.undivided for p in members):
        slots, elements = _with_owners(ordered, owned)
    else:
        offsets = itertools.accumulate((padded_elements(p.numel, ranks) for p in ordered), initial=0)
        *starts, elements = offsets
        slots = list(map(Slot, ordered, starts))
        elements = elements if ranks == 1 else -(-elements // (ranks * _SHARD)) * ranks * _SHARD
    dtype, trained, exact = members[0].dtype, members[0].trained, all(p.exact for p in members)
    return GroupLayout(index, name, dtype, trained, tuple(slots), elements, ranks, exact)


def _with_owners(members: Sequence[Parameter], owned: list[int]) -> tuple[list[Slot], int]:
    """Lay parameters out so that one rank has all of each undivided one, and every rank about as much.

    The divided ones come first, over as many shards as they need. Each of the others, the largest first, goes
    to the shard that has least; a shard is as large as the fullest. Shards go to ranks so that those that
    have had least get the fullest; only the first few stay in their order if the divided ones need several.
    """
    ranks, sizes = len(owned), {p.name: padded_elements(p.numel, len(owned)) for p in members}
    divided = [p for p in members if not p.undivided]
    whole = sorted((p for p in members if p.undivided), key=lambda p: -sizes[p.name])
    first = sum(sizes[p.name] for p in divided)
    share = -(-sum(sizes.values()) // (ranks * _SHARD)) * _SHARD
    while True:
        loads = [min(share, max(0, first - shard * share)) for shard in range(ranks)]
        kept = [shard for shard in range(ranks) if first > share and loads[shard]]
        places: list[tuple[Parameter, int, int]] = []
        for parameter in whole:
            shard = min(range(ranks), key=loads.__getitem__)
            places.append((parameter, shard, loads[shard]))
            loads[shard] += sizes[parameter.name]
        if max(loads) <= share:
            break
        share = max(loads)
    free = range(len(kept), ranks)
    fullest = sorted(free, key=lambda shard: -loads[shard])
    owners = dict(zip([*kept, *fullest], [*kept, *sorted(free, key=owned.__getitem__)], strict=True))
    offset, slots = owners[0] * share, []
    for parameter in divided:
        slots.append(Slot(parameter, offset))
        offset += sizes[parameter.name]
    slots += [Slot(p, owners[shard] * share + before) for p, shard, before in places]
    for shard, rank in owners.items():
        owned[rank] += loads[shard]
    return sorted(slots, key=lambda slot: slot.offset), ranks * share


def padded_elements(elements: int, ranks: int = 1) -> int:
    """Return the elements of a bucket that a parameter of so many takes, at least one unit; if ranks share
    it, no shard ends within a block of its codes."""
    unit = _ALIGN if ranks == 1 else _SHARD
    return max(1, -(-elements // unit)) * unit


def _block_work(
    block: Block, template: DifferentiatedTemplate, part: Partition, owner: dict[str, int]
) -> BlockWork:
    backward = template.policies["none"].backward
    grad_values: list[int] = []
    grad_groups: dict[int, int] = defaultdict(int)
    for (kind, i), nbytes in zip(
        backward.outputs if backward else (), backward.result_bytes if backward else (), strict=True
    ):
        assert kind == "grad"
        if weights := _weights(block.inputs[i], part):
            grad_groups[owner[weights[0]]] += nbytes
        else:
            grad_values.append(block.inputs[i].value)
    tangents = [block.outputs[k] for kind, k in (backward.inputs if backward else ()) if kind == "grad"]
    policies = [
        CheckpointPolicy(
            name=policy.name,
            forward=_block_call(block, policy.forward, owner),
            recompute=_block_call(block, policy.recompute, owner) if policy.recompute else None,
            backward=_block_call(block, policy.backward, owner) if policy.backward else None,
            saved_bytes=policy.saved_bytes,
        )
        for policy in template.policies.values()
    ]
    return BlockWork(
        name=block.name,
        template=block.template,
        outputs=block.outputs,
        tangents=tuple(tangents),
        grad_values=tuple(grad_values),
        grad_groups=tuple(grad_groups.items()),
        policies=tuple(policies),
    )


def _block_call(block: Block, function: BlockFunction, owner: dict[str, int]) -> Call:
    reads, groups = dict[int, None](), dict[int, None]()
    for kind, i in function.inputs:
        if kind == "out":
            reads[block.outputs[i]] = None
        elif kind == "in" and block.inputs[i].kind == "value":
            reads[block.inputs[i].value] = None
        elif kind == "in" and block.inputs[i].kind == "weight":
            groups[owner[block.inputs[i].name]] = None
    return Call(
        reads=tuple(reads),
        groups=tuple(groups),
        peak_bytes=function.peak_bytes,
        end_bytes=function.end_bytes,
        flops=function.flops,
        moved_bytes=function.moved_bytes,
        launches=function.launches,
        attention_flops=function.attention_flops,
        grouped=function.grouped,
        kernels=tuple(
            KernelWork(call.op, call.work * count, call.teraflops)
            for call, count in function.kernels
            if call.teraflops
        ),
    )
