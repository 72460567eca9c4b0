"""Partition: the flat graph becomes a chain of blocks; equal blocks share one template.

In: :class:`~megacompile.capture.Captured`. Out: :class:`Partition`. Blocks are consecutive ranges of
the graph, so any dataflow between them (skips, shared values, an encoder read by all decoder layers)
is an edge from an earlier block to a later one. Invariants: no block returns a view of its inputs
(views are rebuilt where they are used); two blocks share a template only if operators, constants,
shapes, dtypes, strides and gradient masks are all equal.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from megacompile.capture import Captured, module_stack

InputKind = Literal["weight", "buffer", "value", "rng"]
_SMALL = 8  # a run of nodes with less than 1/8 of a layer's weights joins its neighbour
_RANDOM = {"dropout": (1, 2), "attention": (5, 11)}  # our operators: positions of (rng, site)


@dataclass(frozen=True)
class Value:
    """A tensor that crosses blocks; ``producer`` is -1 for a leaf of the batch."""

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

    ``examples`` are fake tensors, one per placeholder, with the gradient mask set; ``kinds`` say what
    each placeholder is; ``out_grads`` which outputs carry gradient.
    """

    index: int
    name: str
    graph: fx.Graph
    kinds: tuple[InputKind, ...]
    examples: tuple[Tensor, ...]
    out_grads: tuple[bool, ...]


@dataclass(frozen=True)
class Partition:
    """Blocks in execution order, their templates, and the values between them."""

    blocks: tuple[Block, ...]
    templates: tuple[Template, ...]
    values: tuple[Value, ...]
    loss: int
    batch_values: dict[int, int]  # value id -> index of the batch's leaf
    constants: dict[str, Tensor]

    def consumers(self, value: int) -> tuple[int, ...]:
        return tuple(b.index for b in self.blocks if any(i.value == value for i in b.inputs))


def partition(captured: Captured) -> Partition:
    """Cut the graph by its module structure and merge equal blocks into templates."""
    nodes = [n for n in captured.graph.nodes if n.op == "call_function"]
    cuts = _cut(nodes, captured)
    return _Builder(captured, cuts).build()


def is_view(node: Any) -> bool:
    """Whether a node returns an alias of its first input (or picks one from a list of aliases)."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    target = node.target
    if target in (torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    alias = target._schema.arguments and target._schema.arguments[0].alias_info
    return bool(alias) and not target._schema.is_mutable


def view_base(node: fx.Node) -> fx.Node:
    """The node whose storage a view shows; the node itself where it is no view."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def storage_nbytes(value: Tensor) -> int:
    """Bytes of a dense tensor's storage."""
    return value.untyped_storage().nbytes() if value.layout == torch.strided else 0


# ---- where to cut -------------------------------------------------------------------------------


@dataclass
class _Run:
    """Consecutive nodes of one module call."""

    key: str
    name: str
    nodes: list[fx.Node]
    weights: set[fx.Node]
    layer: bool

    def absorb(self, other: _Run) -> None:
        self.nodes += other.nodes
        self.weights |= other.weights
        if other.layer or _bytes(other.weights) > _bytes(self.weights - other.weights):
            self.name = other.name
        self.layer |= other.layer


def _bytes(weights: set[fx.Node]) -> int:
    return sum(storage_nbytes(w.meta["val"]) for w in weights)


def _cut(nodes: list[fx.Node], captured: Captured) -> list[tuple[str, list[fx.Node]]]:
    """Runs of one layer each; what stands between layers is merged into as few runs as possible."""
    runs: list[_Run] = []
    ancestors = _ancestors_of_layers(nodes)
    for node in nodes:
        key, name, layer = _unit(node, ancestors)
        if not runs or (key and runs[-1].key != key):
            runs.append(_Run(key, name, [], set(), layer))
        runs[-1].nodes.append(node)
        runs[-1].weights |= {view_base(a) for a in node.all_input_nodes if _is_weight(a, captured)}
    layers = [_bytes(r.weights) for r in runs if r.layer]
    limit = max(layers or [_bytes(r.weights) for r in runs] or [0])
    return [(r.name, r.nodes) for r in _merge(runs, limit)]


def _is_weight(node: fx.Node, captured: Captured) -> bool:
    return view_base(node).name in captured.parameters


def _merge(runs: list[_Run], limit: int) -> list[_Run]:
    """Join what is small beside a layer to a neighbour that is no layer of full size itself."""
    merged: list[_Run] = []
    for run in runs:
        full = run.layer and _bytes(run.weights) * _SMALL >= limit
        last = merged[-1] if merged else None
        last_full = last is not None and last.layer and _bytes(last.weights) * _SMALL >= limit
        if last is None or full:
            merged.append(run)
            if last is not None and not last_full and not last.weights and len(merged) > 2:
                merged.pop(-2)
                merged[-2].absorb(last)  # no weights at all: joins the block before it
        elif last_full:
            merged.append(run)
        elif _joins(last, run, limit):
            last.absorb(run)
        else:
            merged.append(run)
    if len(merged) > 1 and not merged[-1].weights:
        last = merged.pop()
        merged[-1].absorb(last)
    return merged


def _joins(last: _Run, run: _Run, limit: int) -> bool:
    sizes = _bytes(last.weights), _bytes(run.weights)
    return min(sizes) * _SMALL < limit or _bytes(last.weights | run.weights) <= limit


_INDEXED = re.compile(r"(^|\.)\d+$")


