"""Where to cut: consecutive runs of a graph's nodes, one per layer, for the partition to make blocks of.

In: the nodes of a captured graph in order. Out: named runs. A layer is a numbered module outside of any
other one; what stands between layers (embedding, rotary, norm, head and loss) is merged into as few runs as
its weights allow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import fx

from megacompile.graph.captured import Captured, module_stack
from megacompile.graph.node_storage import storage_nbytes, view_base

TILE = "megacompile_tile"
"""Key of a node's meta: (number of the site, name) of the tile that it belongs to."""
SHARE = "megacompile_share"
"""Key of a node's meta: the part of its rows that a grouped product is expected to compute."""
_SMALL_BYTES = 8  # a run of nodes with less than 1/8 of a layer's weights joins its neighbour


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
        heavier = _run_bytes(other.weights) > _run_bytes(self.weights - other.weights)
        if heavier or (other.layer and not self.layer):
            self.name = other.name
        self.layer |= other.layer


def _run_bytes(weights: set[fx.Node]) -> int:
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
    layers = [_run_bytes(r.weights) for r in runs if r.layer]
    limit = max(layers or [_run_bytes(r.weights) for r in runs] or [0])
    return [(r.name, r.nodes) for r in _merge(runs, limit)]


def _is_weight(node: fx.Node, captured: Captured) -> bool:
    return view_base(node).name in captured.parameters


def _merge(runs: list[_Run], limit: int) -> list[_Run]:
    """Join what is small beside a layer to a neighbour that is no layer of full size itself, nor a tile."""

    def full(run: _Run) -> bool:
        return run.tile or (run.layer and _run_bytes(run.weights) * _SMALL_BYTES >= limit)

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
    sizes = _run_bytes(last.weights), _run_bytes(run.weights)
    return min(sizes) * _SMALL_BYTES < limit or _run_bytes(last.weights | run.weights) <= limit


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
