"""Unroll: capture a model with few of its layers, then repeat their blocks to its whole depth.

For planning only. In: a model by name on the meta device, a kind of batch. Out: a
:class:`~megacompile.api.frontend.Compiled` of the whole model for each way of cutting its weights, whose
partition and assembly are those of a full capture (names, templates, bytes, dataflow), and whose graphs
are those of the few layers. Where a model's layers are not of few kinds, or reach back further than one
layer, the whole model is captured.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megacompile.api.frontend import Compiled, Division, Frontend, StateLayout
from megacompile.blocks.partition import Block, BlockValue, Input, Partition
from megacompile.blocks.template_cache import differentiate_once
from megacompile.capture.batch import Batch
from megacompile.capture.repeated_layers import layer_settings
from megacompile.cli.models import Model, build, optimizer_of
from megacompile.graph.tile_cuts import Cuts
from megacompile.kernels._triton import Gpu
from megacompile.planner.tiling import TilingCandidate
from megacompile.state.moment_formats import Form

_FEWEST = 3  # layers: a first one, one whose neighbours are both layers, and a last one


class Repeated:
    """One kind of batch of a whole model, cut in any way, at the cost of a few layers of each kind."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        compute_dtype: torch.dtype,
        *,
        stored: bool = False,
        gpu: Gpu | None = None,
        ranks: int = 1,
        replicas: int = 1,
        optimizer: str = "adamw",
        form: Form = "fp32",
    ) -> None:
        self._model, self._batch = model, batch
        frontend = functools.partial(
            _frontend,
            compute_dtype=compute_dtype,
            gathers=not stored and ranks == 1,
            kernels=gpu is not None,  # as compile has them unless told
            gpu=gpu,
            distributed=ranks * replicas > 1,
            optimizer=optimizer,
            form=form,
            differentiate=functools.partial(differentiate_once, check=False),  # weights' sizes make it slow
        )
        self._whole = frontend(model.module)
        self._layers = _equal_layers(model)
        self._short = _shorten(model, self._layers) if self._layers is not None else None
        self._few = self._whole
        if self._short is not None:
            self._few = frontend(self._short.module)
        # frozen weights are taken to be a checkpoint's in bfloat16
        exact = frozenset([*self._whole.rounded, *self._few.rounded])
        self._layout = StateLayout(ranks=ranks, replicas=replicas, exact=exact)
        self._made: dict[tuple[tuple[tuple[str, tuple[int, ...]], ...], int], Compiled] = {}

    def chunks(self) -> Iterator[int]:
        """Positions of a chunk to try: 0, sequences whole, then ever fewer."""
        return self._few.chunks(self._batch, Division(layout=self._layout))

    def tilings(self, chunk: int = 0) -> Iterator[TilingCandidate[Compiled]]:
        """Yield what compiling the whole model gives with nothing cut, then with ever smaller pieces.

        Which cuts there are depends on the sizes of weights, so that few layers have those of all.
        """
        division = Division(chunk=chunk, layout=self._layout)
        for few in self._few.tilings(self._batch, division):
            yield replace(few, build=functools.partial(self._build, few, chunk))

    def _build(self, few: TilingCandidate[Compiled], chunk: int) -> Compiled:
        compiled = few.build()
        key = tuple(compiled.tiled.cuts.items()), chunk
        if key not in self._made:
            self._made[key] = self._repeat(compiled)
        return self._made[key]

    @property
    def gathers(self) -> bool:
        """Return whether the host may gather rows of some table."""
        return bool(self._few.tables(self._batch))

    def _repeat(self, compiled: Compiled) -> Compiled:
        if self._layers is None or self._short is None:
            return compiled
        few = len(_kinds_of_layers(self._short))
        part = _unroll(compiled.part, self._layers, few)
        cuts = _repeat_cuts(compiled.tiled.cuts, self._layers, few)
        if part is None:
            division = Division(cuts, compiled.chunk, self._layout)
            return self._whole.build(self._batch, division)
        buffers = dict(self._model.module.named_buffers(remove_duplicate=False))
        used = {i.name for b in part.blocks for i in b.inputs if i.kind == "buffer" and i.name in buffers}
        constants = sum(buffers[n].nbytes for n in used) + sum(c.nbytes for c in part.constants.values())
        assembly = self._whole.assembled(part, compiled.templates, cuts, constants, self._layout)
        return replace(compiled, tiled=replace(compiled.tiled, cuts=cuts), part=part, assembly=assembly)


