"""Partition: the flat graph becomes a chain of blocks; equal blocks share one template.

In: :class:`~megacompile.graph.captured.Captured`. Out: :class:`Partition`. Blocks are consecutive ranges of
the graph, so any dataflow between them (skips, shared values, an encoder read by all decoder layers)
is an edge from an earlier block to a later one. Invariants: no block returns a view of its inputs
(views are rebuilt where they are used); two blocks share a template only if operators, constants,
shapes, dtypes, strides and gradient masks are all equal.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from megacompile.capture.changed_buffers import SNAPSHOT
from megacompile.capture.random_draws import site_of
from megacompile.graph.block_cuts import SHARE, cut
from megacompile.graph.captured import Captured, Rows, given_gradients, results_of
from megacompile.graph.node_storage import WRITE, is_view, storage_nbytes, view_base
from megacompile.printable import printable

InputKind = Literal["weight", "buffer", "value", "rng"]


@dataclass(frozen=True)
class BlockValue:
    """A tensor that crosses blocks; ``producer`` is -1 for what the host gives: leaves, gathered rows."""

    id: int
    name: str
    producer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    requires_grad: bool


@dataclass(frozen=True)
class Input:
    """One input of a block: a parameter's or buffer's name, a value's id, or the seed's base site."""

    kind: InputKind
    name: str = ""
    value: int = -1
    site: int = 0


@dataclass(frozen=True)
class Block:
    """One range of the graph: what it reads and writes, and the template that computes it."""

    index: int
    name: str
    template: int
    inputs: tuple[Input, ...]
    outputs: tuple[int, ...]

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(i.name for i in self.inputs if i.kind == "weight")


@dataclass(frozen=True)
class Template:
    """The graph that equal blocks share.

    ``examples`` are fake tensors, one per placeholder, with the gradient mask set, ``results`` the graph's
    results on them. ``kinds`` are the kinds of placeholders, ``out_grads`` the outputs with a gradient.
    ``digest`` is equal for templates that compute the same. ``share`` is the part of its rows that a grouped
    product is counted with. ``writes`` are the placeholders of buffers that the forward changes; their new
    values are the graph's last outputs, of which none of the other fields speaks.
    """

    index: int
    name: str
    graph: fx.Graph
    kinds: tuple[InputKind, ...]
    examples: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    out_grads: tuple[bool, ...]
    digest: str
    share: float = 1.0
    writes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Partition:
    """Blocks in execution order, their templates, and the values between them."""

    blocks: tuple[Block, ...]
    templates: tuple[Template, ...]
    values: tuple[BlockValue, ...]
    results: tuple[int, ...]  # the loss alone, or what is wanted in its place
    batch_values: dict[int, int]  # value id -> index of the batch's leaf
    constants: dict[str, Tensor]
    rows: dict[int, Rows] = field(default_factory=dict)  # by value id

    def written(self, block: Block) -> tuple[str, ...]:
        """The buffers that a block's forward changes."""
        return tuple(block.inputs[i].name for i in self.templates[block.template].writes)

    @property
    def changed(self) -> frozenset[str]:
        """The buffers that forwards change."""
        return frozenset(name for block in self.blocks for name in self.written(block))


def partition(captured: Captured) -> Partition:
    """Cut the graph by its module structure and merge equal blocks into templates."""
    nodes = [n for n in captured.graph.nodes if n.op == "call_function"]
    return _Builder(captured, cut(nodes, captured)).build()


