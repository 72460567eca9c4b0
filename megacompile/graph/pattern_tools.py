"""Tools of the fusion patterns: matches, the emitter of new nodes, small predicates.

A pattern is a function from a node that could be its anchor to a :class:`Match`, to None (this is
something else), or to a :class:`NearMissError` (this is the thing, but a condition fails). It reads
targets, constants, shapes and dtypes, never the name of a module's class.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

aten = torch.ops.aten
Build = Callable[["Emitter", Sequence[fx.Node]], "fx.Node | tuple[fx.Node, ...]"]


class NearMissError(Exception):
    """A subgraph that is nearly a pattern; the message is the reason why it is left alone."""


@dataclass(frozen=True)
class Match:
    """One subgraph that a fused operator can replace.

    ``nodes`` are in graph order and end with ``root``, whose value is replaced; they read nothing but
    each other and ``inputs``. ``build`` writes the replacement from nodes that stand for the inputs.
    ``fixed`` are positions of inputs for which the operator has no gradient. ``home`` names the place
    in reports; ``views`` are nodes whose shape argument follows the number of rows. ``also`` are inner
    nodes whose values are replaced too: ``build`` then returns one node for the root and one for each.
    ``takes`` are the placements (pattern, home) that this one takes over. ``stays`` allows that others read
    inner values without a gradient: these are computed beside it, again. ``reordered`` says that the
    same operators multiply in another order, which needs no check on random inputs.
    """

    pattern: str
    root: fx.Node
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    build: Build
    home: fx.Node
    fixed: tuple[int, ...] = ()
    views: tuple[fx.Node, ...] = ()
    also: tuple[fx.Node, ...] = ()
    takes: tuple[tuple[str, fx.Node], ...] = ()
    stays: bool = False
    reordered: bool = False

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes whose values are replaced, in the order of what ``build`` returns."""
        return (self.root, *self.also)

    def built(self, emit: Emitter, inputs: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """The replacement of each of ``results``."""
        new = self.build(emit, inputs)
        return (new,) if isinstance(new, fx.Node) else new


Pattern = Callable[[fx.Node], Match | None]


class Emitter:
    """Adds calls to a graph and computes each one's value as it goes, inside ``context``."""

    def __init__(
        self, graph: fx.Graph, like: fx.Node, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.graph = graph
        self.like = like
        self.context = context

    def call(self, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        """A new node; ``like`` gives it its place in the module tree."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in (like or self.like).meta.items() if k != "val"}
        given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.context():
            node.meta["val"] = target(*given, **named)
        return node


def operands(node: Any) -> tuple[Any, ...]:
    """A node's positional arguments, for patterns that check each one by what it calls."""
    found: tuple[Any, ...] = node.args
    return found


def value(node: fx.Node) -> Tensor:
    """The tensor that a node stands for."""
    found: Tensor = node.meta["val"]
    return found


def is_call(node: Any, *targets: Any) -> TypeGuard[fx.Node]:
    """Return whether a node calls one of the operators."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_tensor(node: Any) -> TypeGuard[fx.Node]:
    """Return whether a node stands for one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def is_cast(node: Any) -> TypeGuard[fx.Node]:
    """Return whether a node changes one float dtype into another and does nothing else."""
    if not is_call(node, aten._to_copy.default, aten.type_as.default, aten.to.dtype):
        return False
    if node.target is aten._to_copy.default and set(node.kwargs) - {"dtype"}:
        return False
    given = value(operands(node)[0])
    floating = given.is_floating_point() and value(node).is_floating_point()
    return floating and value(node).shape == given.shape


def source(node: fx.Node) -> fx.Node:
    """Return what an identity (``aten.alias``) shows; the node itself where it is none."""
    while is_call(node, aten.alias.default):
        node = operands(node)[0]
    return node


def only_user(node: fx.Node) -> fx.Node | None:
    """The single node that reads this one."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].op == "call_function" else None


def number(item: Any) -> float | None:
    """A Python number among a node's arguments."""
    return float(item) if isinstance(item, (int, float)) and not isinstance(item, bool) else None


def other(node: fx.Node, one: fx.Node) -> Any:
    """The second operand of a product or sum that reads ``one`` as the other."""
    a, b = operands(node)[:2]
    return b if a is one else a


def scaled(node: Any, target: Any) -> tuple[fx.Node, float] | None:
    """(tensor, number) of ``tensor * number``, ``number + tensor`` and the like."""
    if not is_call(node, target) or len(operands(node)) < 2 or node.kwargs:
        return None
    a, b = operands(node)[:2]
    if number(a) is not None and isinstance(b, fx.Node) and target is not aten.div.Tensor:
        a, b = b, a
    factor = number(b)
    return (a, factor) if isinstance(a, fx.Node) and factor is not None else None


def halves(a: Any, b: Any) -> tuple[fx.Node, set[fx.Node]] | None:
    """(x, the nodes between) where a and b are the first and second half of x's last dimension."""
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return None
    if is_call(a, operator.getitem) and is_call(b, operator.getitem):
        split = operands(a)[0]
        split_in_two = (
            is_call(split, aten.split.Tensor)
            and split is operands(b)[0]
            and (operands(a)[1], operands(b)[1]) == (0, 1)
        )
        if not split_in_two or operands(split)[2:3] not in ((-1,), (value(a).ndim - 1,)):
            return None
        x = operands(split)[0]
        inside = {a, b, split}
    elif is_call(a, aten.slice.Tensor) and is_call(b, aten.slice.Tensor) and operands(a)[0] is operands(b)[0]:
        x, inside = operands(a)[0], {a, b}
        half = value(a).shape[-1]
        if slice_range(a) != (0, half) or slice_range(b) != (half, 2 * half):
            return None
    else:
        return None
    assert isinstance(x, fx.Node)
    whole = value(a).shape == value(b).shape and value(x).shape[-1] == 2 * value(a).shape[-1]
    return (x, inside) if whole else None


def slice_range(node: fx.Node) -> tuple[int, int] | None:
    """(start, end) of a slice of the last dimension; None for any other slice."""
    defaults: tuple[Any, ...] = (None, 0, None, None, 1)
    x, dim, start, _, step = (*operands(node), *defaults[len(operands(node)) :])
    if dim not in (-1, value(x).ndim - 1) or step != 1:
        return None
    begin = start or 0
    return begin, begin + value(node).shape[-1]


def stepped(node: fx.Node) -> tuple[Any, int, int, int]:
    """(x, dimension, start, step) of a slice that goes to the end."""
    x, dim, start, end, step = (*operands(node), 1)[:5]
    whole = end is None or end >= value(x).shape[dim]
    return x, dim % value(x).ndim, start or 0, step if whole else 0


def ordered(nodes: set[fx.Node]) -> tuple[fx.Node, ...]:
    """Nodes in the order of their graph."""
    return tuple(sorted(nodes))


def outside_user(match: Match, graded: Collection[fx.Node]) -> str | None:
    """Say why a value inside a match must stay: the name of what else reads it.

    What ``stays`` may be read beside, where no gradient comes back: not by nodes that are ``graded``.
    """
    inside = set(match.nodes)
    for node in match.nodes:
        for user in node.users:
            shown = node in match.results and match.root < user
            beside = match.stays and user not in graded
            if user not in inside and not shown and not beside:
                return f"{node.name}, which the fused operator would not compute, is also read by {user.name}"
    return None
