"""Fuse: subgraphs of the captured forward become single operators with kernels of their own."""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.errors import MegacompileError
from megacompile.graph import glu_patterns, lm_head_patterns, norm_patterns
from megacompile.graph.captured import Captured, module_path
from megacompile.graph.lm_head_patterns import narrow
from megacompile.graph.pattern_tools import (
    Emitter,
    Match,
    NearMissError,
    Pattern,
    aten,
    is_call,
    operands,
    outside_user,
    value,
)
from megacompile.units import runs_of

# ------------------------------------------------------------------------------------------------------------
# What the fuse stage says it did: placements, near misses, and their folded table.


@dataclass(frozen=True)
class OperatorPlacement:
    """A fused operator that stands in the module ``where``."""

    pattern: str
    where: str


@dataclass(frozen=True)
class NearMiss:
    """A subgraph in the module ``where`` that is nearly a pattern, and why it was left alone."""

    pattern: str
    where: str
    reason: str


@dataclass(frozen=True)
class Fusions:
    """The report of fusion: what was fused where, what nearly was and why not, and which patterns were
    switched off."""

    placements: tuple[OperatorPlacement, ...]
    near_misses: tuple[NearMiss, ...]
    off: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """The number of placements of each pattern."""
        return dict(Counter(p.pattern for p in self.placements))

    def __str__(self) -> str:
        lines = []
        for name, count in self.counts.items():
            lines.append(f"{name} (×{count})")
            lines += [f"  {text}" for text in fold(p.where for p in self.placements if p.pattern == name)]
        if self.near_misses:
            lines.append("not fused")
            reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
            for miss in self.near_misses:
                reasons[miss.pattern, _plain(miss.reason)].append(miss.where)
            for (name, reason), places in reasons.items():
                lines += [f"  {name}: {text}: {reason}" for text in fold(places)]
        if self.off:
            lines.append(f"switched off: {', '.join(self.off)}")
        return "\n".join(lines)


def _plain(reason: str) -> str:
    """A reason without the running numbers of node names, so that equal layers fold."""
    return re.sub(r"(?<=[a-z])_\d+\b", "", reason)


def fold(places: Iterable[str]) -> list[str]:
    """One line for places that differ in their first number: ``model.layers.0-31.mlp (×32)``."""
    groups: dict[tuple[str, str], list[int]] = {}
    for place in places:
        head, digits, tail = re.findall(r"^(\D*)(\d*)(.*)$", place)[0]
        groups.setdefault((head, tail if digits else ""), []).append(int(digits) if digits else -1)
    lines = []
    for (head, tail), numbers in groups.items():
        runs = [] if numbers[0] < 0 else runs_of(sorted(set(numbers)))
        span = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
        name = f"{head}{span}{tail}" or "the model itself"
        lines.append(f"{name} (×{len(numbers)})" if len(numbers) > 1 else name)
    return lines


# ------------------------------------------------------------------------------------------------------------
# Fuse: subgraphs of the captured forward become single operators with kernels of their own.
#
# In: :class:`~megacompile.graph.captured.Captured`. Out: the same with a rewritten copy of the graph, and
# :class:`~megacompile.graph.fusion_rewriter.Fusions`, which says what was replaced where, what nearly was and
# why not. Invariants: a subgraph is replaced only if nothing else reads its inner values, but logits without
# a gradient, which are computed again in the parts that are read; and only after the fused operator agreed
# with it on random inputs, gradients included, or where the same operators multiply in another order; a new
# node carries a value of its result and stands in the module whose work it does.


# tried in this order: some take over what an earlier one placed
PATTERNS: dict[str, Pattern] = (
    norm_patterns.NORM_PATTERNS
    | norm_patterns.ROPE_PATTERNS
    | norm_patterns.QK_NORM_PATTERNS
    | glu_patterns.GLU_PATTERNS
    | glu_patterns.EXPERT_PATTERNS
    | lm_head_patterns.PATTERNS
)


def read_switches(kernels: Mapping[str, bool] | bool | None) -> dict[str, bool]:
    """Return which patterns are on: None and False none, True all, a mapping all but what it switches off."""
    if kernels is None or isinstance(kernels, bool):
        return dict.fromkeys(PATTERNS, bool(kernels))
    if not isinstance(kernels, Mapping):
        raise MegacompileError(f"kernels={kernels!r} must be True, False, None or a dict of names.")
    for name, on in kernels.items():
        if name not in PATTERNS:
            raise MegacompileError(
                f"kernels names {name!r}, which is not a fused kernel: choose from {', '.join(PATTERNS)}."
            )
        if not isinstance(on, bool):
            raise MegacompileError(f"kernels[{name!r}]={on!r} must be True or False.")
    return dict.fromkeys(PATTERNS, True) | dict(kernels)


def fuse(captured: Captured, enabled: Mapping[str, bool]) -> tuple[Captured, Fusions]:
    """Replace what the enabled patterns find; ``captured`` itself is left as it is."""
    off = tuple(name for name in PATTERNS if not enabled.get(name, False))
    if len(off) == len(PATTERNS):
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


# ------------------------------------------------------------------------------------------------------------
# The numerical check of the fuse stage: a subgraph and its replacement on equal random inputs.
#
# Both run, forward and backward, in the dtypes of the graph; the subgraph runs once more in float64. The
# replacement may be as far from float64 as the subgraph is, and a tolerance more. Rows, and the head's
# vocabulary and width, are cut, so that a check costs milliseconds.


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Of the tensor's largest element, by the lowest precision among inputs and result."""
Run = Callable[[Match, Sequence[Tensor]], list[Tensor]]
_ROWS, _VOCABULARY, _WIDTH = 4, 600, 256


