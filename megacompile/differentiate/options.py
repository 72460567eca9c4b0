"""Differentiate: each template becomes a few options of forward, recompute and backward functions.

In: a :class:`~megacompile.partition.blocks.Template`. Out: :class:`DifferentiatedTemplate`. The joint graph
of forward and backward is traced once with the gradient rules that eager PyTorch uses; an option is
a choice of the forward tensors that are kept for the backward (the saved set). Invariants: weights
and what is computed from weights alone are never saved, views are never saved (their base is), and
every function is functional: no operator writes in place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.capture.views import is_view, storage_nbytes, view_base
from megacompile.differentiate.codegen import DEVICE, function_source
from megacompile.differentiate.costs import flat, flops, is_heavy, moved
from megacompile.differentiate.joint import Ref, extract, trace_joint
from megacompile.differentiate.kernel_calls import Calls, kernel_calls
from megacompile.differentiate.meter import StorageMeter
from megacompile.differentiate.reuse import reuse
from megacompile.partition.blocks import Template

aten = torch.ops.aten
OptionName = Literal["all", "some", "none", "least"]
OPTIONS: tuple[OptionName, ...] = ("all", "some", "none", "least")
"""Keep every tensor that the backward reads; keep the results of products and attention and derive
the rest again; keep nothing and recompute the first set, or the second, before the backward."""


@dataclass(frozen=True)
class BlockFunction:
    """One generated function and what it costs.

    ``inputs`` and ``outputs`` name what the list argument and the returned list hold: ("in", i) the
    template's input i, ("out", k) its output k, ("saved", j) a saved tensor, and ("grad", n) the
    gradient of output n (as an argument) or of input n (as a result). ``peak_bytes`` is the most that
    the function holds beyond what was alive when it was called; saved tensors and gradients among its
    arguments are donated, so they count as freed at their last use. ``end_bytes`` is what is left
    when it returns: results less donations. ``kernels`` counts the calls of our own operators.
    """

    name: str
    source: str
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    result_bytes: tuple[int, ...]
    peak_bytes: int
    end_bytes: int
    flops: int
    moved_bytes: int
    kernels: Calls = ()


@dataclass(frozen=True)
class Option:
    """A saved set: what forward keeps, and the functions that belong to it.

    ``recompute`` is None where forward itself keeps the saved set. ``saved`` holds the bytes of each
    saved tensor.
    """

    name: OptionName
    forward: BlockFunction
    recompute: BlockFunction | None
    backward: BlockFunction | None
    saved: tuple[int, ...]

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved)


@dataclass(frozen=True)
class DifferentiatedTemplate:
    """A template's options by name; ``forward`` alone serves evaluation."""

    index: int
    name: str
    forward: BlockFunction
    options: dict[OptionName, Option]

    def functions(self) -> Iterable[BlockFunction]:
        seen: set[str] = set()
        for option in self.options.values():
            for function in (option.forward, option.recompute, option.backward):
                if function is not None and function.name not in seen:
                    seen.add(function.name)
                    yield function
        if self.forward.name not in seen:
            yield self.forward


def differentiate(template: Template, mode: FakeTensorMode) -> DifferentiatedTemplate:
    """Trace a template's forward and backward jointly and cut it at several saved sets."""
    return _Cutter(template, mode).run()