class _Builder:
    """Builds blocks one after the other; holds the tables that grow on the way."""

    def __init__(self, captured: Captured, cuts: list[tuple[str, list[fx.Node]]]) -> None:
        self.captured = captured
        self.cuts = cuts
        self.owner = {node: i for i, (_, nodes) in enumerate(cuts) for node in nodes}
        self.values: dict[fx.Node, BlockValue] = {}
        self.values_by_id: dict[int, BlockValue] = {}
        self.templates: dict[str, Template] = {}
        self.crossing = self._crossing()
        self.reached = given_gradients(captured.graph)

    def _crossing(self) -> list[list[fx.Node]]:
        """Per block, the nodes that later blocks (or the output) read; views give way to their base."""
        crossing: dict[int, dict[fx.Node, None]] = defaultdict(dict)
        for result in results_of(self.captured.graph):
            crossing[self.owner[result]][result] = None
        for node, block in self.owner.items():
            for argument in node.all_input_nodes:
                base = view_base(argument)
                if base in self.owner and self.owner[base] != block:
                    crossing[self.owner[base]][base] = None
            if node.target is SNAPSHOT:  # what is computed again reads it, too
                crossing[block][node] = None
        order = {node: i for i, node in enumerate(self.owner)}
        return [sorted(crossing[i], key=order.__getitem__) for i in range(len(self.cuts))]

    def build(self) -> Partition:
        batch_values = {}
        for name, leaf in self.captured.inputs.items():
            value = self._value(self.captured.placeholder(name), -1, False)
            batch_values[value.id] = leaf
        rows = {}
        for name, given in self.captured.rows.items():
            trained = given.pieces[0] in self.captured.trainable
            rows[self._value(self.captured.placeholder(name), -1, trained).id] = given
        names = _unique([printable(name) or "model" for name, _ in self.cuts])
        blocks = [self._block(i, names[i], nodes) for i, (_, nodes) in enumerate(self.cuts)]
        return Partition(
            blocks=tuple(blocks),
            templates=tuple(self.templates.values()),
            values=tuple(self.values.values()),
            results=tuple(self.values[node].id for node in results_of(self.captured.graph)),
            batch_values=batch_values,
            constants=self.captured.constants,
            rows=rows,
        )

    def _value(self, node: fx.Node, producer: int, requires_grad: bool) -> BlockValue:
        meta: Tensor = node.meta["val"]
        value = BlockValue(
            id=len(self.values),
            name=node.name,
            producer=producer,
            shape=tuple(meta.shape),
            dtype=meta.dtype,
            nbytes=storage_nbytes(meta),
            requires_grad=requires_grad,
        )
        self.values[node] = self.values_by_id[value.id] = value
        return value

    def _block(self, index: int, name: str, nodes: list[fx.Node]) -> Block:
        graph, inputs, writes = self._subgraph(index, nodes)
        kinds = tuple(i.kind for i in inputs)
        grads = tuple(self._needs_grad(i) for i in inputs)
        reached = tuple(node in self.reached for node in self.crossing[index])
        digest = _block_digest(graph, kinds, (*grads, *reached), writes)
        template = self.templates.get(digest)
        if template is None:
            template = self._template(name, graph, kinds, grads, reached, digest, writes)
            self.templates[digest] = template
        outputs = tuple(
            self._value(node, index, grad).id
            for node, grad in zip(self.crossing[index], template.out_grads, strict=True)
        )
        return Block(index, name, template.index, tuple(inputs), outputs)

    def _needs_grad(self, item: Input) -> bool:
        if item.kind == "value":
            return self.values_by_id[item.value].requires_grad
        return item.kind == "weight" and item.name in self.captured.trainable

    def _subgraph(self, index: int, nodes: list[fx.Node]) -> tuple[fx.Graph, list[Input], tuple[int, ...]]:
        """Copy a range of nodes; inputs appear in order of first use, views of inputs are rebuilt. What is
        written becomes further outputs; the last result says into which inputs."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        inputs: list[Input] = []
        placeholders: list[fx.Node] = []
        site: list[int] = []

        def fetch(node: fx.Node) -> fx.Node:
            if node in copies:
                return copies[node]
            if node.op != "placeholder" and (self.owner[node] == index or is_view(node)):
                return put(node)
            before = placeholders[-1] if placeholders else None
            with graph.inserting_after(before) if before else graph.inserting_before(None):
                copies[node] = graph.placeholder(_base_name(node))
            copies[node].target = copies[node].name  # the argument's name, made unique
            copies[node].meta["val"] = node.meta["val"]
            placeholders.append(copies[node])
            inputs.append(self._input(node))
            return copies[node]

        def put(node: fx.Node) -> fx.Node:
            for argument in node.all_input_nodes:
                fetch(argument)
            arguments, keywords = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copy = graph.create_node(node.op, node.target, arguments, keywords, name=_base_name(node))
            copy.meta = dict(node.meta)
            copies[node] = copy
            _relative_site(copy, site)
            return copy

        written: dict[fx.Node, fx.Node] = {}  # by the buffer
        for node in nodes:
            if node.target is WRITE:
                buffer, new = map(fetch, node.args)  # type: ignore[arg-type]
                written[buffer] = new
            elif node not in copies:
                put(node)
        graph.output((*(copies[n] for n in self.crossing[index]), *written.values()))
        graph.eliminate_dead_code()
        pairs = [(n, i) for n, i in zip(placeholders, inputs, strict=True) if n.users or n in written]
        for node in placeholders:
            if not node.users and node not in written:
                graph.erase_node(node)
        places = {node: i for i, (node, _) in enumerate(pairs)}
        items = [Input("rng", site=site[0]) if item.kind == "rng" else item for _, item in pairs]
        return graph, items, tuple(places[buffer] for buffer in written)

    def _input(self, node: fx.Node) -> Input:
        if node.name in self.captured.parameters:
            return Input("weight", name=self.captured.parameters[node.name])
        if node.name in self.captured.buffers:
            return Input("buffer", name=self.captured.buffers[node.name])
        if node.name in self.captured.constants:
            return Input("buffer", name=node.name)
        if node.name == self.captured.rng:
            return Input("rng")
        return Input("value", value=self.values[node].id)

    def _template(
        self,
        name: str,
        graph: fx.Graph,
        kinds: tuple[InputKind, ...],
        grads: tuple[bool, ...],
        reached: tuple[bool, ...],
        digest: str,
        writes: tuple[int, ...],
    ) -> Template:
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        with self.captured.fake_mode:
            examples = tuple(
                torch.empty_strided(
                    n.meta["val"].shape, n.meta["val"].stride(), dtype=n.meta["val"].dtype
                ).requires_grad_(grad)
                for n, grad in zip(placeholders, grads, strict=True)
            )
            outputs = fx.Interpreter(fx.GraphModule({}, graph)).run(*examples)[: len(reached)]
        out_grads = tuple(o.requires_grad and r for o, r in zip(outputs, reached, strict=True))
        results = tuple(o.detach() for o in outputs)
        share = min((n.meta.get(SHARE, 1.0) for n in graph.nodes), default=1.0)
        return Template(
            len(self.templates), name, graph, kinds, examples, results, out_grads, digest, share, writes
        )


def _base_name(node: fx.Node) -> str:
    return re.sub(r"(_\d+)+$", "", node.name.removeprefix("p_model_")) or node.name


def _relative_site(node: fx.Node, first: list[int]) -> None:
    """Number the random calls of a block from 0; ``first`` keeps the site of the block's first one."""
    places = site_of(node.target, node.args)
    if places is not None:
        number = node.args[places[1]]
        assert isinstance(number, int)
        first.append(number)
        node.update_arg(places[1], number - first[0])


def _block_digest(
    graph: fx.Graph, kinds: tuple[InputKind, ...], grads: tuple[bool, ...], writes: tuple[int, ...]
) -> str:
    """Canonical hash of a block: equal digests mean equal computation on equal kinds of inputs."""
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    lines: list[Any] = [kinds, grads, *([writes] if writes else [])]
    for node in graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        line: list[Any] = [node.op, str(node.target) if node.op == "call_function" else "", arguments]
        if node.op == "placeholder":
            value = node.meta["val"]
            line += [tuple(value.shape), value.stride(), str(value.dtype)]
        lines.append(line)
    return hashlib.sha256(repr(lines).encode()).hexdigest()


def _unique(names: list[str]) -> list[str]:
    """Names with a call number where one module is called several times."""
    seen: dict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))
    total = {n: names.count(n) for n in names}
    return [f"{n}#{next(seen[n])}" if total[n] > 1 else n for n in names]
