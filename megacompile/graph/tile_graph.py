"""What tile rewrites are written in: a copy of the graph, its cut parameters' pieces, marked new nodes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.graph.block_cuts import TILE
from megacompile.graph.captured import Captured, Rows, module_path
from megacompile.graph.fusion_rewriter import copy_graph
from megacompile.graph.pattern_tools import Emitter, aten, is_call, operands, value


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of a parameter, as a placeholder of their own."""

    start: int
    stop: int
    node: fx.Node

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def label(self) -> str:
        return f"[{self.start}:{self.stop}]"


class TileGraph:
    """One copy of a captured graph while what reads cut parameters is being rewritten."""

    def __init__(self, captured: Captured, cuts: Mapping[str, tuple[int, ...]]) -> None:
        self.captured = captured
        self.graph = copy_graph(captured.graph)
        self.pieces: dict[fx.Node, tuple[Piece, ...]] = {}
        self._names: dict[str, str] = {}
        self._rows: dict[str, Rows] = {}
        self._sites = 0
        for node in list(self.graph.nodes):
            name = captured.parameters.get(node.name) if node.op == "placeholder" else None
            if name is not None and name in cuts:
                self.pieces[node] = self._cut(node, name, cuts[name])

    def _cut(self, node: fx.Node, name: str, bounds: tuple[int, ...]) -> tuple[Piece, ...]:
        pieces = []
        whole = value(node)
        assert bounds[0] == 0 and bounds[-1] == whole.shape[0], f"{name} is cut at {bounds}"
        for start, stop in itertools.pairwise(bounds):
            with self.graph.inserting_before(node):
                piece = self.graph.placeholder(f"{node.name}_{start}")
            with self.captured.fake_mode:
                piece.meta["val"] = torch.empty((stop - start, *whole.shape[1:]), dtype=whole.dtype)
            self._names[piece.name] = f"{name}[{start}:{stop}]"
            pieces.append(Piece(start, stop, piece))
        return tuple(pieces)

    def cuts(self, node: fx.Node) -> bool:
        """Return whether a node is a parameter of several pieces."""
        return len(self.pieces.get(node, ())) > 1

    def name_of(self, piece: Piece) -> str:
        """The name of a piece as a parameter."""
        return self._names[piece.node.name]

    def add_rows(self, table: fx.Node, like: Tensor, rows: Rows) -> fx.Node:
        """A new input of the graph: rows of a table in the shape of ``like``."""
        with self.graph.inserting_before(table):
            node = self.graph.placeholder(f"{table.name}_rows")
        with self.captured.fake_mode:
            node.meta["val"] = torch.empty(like.shape, dtype=like.dtype)
        self._rows[node.name] = rows
        return node

    def site(self, node: fx.Node) -> TileEmitter:
        """An emitter of the tiles that take the place of what ``node`` computes, right before it."""
        self._sites += 1
        return TileEmitter(self, node, self._sites)

    def finish(self) -> Captured:
        """The rewritten graph with its tables; what still reads a cut parameter gets it put together."""
        self.graph.eliminate_dead_code()
        for whole, pieces in self.pieces.items():
            for user in list(whole.users):
                user.replace_input_with(whole, self._joined(pieces, user))
        self.graph.eliminate_dead_code()
        for node in list(self.graph.nodes):
            if (
                node.op == "placeholder"
                and not node.users
                and (node in self.pieces or node.name in self._names)
            ):
                self.graph.erase_node(node)
        self.graph.lint()
        left = {n.name for n in self.graph.nodes if n.op == "placeholder"}
        parameters = {**self.captured.parameters, **self._names}
        return replace(
            self.captured,
            graph=self.graph,
            parameters={n: p for n, p in parameters.items() if n in left},
            trainable=self.captured.trainable | self._trainable_pieces(),
            rows=self._rows,
        )

    def _joined(self, pieces: tuple[Piece, ...], user: fx.Node) -> fx.Node:
        if len(pieces) == 1:
            return pieces[0].node
        with self.graph.inserting_before(user):
            emit = Emitter(self.graph, user, self.fake)
            return emit.call(aten.cat.default, [p.node for p in pieces], 0)

    def _trainable_pieces(self) -> set[str]:
        tables = self.captured.parameters, self.captured.trainable
        return {
            self._names[p.node.name]
            for whole, pieces in self.pieces.items()
            if tables[0][whole.name] in tables[1]
            for p in pieces
        }

    @contextlib.contextmanager
    def fake(self) -> Iterator[None]:
        with self.captured.fake_mode, torch.no_grad():
            yield


class TileEmitter(Emitter):
    """Adds calls before one node; what is added within :meth:`tile` belongs to that tile alone."""

    def __init__(self, graph: TileGraph, node: fx.Node, site: int) -> None:
        super().__init__(graph.graph, node, graph.fake)
        self._site = site
        self._tile: tuple[int, str] | None = None

    @contextlib.contextmanager
    def tile(self, label: str) -> Iterator[None]:
        self._tile = self._site, f"{module_path(self.like) or 'model'}{label}"
        try:
            yield
        finally:
            self._tile = None

    def call(self, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.like):
            node = super().call(target, *args, like=like, **kwargs)
        node.meta.pop(TILE, None)
        if self._tile is not None:
            node.meta[TILE] = self._tile
        return node


def is_matmul(node: fx.Node) -> bool:
    """Return whether a node is ``x @ weight``, with a bias or without, over a matrix [inputs, outputs]."""
    if not is_call(node, aten.addmm.default, aten.mm.default, aten.matmul.default) or node.kwargs:
        return False
    *_, x, weight = operands(node)
    return weight not in operands(node)[:-1] and value(weight).ndim == 2 and value(x).ndim >= 2
