"""Fuse: subgraphs of the captured forward become single operators with kernels of their own.

In: :class:`~megacompile.graph.captured.Captured`. Out: the same with a rewritten copy of the graph, and
:class:`~megacompile.graph.fusion_report.Fusions`, which says what was replaced where, what nearly was and why
not. Invariants: a subgraph is replaced only if nothing else reads its inner values. The exception are logits
without a gradient: the parts that are read are computed again. The fused operator has agreed with the
subgraph on random inputs, gradients included, unless the same operators only multiply in another order. A new
node carries a value of its result and stands in the module whose work it does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megacompile.errors import MegacompileError
from megacompile.graph import (
    expert_patterns,
    glu_patterns,
    lm_head_patterns,
    norm_patterns,
    qk_norm_rope_patterns,
    rope_patterns,
)
from megacompile.graph.captured import Captured, module_path
from megacompile.graph.fusion_check import disagreement, signature
from megacompile.graph.fusion_report import Fusions, NearMiss, OperatorPlacement
from megacompile.graph.narrow_products import narrow
from megacompile.graph.pattern_tools import (
    Emitter,
    Match,
    NearMissError,
    Pattern,
    aten,
    is_call,
    outside_user,
)

# tried in this order: some take over what an earlier one placed
PATTERNS: dict[str, Pattern] = (
    norm_patterns.NORM_PATTERNS
    | rope_patterns.ROPE_PATTERNS
    | qk_norm_rope_patterns.QK_NORM_PATTERNS
    | glu_patterns.GLU_PATTERNS
    | expert_patterns.EXPERT_PATTERNS
    | lm_head_patterns.PATTERNS
)

FOLDED_SUMS = "folded_sums"
"""The switch of sums that products take in; these are placed where blocks are differentiated."""
SWITCHES = (*PATTERNS, FOLDED_SUMS)


def read_switches(kernels: Mapping[str, bool] | bool | None) -> dict[str, bool]:
    """Return which patterns are on: None and False none, True all, a mapping all but what it switches off."""
    if kernels is None or isinstance(kernels, bool):
        return dict.fromkeys(SWITCHES, bool(kernels))
    if not isinstance(kernels, Mapping):
        raise MegacompileError(f"kernels={kernels!r} must be True, False, None or a dict of names.")
    for name, on in kernels.items():
        if name not in SWITCHES:
            raise MegacompileError(
                f"kernels names {name!r}, which is not a fused kernel: choose from {', '.join(SWITCHES)}."
            )
        if not isinstance(on, bool):
            raise MegacompileError(f"kernels[{name!r}]={on!r} must be True or False.")
    return dict.fromkeys(SWITCHES, True) | dict(kernels)


def fuse(captured: Captured, enabled: Mapping[str, bool]) -> tuple[Captured, Fusions]:
    """Replace what the enabled patterns find; ``captured`` itself is left as it is."""
    off = tuple(name for name in SWITCHES if not enabled.get(name, False))
    if len(off) == len(SWITCHES):
        return captured, Fusions((), (), off)
    rewriter = _Rewriter(captured)
    for name, pattern in PATTERNS.items():
        if name not in off:
            rewriter.run(name, pattern)
    graph = rewriter.finish()
    narrow(graph, captured.fake_mode)
    return replace(captured, graph=graph), Fusions(tuple(rewriter.placed), tuple(rewriter.near), off)


class _Rewriter:
    """One copy of a graph while its subgraphs are being replaced."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.graph = copy_graph(captured.graph)
        self.placed: list[OperatorPlacement] = []
        self.near: list[NearMiss] = []
        self._checked: dict[str, str | None] = {}
        self._gone: set[fx.Node] = set()
        self._restrided: set[fx.Node] = set()
        self._graded = self._carries_gradient()

    def run(self, name: str, pattern: Pattern) -> None:
        """Try one pattern at every node."""
        for node in list(self.graph.nodes):
            if node in self._gone or node.op != "call_function":
                continue
            try:
                match = pattern(node)
                if match is None:
                    continue
                self._accept(match)
            except NearMissError as reason:
                self.near.append(NearMiss(name, module_path(node), str(reason)))
                continue
            for taken, home in match.takes:
                self.placed.remove(OperatorPlacement(taken, module_path(home)))
            self.placed.append(OperatorPlacement(name, module_path(match.home)))
            self._replace(match)

    def _accept(self, match: Match) -> None:
        """Raise NearMissError where a match must not be made."""
        reason = outside_user(match, self._graded)
        if reason is not None:
            raise NearMissError(reason)
        for i in match.fixed:
            if match.inputs[i] in self._graded:
                raise NearMissError(f"{match.inputs[i].name} needs a gradient that the fused operator lacks")
        if match.reordered:
            return
        key = signature(match)
        if key not in self._checked:
            self._checked[key] = disagreement(match)
        found = self._checked[key]
        if found is not None:
            raise NearMissError(found)

    def _replace(self, match: Match) -> None:
        inside = set(match.nodes)
        with self.graph.inserting_before(match.root):
            built = match.built(Emitter(self.graph, match.root, self._fake), match.inputs)
        for old, new in zip(match.results, built, strict=True):
            before, after = old.meta["val"], new.meta["val"]
            if before.shape != after.shape or before.dtype != after.dtype:
                raise AssertionError(f"{match.pattern} at {old.name} changed its result's shape or dtype")
            if before.stride() != after.stride():
                self._restrided.add(new)
            old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
            if old in self._graded:
                self._graded.add(new)
        for node in reversed(match.nodes):
            if not node.users:
                self.graph.erase_node(node)
                self._gone.add(node)

    def finish(self) -> fx.Graph:
        """Bring what depends on changed strides up to date, and check the graph."""
        for node in self.graph.nodes:
            if node.op == "call_function" and any(a in self._restrided for a in node.all_input_nodes):
                self._refresh(node)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return self.graph

    def _refresh(self, node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        target: Any = node.target
        with self._fake():
            try:
                found = target(*args, **kwargs)
            except (RuntimeError, ValueError):  # a view of memory that is laid out in another way now
                if not is_call(node, aten.view.default):
                    raise
                node.target = aten.reshape.default
                found = aten.reshape.default(*args, **kwargs)
        before = node.meta["val"]
        if not isinstance(found, torch.Tensor) or found.stride() != before.stride():
            self._restrided.add(node)
        node.meta["val"] = found

    @contextlib.contextmanager
    def _fake(self) -> Iterator[None]:
        with self.captured.fake_mode, torch.no_grad():
            yield

    def _carries_gradient(self) -> set[fx.Node]:
        """Nodes through which a gradient reaches a trained parameter."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                if self.captured.parameters.get(node.name) in self.captured.trainable:
                    found.add(node)
            elif node.op == "call_function" and node.target is not aten.detach.default:
                item = node.meta.get("val")
                floats = not isinstance(item, torch.Tensor) or item.is_floating_point()
                if floats and any(a in found for a in node.all_input_nodes):
                    found.add(node)
        return found


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy with the same names, so that the tables of :class:`Captured` go on holding."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = new.node_copy(node, copies.__getitem__)
        assert copies[node].name == node.name or node.op == "output"
    return new
