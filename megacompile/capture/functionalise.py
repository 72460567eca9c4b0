"""Functionalise: what export wrote becomes one flat graph of operators that neither write nor hide others.

In: an exported program in training IR. Out: the graph that ``run_decompositions({})`` would give, and its
signature. torch would trace the whole graph twice for it. But few operators change, and how a call changes
depends on the call alone: its constants, and the shapes, strides and dtypes of its tensors. So each form of
call is decomposed once, and every call of the form is written in this way. A write into a tensor of the
graph's own, which no view shows, becomes the operator that returns the new value. A graph in which an
operator writes into another, or that holds more than calls of operators, goes through torch.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import ExportGraphSignature
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from megacompile.capture.call_tensors import given_by_name
from megacompile.capture.exported_graph import CHECKS
from megacompile.capture.repeated_layers import LAYER, LayersDifferError
from megacompile.errors import CaptureError
from megacompile.graph.node_storage import is_mutable, is_view, reached

aten = torch.ops.aten
_SELF = {aten.to, aten.contiguous, aten.type_as}


def handed_through(owner: fx.GraphModule, region: fx.Node, item: fx.Node) -> fx.Node | None:
    """The operand of a region of a graph that one of its results is: the same tensor, and no new one.

    Operators such as ``x.to(x.dtype)`` return their argument; what reads x later then reads the region.
    """
    inner, *operands = region.args[1:]
    assert isinstance(inner, fx.Node) and item.target is operator.getitem
    graph = getattr(owner, str(inner.target)).graph
    (results,) = next(n for n in graph.nodes if n.op == "output").args
    source = results[item.args[1]]
    while _returns_its_argument(source):
        source = source.args[0]
    places = [n for n in graph.nodes if n.op == "placeholder"]
    found = operands[places.index(source)] if source in places else None
    return found if isinstance(found, fx.Node) else None


def _returns_its_argument(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.overloadpacket not in _SELF:
        return False
    given = given_by_name(node.target, node.args, node.kwargs)
    (before, after) = (n.meta["val"] for n in (node.args[0], node))  # type: ignore[union-attr]
    same = (before.dtype, before.device, before.stride()) == (after.dtype, after.device, after.stride())
    return same and not given.get("copy")


_REGIONS = (
    torch.ops.higher_order.wrap_with_set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast,
)
_Values = dict[fx.Node, Any]  # what a node became: a node, or a list of nodes


class _NeedsTorchError(Exception):
    """Something that a call's form does not describe, or the nodes of a repeated layer do not."""


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
    """Return the graph without writes, regions and composite operators, and the signature that names its
    inputs.

    Raises :class:`LayersDifferError` if other layers cannot repeat a first one.
    """
    _keep_gradient_barriers(exported.graph_module)
    _unmark_single(exported.graph_module)
    for module in _graphs(exported.graph_module):
        _functional_writes(module.graph)
    try:
        calls = list(_calls(exported.graph_module))
        forms = {form.key: form for form in map(_Form, (c for c in calls if _is_composite(c.target)))}
        became = _decomposed(list(forms.values())) if forms else {}
        return _rewritten(exported.graph_module, became), exported.graph_signature
    except _NeedsTorchError:
        if any(_marks(exported.graph_module)):
            raise LayersDifferError from None
        for module in _graphs(exported.graph_module):
            module.recompile()  # with the barriers that were put in
        _drop_other_names(exported)
        whole = exported.run_decompositions({})
        return whole.graph, whole.graph_signature


def _marks(root: fx.GraphModule) -> list[fx.Node]:
    """The marks of repeated layers in a graph and its regions."""
    return [n for m in _graphs(root) for n in m.graph.find_nodes(op="call_function", target=LAYER)]