def _frontend(module: nn.Module, optimizer: str, **options: Any) -> Frontend:
    made = None if optimizer == "adamw" else optimizer_of(optimizer, module)
    return Frontend(module, optimizer=made, **options)


@dataclass(frozen=True)
class _Layers:
    """The path of a model's list of layers and the kind of each; equal kinds compute the same."""

    path: str
    kinds: tuple[object, ...]


def _equal_layers(model: Model) -> _Layers | None:
    count = getattr(model.text_config, "num_hidden_layers", None)
    lists = [
        (n, m) for n, m in model.module.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count
    ]
    if len(lists) != 1:
        return None
    path, layers = lists[0]
    rows = [v for v in vars(model.text_config).values() if isinstance(v, (list, tuple)) and len(v) == count]
    kinds = (
        (layer_settings(layer), _shapes(layer), *(str(row[i]) for row in rows))
        for i, layer in enumerate(layers)
    )
    numbers: dict[object, int] = {}
    return _Layers(path, tuple(numbers.setdefault(kind, len(numbers)) for kind in kinds))


def _shapes(layer: nn.Module) -> object:
    return tuple((name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters())


def _kinds_of_layers(model: Model) -> tuple[object, ...]:
    layers = _equal_layers(model)
    return layers.kinds if layers is not None else ()


def _shorten(model: Model, layers: _Layers) -> Model | None:
    """The model cut after the first layers that show each kind between two others, and a last one."""
    kinds, count = layers.kinds, len(layers.kinds)
    residency = max(_FEWEST, *(2 + kinds.index(k, 1) for k in set(kinds[1:-1]))) if count > _FEWEST else count
    while residency < count and kinds[residency - 1] != kinds[-1]:
        residency += 1
    if residency >= count:
        return None
    config: Any = copy.deepcopy(model.config)
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(text, name, value[:residency])
    text.num_hidden_layers = residency
    short = build(model.name, config, model.lora)
    return short if _kinds_of_layers(short) == kinds[:residency] else None


def _unroll(part: Partition, layers: _Layers, few: int) -> Partition | None:
    """The partition of the whole model from that of its first ``few`` layers; None where it differs."""
    where = re.compile(rf"^{re.escape(layers.path)}\.(\d+)(\D|$)")
    segments = _segments(part, where, few)
    if segments is None or any(p.startswith(f"{layers.path}.") for r in part.rows.values() for p in r.pieces):
        return None
    builder = _Unroller(part, layers.path, segments)
    try:
        builder.repeat(segments[0], None, 0, 0)
        for i in range(len(layers.kinds)):
            source = _source(i, layers.kinds, few)
            builder.repeat(segments[1 + source], segments[source], source, i)
        builder.repeat(segments[-1], segments[-2], 0, 0)
    except _FarReach:
        return None
    results = tuple(builder.ids[result] for result in part.results)
    return replace(part, blocks=tuple(builder.blocks), values=tuple(builder.values), results=results)


def _source(layer: int, kinds: tuple[object, ...], few: int) -> int:
    """Return which of the first ``few`` layers stands for a layer: the last for the last, else an inner
    one."""
    if layer < few - 1:
        return layer
    if layer == len(kinds) - 1:
        return few - 1
    return max(j for j in range(1, few - 1) if kinds[j] == kinds[layer])


def _repeat_cuts(cuts: Cuts, layers: _Layers, few: int) -> Cuts:
    """The cuts of the whole model from those of its first ``few`` layers."""
    start = f"{layers.path}."
    found = {name: rows for name, rows in cuts.items() if not name.startswith(start)}
    for i in range(len(layers.kinds)):
        own = f"{start}{_source(i, layers.kinds, few)}."
        found |= {f"{start}{i}.{n.removeprefix(own)}": rows for n, rows in cuts.items() if n.startswith(own)}
    return found


def _segments(part: Partition, where: re.Pattern[str], few: int) -> list[list[Block]] | None:
    """Blocks before the layers, of each layer, and after them."""
    layer_of = [_layer_of(block, where) for block in part.blocks]
    segments: list[list[Block]] = [[] for _ in range(few + 2)]
    place = 0
    for block, layer in zip(part.blocks, layer_of, strict=True):
        if layer is not None and layer + 1 < place:
            return None
        if layer is not None:
            place = layer + 1
        elif place and any(later is not None for later in layer_of[block.index :]):
            return None
        elif place:
            place = few + 1
        segments[place].append(block)
    return segments if all(segments) else None


def _layer_of(block: Block, where: re.Pattern[str]) -> int | None:
    found = {int(m[1]) for w in (block.name, *block.weights) if (m := where.match(w))}
    return found.pop() if len(found) == 1 else None


class _FarReach(Exception):
    """A layer reads what an earlier layer than the one before it has written."""


class _Unroller:
    """Copies blocks one after the other; ``ids`` maps the source's values to the last copy's."""

    def __init__(self, part: Partition, path: str, segments: list[list[Block]]) -> None:
        self.part, self.path = part, path
        self.blocks: list[Block] = []
        self.values: list[BlockValue] = [v for v in part.values if v.producer < 0]
        self.ids: dict[int, int] = {v.id: v.id for v in self.values}
        self.shared = frozenset({o for b in segments[0] for o in b.outputs} | set(self.ids))
        self.before: list[tuple[int, ...]] = []  # outputs of the blocks of the segment before, as copied

    def repeat(self, blocks: list[Block], previous: list[Block] | None, source: int, target: int) -> None:
        """Append a copy of one segment, renamed from layer ``source`` to layer ``target``."""
        if previous is not None:
            self._chain(previous)
        reach = {o for b in (*blocks, *(previous or ())) for o in b.outputs} | self.shared
        copied: list[tuple[int, ...]] = []
        for block in blocks:
            if any(i.kind == "value" and i.value not in reach for i in block.inputs):
                raise _FarReach
            inputs = tuple(self._input(i, source, target) for i in block.inputs)
            outputs = tuple(self._output(o) for o in block.outputs)
            name = self._rename(block.name, source, target)
            self.blocks.append(Block(len(self.blocks), name, block.template, inputs, outputs))
            copied.append(outputs)
        self.before = copied

    def _chain(self, previous: list[Block]) -> None:
        """Map results of the source's previous segment to those of the last copy."""
        for block, outputs in zip(reversed(previous), reversed(self.before), strict=False):
            for old, new in zip(block.outputs, outputs, strict=False):
                if old not in self.shared:
                    self.ids[old] = new

    def _input(self, item: Input, source: int, target: int) -> Input:
        if item.kind == "value":
            return replace(item, value=self.ids[item.value])
        return replace(item, name=self._rename(item.name, source, target))

    def _output(self, old: int) -> int:
        value = self.part.values[old]
        new = len(self.values)
        self.values.append(replace(value, id=new, producer=len(self.blocks)))
        self.ids[old] = new
        return new

    def _rename(self, name: str, source: int, target: int) -> str:
        start = f"{self.path}.{source}"
        if name.startswith(start) and not name[len(start) :][:1].isdigit():
            return f"{self.path}.{target}{name[len(start) :]}"
        return name