def disagreement(match: Match) -> str | None:
    """Say why the replacement does not compute what the subgraph does; None where it does."""
    inputs = _random_inputs(match)
    try:
        fused = _results(match, inputs, _fused)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"the fused operator fails on random inputs: {first}"
    plain = _results(match, inputs, _unfused)
    exact = _results(match, [x.double() if x.is_floating_point() else x for x in inputs], _unfused)
    dtypes = [x.dtype for x in inputs if x.is_floating_point()] + [value(match.root).dtype]
    allowed = max(TOLERANCE.get(d, 0.0) for d in dtypes)
    names = ["result"] * len(match.results) + [f"gradient of {n.name}" for n in _differentiable(match)]
    for name, got, want, reference in zip(names, fused, plain, exact, strict=True):
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"its {name} is {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
        scale = float(reference.abs().max()) or 1.0
        ours, theirs = (float((x.double() - reference).abs().max()) / scale for x in (got, want))
        if not ours <= theirs + allowed:
            return (
                f"its {name} is off by {ours:.1e} of scale on random inputs, "
                f"the subgraph's by {theirs:.1e}, allowed are {allowed:.0e} more"
            )
    return None


def signature(match: Match) -> str:
    """Equal for matches that the same check covers: targets, constants, shapes, dtypes."""
    numbers = {n: i for i, n in enumerate((*match.inputs, *match.nodes))}
    lines: list[object] = [match.pattern]
    for node in match.inputs:
        lines.append((tuple(value(node).shape), value(node).stride(), str(value(node).dtype)))
    for node in match.nodes:
        arguments = fx.map_arg((operands(node), node.kwargs), lambda n: f"%{numbers[n]}")
        lines.append((str(node.target), arguments))
    return repr(lines)


def _differentiable(match: Match) -> list[fx.Node]:
    return [n for i, n in enumerate(match.inputs) if value(n).is_floating_point() and i not in match.fixed]


def _random_inputs(match: Match) -> list[Tensor]:
    """Rows of very different sizes, so that an epsilon or a cap shows."""
    generator = torch.Generator().manual_seed(0)
    shapes = _shapes(match)
    made = []
    for node, shape in zip(match.inputs, shapes, strict=True):
        if not value(node).is_floating_point():
            labels = torch.randint(0, _classes(match), shape, generator=generator)
            labels[::3] = _ignored(match)
            made.append(labels)
            continue
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) > 1:
            x *= 10 ** (torch.rand((*shape[:-1], 1), generator=generator, dtype=torch.float64) * 3 - 2)
        made.append(x.to(value(node).dtype))
    return made


def _shapes(match: Match) -> list[tuple[int, ...]]:
    if match.pattern != "linear_cross_entropy":
        return [_cut_rows(value(n)) for n in match.inputs]
    hidden, weight, *rest = (value(n) for n in match.inputs)
    *lead, width = _cut_rows(hidden)
    width = min(width, _WIDTH)
    kept = list(lead)
    for node in match.nodes:
        if node.target is aten.slice.Tensor:
            _, dim, start, end = operands(node)[:4]
            kept[dim] = len(range(kept[dim])[start:end])
    tokens = torch.Size(kept).numel()
    shapes = [(*lead, width), (min(weight.shape[0], _VOCABULARY), width), (tokens,)]
    return shapes + [(shapes[1][0],) for _ in rest[1:]]


def _cut_rows(x: Tensor) -> tuple[int, ...]:
    return (*(min(size, _ROWS) for size in x.shape[:-1]), x.shape[-1]) if x.ndim else ()


def _classes(match: Match) -> int:
    return min(value(match.inputs[1]).shape[0], _VOCABULARY)


def _ignored(match: Match) -> int:
    given = operands(match.root)[4:5]
    return int(given[0]) if given else -100


def _unfused(match: Match, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The subgraph itself; float64 inputs stay float64 through its casts."""
    exact = inputs[0].dtype == torch.float64
    known = dict(zip(match.inputs, inputs, strict=True))
    for node in match.nodes:
        args: Any
        kwargs: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        if exact and node.target is aten._to_copy.default:
            kwargs = {**kwargs, "dtype": torch.float64}
        if node in match.views:
            args = (args[0], _view_shape(value(node), args[0]))
        target: Any = node.target
        known[node] = target(*args, **kwargs)
    return [known[node] for node in match.results]


def _view_shape(before: Tensor, x: Tensor) -> list[int]:
    """The shape of a view on fewer rows: of merged rows, or of merged last dimensions."""
    merged = before.ndim == x.ndim - 1 and before.shape[-1] == x.shape[-1] * x.shape[-2]
    return [*x.shape[:-2], -1] if merged else [-1, x.shape[-1]]


def _fused(match: Match, inputs: Sequence[Tensor]) -> list[Tensor]:
    graph = fx.Graph()
    nodes = []
    for i, x in enumerate(inputs):
        nodes.append(graph.placeholder(f"x{i}"))
        nodes[-1].meta["val"] = x
    return [value(new) for new in match.built(Emitter(graph, match.root, contextlib.nullcontext), nodes)]


def _results(match: Match, inputs: Sequence[Tensor], run: Run) -> list[Tensor]:
    """The results and the gradients of the differentiable inputs, for one random gradient of each."""
    wanted = {match.inputs.index(n) for n in _differentiable(match)}
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
    with torch.enable_grad():
        outs = run(match, leaves)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outs]
    found = torch.autograd.grad(outs, [x for i, x in enumerate(leaves) if i in wanted], grads)
    return [*(o.detach() for o in outs), *found]
