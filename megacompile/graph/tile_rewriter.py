"""Tile: weights that are too large to be on the device whole become several parameters of rows."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.graph.captured import SHARE, TILE, Captured, Rows, module_path
from megacompile.graph.fusion_rewriter import NearMiss, copy_graph, fuse
from megacompile.graph.glu_patterns import is_product
from megacompile.graph.pattern_tools import Emitter, aten, is_call, operands, value
from megacompile.kernels._triton import wide
from megacompile.kernels.linear_cross_entropy import add_product_, head_backward_flops, head_flops, tiles
from megacompile.kernels.registry import OpPass, OpSpec, called, declare

# ------------------------------------------------------------------------------------------------------------
# What tile rewrites are written in: a copy of the graph, its cut parameters' pieces, marked new nodes.


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


# ------------------------------------------------------------------------------------------------------------
# Tiles of a head with its cross-entropy: one range of the vocabulary each, the logits never whole.
#
# Every tile gives three numbers per token, the log-sum-exp of its logits, the logit at the label, and the
# logits' sum; what follows the last tile adds them up to the loss of the fused operator that this stage
# starts from. All of it is ordinary autograd, so a tile needs nothing of the others in its backward.


FUSED = torch.ops.megacompile.linear_cross_entropy.default
_WORKSPACE = 256 << 20
_COLUMNS = 512  # of logits at once at least: narrower products are slow
_LSE, _TARGET, _MASS = 0, 1, 2


def tile_head(graph: TileGraph, node: fx.Node) -> None:
    """Replace a fused head over a cut weight; ``node`` returns (loss per token, statistics)."""
    hidden, weight, bias, labels, ignored, smoothing, softcap, _ = operands(node)
    emit = graph.site(node)
    pieces = graph.pieces[weight]
    biases = graph.pieces.get(bias) if bias is not None else None
    columns = _COLUMNS * value(labels).shape[0] * value(hidden).element_size()
    parts, local = [], labels
    for i, piece in enumerate(pieces):
        with emit.tile(piece.label):
            chunk = min(_WORKSPACE, max(columns, value(piece.node).nbytes // 4))
            own = biases[i].node if biases else bias
            if own is bias and bias is not None:
                own = emit.call(aten.slice.Tensor, bias, 0, piece.start, piece.stop)
            found = emit.call(HEAD_TILE, hidden, piece.node, own, local, softcap, chunk)
            parts.append(emit.call(operator.getitem, found, 0))
            if i + 1 < len(pieces):
                local = emit.call(aten.sub.Tensor, local, piece.rows)
    loss = _combine(emit, parts, labels, ignored, smoothing, pieces[-1].stop)
    for user in list(node.users):
        assert is_call(user, operator.getitem) and operands(user)[1] == 0
        user.replace_all_uses_with(loss)
        graph.graph.erase_node(user)
    graph.graph.erase_node(node)


def _combine(
    emit: TileEmitter, parts: list[fx.Node], labels: fx.Node, ignored: int, smoothing: float, vocabulary: int
) -> fx.Node:
    """The loss per token: 0 for the ignored label, NaN for one outside of the vocabulary."""
    stacked = emit.call(aten.stack.default, parts)

    def term(i: int) -> fx.Node:
        return emit.call(aten.select.int, stacked, 1, i)

    lse = emit.call(aten.logsumexp.default, term(_LSE), [0])
    target = emit.call(aten.sum.dim_IntList, term(_TARGET), [0])
    if smoothing:
        target = emit.call(aten.mul.Tensor, target, 1.0 - smoothing)
        mass = emit.call(aten.sum.dim_IntList, term(_MASS), [0])
        target = emit.call(aten.add.Tensor, target, emit.call(aten.mul.Tensor, mass, smoothing / vocabulary))
    loss = emit.call(aten.sub.Tensor, lse, target)
    below = emit.call(aten.lt.Scalar, labels, 0)
    unknown = emit.call(aten.logical_or.default, below, emit.call(aten.ge.Scalar, labels, vocabulary))
    loss = emit.call(aten.masked_fill.Scalar, loss, unknown, float("nan"))
    return emit.call(aten.masked_fill.Scalar, loss, emit.call(aten.eq.Scalar, labels, ignored), 0.0)


# ------------------------------------------------------------------------------------------------------------
# Tiles of a bank of experts: some experts each, one after the other, on the rows sorted by expert.
#
# A bank is the part of the graph between the grouped products over stacked weights [E, ...] that share one
# tensor of offsets. A tile moves its experts' rows to the front, runs the same operators on them, and adds
# the result to the sum at the rows' old places. The number of rows is known on the device alone, so shapes
# stay those of all rows, and the products skip the rows behind the last offset.


_ROWWISE = {
    aten.split.Tensor, aten.chunk.default, aten.slice.Tensor, aten._to_copy.default, aten.clone.default,
    aten.alias.default, operator.getitem,
}  # fmt: skip


@dataclass(frozen=True)
class Bank:
    """Grouped products that share ``offsets``, and ``inside``, all nodes from the first to the last.

    ``rows`` are the nodes outside whose first dimension is the sorted rows, ``tables`` parameters from
    which rows are gathered.
    """

    offsets: fx.Node
    weights: tuple[fx.Node, ...]
    inside: tuple[fx.Node, ...]
    rows: tuple[fx.Node, ...]
    tables: tuple[fx.Node, ...]

    @property
    def result(self) -> fx.Node:
        return self.inside[-1]


def banks(graph: fx.Graph) -> list[Bank]:
    """All banks of a graph whose weights are placeholders and whose inner operators act row by row."""
    by_offsets: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if is_product(node):
            by_offsets.setdefault(operands(node)[2], []).append(node)
    found = (_bank(offsets, products) for offsets, products in by_offsets.items())
    return [bank for bank in found if bank is not None]


def _bank(offsets: fx.Node, products: list[fx.Node]) -> Bank | None:
    weights = tuple(dict.fromkeys(_stacked(operands(p)[1]) for p in products))
    inside = _between(products)
    count = value(products[0]).shape[0]
    rows: dict[fx.Node, None] = {}
    tables: dict[fx.Node, None] = {}
    for node in inside:
        if node is not inside[-1] and any(u not in inside for u in node.users):
            return None
        given = [a for a in node.all_input_nodes if a not in inside]
        if is_product(node):
            given = [a for a in given if a is operands(node)[0]]
        elif _gathers(node):
            tables[operands(node)[0]] = None
            given = [operands(node)[1][0]]
        elif not _acts_by_row(node):
            return None
        if any(value(a).ndim not in (1, 2) or value(a).shape[0] != count for a in given):
            return None
        rows.update(dict.fromkeys(given))
    if any(w.op != "placeholder" for w in (*weights, *tables)):
        return None
    return Bank(offsets, weights, inside, tuple(rows), tuple(tables))


def _stacked(node: fx.Node) -> fx.Node:
    """The stacked weights behind a transposition."""
    return operands(node)[0] if is_call(node, aten.transpose.int) else node


def _between(products: list[fx.Node]) -> tuple[fx.Node, ...]:
    """The products, what lies on the ways between them, and rows gathered from a table on the way."""
    last = products[-1]
    below = set(products)
    order = list(_reachable(products[0], last))
    for node in order:
        if any(a in below for a in node.all_input_nodes):
            below.add(node)
    above = {last}
    for node in reversed(order):
        if node in below and any(u in above for u in node.users):
            above.add(node)
    inside = {n for n in order if n in above}
    inside |= {a for n in inside for a in n.all_input_nodes if a not in inside and _gathers(a)}
    return tuple(sorted(inside))


def _reachable(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first
    while True:
        yield node
        if node is last:
            return
        node = node.next


def _gathers(node: fx.Node) -> bool:
    """``table[rows]``, one row of a parameter for each sorted row."""
    if not is_call(node, aten.index.Tensor):
        return False
    table, indices = operands(node)
    return table.op == "placeholder" and len(indices) == 1 and value(indices[0]).ndim == 1


def _acts_by_row(node: fx.Node) -> bool:
    """Return whether row i of the result is computed from row i of the tensors among the arguments."""
    target = node.target
    if target in _ROWWISE:
        return not is_call(node, *_ROWWISE - {operator.getitem}) or _keeps_rows(node)
    call = called(target)
    pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    pointwise |= call is not None and call.spec.along == "elements"
    return pointwise and all(value(a).ndim == 2 for a in node.all_input_nodes)


def _keeps_rows(node: fx.Node) -> bool:
    """Return whether a split, slice or copy leaves the first dimension alone."""
    args = operands(node)
    rank = value(args[0]).ndim
    if is_call(node, aten.slice.Tensor):
        return (args[1] if len(args) > 1 else 0) % rank != 0
    if is_call(node, aten.split.Tensor, aten.chunk.default):
        return (args[2] if len(args) > 2 else 0) % rank != 0
    return True


def tile_bank(graph: TileGraph, bank: Bank) -> None:
    """Replace a bank over cut weights by tiles and the sum of their results."""
    emit = graph.site(bank.result)
    pieces = [graph.pieces[w] for w in bank.weights]
    experts = pieces[0][-1].stop
    zero = emit.call(aten.new_zeros.default, bank.offsets, [1])
    bounds = emit.call(aten.cat.default, [zero, bank.offsets])
    ranges = [
        emit.call(aten.clone.default, emit.call(aten.slice.Tensor, bounds, 0, p.start, p.stop + 1))
        for p in pieces[0]
    ]
    total: fx.Node | None = None
    for i, piece in enumerate(pieces[0]):
        own = {w: p[i].node for w, p in zip(bank.weights, pieces, strict=True)}
        with emit.tile(piece.label):
            result = _tile(emit, bank, own, ranges[i], piece.rows / experts)
            total = result if total is None else emit.call(aten.add.Tensor, total, result)
    assert total is not None
    bank.result.replace_all_uses_with(total)
    for node in reversed(bank.inside):
        graph.graph.erase_node(node)


def _tile(
    emit: TileEmitter, bank: Bank, own: dict[fx.Node, fx.Node], bounds: fx.Node, share: float
) -> fx.Node:
    """The bank's operators on the rows of one range of experts; ``bounds`` are theirs, the start first."""
    start = emit.call(aten.slice.Tensor, bounds, 0, 0, 1)
    offsets = emit.call(aten.sub.Tensor, emit.call(aten.slice.Tensor, bounds, 0, 1), start)
    count = emit.call(aten.slice.Tensor, offsets, 0, -1)
    origin = emit.call(aten.zeros_like.default, start)
    copies: dict[fx.Node, fx.Node] = {bank.offsets: offsets, **{t: t for t in bank.tables}}
    for node in bank.rows:
        copies[node] = emit.call(TAKE_ROWS, node, start, count)
    for node in bank.inside:
        if is_product(node):
            _transposed(emit, operands(node)[1], own, copies)
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        copy = emit.call(node.target, *args, **kwargs, like=node)
        if is_product(node):
            copy.meta[SHARE] = share
        if _gathers(node):  # the gradient of rows that belong to no expert here is undefined
            copy = emit.call(TAKE_ROWS, copy, origin, count)
        copies[node] = copy
    return emit.call(PUT_ROWS, copies[bank.result], start, count)