def _graphs(root: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph and its regions."""
    return [module for module in root.modules() if isinstance(module, fx.GraphModule)]


def _unmark_single(root: fx.GraphModule) -> None:
    """Leave out the marks of layers that no other one repeats."""
    marks = _marks(root)
    times = Counter(mark.args[0] for mark in marks)
    for mark in marks:
        if times[mark.args[0]] == 1:
            _unmark(mark)


def _unmark(mark: fx.Node) -> None:
    """Replace the result of each mark of a first layer by the mark's argument."""
    for item in list(mark.users):
        item.replace_all_uses_with(mark.args[2][item.args[1]])  # type: ignore[index,arg-type]
        item.graph.erase_node(item)
    mark.graph.erase_node(mark)


def _drop_other_names(exported: torch.export.ExportedProgram) -> None:
    """Give each unused name of a tensor a tensor of its own, because torch does not write into a tensor with
    several."""
    unused = {n.name for n in exported.graph.nodes if n.op == "placeholder" and not n.users}
    for spec in exported.graph_signature.input_specs:
        for tensors in (exported.state_dict, exported.constants):
            if spec.arg.name in unused and spec.target in tensors:
                tensors[spec.target] = copy.copy(tensors[spec.target])


def _keep_gradient_barriers(root: fx.GraphModule) -> None:
    """Detach what leaves a ``no_grad`` region: decomposition inlines the region and forgets it."""
    for module in _graphs(root):
        for node in list(module.graph.nodes):
            if node.target in _REGIONS:
                _detach_written(module, node)
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


def _detach_written(owner: fx.GraphModule, region: fx.Node) -> None:
    """Detach what a region without gradients wrote into, a buffer, from what is computed with it later."""
    for operand in _written_operands(owner, region, region.args[0] is False):
        if operand.op == "placeholder":
            with owner.graph.inserting_after(region):
                barrier = owner.graph.call_function(aten.detach.default, (operand,))
            barrier.meta = dict(operand.meta)
            later = {user for user in operand.users if region < user and user is not barrier}
            operand.replace_all_uses_with(barrier, later.__contains__)


def _written_operands(owner: fx.GraphModule, region: fx.Node, without_gradient: bool) -> list[fx.Node]:
    """The operands of a region that calls without gradients in it write into."""
    inner, operands = _region(owner, region)
    written: list[Any] = []
    for node in inner.graph.nodes:
        if node.target in _REGIONS:
            written += _written_operands(inner, node, without_gradient or node.args[0] is False)
        elif without_gradient and is_mutable(node):
            written.append(node.args[0])
    places = [n for n in inner.graph.nodes if n.op == "placeholder"]
    found = dict.fromkeys(map(_base, written))
    return [o for place, o in zip(places, operands, strict=True) if place in found]


def _base(node: fx.Node) -> fx.Node:
    """The node in whose memory a view, or what a write returned, is."""
    if is_mutable(node) or is_view(node):
        return _base(node.args[0])  # type: ignore[arg-type]
    return node


def _functional_writes(graph: fx.Graph) -> None:
    """Replace writes into tensors of the graph's own, which no view shows, by operators that return the new
    value."""
    for node in list(graph.nodes):
        target = _returning(node.target)
        base = node.args[0] if target is not None and node.args else None
        if target is None or not isinstance(base, fx.Node) or not _is_own(base, node):
            continue
        value = fake_result(target, node.args, node.kwargs)
        if tensor_form(value) != tensor_form(base.meta["val"]):
            continue  # a write casts to what it writes into
        with graph.inserting_before(node):
            fresh = graph.call_function(target, node.args, node.kwargs)
        fresh.meta = node.meta | {"val": value}
        base.replace_all_uses_with(fresh, node.__lt__)
        node.replace_all_uses_with(fresh)
        graph.erase_node(node)


@functools.cache
def _returning(target: Any) -> torch._ops.OpOverload | None:
    """The operator that returns what one writes into its first argument; None for all others, and draws."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    namespace, name = target._schema.name.split("::")
    packet = getattr(aten, name.removesuffix("_"), None)  # of others a pair of names promises nothing
    found = getattr(packet, target._overloadname, None)
    if (
        namespace != "aten"
        or not name.endswith("_")
        or found is None
        or torch.Tag.nondeterministic_seeded in found.tags
    ):
        return None
    same = [a.name for a in found._schema.arguments] == [a.name for a in target._schema.arguments]
    others = any(a.alias_info is not None for a in target._schema.arguments[1:])
    return found if same and not others and not _may_alias(found) else None


def _is_own(base: fx.Node, write: fx.Node) -> bool:
    """Return whether a call of the graph made a tensor, and neither a view shows it nor a write before this
    one, which may have views: those after it are moved to what it returns."""
    later = (n for n in (*base.users, *write.users) if _returning(n.target) is None or n < write)
    return base.op == "call_function" and not any(_may_alias(n.target) for n in (base, *later))


def _may_alias(target: Any) -> bool:
    """Return whether what a call returns may be one of its arguments, or a view of it."""
    if not isinstance(target, torch._ops.OpOverload) or target in (LAYER, aten._unsafe_view.default):
        return True
    return any(a.alias_info is not None for a in target._schema.arguments) or _is_composite(target)


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
    """Return whether a call computes and does nothing else, or is a check."""
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
    """Return whether decomposition writes an operator as others: all composites but those that only
    compute."""
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
    given = [[_empty_like(_tensor(n)) for n in form.tensors] for form in forms]

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
        made = [n.meta["val"] for n in pytree.tree_leaves(found[form.key][1])]
        if list(map(tensor_form, made)) != list(map(tensor_form, pytree.tree_leaves(form.value))):
            raise _NeedsTorchError
    return found


def tensor_form(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.dtype


def _empty_like(value: Tensor) -> Tensor:
    """A fake tensor of a form, in memory of its own; a mode would take seven times as long."""
    form = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, form, value.device)  # type: ignore[attr-defined]


def fake_result(target: Any, args: Any, kwargs: Any) -> Any:
    """Compute what a call of nodes gives, in their storage where it is a view."""
    given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
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
    writer = _Writer(graph, became)
    writer.write(root, values)
    results: Any = root.graph.output_node().args[0]
    graph.output(tuple(values[n] for n in results))
    for mark, nodes in writer.firsts.values():
        _refuse_leaks(mark, nodes)
        _unmark(mark)
    return graph


def _refuse_leaks(mark: fx.Node, nodes: list[fx.Node]) -> None:
    """Refuse a layer of which others are to be copies, and of which more is used than what it returns."""
    inside = {mark, *nodes}
    outside = {user for node in nodes for user in node.users} - inside
    if outside & reached([mark.graph.output_node()], lambda n: n.all_input_nodes):
        raise _NeedsTorchError


def _layer_nodes(mark: fx.Node) -> list[fx.Node]:
    """The nodes of a first layer in order: those between what is around it and its results, and what was made
    of these so far."""
    around, results = (set(nodes) for nodes in mark.args[1:])  # type: ignore[arg-type]
    inside = reached(results - around, lambda n: [a for a in n.all_input_nodes if a not in around])
    nodes = []
    for node in mark.graph.nodes:
        if node is not mark and not inside.isdisjoint((node, *node.all_input_nodes)):
            inside.add(node)
            nodes.append(node)
    if any(n.op != "call_function" or not inside.union(around).issuperset(n.all_input_nodes) for n in nodes):
        raise _NeedsTorchError
    return nodes


class _Writer:
    """Writes the calls of graph modules into one graph; ``firsts`` are the layers that others repeat, by
    number, with their nodes."""

    def __init__(self, graph: fx.Graph, became: dict[str, tuple[list[fx.Node], Any]]) -> None:
        self._graph = graph
        self._became = became
        self.firsts: dict[int, tuple[fx.Node, list[fx.Node]]] = {}

    def write(self, owner: fx.GraphModule, values: _Values) -> None:
        """Add what a graph module calls; ``values`` holds its inputs and takes what its nodes became."""
        for node in owner.graph.nodes:
            if node.op != "call_function" or node.target in CHECKS:
                continue
            if node.target in _REGIONS:
                values[node] = self._inline(*_region(owner, node), values.__getitem__)
            elif node.target is operator.getitem and isinstance(values[node.args[0]], (list, tuple)):
                values[node] = values[node.args[0]][node.args[1]]
            elif node.target is LAYER:
                values[node] = self._layer(node, fx.map_arg(node.args, values.__getitem__))
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
        """Expand a call into what its form became, on the call's own tensors."""
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
                if inner in given:
                    made = given[inner]
                else:
                    made = (
                        fake_result(inner.target, args, kwargs)
                        if inner.all_input_nodes
                        else inner.meta["val"]
                    )
                copies[inner] = self._put(inner.target, args, kwargs, node.meta | {"val": made})
            return copies[inner]

        return pytree.tree_map(put, results)

    def _layer(self, mark: fx.Node, args: Any) -> Any:
        """Mark the first layer of a kind; write it again, around other tensors, for each other one."""
        number, around, results = args
        if number not in self.firsts:
            own = self._graph.create_node("call_function", LAYER, args, name=f"first_layer_{number}")
            own.meta = dict(mark.meta)
            self.firsts[number] = own, _layer_nodes(own)
            items = []
            for i, result in enumerate(results):
                items.append(self._graph.create_node(
                    "call_function", operator.getitem, (own, i), name=f"{own.name}_result"
                ))  # fmt: skip
                items[-1].meta = dict(result.meta)
            return items
        first, nodes = self.firsts[number]
        copies = dict(zip(first.args[1], around, strict=True))  # type: ignore[arg-type]
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
            if node.all_input_nodes and _may_alias(node.target):
                fresh = fake_result(node.target, args, kwargs)
            else:
                fresh = pytree.tree_map_only(Tensor, _empty_like, node.meta["val"])
            copies[node] = self._put(node.target, args, kwargs, node.meta | {"val": fresh})
            copies[node].meta["nn_module_stack"] = _renamed_stack(node, first, mark)
        return [copies[r] for r in results]

    def _put(self, target: Any, args: Any, kwargs: Any, meta: dict[str, Any]) -> fx.Node:
        packet = getattr(target, "overloadpacket", target)
        name = self._graph._target_to_str(packet.__name__)
        node = self._graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta = dict(meta)
        return node


def _renamed_stack(node: fx.Node, first: fx.Node, mark: fx.Node) -> dict[str, tuple[str, Any]]:
    """The modules around a copy of a node of the first layer in the layer of ``mark``."""
    outer, own = (list(n.meta["nn_module_stack"].items()) for n in (first, mark))
    (key, (path, _)), (own_key, (own_path, _)) = outer[-1], own[-1]
    inner = list(node.meta["nn_module_stack"].items())[len(outer) :]
    renamed = [(k.replace(key, own_key, 1), (p.replace(path, own_path, 1), kind)) for k, (p, kind) in inner]
    return dict(own + renamed)