def _ancestors_of_layers(nodes: list[fx.Node]) -> set[str]:
    """Paths of the modules that contain numbered children, outermost numbering only."""
    ancestors = {""}
    for node in nodes:
        for _, path in module_stack(node):
            if _INDEXED.search(path):
                parts = path.split(".")
                ancestors |= {".".join(parts[:i]) for i in range(len(parts))}
                break
    return ancestors


def _unit(node: fx.Node, ancestors: set[str]) -> tuple[str, str, bool]:
    """(key, name, is a layer) of the module call that a node is counted to."""
    outside = ("", "", False)
    for key, path in module_stack(node):
        if _INDEXED.search(path):
            return key, path, True
        if path not in ancestors:
            return key, path, False
        outside = (key, path, False)
    return outside


# ---- blocks, values and templates ---------------------------------------------------------------


class _Builder:
    """Builds blocks one after the other; holds the tables that grow on the way."""

    def __init__(self, captured: Captured, cuts: list[tuple[str, list[fx.Node]]]) -> None:
        self.captured = captured
        self.cuts = cuts
        self.owner = {node: i for i, (_, nodes) in enumerate(cuts) for node in nodes}
        self.values: dict[fx.Node, Value] = {}
        self.values_by_id: dict[int, Value] = {}
        self.templates: dict[str, Template] = {}
        self.crossing = self._crossing()

    def _crossing(self) -> list[list[fx.Node]]:
        """Per block, the nodes that later blocks (or the output) read; views give way to their base."""
        crossing: dict[int, dict[fx.Node, None]] = defaultdict(dict)
        loss = self._loss_node()
        crossing[self.owner[loss]][loss] = None
        for node, block in self.owner.items():
            for argument in node.all_input_nodes:
                base = view_base(argument)
                if base in self.owner and self.owner[base] != block:
                    crossing[self.owner[base]][base] = None
        order = {node: i for i, node in enumerate(self.owner)}
        return [sorted(crossing[i], key=order.__getitem__) for i in range(len(self.cuts))]

    def _loss_node(self) -> fx.Node:
        output = next(n for n in self.captured.graph.nodes if n.op == "output")
        (loss,) = output.args[0]
        assert isinstance(loss, fx.Node)
        return loss

    def build(self) -> Partition:
        batch_values = {}
        for name, leaf in self.captured.inputs.items():
            value = self._value(self.captured.placeholder(name), -1, False)
            batch_values[value.id] = leaf
        names = _unique([name or "model" for name, _ in self.cuts])
        blocks = [self._block(i, names[i], nodes) for i, (_, nodes) in enumerate(self.cuts)]
        return Partition(
            blocks=tuple(blocks),
            templates=tuple(self.templates.values()),
            values=tuple(self.values.values()),
            loss=self.values[self._loss_node()].id,
            batch_values=batch_values,
            constants=self.captured.constants,
        )

    def _value(self, node: fx.Node, producer: int, requires_grad: bool) -> Value:
        meta: Tensor = node.meta["val"]
        value = Value(
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
        graph, inputs = self._subgraph(index, nodes)
        kinds = tuple(i.kind for i in inputs)
        grads = tuple(self._needs_grad(i) for i in inputs)
        digest = _digest(graph, kinds, grads)
        template = self.templates.get(digest)
        if template is None:
            template = self._template(name, graph, kinds, grads)
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

    def _subgraph(self, index: int, nodes: list[fx.Node]) -> tuple[fx.Graph, list[Input]]:
        """Copy a range of nodes; inputs appear in order of first use, views of inputs are rebuilt."""
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

        for node in nodes:
            if node not in copies:
                put(node)
        graph.output(tuple(copies[n] for n in self.crossing[index]))
        graph.eliminate_dead_code()
        kept = []
        for node, item in zip(placeholders, inputs, strict=True):
            if node.users:
                kept.append(Input("rng", site=site[0]) if item.kind == "rng" else item)
            else:
                graph.erase_node(node)
        return graph, kept

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
        self, name: str, graph: fx.Graph, kinds: tuple[InputKind, ...], grads: tuple[bool, ...]
    ) -> Template:
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        with self.captured.fake_mode:
            examples = tuple(
                torch.empty_strided(
                    n.meta["val"].shape, n.meta["val"].stride(), dtype=n.meta["val"].dtype
                ).requires_grad_(grad)
                for n, grad in zip(placeholders, grads, strict=True)
            )
            outputs = fx.Interpreter(fx.GraphModule({}, graph)).run(*examples)
        out_grads = tuple(bool(o.requires_grad) for o in outputs)
        return Template(len(self.templates), name, graph, kinds, examples, out_grads)


def _base_name(node: fx.Node) -> str:
    return re.sub(r"(_\d+)+$", "", node.name.removeprefix("p_model_")) or node.name


def _relative_site(node: fx.Node, first: list[int]) -> None:
    """Number the random calls of a block from 0; ``first`` keeps the site of the block's first one."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "megacompile":
        return
    for name, (rng, site) in _RANDOM.items():
        if target._schema.name == f"megacompile::{name}" and node.args[rng] is not None:
            number = node.args[site]
            assert isinstance(number, int)
            first.append(number)
            node.update_arg(site, number - first[0])


def _digest(graph: fx.Graph, kinds: tuple[InputKind, ...], grads: tuple[bool, ...]) -> str:
    """Canonical hash of a block: equal digests mean equal computation on equal kinds of inputs."""
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    lines: list[Any] = [kinds, grads]
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