def _transposed(
    emit: TileEmitter, weight: fx.Node, own: dict[fx.Node, fx.Node], copies: dict[fx.Node, fx.Node]
) -> None:
    """A product's weight as this tile's own: the piece, transposed as the whole is."""
    piece = own[_stacked(weight)]
    copies[weight] = (
        piece if weight.op == "placeholder" else emit.call(aten.transpose.int, piece, *operands(weight)[1:])
    )


# ------------------------------------------------------------------------------------------------------------
# Rows of a table that the host gathers: a lookup by ids of the batch needs no table on the device.
#
# In: a graph whose tables are cut, and an embedding. Where the ids are computed from the batch's leaves
# alone, the host knows them when a step begins. Then the looked-up rows become an input of the graph,
# :class:`~megacompile.graph.captured.Rows`, in the shape of the embedding's result; their gradient leaves the
# device as it is, and the host adds it into the table's. A copy of the rows makes them a block of their own,
# so that one block alone reads them and gives their gradient.


FEWER = 2
"""A table must have so many times the rows that a batch looks up."""
_MOST_NODES = 64  # that compute ids: more would be no look at a batch, but work


def gathers(node: fx.Node, captured: Captured) -> bool:
    """Return whether a node is an embedding whose rows the host can gather, and few enough of them."""
    if not is_call(node, aten.embedding.default):
        return False
    table, ids, *rest = operands(node)
    if table.name not in captured.parameters or any(rest[1:]) or value(table).ndim != 2:
        return False
    return FEWER * value(ids).numel() <= value(table).shape[0] and _on_host(ids, captured) is not None


