"""What capture gives to the stages after it: a flat graph whose nodes know their modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from megacompile.graph.forward_outputs import Returned, Structure

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

    The four dictionaries map placeholder names to: a parameter's first name, a buffer's name, the index of a
    tensor leaf of the batch, a constant tensor. After the batch's leaves come those that ``prologue`` makes
    of it on the host, where the forward needs values of the batch. ``rng`` names the int64 [2] seed input.
    ``outside``: the results are trained on, by a loss outside of the graph. ``trainable`` holds the names of
    the parameters that require a gradient. ``rows`` are, by placeholder, values that the host makes of a
    batch and of parameters. ``blind`` says that the loss is known not to depend on padding at the right, of
    which attention gets no mask. ``returned`` is what the forward returned, where a function of the user's
    made the results of it.
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
            _identical(value, other.constants[name]) for name, value in self.constants.items()
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


def _identical(one: Any, other: Any) -> bool:
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
