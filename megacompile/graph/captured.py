"""A captured graph: its outputs, its nodes' modules, which values share storage, where blocks may end."""

from __future__ import annotations

import functools
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from megacompile.errors import CaptureError

# ------------------------------------------------------------------------------------------------------------
# What nodes of a graph share storage: views, their bases, and bytes; and which are reached from others.


def is_view(node: Any) -> bool:
    """Return whether a node returns an alias of its first input (or picks one from a list of aliases)."""
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


def reached(starts: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes that are reached from ``starts``, these included; ``onward`` is asked about each once."""
    found: set[fx.Node] = set()
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += onward(node)
    return found


WRITE = torch.ops.aten.copy_.default
"""Writes a new value into a buffer of the model: all that writes in a captured graph."""
BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
"""By a batch's own statistics; (result, mean, 1 / deviation, new running mean, new running variance)."""


def written_buffers(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a graph that it writes, each once."""
    return [n.args[0] for n in graph.nodes if n.target is WRITE]


# ------------------------------------------------------------------------------------------------------------
# What is captured in the place of the loss: outputs of the forward, tensors and the structure around them.
#
# In: what a forward returned, or what a function of the user's made of it. Out: its tensors, which a program
# computes, and :class:`Structure`, which puts their values back into tuples, dicts and a model's own classes.


OutputsFn = Callable[[Any, Any], Any]
"""(what the forward returned, the batch) -> tensors in tuples, lists and dicts."""
_PLAIN = (bool, int, float, complex, str, torch.dtype, type(None))
_HERE = object()  # where a tensor stands


def all_outputs(outputs: Any, batch: Any) -> Any:
    """Return the forward's outputs, as they are."""
    return outputs


@dataclass(frozen=True)
class Structure:
    """The structure that surrounds the tensors of an output: containers, numbers, None."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def around(self, tensors: Sequence[Tensor]) -> Any:
        """The output with these tensors in it."""
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if x is _HERE else x for x in self.leaves], self.spec)

    @property
    def names(self) -> list[str]:
        """Return how each tensor is reached in the output: ``['logits']``."""
        numbered = pytree.tree_unflatten(range(len(self.leaves)), self.spec)
        found = pytree.tree_flatten_with_path(numbered)[0]
        return [pytree.keystr(path) for path, i in found if self.leaves[i] is _HERE]


@dataclass(frozen=True)
class Returned:
    """The outputs of a forward: the shape and dtype of each tensor, and what surrounds them."""

    structure: Structure
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]


def returned(outputs: Any) -> Returned | None:
    """Describe the outputs of a forward; None where they hold something else than tensors and plain
    values."""
    try:
        tensors, structure = split(outputs)
    except CaptureError:
        return None
    return Returned(structure, tuple((x.shape, x.dtype) for x in tensors))


def split(outputs: Any, *, stays: bool = False) -> tuple[list[Tensor], Structure]:
    """The tensors of an output and what surrounds them; it may be anything in what ``stays`` within."""
    leaves, spec = pytree.tree_flatten(outputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if not (stays or isinstance(leaf, (Tensor, *_PLAIN))):
            raise CaptureError(
                f"The output holds a {type(leaf).__name__}, which a program cannot give back: give predict "
                "outputs=, a function that returns tensors in tuples, lists and dicts."
            )
    if not tensors:
        raise CaptureError("The output holds no tensor: return at least one.")
    return tensors, Structure(spec, tuple(_HERE if isinstance(x, Tensor) else x for x in leaves))


def identity(function: Callable[..., Any]) -> Any:
    """Return what a function computes with, the same for one that is written inline and made again and again:
    code, defaults, what it closes over."""
    if isinstance(function, functools.partial):
        return identity(function.func), function.args, function.keywords
    if isinstance(function, types.MethodType):
        return identity(function.__func__), function.__self__
    if not isinstance(function, types.FunctionType):
        return function
    closed = [cell.cell_contents for cell in function.__closure__ or ()]
    return function.__code__, function.__defaults__, function.__kwdefaults__, closed


def copy_results(graph: fx.Graph, mode: FakeTensorMode, *, shared: bool) -> None:
    """Let each result be dense, in memory of its own: an input, or a view of something larger, is copied.

    So is, where ``shared``, what something else in the graph reads: no other gradient is added to a result's.
    """
    output = graph.output_node()
    dense: dict[str, Any] = {"memory_format": torch.contiguous_format}
    for node in dict.fromkeys(output.all_input_nodes):
        own = node.op != "placeholder" and not is_view(node) and not (shared and len(node.users) > 1)
        if not own or not node.meta["val"].is_contiguous():
            before = output if node.op == "placeholder" else node.next
            with graph.inserting_before(before):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,), dense)
            with mode:
                copy.meta = {**node.meta, "val": node.meta["val"].clone(**dense)}
            output.replace_input_with(node, copy)


# ------------------------------------------------------------------------------------------------------------
# What capture gives to the stages after it: a flat graph whose nodes know their modules.


_WRAPPED = "model"  # the attribute under which capture wraps the user's module


@dataclass(frozen=True)
class Rows:
    """A value that the host gathers: of one table, the row of each id of a batch.

    ``pieces`` name the table's parameters, whose rows end at ``stops``. ``find`` computes the ids, int64 of
    the value's shape without its last dimension, from the batch's tensor leaves on the host; ``source``
    says how. The row ``padding`` gets no gradient; -1: each does.
    """

    pieces: tuple[str, ...]
    stops: tuple[int, ...]
    padding: int
    source: str
    find: Callable[[Sequence[Tensor]], Tensor] = field(compare=False)


Prologue = Callable[[Sequence[Any], int], list[Tensor] | None]
"""(a batch's leaves, the seed of its random numbers) -> what the host makes of them for a program; None where
the graph may be another."""


@dataclass(frozen=True)
class Captured:
    """The forward as a graph: every input is a placeholder; the results are the scalar loss alone, or the
    tensors that ``structure`` surrounds in what the forward, or a function of the user's, returned. All that
    writes are new values of buffers (:data:`WRITE`).

    The four dictionaries map placeholder names to: a parameter's first name, a buffer's name, the
    index of a tensor leaf of the batch, a constant tensor. After the batch's leaves come those that
    ``prologue`` makes of it on the host, where the forward needs values of the batch. ``rng`` names the
    int64 [2] seed input;
    ``outside`` says that the results are trained on, by a loss that the graph does not hold;
    ``trainable`` holds the names of the parameters that require a gradient. ``rows`` are, by placeholder,
    values that the host makes of a batch and of parameters. ``blind`` says that the loss is known not to
    depend on padding at the right, of which attention gets no mask. ``returned`` is what the forward
    returned, where a function of the user's made the results of it.
    """

    graph: fx.Graph
    parameters: dict[str, str]
    buffers: dict[str, str]
    inputs: dict[str, int]
    constants: dict[str, Tensor]
    rng: str
    trainable: frozenset[str]
    fake_mode: FakeTensorMode
    structure: Structure
    rows: Mapping[str, Rows] = field(default_factory=dict)
    outside: bool = False
    blind: bool = False
    returned: Returned | None = None
    prologue: Prologue | None = None

    def computes_as(self, other: Captured) -> bool:
        """Return whether another capture of the same model is the same graph, of inputs at the same places
        and of the same forms, so that one program serves both."""
        compared_apart = {"graph", "constants", "fake_mode", "rows", "prologue"}
        names = [of.name for of in fields(self) if of.name not in compared_apart]
        if any(getattr(self, name) != getattr(other, name) for name in names):
            return False
        if self.constants.keys() != other.constants.keys() or not all(
            _same(value, other.constants[name]) for name, value in self.constants.items()
        ):
            return False
        mine, others = (list(map(_described, of.graph.nodes)) for of in (self, other))
        return mine == others

    def placeholder(self, name: str) -> fx.Node:
        node: fx.Node
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.name == name:
                return node
        raise KeyError(name)


def _same(one: Any, other: Any) -> bool:
    """Return whether two constants are equal, bit by bit."""
    alike = all(isinstance(x, Tensor) for x in (one, other)) and one.dtype == other.dtype
    return one is other or (alike and torch.equal(one, other))


def _described(node: fx.Node) -> tuple[Any, ...]:
    """A node with its arguments, and the form of its value."""
    values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    forms = [(tuple(v.shape), v.stride(), v.dtype) for v in values]
    return node.op, node.name, node.target, repr((node.args, node.kwargs)), forms, list(module_stack(node))


def results_of(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The outputs of a captured graph: the loss alone, or what is wanted in its place."""
    results: tuple[fx.Node, ...] = tuple(graph.output_node().args[0])  # type: ignore[arg-type]
    return results


def given_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that the loss, or any result, has a gradient for, should they require one.

    ``detach`` hands none on.
    """
    found = {node for node in results_of(graph) if _differentiable(node)}
    for node in reversed(graph.nodes):
        if node in found and node.target is not torch.ops.aten.detach.default:
            found.update(n for n in node.all_input_nodes if _differentiable(n))
    return found


def _differentiable(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()


def strip(name: str) -> str:
    """A name in the traced wrapper as the user's model has it."""
    return name.removeprefix(_WRAPPED + ".")


def module_stack(node: fx.Node) -> Iterator[tuple[str, str]]:
    """(call key, module path) of the modules around a node, outermost first, without our wrapper.

    The key differs between two calls of one module, the path does not.
    """
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        if path.startswith(_WRAPPED + ".") or path == _WRAPPED:
            yield key, strip(path) if path != _WRAPPED else ""


def module_path(node: fx.Node) -> str:
    """The path of the innermost module that a node belongs to; "" for the model itself."""
    return list(module_stack(node))[-1][1] if list(module_stack(node)) else ""


# ------------------------------------------------------------------------------------------------------------
# Where to cut: consecutive runs of a graph's nodes, one per layer, for the partition to make blocks of.
#
# In: the nodes of a captured graph in order. Out: named runs. A layer is a numbered module outside of any
# other one; what stands between layers (embedding, rotary, norm, head and loss) is merged into as few runs as
# its weights allow.


TILE = "megacompile_tile"
"""Key of a node's meta: (number of the site, name) of the tile that it belongs to."""
SHARE = "megacompile_share"
"""Key of a node's meta: the part of its rows that a grouped product is expected to compute."""
_SMALL = 8  # a run of nodes with less than 1/8 of a layer's weights joins its neighbour


@dataclass
class _Run:
    """Consecutive nodes of one module call."""

    key: str
    name: str
    nodes: list[fx.Node]
    weights: set[fx.Node]
    layer: bool
    tile: bool = False

    def absorb(self, other: _Run) -> None:
        self.nodes += other.nodes
        self.weights |= other.weights
        heavier = _bytes(other.weights) > _bytes(self.weights - other.weights)
        if heavier or (other.layer and not self.layer):
            self.name = other.name
        self.layer |= other.layer


def _bytes(weights: set[fx.Node]) -> int:
    return sum(storage_nbytes(w.meta["val"]) for w in weights)


def cut(nodes: list[fx.Node], captured: Captured) -> list[tuple[str, list[fx.Node]]]:
    """(name, nodes) of runs of one layer each, with as few runs between layers as possible."""
    runs: list[_Run] = []
    ancestors = _ancestors_of_layers(nodes)
    for node in nodes:
        key, name, layer = _unit(node, ancestors)
        tile = TILE in node.meta
        if tile:
            (site, name), layer = node.meta[TILE], False
            key = f"tile {site} {name}"
        if not runs or runs[-1].tile != tile or (key and runs[-1].key != key):
            runs.append(_Run(key, name, [], set(), layer, tile))
        runs[-1].nodes.append(node)
        runs[-1].weights |= {view_base(a) for a in node.all_input_nodes if _is_weight(a, captured)}
    layers = [_bytes(r.weights) for r in runs if r.layer]
    limit = max(layers or [_bytes(r.weights) for r in runs] or [0])
    return [(r.name, r.nodes) for r in _merge(runs, limit)]


def _is_weight(node: fx.Node, captured: Captured) -> bool:
    return view_base(node).name in captured.parameters


def _merge(runs: list[_Run], limit: int) -> list[_Run]:
    """Join what is small beside a layer to a neighbour that is no layer of full size itself, nor a tile."""

    def full(run: _Run) -> bool:
        return run.tile or (run.layer and _bytes(run.weights) * _SMALL >= limit)

    merged: list[_Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last is None or full(last) or not (full(run) or _joins(last, run, limit)):
            merged.append(run)
        elif not full(run):
            last.absorb(run)
        else:
            merged.append(run)
            if not last.weights and len(merged) > 2 and not merged[-3].tile:
                merged.pop(-2)
                merged[-2].absorb(last)  # no weights at all: joins the block before it
    if len(merged) > 1 and not merged[-1].weights and not any(r.tile for r in merged[-2:]):
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