def gather_rows(graph: TileGraph, node: fx.Node) -> None:
    """Replace an embedding that :func:`gathers` by rows that come from the host."""
    table, ids, *rest = operands(node)
    pieces = graph.pieces[table]
    nodes = _on_host(ids, graph.captured)
    assert nodes is not None
    source, find = _function(nodes, ids, graph.captured)
    rows = Rows(
        tuple(graph.name_of(p) for p in pieces),
        tuple(p.stop for p in pieces),
        rest[0] if rest and rest[0] >= 0 else -1,
        source,
        find,
    )
    given = graph.add_rows(table, value(node), rows)
    emit = graph.site(node)
    with emit.tile("[ids]"):
        copied = emit.call(aten.clone.default, given)
    node.replace_all_uses_with(copied)
    graph.graph.erase_node(node)


def _on_host(ids: fx.Node, captured: Captured) -> list[fx.Node] | None:
    """The nodes that compute ``ids`` in order, if they read leaves of the batch alone; leaves are not among
    them."""
    found: dict[fx.Node, None] = {}
    waiting, leaves = [ids], 0
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        if node.op == "placeholder":
            if node.name not in captured.inputs:
                return None
            leaves += 1
        else:
            target = node.target
            plain = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
            if not (plain or target is operator.getitem) or len(found) == _MOST_NODES:
                return None
            found[node] = None
            waiting += node.all_input_nodes
    return sorted(found) if leaves else None


