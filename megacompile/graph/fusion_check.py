"""The numerical check of the fuse stage: a subgraph and its replacement on equal random inputs.

Both run, forward and backward, in the dtypes of the graph; the subgraph runs once more in float64. The
replacement may be as far from float64 as the subgraph is, and a tolerance more. Rows, and the head's
vocabulary and width, are cut, so that a check costs milliseconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.graph.pattern_tools import Emitter, Match, aten, operands, value

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