class _Cutter:
    """Cuts one joint graph at several saved sets."""

    def __init__(self, template: Template, mode: FakeTensorMode) -> None:
        self.template = template
        self.mode = mode
        self.graph = trace_joint(template, mode)
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        count = len(template.examples)
        self.inputs, self.tangents = placeholders[:count], placeholders[count:]
        output = next(n for n in self.graph.nodes if n.op == "output")
        results = flat(output.args[0])
        outs = len(template.out_grads)
        self.outs, self.grads = results[:outs], results[outs:]
        self.backward_nodes = self._depends_on(self.tangents)
        weights = [n for n, k in zip(self.inputs, template.kinds, strict=True) if k in ("weight", "buffer")]
        moving = self._depends_on([n for n in self.inputs if n not in weights] + self.tangents)
        self.static = {n for n in self.graph.nodes if n not in moving and not is_heavy(n)}
        self.refs = self._reference_names()

    def _depends_on(self, roots: Iterable[fx.Node]) -> set[fx.Node]:
        found = set(roots)
        for node in self.graph.nodes:
            if any(a in found for a in node.all_input_nodes):
                found.add(node)
        return found

    def _reference_names(self) -> dict[fx.Node, Ref]:
        refs: dict[fx.Node, Ref] = {n: ("in", i) for i, n in enumerate(self.inputs)}
        with_grad = [k for k, g in enumerate(self.template.out_grads) if g]
        refs.update({n: ("grad", k) for n, k in zip(self.tangents, with_grad, strict=True)})
        for k, node in enumerate(self.outs):
            refs.setdefault(node, ("out", k))
        return refs

    def run(self) -> DifferentiatedTemplate:
        prefix = _identifier(self.template.name)
        forward = self._function(f"{prefix}_forward", self._out_list(), ())
        options: dict[OptionName, Option] = {}
        if any(isinstance(g, fx.Node) for g in self.grads):
            everything, something = self._saved(keep_cheap=True), self._saved(keep_cheap=False)
            kept: dict[OptionName, list[fx.Node]] = {"all": everything, "some": something}
            for name, saved in kept.items():
                if name == "some" and _total(saved) >= _total(everything):
                    continue
                options[name] = self._option(name, prefix, saved, forward)
            options["none"] = self._recomputed("none", prefix, everything, options["all"], forward)
            if "some" in options:
                lean = self._recomputed("least", prefix, something, options["some"], forward)
                options["least"] = lean
        else:
            for name in OPTIONS:
                options[name] = Option(name, forward, None, None, ())
        return DifferentiatedTemplate(self.template.index, self.template.name, forward, options)

    def _out_list(self) -> list[tuple[Ref, fx.Node]]:
        return [(("out", k), node) for k, node in enumerate(self.outs)]

    def _saved(self, *, keep_cheap: bool) -> list[fx.Node]:
        """Forward tensors that the backward starts from; inputs and outputs count as given."""
        saved: dict[fx.Node, None] = {}
        visited: set[fx.Node] = set()

        def need(node: fx.Node) -> None:
            if node in visited:
                return
            visited.add(node)
            if node in self.refs:
                return
            if is_view(node) or node in self.static or _is_tuple(node):
                for argument in node.all_input_nodes:
                    need(argument)
            elif keep_cheap or is_heavy(node) or not node.all_input_nodes:
                saved[node] = None
            else:
                for argument in node.all_input_nodes:
                    need(argument)

        for node in self.graph.nodes:
            if node in self.backward_nodes or node.op == "output":
                for argument in node.all_input_nodes:
                    if argument not in self.backward_nodes and node.op != "output":
                        need(argument)
        for grad in self.grads:
            if isinstance(grad, fx.Node) and grad not in self.backward_nodes:
                need(grad)
        return [n for n in self.graph.nodes if n in saved]

    def _option(self, name: OptionName, prefix: str, saved: list[fx.Node], plain: BlockFunction) -> Option:
        results = self._out_list() + _saved_list(saved)
        forward = self._function(f"{prefix}_forward_save_{name}", results, ()) if saved else plain
        backward = self._backward(f"{prefix}_backward_from_{name}", saved)
        return Option(name, forward, None, backward, tuple(_nbytes(n) for n in saved))

    def _recomputed(
        self,
        name: OptionName,
        prefix: str,
        saved: list[fx.Node],
        full: Option,
        plain: BlockFunction,
    ) -> Option:
        if not saved:
            return Option(name, plain, None, full.backward, ())
        recompute = self._function(f"{prefix}_recompute_{full.name}", _saved_list(saved), ())
        return Option(name, plain, recompute, full.backward, full.saved)

    def _backward(self, name: str, saved: list[fx.Node]) -> BlockFunction:
        leaves = [i for i, e in enumerate(self.template.examples) if e.requires_grad]
        results: list[tuple[Ref, fx.Node]] = [
            (("grad", i), grad)
            for i, grad in zip(leaves, self.grads, strict=True)
            if isinstance(grad, fx.Node)
        ]
        return self._function(name, results, saved, outputs_given=True)

    def _function(
        self,
        name: str,
        results: list[tuple[Ref, fx.Node]],
        saved: Sequence[fx.Node],
        *,
        outputs_given: bool = False,
    ) -> BlockFunction:
        """Extract the part of the joint graph that computes ``results`` from what is given."""
        given: dict[fx.Node, Ref] = {n: r for n, r in self.refs.items() if r[0] != "out"}
        if outputs_given:
            given.update({n: r for n, r in self.refs.items() if r[0] == "out"})
            given.update({n: ("saved", j) for j, n in enumerate(saved)})
        graph, inputs = extract(self.graph, [n for _, n in results], given)
        counted = [n for n in graph.nodes if n.op == "call_function"]
        counts = sum(flops(n, self.template.share) for n in counted), sum(map(moved, counted))
        work = *counts, kernel_calls(graph)
        reuse(graph, self._owned(graph, saved))
        source = function_source(graph, name, f"{_signature(inputs)} -> {_signature(r for r, _ in results)}")
        peak, end = self._measure(source, name, graph, inputs)
        return BlockFunction(
            name=name,
            source=source,
            inputs=tuple(inputs),
            outputs=tuple(r for r, _ in results),
            result_bytes=tuple(_nbytes(n) for _, n in results),
            peak_bytes=peak,
            end_bytes=end,
            flops=work[0],
            moved_bytes=work[1],
            kernels=work[2],
        )

    def _owned(self, graph: fx.Graph, saved: Sequence[fx.Node]) -> set[fx.Node]:
        """The saved tensors that a backward may overwrite: those that no output of the block shows."""
        shown = {view_base(n) for n in self.outs}
        names = {n.name for n in saved if n not in shown}
        return {n for n in graph.nodes if n.op == "placeholder" and n.name in names}

    def _measure(self, source: str, name: str, graph: fx.Graph, inputs: list[Ref]) -> tuple[int, int]:
        """(highest, last) bytes beyond what is alive at entry, from a run on fake tensors."""
        function = load_functions(source, torch.device("cpu"))[name]
        values = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
        meter = StorageMeter()
        with self.mode, torch.no_grad():
            kept, arguments = [], []
            for value, (kind, _) in zip(values, inputs, strict=True):
                fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
                if kind in ("saved", "grad"):
                    meter.track(fake)
                else:
                    meter.ignore(fake)
                    kept.append(fake)
                arguments.append(fake)
                del fake
            start = meter.live
            with meter:
                results = function(arguments)
            end = meter.live
            del results
        return max(0, meter.peak - start), end - start


def load_functions(source: str, device: torch.device) -> dict[str, Callable[[list[Any]], list[Any]]]:
    """Execute generated source; returns the functions it defines."""
    namespace: dict[str, Any] = {"torch": torch, "aten": aten, "operator": operator, DEVICE: device}
    exec(compile(source, "<megacompile blocks>", "exec"), namespace)
    return {k: v for k, v in namespace.items() if callable(v) and hasattr(v, "__code__")}


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (list, tuple))


def _nbytes(node: fx.Node) -> int:
    return storage_nbytes(node.meta["val"])


def _total(nodes: Iterable[fx.Node]) -> int:
    return sum(map(_nbytes, nodes))


def _saved_list(saved: Sequence[fx.Node]) -> list[tuple[Ref, fx.Node]]:
    return [(("saved", j), node) for j, node in enumerate(saved)]


def _signature(refs: Iterable[Ref]) -> str:
    return "(" + ", ".join(f"{kind} {i}" for kind, i in refs) + ")"


def _identifier(name: str) -> str:
    text = "".join(c if c.isalnum() else "_" for c in name).strip("_") or "model"
    return f"block_{text}" if text[0].isdigit() else text