def _function(
    nodes: Sequence[fx.Node], ids: fx.Node, captured: Captured
) -> tuple[str, Callable[[Sequence[Tensor]], Tensor]]:
    """(source, function): ``ids`` from the leaves of a batch, which may be on any device."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    leaves = {a: None for n in (*nodes, ids) for a in (*n.all_input_nodes, n) if a.op == "placeholder"}
    for leaf in leaves:
        copies[leaf] = graph.placeholder(leaf.name)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[ids])
    module = fx.GraphModule({}, graph)
    places = [captured.inputs[leaf.name] for leaf in leaves]

    def find(batch: Sequence[Tensor]) -> Tensor:
        found: Tensor = module(*(batch[i].cpu() for i in places))
        return found

    return str(graph).strip(), find


# ------------------------------------------------------------------------------------------------------------
# Tile: weights that are too large to be on the device whole become several parameters of rows each.
#
# In: :class:`~megacompile.graph.captured.Captured` and the rows at which parameters are cut. Out: the same
# with a rewritten copy of the graph, in which every piece is a parameter of its own, ``name[start:stop]``,
# and what it takes part in is marked, so that partition makes a block of it: an embedding looks its tokens up
# piece by piece, or leaves that to the host (``rows``), a linear layer computes some of its outputs, a
# product with [inputs, outputs] uses some of its inputs, a head adds to the loss what one range of the
# vocabulary does (``head``), a bank computes some of its experts (``experts``). Anything else that reads a
# cut parameter is given the pieces put together, which is right for every operator and saves nothing.
# Invariant: no tile reads more than one piece of a parameter.


Cuts = Mapping[str, tuple[int, ...]]
"""By parameter's name, the rows at which it is cut: 0, ..., its number of rows. What is cut at these two
alone stays whole, as a parameter whose rows the host may gather."""


@dataclass(frozen=True)
class Tiled:
    """The rewritten graph; ``left`` says which heads over cut weights keep their logits whole and why."""

    captured: Captured
    cuts: Cuts
    left: tuple[NearMiss, ...] = ()


def tile(captured: Captured, cuts: Cuts, *, gather: bool = False) -> Tiled:
    """Replace the cut parameters by their pieces; ``captured`` itself is left as it is.

    ``gather`` allows the host to gather rows of cut tables.
    """
    if not set(cuts) & set(captured.parameters.values()):
        return Tiled(captured, {})
    cut = {p for p, name in captured.parameters.items() if len(cuts.get(name, ())) > 2}
    headed, left = _with_fused_heads(captured, cut)
    graph = TileGraph(headed, cuts)
    for node in list(graph.graph.nodes):
        if gather and gathers(node, headed) and operands(node)[0] in graph.pieces:
            gather_rows(graph, node)
    for bank in banks(graph.graph):
        if all(graph.cuts(w) for w in bank.weights):
            tile_bank(graph, bank)
    for node in list(graph.graph.nodes):
        if is_call(node, FUSED) and graph.cuts(operands(node)[1]):
            tile_head(graph, node)
        elif is_call(node, aten.embedding.default) and graph.cuts(operands(node)[0]):
            _tile_embedding(graph, node)
        elif is_call(node, aten.linear.default) and graph.cuts(operands(node)[1]):
            _tile_linear(graph, node)
        elif is_matmul(node) and graph.cuts(operands(node)[-1]):
            _tile_product(graph, node)
    return Tiled(graph.finish(), cuts, left)


def _with_fused_heads(captured: Captured, cut: set[str]) -> tuple[Captured, tuple[NearMiss, ...]]:
    """Heads over cut weights as the fused operator, whose arguments say all that their tiles must know."""
    fused, report = fuse(captured, {"linear_cross_entropy": True})
    heads = [n for n in fused.graph.nodes if is_call(n, FUSED)]
    if any(operands(n)[1].name in cut for n in heads):
        return fused, report.near_misses
    return captured, report.near_misses


def is_matmul(node: fx.Node) -> bool:
    """Return whether a node is ``x @ weight``, with a bias or without, over a matrix [inputs, outputs]."""
    if not is_call(node, aten.addmm.default, aten.mm.default, aten.matmul.default) or node.kwargs:
        return False
    *_, x, weight = operands(node)
    return weight not in operands(node)[:-1] and value(weight).ndim == 2 and value(x).ndim >= 2


def _tile_embedding(graph: TileGraph, node: fx.Node) -> None:
    """``table[ids]``: each piece fills in the rows of the tokens that lie in it.

    The first piece takes every id below its end and the last one every id that is left, so that an id
    outside of the table fails as it does without tiles. ids are counted from the piece's first row.
    """
    table, ids, *rest = operands(node)
    padding = rest[0] if rest and rest[0] >= 0 else -1
    emit = graph.site(node)
    pieces = graph.pieces[table]
    found: fx.Node | None = None
    for i, piece in enumerate(pieces):
        with emit.tile(piece.label):
            last = i + 1 == len(pieces)
            outside = emit.call(aten.lt.Scalar, ids, 0) if i else emit.call(aten.ge.Scalar, ids, piece.rows)
            if i and not last:
                behind = emit.call(aten.ge.Scalar, ids, piece.rows)
                outside = emit.call(aten.logical_or.default, outside, behind)
            own = emit.call(aten.masked_fill.Scalar, ids, outside, 0)
            padded = padding - piece.start if piece.start <= padding < piece.stop else -1
            rows = emit.call(aten.embedding.default, piece.node, own, padded)
            if found is not None:
                rows = emit.call(aten.where.self, emit.call(aten.unsqueeze.default, outside, -1), found, rows)
            found = rows
            if not last:
                ids = emit.call(aten.sub.Tensor, ids, piece.rows)
    assert found is not None
    node.replace_all_uses_with(found)
    graph.graph.erase_node(node)


def _tile_linear(graph: TileGraph, node: fx.Node) -> None:
    """``x @ weight.T + bias``: each piece gives some of the outputs, which are put side by side."""
    x, weight, *rest = operands(node)
    bias = rest[0] if rest else None
    biases = graph.pieces.get(bias) if bias is not None else None
    emit = graph.site(node)
    outputs = []
    for i, piece in enumerate(graph.pieces[weight]):
        with emit.tile(piece.label):
            own = biases[i].node if biases else bias
            if own is bias and bias is not None:
                own = emit.call(aten.slice.Tensor, bias, 0, piece.start, piece.stop)
            outputs.append(emit.call(aten.linear.default, x, piece.node, own))
    joined = emit.call(aten.cat.default, outputs, -1)
    node.replace_all_uses_with(joined)
    graph.graph.erase_node(node)


def _tile_product(graph: TileGraph, node: fx.Node) -> None:
    """``bias + x @ weight``: each piece multiplies some of the inputs; products are added in float32.

    Inputs are copied apart first, so that all tiles of a size share one template and each hands back the
    gradient of its own inputs alone.
    """
    *bias, x, weight = operands(node)
    emit = graph.site(node)
    pieces, narrow = graph.pieces[weight], value(node).dtype in (torch.bfloat16, torch.float16)
    parts = emit.call(aten.split_with_sizes.default, x, [p.rows for p in pieces], -1)
    given = [emit.call(aten.clone.default, emit.call(operator.getitem, parts, i)) for i in range(len(pieces))]
    total: fx.Node | None = None
    for own, piece in zip(given, pieces, strict=True):
        with emit.tile(piece.label):
            product = emit.call(aten.matmul.default, own, piece.node)
            if narrow:
                product = emit.call(aten._to_copy.default, product, dtype=torch.float32)
            total = product if total is None else emit.call(aten.add.Tensor, total, product)
    assert total is not None
    total = emit.call(aten.add.Tensor, total, *bias) if bias else total
    total = emit.call(aten._to_copy.default, total, dtype=value(node).dtype) if narrow else total
    node.replace_all_uses_with(total)
    graph.graph.erase_node(node)


# ------------------------------------------------------------------------------------------------------------
# Which parameters can be cut into pieces, and at which rows.
#
# In: a captured graph and the most bytes that a piece should have. Out: the cuts that ``tile`` makes.
# Parameters that one operator reads together (a linear layer's weight and bias, the stacked weights of a bank
# of experts) are cut at the same rows; a parameter that any operator reads as a whole is not cut.


LEAST_PIECE = 1 << 20
"""Bytes below which a piece's own transfer and launches would cost more than they save."""
MOST_PIECES = 64
_ALIGN = 64  # rows: products run faster on multiples of it


