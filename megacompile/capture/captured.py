"""What capture gives to the stages after it: a flat graph whose nodes know their modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.capture.outputs import Returned, Structure

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


@dataclass(frozen=True)
class Captured:
    """The forward as a graph: every input is a placeholder; the results are the scalar loss alone, or the
    tensors that ``structure`` surrounds in what the forward, or a function of the user's, returned.

    The four dictionaries map placeholder names to: a parameter's first name, a buffer's name, the
    index of a tensor leaf of the batch, a constant tensor. ``rng`` names the int64 [2] seed input;
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

    def placeholder(self, name: str) -> fx.Node:
        node: fx.Node
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.name == name:
                return node
        raise KeyError(name)


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
