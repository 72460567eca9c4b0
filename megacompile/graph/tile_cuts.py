"""Which parameters can be cut into pieces, and at which rows.

In: a captured graph and the most bytes that a piece should have. Out: the cuts that ``tile`` makes.
Parameters that one operator reads together (a linear layer's weight and bias, the stacked weights of a bank
of experts) are cut at the same rows; a parameter that any operator reads as a whole is not cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from megacompile.graph.captured import Captured
from megacompile.graph.expert_tiles import Bank, banks
from megacompile.graph.gathered_rows import gathers
from megacompile.graph.head_tiles import FUSED
from megacompile.graph.pattern_tools import aten, is_call, operands, value
from megacompile.graph.tile_graph import is_matmul

Cuts = Mapping[str, tuple[int, ...]]
"""By parameter's name, the rows at which it is cut: 0, ..., its number of rows. What is cut at these two
alone stays whole, as a parameter whose rows the host may gather."""


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