@dataclass(frozen=True)
class Family:
    """Parameters that are cut at the same rows; ``nbytes`` of them all, on the device."""

    names: tuple[str, ...]
    rows: int
    nbytes: int


def families(captured: Captured, *, gather: bool = False) -> tuple[Family, ...]:
    """List what can be cut, largest first; with ``gather``, without tables of which only rows would
    travel."""
    nodes = {n: captured.parameters[n.name] for n in captured.graph.nodes if n.name in captured.parameters}
    if gather:
        nodes = {n: p for n, p in nodes.items() if not all(gathers(u, captured) for u in n.users)}
    found = banks(captured.graph)
    joined = _joined(nodes, found)
    whole = {root for node, root in joined.items() if not _can_be_cut(node, found)}
    members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, root in joined.items():
        if root not in whole:
            members[root].append(node)
    made = [
        Family(
            tuple(nodes[n] for n in group), group[0].meta["val"].shape[0], sum(value(n).nbytes for n in group)
        )
        for group in members.values()
        if len({n.meta["val"].shape[0] for n in group}) == 1
    ]
    return tuple(sorted(made, key=lambda f: -f.nbytes))


def tables(captured: Captured) -> Cuts:
    """Tables of which the host can gather the rows that a batch looks up, as whole ones."""
    found = {operands(n)[0] for n in captured.graph.nodes if gathers(n, captured)}
    return {
        captured.parameters[n.name]: (0, value(n).shape[0])
        for n in sorted(found)
        if value(n).nbytes >= LEAST_PIECE and value(n).is_contiguous()
    }


