"""Functionalise: what export wrote becomes one flat graph of operators that neither write nor hide others.

In: an exported program in training IR. Out: the graph that ``run_decompositions({})`` would give, and its
signature. torch would trace the whole graph twice for it. But few operators change, and how a call changes
depends on the call alone: its constants, and the shapes, strides and dtypes of its tensors. So each form of
call is decomposed once, and every call of the form is written in this way. A graph in which an operator
writes, or that holds more than calls of operators, goes through torch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import ExportGraphSignature
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from megacompile.capture.clean import CHECKS, handed_through
from megacompile.errors import CaptureError

aten = torch.ops.aten

_REGIONS = (
    torch.ops.higher_order.wrap_with_set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast,
)
_Values = dict[fx.Node, Any]  # what a node became: a node, or a list of nodes


class _NeedsTorchError(Exception):
    """Something that a call's form does not describe."""


class _Form:
    """A call without its tensors: what equal calls have in common."""

    def __init__(self, node: fx.Node) -> None:
        self.target: Any = node.target
        self.tensors = list(node.all_input_nodes)
        place = {n: f"%{i}" for i, n in enumerate(self.tensors)}
        arguments = fx.map_arg((node.args, node.kwargs), place.__getitem__)
        given = [(tuple(v.shape), v.stride(), v.dtype) for v in map(_tensor, self.tensors)]
        self.key = f"{self.target} {arguments} {given}"
        self.value = node.meta["val"]
        self._node = node

    def call(self, tensors: Sequence[Tensor]) -> Any:
        """The call on other tensors of the same form."""
        given = dict(zip(self.tensors, tensors, strict=True))
        args, kwargs = fx.map_arg((self._node.args, self._node.kwargs), given.__getitem__)
        return self.target(*args, **kwargs)


def functionalise(exported: torch.export.ExportedProgram) -> tuple[fx.Graph, ExportGraphSignature]:
    """The graph without writes, regions and composite operators, and the signature that names its inputs."""
    _keep_gradient_barriers(exported.graph_module)
    try:
        calls = list(_calls(exported.graph_module))
        forms = {form.key: form for form in map(_Form, (c for c in calls if _is_composite(c.target)))}
        became = _decomposed(list(forms.values())) if forms else {}
        return _rewritten(exported.graph_module, became), exported.graph_signature
    except _NeedsTorchError:
        for module in exported.graph_module.modules():
            if isinstance(module, fx.GraphModule):
                module.recompile()  # with the barriers that were put in
        whole = exported.run_decompositions({})
        return whole.graph, whole.graph_signature


def _keep_gradient_barriers(root: fx.GraphModule) -> None:
    """Detach what leaves a ``no_grad`` region: decomposition inlines the region and forgets it."""
    for module in root.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
                _detach_results(module, node)
            autocast = node.target is torch.ops.higher_order.wrap_with_autocast and node.args[1] is not None
            if autocast and node.args[2]:  # enabled
                raise CaptureError(
                    "The forward enters torch.autocast: remove it and choose compute_dtype= "
                    "in megacompile.compile instead."
                )


def _detach_results(owner: fx.GraphModule, region: fx.Node) -> None:
    for item in list(region.users):
        same = handed_through(owner, region, item)
        if same is not None:  # a tensor of outside, which keeps its gradient
            item.replace_all_uses_with(same)
            continue
        with owner.graph.inserting_after(item):
            barrier = owner.graph.call_function(aten.detach.default, (item,))
        barrier.meta = dict(item.meta)
        item.replace_all_uses_with(barrier, functools.partial(operator.is_not, barrier))


def _calls(owner: fx.GraphModule) -> list[fx.Node]:
    """The calls of a graph and its regions, those of checks left out."""
    found = []
    for node in owner.graph.nodes:
        if node.target in _REGIONS:
            found += _calls(_region(owner, node)[0])
        elif node.op == "call_function" and node.target is not operator.getitem:
            if not _is_plain(node.target):
                raise _NeedsTorchError
            if node.target not in CHECKS:
                found.append(node)
        elif node.op == "get_attr" and not isinstance(getattr(owner, str(node.target)), fx.GraphModule):
            raise _NeedsTorchError
    return found


def _is_plain(target: Any) -> bool:
    """Whether a call computes and does nothing else, or is a check."""
    if target is operator.getitem or target in CHECKS:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target is aten.native_batch_norm.default:
        return False  # the latter writes, whatever its schema says
    return not target._schema.is_mutable and bool(target._schema.returns)


