"""Assign the nodes of a block function's graph to loops over chunks, and find the values that are whole.

In: a graph whose nodes :mod:`~megacompile.blocks.chunk_roles` has noted. Out: :class:`Stages`. Even ones
run operators on whole values once, odd ones are loops. What such an operator or the result reads is whole;
of what a later loop reads again, a value with a product on the way to it is whole, and the rest is derived
again there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from megacompile.blocks.chunk_roles import role
from megacompile.blocks.costs import is_heavy
from megacompile.graph.node_storage import is_view, reached


class Stages:
    """The stage of each node of one graph.

    ``stage`` is the earliest, ``home`` of a local one the latest at which all its readers are served;
    ``whole`` are the local ones that loops write for what comes after them.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes = [n for n in graph.nodes if n.op == "call_function"]
        self.roles = {n: role(n) for n in graph.nodes}
        results: Any = graph.output_node().args[0]
        self.results: list[Any] = list(results)
        self.stage: dict[fx.Node, int] = {}
        self.home: dict[fx.Node, int] = {}
        self.whole: set[fx.Node] = set()
        self._sort()
        self._whole()
        for loop in reversed(self.loops):
            self.sinks(loop)

    @property
    def loops(self) -> range:
        return range(1, max(self.stage.values(), default=0) + 1, 2)

    @property
    def worthwhile(self) -> bool:
        """Return whether any loop has a product."""
        return any(is_heavy(n) for loop in self.loops for n in self._inside(self.sinks(loop), loop))

    def _sort(self) -> None:
        """The earliest stage of each node, then for local ones the latest at which all readers are served."""
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.stage[node] = 0
            elif node.op == "call_function":
                local = self.roles[node] != "mixing"
                self.stage[node] = max([int(local), *(self._after(a, local) for a in node.all_input_nodes)])
        for node in reversed(self.nodes):
            if self.roles[node] == "local":
                latest = [self._served(node, user) for user in node.users]
                self.home[node] = min(latest, default=self.stage[node])

    def _after(self, argument: fx.Node, local: bool) -> int:
        at = self.stage[argument]
        if self.roles[argument] == "local":
            return at if local else at + 1
        if self.roles[argument] == "sum":
            return at + 2 if local else at + 1
        return at + 1 if local else at

    def _served(self, node: fx.Node, user: fx.Node) -> int:
        if user.op == "output":
            return self.stage[node]
        if self.roles[user] == "local":
            return self.home[user]
        return self.stage[user] - (self.roles[user] == "mixing")

    def _whole(self) -> None:
        for node in self.nodes:
            if self.roles[node] == "mixing":
                for argument in node.all_input_nodes:
                    self._make_whole(argument)
        for node in self.results:
            if isinstance(node, fx.Node):
                self._make_whole(node)

    def _make_whole(self, node: fx.Node) -> None:
        """A local view is rebuilt from its base, which is whole instead."""
        while self.roles[node] == "local" and is_view(node):
            node = node.all_input_nodes[0]
        if self.roles[node] == "local" and isinstance(node.meta["val"], Tensor):
            self.whole.add(node)

    def _is_whole(self, node: fx.Node) -> bool:
        return self.roles[node] != "local" or node in self.whole

    def _derived_cheaply(self, node: fx.Node) -> bool:
        """Return whether no product is on the way to a local node from what is whole."""
        seen, pending = set[fx.Node](), [node]
        while pending:
            current = pending.pop()
            if current in seen or self._is_whole(current):
                continue
            seen.add(current)
            if is_heavy(current):
                return False
            pending += current.all_input_nodes
        return True

    def sinks(self, loop: int) -> list[fx.Node]:
        """Return the results of a loop: whole values and sums; values of earlier loops that it reads become
        whole."""
        sinks = [n for n in self.nodes if self._ends_in(n, loop)]

        def onward(node: fx.Node) -> list[fx.Node]:
            derived = []
            for argument in (a for a in node.all_input_nodes if self._in_loop(a, loop)):
                if self._stays(argument, loop):
                    self.whole.add(argument)
                else:
                    derived.append(argument)
            return derived

        reached(sinks, onward)
        return sinks

    def _stays(self, node: fx.Node, loop: int) -> bool:
        """Return whether an earlier loop leaves a node whole for this one, as that costs less than to derive
        it."""
        made = self.home[node] < loop and isinstance(node.meta["val"], Tensor) and not is_view(node)
        return made and not self._derived_cheaply(node)

    def before(self, node: fx.Node, loop: int) -> bool:
        """Return whether a local node is whole when a loop begins."""
        return node in self.whole and self.home[node] < loop

    def _in_loop(self, node: fx.Node, loop: int) -> bool:
        return self.roles[node] == "local" and not self.before(node, loop)

    def _ends_in(self, node: fx.Node, loop: int) -> bool:
        if self.roles[node] == "sum":
            return self.stage[node] == loop
        return node in self.whole and self.home[node] == loop

    def _inside(self, sinks: list[fx.Node], loop: int) -> set[fx.Node]:
        """Return the nodes that a loop computes for its sinks, these included."""
        return reached(sinks, lambda n: [a for a in n.all_input_nodes if self._in_loop(a, loop)])