def _joined(nodes: dict[fx.Node, str], found: list[Bank]) -> dict[fx.Node, fx.Node]:
    """For each parameter one that stands for its family."""
    root = {n: n for n in nodes}

    def join(together: list[fx.Node]) -> None:
        roots = {root[n] for n in together if n in root}
        for n, r in root.items():
            if r in roots:
                root[n] = min(roots)

    for node in {u for n in nodes for u in n.users}:
        if is_call(node, aten.linear.default, FUSED):
            join([a for a in operands(node)[1:3] if a is not None])
    for bank in found:
        join(list(bank.weights))
    return root


def _can_be_cut(node: fx.Node, found: list[Bank]) -> bool:
    """Return whether every operator that reads a parameter can do with some of its rows at a time."""
    whole = value(node)
    if whole.ndim == 0 or not whole.is_contiguous():
        return False
    return all(_reads_rows(user, node, found) for user in node.users)


def _reads_rows(user: fx.Node, node: fx.Node, found: list[Bank]) -> bool:
    args = operands(user)
    if is_call(user, aten.embedding.default):
        return args[0] is node and not any(args[3:])
    if is_call(user, aten.linear.default, FUSED):
        return node in args[1:3] and node is not args[0] and not user.kwargs
    if is_matmul(user):
        return args[-1] is node
    return any(node in bank.weights and _feeds(user, bank) for bank in found)