def _region(owner: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """The graph of a region and its operands, which follow the arguments of the region itself."""
    at = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
    inner = node.args[at]
    assert isinstance(inner, fx.Node)
    module: fx.GraphModule = getattr(owner, str(inner.target))
    return module, node.args[at + 1 :]


@functools.cache
def _is_composite(target: torch._ops.OpOverload) -> bool:
    """Whether decomposition writes an operator as others: all composites but those that only compute."""
    if not target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return False
    aliases = any(a.alias_info is not None for a in target._schema.arguments)
    return aliases or torch.Tag.maybe_aliasing_or_mutating in target.tags


def _tensor(node: fx.Node) -> Tensor:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        raise _NeedsTorchError
    return value


def _decomposed(forms: Sequence[_Form]) -> dict[str, tuple[list[fx.Node], Any]]:
    """By form: the inputs of its call in one small graph of them all, and its results."""
    given = [[_like(_tensor(n)) for n in form.tensors] for form in forms]

    def every(given: list[list[Tensor]]) -> list[Any]:
        return [form.call(tensors) for form, tensors in zip(forms, given, strict=True)]

    with torch.no_grad():
        graph = make_fx(every)(given).graph
    if any(n.op == "get_attr" or (n.op == "call_function" and not _is_plain(n.target)) for n in graph.nodes):
        raise _NeedsTorchError
    places = iter([n for n in graph.nodes if n.op == "placeholder"])
    results = iter(pytree.tree_leaves(graph.output_node().args[0]))
    found = {}
    for form in forms:
        inputs = [next(places) for _ in form.tensors]
        found[form.key] = inputs, pytree.tree_map(lambda _: next(results), form.value)  # one node or a list
        if any(map(_differ, pytree.tree_leaves(found[form.key][1]), pytree.tree_leaves(form.value))):
            raise _NeedsTorchError
    return found


def _differ(result: fx.Node, value: Tensor) -> bool:
    made: Tensor = result.meta["val"]
    return (made.shape, made.stride(), made.dtype) != (value.shape, value.stride(), value.dtype)


def _like(value: Tensor) -> Tensor:
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _value(call: fx.Node, args: Any, kwargs: Any) -> Any:
    """What a call gives for other arguments, in their storage where it is a view."""
    if not call.all_input_nodes:
        return call.meta["val"]
    given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    target: Any = call.target
    with torch.no_grad():
        return target(*given, **named)


def _rewritten(root: fx.GraphModule, became: dict[str, tuple[list[fx.Node], Any]]) -> fx.Graph:
    """A graph in which regions stand inline and calls as their forms became."""
    graph = fx.Graph()
    values: _Values = {}
    for node in root.graph.nodes:
        if node.op == "placeholder":
            values[node] = graph.placeholder(node.name)
            values[node].meta = dict(node.meta)
    _Writer(graph, became).write(root, values)
    results: Any = root.graph.output_node().args[0]
    graph.output(tuple(values[n] for n in results))
    return graph


class _Writer:
    """Writes the calls of graph modules into one graph."""

    def __init__(self, graph: fx.Graph, became: dict[str, tuple[list[fx.Node], Any]]) -> None:
        self._graph = graph
        self._became = became

    def write(self, owner: fx.GraphModule, values: _Values) -> None:
        """Add what a graph module calls; ``values`` holds its inputs and takes what its nodes became."""
        for node in owner.graph.nodes:
            if node.op != "call_function" or node.target in CHECKS:
                continue
            if node.target in _REGIONS:
                values[node] = self._inline(*_region(owner, node), values.__getitem__)
            elif node.target is operator.getitem and isinstance(values[node.args[0]], (list, tuple)):
                values[node] = values[node.args[0]][node.args[1]]
            elif node.target is not operator.getitem and _is_composite(node.target):
                values[node] = self._expand(node, values)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = self._put(node.target, args, kwargs, node.meta)

    def _inline(self, inner: fx.GraphModule, operands: Any, value: Callable[[fx.Node], Any]) -> list[Any]:
        places = [n for n in inner.graph.nodes if n.op == "placeholder"]
        values: _Values = {p: value(o) for p, o in zip(places, operands, strict=True)}
        self.write(inner, values)
        return [values[n] for n in inner.graph.output_node().args[0]]  # type: ignore[union-attr,index]

    def _expand(self, node: fx.Node, values: _Values) -> Any:
        """What a call's form became, on the call's own tensors."""
        form = _Form(node)
        inputs, results = self._became[form.key]
        copies = {p: values[n] for p, n in zip(inputs, form.tensors, strict=True)}
        given = dict(zip(pytree.tree_leaves(results), pytree.tree_leaves(form.value), strict=True))

        def put(inner: fx.Node) -> Any:
            if inner not in copies:
                for before in inner.all_input_nodes:
                    put(before)
                if inner.op != "call_function":
                    raise _NeedsTorchError
                args, kwargs = fx.map_arg((inner.args, inner.kwargs), copies.__getitem__)
                made = given[inner] if inner in given else _value(inner, args, kwargs)
                copies[inner] = self._put(inner.target, args, kwargs, node.meta | {"val": made})
            return copies[inner]

        return pytree.tree_map(put, results)

    def _put(self, target: Any, args: Any, kwargs: Any, meta: dict[str, Any]) -> fx.Node:
        packet = getattr(target, "overloadpacket", target)
        name = self._graph._target_to_str(packet.__name__)
        node = self._graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta = dict(meta)
        return node