def _feeds(user: fx.Node, bank: Bank) -> bool:
    return user in bank.inside or all(u in bank.inside for u in user.users)


def choose_cuts(found: Sequence[Family], piece_bytes: int) -> Cuts:
    """Equal pieces of at most ``piece_bytes``, as far as rows and the number of pieces allow."""
    cuts: dict[str, tuple[int, ...]] = {}
    for family in found:
        pieces = min(MOST_PIECES, family.rows, -(-family.nbytes // max(piece_bytes, LEAST_PIECE)))
        if pieces > 1:
            rows = -(-family.rows // pieces)
            rows = -(-rows // _ALIGN) * _ALIGN if rows >= _ALIGN else rows
            bounds = (*range(0, family.rows, rows), family.rows)
            if len(bounds) > 2:
                cuts |= dict.fromkeys(family.names, bounds)
    return cuts


# ------------------------------------------------------------------------------------------------------------
# The operators that tiles of a large weight compute with: a piece of the head, and ranges of rows.
#
# They are custom operators for what plain torch would hold: the logits of a piece of the vocabulary are
# formed in chunks of ``workspace`` bytes in both passes, and the rows of a range of experts keep a fixed
# shape although their number is known on the device alone.


@torch.library.custom_op("megacompile::head_tile", mutates_args=())
def head_tile(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, softcap: float, workspace: int
) -> tuple[Tensor, Tensor]:
    """Compute what one piece of the vocabulary adds to a cross-entropy: ([3, T], log-sum-exp [T]).

    The rows of the first are the log-sum-exp of the piece's logits, the logit at the label (0 where
    the label lies in another piece), and the sum of the logits; all in at least float32. The second
    repeats the log-sum-exp for the backward and has no gradient. hidden [T, H], weight [V, H], bias
    [V] or None, labels int64 [T] counted from the piece's first row; ``softcap`` c > 0 maps logits z
    to c·tanh(z / c).
    """
    dtype = wide(hidden.dtype)
    tokens = hidden.shape[0]
    top = hidden.new_full((tokens,), float("-inf"), dtype=dtype)
    total, target, mass = hidden.new_zeros((3, tokens), dtype=dtype).unbind()
    for columns, logits in tiles(hidden, weight, bias, workspace):
        z = _capped(logits.to(dtype), softcap)
        mass += z.sum(1)
        target += _at(z, labels - columns.start)
        above = torch.maximum(top, z.amax(1))
        base = torch.where(above == float("-inf"), 0.0, above)
        total = total * torch.exp(top - base) + (z - base[:, None]).exp_().sum(1)
        top = above
    lse = top + total.log()
    return torch.stack((lse, target, mass)), lse


def _capped(z: Tensor, softcap: float) -> Tensor:
    return torch.tanh(z / softcap) * softcap if softcap > 0 else z


def _at(z: Tensor, labels: Tensor) -> Tensor:
    """z at each row's label, 0 where the label is no column of z."""
    inside = (labels >= 0) & (labels < z.shape[1])
    picked = z.gather(1, labels.clamp(0, z.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return torch.where(inside, picked, torch.zeros((), dtype=z.dtype, device=z.device))


@head_tile.register_fake
def _(hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    parts = hidden.new_empty((3, hidden.shape[0]), dtype=wide(hidden.dtype))
    return parts, torch.empty_like(parts[0])


@torch.library.custom_op("megacompile::head_tile_backward", mutates_args=())
def head_tile_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    softcap: float,
    workspace: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`head_tile` for (hidden, weight, bias); the last is empty without a bias.

    ``grad`` is [3, T]. Chunks of logits are formed again and overwritten by their gradient.
    """
    of_lse, of_target, of_mass = grad.unbind()
    total = torch.zeros_like(hidden, dtype=lse.dtype)
    dweight = torch.empty_like(weight)
    dbias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    for columns, logits in tiles(hidden, weight, bias, workspace):
        z = _capped(logits.to(lse.dtype), softcap)
        slope = (z - lse[:, None]).exp_().mul_(of_lse[:, None]).add_(of_mass[:, None])
        local = labels - columns.start
        inside = (local >= 0) & (local < z.shape[1])
        index = local.clamp(0, z.shape[1] - 1).unsqueeze(1)
        slope.scatter_add_(1, index, torch.where(inside, of_target, 0.0).unsqueeze(1))
        if softcap > 0:
            slope *= 1.0 - (z / softcap).square_()
        del z
        logits.copy_(slope)
        torch.mm(logits.t(), hidden, out=dweight[columns])
        if bias is not None:
            dbias[columns] = slope.sum(0).to(bias.dtype)
        del slope
        add_product_(total, logits, weight[columns])
    return total.to(hidden.dtype, copy=True), dweight, dbias


@head_tile_backward.register_fake
def _(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    return torch.empty_like(hidden), torch.empty_like(weight), dbias


def _head_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    hidden, weight, bias, labels, ctx.softcap, ctx.workspace = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(hidden, weight, bias, labels, output[1])


def _head_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, labels, lse = ctx.saved_tensors
    dhidden, dweight, dbias = head_tile_backward(
        grad.contiguous(), hidden, weight, bias, labels, lse, ctx.softcap, ctx.workspace
    )
    return dhidden, dweight, None if bias is None else dbias, None, None, None


head_tile.register_autograd(_head_backward, setup_context=_head_setup)


@torch.library.custom_op("megacompile::take_rows", mutates_args=())
def take_rows(x: Tensor, start: Tensor, count: Tensor) -> Tensor:
    """Rows [start, start + count) of ``x`` moved to the front, zeros behind them; x's shape.

    ``start`` and ``count`` are integers of shape [1], on x's device and never read on the host.
    Linear in x; :func:`put_rows` is its adjoint.
    """
    rows = torch.arange(x.shape[0], device=x.device)
    moved = x[(rows + start) % x.shape[0]]
    return moved.masked_fill_(_column(rows >= count, x), 0)


@torch.library.custom_op("megacompile::put_rows", mutates_args=())
def put_rows(x: Tensor, start: Tensor, count: Tensor) -> Tensor:
    """The first ``count`` rows of ``x`` moved to [start, start + count), zeros elsewhere; x's shape."""
    rows = torch.arange(x.shape[0], device=x.device)
    moved = x[(rows - start) % x.shape[0]]
    return moved.masked_fill_(_column((rows < start) | (rows >= start + count), x), 0)


def _column(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(-1, *(1 for _ in x.shape[1:]))


def _like(x: Tensor, start: Tensor, count: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _take_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.megacompile.put_rows(grad, *ctx.saved_tensors), None, None


def _put_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.megacompile.take_rows(grad, *ctx.saved_tensors), None, None


take_rows.register_fake(_like)
put_rows.register_fake(_like)
take_rows.register_autograd(_take_backward, setup_context=_rows_setup)
put_rows.register_autograd(_put_backward, setup_context=_rows_setup)


declare(OpSpec("head_tile", OpPass(head_flops), OpPass(head_backward_flops)))
declare(OpSpec("take_rows"))
declare(OpSpec("put_rows"))

HEAD_TILE = torch.ops.megacompile.head_tile.default
TAKE_ROWS = torch.ops.megacompile.take_rows.default
PUT_ROWS = torch.ops.megacompile.put_rows.default
