"""Capture: a module and a batch become one flat, functional ``torch.fx`` graph of the loss or outputs."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import operator
import re
import sys
import threading
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType, MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from megacompile.capture.batch import CALLED, LossFn, apply_loss, divide, divides, find_loss, given_batch
from megacompile.capture.changed_buffers import write_changes
from megacompile.capture.counter_rng import replace_draws
from megacompile.capture.fingerprint import Form, fake_copy
from megacompile.capture.frozen_parts import run_parts_for_real
from megacompile.capture.host_draws import DecidesError, decides
from megacompile.capture.host_values import HostValues, is_alike
from megacompile.capture.loss_cut import LossCut
from megacompile.capture.patches import REFUSED, Patch, graphs_alone, our_operators, replaced
from megacompile.capture.refusals import (
    FLEX,
    Effects,
    fake_kernels_named,
    forward_runs,
    refuse_constants,
    refuse_mixed_products,
    refuse_mutations,
    refuse_other_forward,
    refuse_sparse,
    refuse_writes,
)
from megacompile.capture.repeated_layers import LAYER, LayersDifferError, RepeatedLayers
from megacompile.capture.written_arguments import return_writes
from megacompile.errors import BudgetError, CaptureError, UntraceableError
from megacompile.graph.captured import (
    WRITE,
    Captured,
    OutputsFn,
    Returned,
    Structure,
    all_outputs,
    copy_results,
    given_gradients,
    is_view,
    module_path,
    reached,
    returned,
    split,
    strip,
)
from megacompile.graph.sequence_dimension import reads_no_padding

TRACING = threading.RLock()
"""Held while torch traces, one model at a time: it sets flags of the whole process, by which also functions
that other threads call, such as torch's optimizers, compute otherwise."""

# ------------------------------------------------------------------------------------------------------------
# What export leaves in a graph: checks and dead code are dropped, what could not run right is refused.


aten = torch.ops.aten
_OURS = "megacompile"
_SELF = {aten.to, aten.contiguous, aten.type_as}
CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}


def clean(graph: fx.Graph) -> None:
    """Drop checks and dead code, and refuse randomness that a recompute would not repeat."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in CHECKS:
            graph.erase_node(node)
        elif node.op == "call_function" and node.target is aten.copy.default:
            _replace_copy(graph, node)
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
            continue
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape):
            raise UntraceableError(
                f"{module_path(node) or 'The model'} makes a tensor whose shape depends on the values in the "
                f"batch ({node.target}): a scheduled step needs fixed shapes."
            )
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise UntraceableError(
                f"{module_path(node) or 'The model'} takes a number out of a tensor ({node.target}): compute "
                "with the tensor, or pass the number itself in the batch."
            )
        _refuse_call(node)
    graph.lint()


def _refuse_call(node: fx.Node) -> None:
    """Refuse an operator that draws random numbers or writes, one of graphs, one whose gradient is sparse."""
    target, where = node.target, module_path(node) or "The model"
    if isinstance(target, HigherOrderOperator):
        raise CaptureError(_of_graphs(where, node, target))
    if target is aten.instance_norm.default and node.args[3] is not None and node.args[5]:
        raise CaptureError(
            f"{where} changes its running statistics: of all norms BatchNorm alone may; build it with "
            "track_running_stats=False, or put it into eval mode."
        )
    if target is aten.embedding.default and any(node.args[4:5]):
        raise CaptureError(
            f"{where} is an embedding with sparse=True, whose gradient no "
            "Adam takes: build it with sparse=False."
        )
    if isinstance(target, torch._ops.OpOverload) and target.namespace != _OURS:
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise CaptureError(
                f"{where} calls {target}, whose randomness a recompute cannot repeat: make the numbers from "
                "torch.rand or randn without a generator, or move them into the batch."
            )
        if target._schema.is_mutable and target is not WRITE:
            raise CaptureError(
                f"{where} calls {target}, which writes in place: replace it by its out-of-place form."
            )


def _choose_by_masks(graph: fx.Graph) -> None:
    """Write what is put alike to all places where a mask holds by ``where``, whose gradient need not know how
    many there are."""
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        (base, indices, put), mask = node.args[:3], node.args[1][0]
        if len(indices) > 1 or mask is None or mask.meta["val"].dtype != torch.bool or any(node.args[3:]):
            continue
        rest = base.meta["val"].dim() - mask.meta["val"].dim()
        if not is_alike(put.meta["val"], rest):
            continue
        with graph.inserting_before(node):
            for _ in range(rest):
                mask = _call_like(graph, node, aten.unsqueeze.default, mask, -1)
            if put.meta["val"].dim() > rest:
                put = _call_like(graph, node, aten.squeeze.dim, put, 0)
            chosen = _call_like(graph, node, aten.where.self, mask, put, base)
        if _form_of(chosen.meta["val"]) == _form_of(node.meta["val"]):
            node.replace_all_uses_with(chosen)
    graph.eliminate_dead_code()


def _call_like(graph: fx.Graph, node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call in the place of another one."""
    made = graph.call_function(target, args)
    made.meta = node.meta | {"val": _value(target, args, {})}
    return made


def _refuse_masked_writes(graph: fx.Graph, parameters: Collection[str]) -> None:
    """Refuse a write of what is trained to where a mask holds: how many places its gradient is of depends on
    values."""
    trained: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name in parameters or not trained.isdisjoint(node.all_input_nodes):
            trained.add(node)
        if node.target is not aten.index_put.default or node.args[2] not in trained:
            continue
        if any(n.meta["val"].dtype in (torch.bool, torch.uint8) for n in node.all_input_nodes):
            raise UntraceableError(
                f"{module_path(node) or 'The model'} writes to where a mask holds, by {node.target}, and the "
                "mask depends on more than the batch: use torch.where, or masked_scatter."
            )


def _of_graphs(where: str, node: fx.Node, target: HigherOrderOperator) -> str:
    """Refuse an operator whose operands are graphs, or another operator that writes."""
    if "auto_functionalized" in str(target):
        return (
            f"{where} calls {node.args[0]}, which writes into its arguments: write it as an operator that "
            "returns new tensors, with mutates_args=()."
        )
    if "flex_attention" in str(target):
        return f"{where} calls flex attention, {FLEX}."
    return (
        f"{where} calls torch's {target}, whose parts are graphs of their own: compute all branches and "
        "choose by torch.where, and write loops in Python."
    )


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
    given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    (before, after) = (n.meta["val"] for n in (node.args[0], node))  # type: ignore[union-attr]
    same = (before.dtype, before.device, before.stride()) == (after.dtype, after.device, after.stride())
    return same and not given.get("copy")


def _replace_copy(graph: fx.Graph, node: fx.Node) -> None:
    """Write ``copy(target, source)``, which has no gradient rule, as a cast and an expansion."""
    source, value = node.args[1], node.meta["val"]
    assert isinstance(source, fx.Node)
    given = source.meta["val"]
    with graph.inserting_before(node):
        new = source
        if given.dtype != value.dtype:
            new = graph.call_function(aten._to_copy.default, (new,), {"dtype": value.dtype})
            new.meta = dict(node.meta, val=given.to(value.dtype))
        if given.shape != value.shape:
            new = graph.call_function(aten.expand.default, (new, list(value.shape)))
            new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


# ------------------------------------------------------------------------------------------------------------
# Functionalise: what export wrote becomes one flat graph of operators that neither write nor hide others.
#
# In: an exported program in training IR. Out: the graph that ``run_decompositions({})`` would give, and its
# signature. torch would trace the whole graph twice for it. But few operators change, and how a call changes
# depends on the call alone: its constants, and the shapes, strides and dtypes of its tensors. So each form of
# call is decomposed once, and every call of the form is written in this way. A write into a tensor that the
# graph made, and of which it has no view, becomes the operator that returns what is written. A graph in which
# an operator writes into another, or that holds more than calls of operators, goes through torch.


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
    """Let what a mark of a first layer returns be what it was given."""
    for item in list(mark.users):
        item.replace_all_uses_with(mark.args[2][item.args[1]])  # type: ignore[index,arg-type]
        item.graph.erase_node(item)
    mark.graph.erase_node(mark)


def _drop_other_names(exported: torch.export.ExportedProgram) -> None:
    """Let each name of a tensor that the graph does not use be one of its own: torch does not write into what
    has several."""
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
    for operand in _written(owner, region, region.args[0] is False):
        if operand.op == "placeholder":
            with owner.graph.inserting_after(region):
                barrier = owner.graph.call_function(aten.detach.default, (operand,))
            barrier.meta = dict(operand.meta)
            later = {user for user in operand.users if region < user and user is not barrier}
            operand.replace_all_uses_with(barrier, later.__contains__)


def _written(owner: fx.GraphModule, region: fx.Node, without_gradient: bool) -> list[fx.Node]:
    """The operands of a region that calls without gradients in it write into."""
    inner, operands = _region(owner, region)
    written: list[Any] = []
    for node in inner.graph.nodes:
        if node.target in _REGIONS:
            written += _written(inner, node, without_gradient or node.args[0] is False)
        elif without_gradient and isinstance(node.target, torch._ops.OpOverload):
            written += [node.args[0]] * node.target._schema.is_mutable
    places = [n for n in inner.graph.nodes if n.op == "placeholder"]
    found = dict.fromkeys(map(_base, written))
    return [o for place, o in zip(places, operands, strict=True) if place in found]


def _base(node: fx.Node) -> fx.Node:
    """The node in whose memory a view, or what a write returned, is."""
    target = node.target
    if (isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable) or is_view(node):
        return _base(node.args[0])  # type: ignore[arg-type]
    return node


def _functional_writes(graph: fx.Graph) -> None:
    """Let writes into tensors that a graph made, and of which it has no view, return what they write."""
    for node in list(graph.nodes):
        target = _returning(node.target)
        base = node.args[0] if target is not None and node.args else None
        if target is None or not isinstance(base, fx.Node) or not _is_own(base, node):
            continue
        value = _value(target, node.args, node.kwargs)
        if _form_of(value) != _form_of(base.meta["val"]):
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
        made = [n.meta["val"] for n in pytree.tree_leaves(found[form.key][1])]
        if list(map(_form_of, made)) != list(map(_form_of, pytree.tree_leaves(form.value))):
            raise _NeedsTorchError
    return found


def _form_of(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.dtype


def _like(value: Tensor) -> Tensor:
    """A fake tensor of a form, in memory of its own; a mode would take seven times as long."""
    form = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, form, value.device)  # type: ignore[attr-defined]


def _value(target: Any, args: Any, kwargs: Any) -> Any:
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
        raise LayersDifferError


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
        raise LayersDifferError
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
                    made = _value(inner.target, args, kwargs) if inner.all_input_nodes else inner.meta["val"]
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
                fresh = _value(node.target, args, kwargs)
            else:
                fresh = pytree.tree_map_only(Tensor, _like, node.meta["val"])
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


# ------------------------------------------------------------------------------------------------------------
# The gradient of transformers' grouped product as one operator, where transformers itself has a loop.
#
# Before 5.23 the backward of ``transformers::grouped_mm_fallback`` loops over how many rows each expert has,
# which a graph does not know. Later versions call an operator there, which runs that loop.


_NAME = "grouped_mm_fallback"
_BACKWARD = f"{_NAME}_backward"


def define_grouped_gradient() -> None:
    """Define the operator that later versions of transformers have; the product calls it."""
    moe = sys.modules.get("transformers.integrations.moe")
    operators = torch.ops.transformers
    if moe is None or not hasattr(operators, _NAME) or hasattr(operators, _BACKWARD):
        return
    loop = moe._grouped_mm_fallback_backward

    def gradients(input: Tensor, weight: Tensor, offs: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        of_input, of_weight, _ = loop(SimpleNamespace(saved_tensors=(input, weight), offs=offs), grad_output)
        return of_input, of_weight

    def shapes(input: Tensor, weight: Tensor, offs: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(input), torch.empty_like(weight)

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        input, weight = ctx.saved_tensors
        return *getattr(operators, _BACKWARD)(input, weight, ctx.offs, grad_output), None

    schema = "(Tensor input, Tensor weight, Tensor offs, Tensor grad_output) -> (Tensor, Tensor)"
    torch.library.custom_op(f"transformers::{_BACKWARD}", gradients, mutates_args=(), schema=schema)
    torch.library.register_fake(f"transformers::{_BACKWARD}", shapes)
    context = moe._grouped_mm_fallback_setup_context
    torch.library.register_autograd(f"transformers::{_NAME}", backward, setup_context=context)


# ------------------------------------------------------------------------------------------------------------
# Capture: a module and a batch become one flat, functional ``torch.fx`` graph of the loss, or of outputs.
#
# In: the module (its values are never read), one batch, what of its forward is wanted. Out:
# :class:`Captured`. Invariants: one placeholder per parameter *object* (tied names are merged), no mutation,
# no hidden randomness, gradient barriers (``no_grad``, ``detach``) kept, every node still names its module.
# Parameters are traced as fake tensors in the dtype they will compute in, so no weight is touched.


_NO_PARTS: Mapping[str, str] = MappingProxyType({})
_LOGS = GuardOnDataDependentSymNode.__module__, FakeTensorMode.__module__


class _Forward(nn.Module):
    """Runs the model on (args, kwargs) with our operators and returns what is wanted of it: the scalar loss,
    or the tensors of what ``outputs`` returns.

    ``structure`` is what surrounds them; ``outside`` says that they are trained on; ``leaves_out`` that
    causal attention gets no mask of padding, ``of_ones`` that no attention needs one; ``repeats`` that equal
    layers may be traced once. ``returned`` is what a function of the user's was given. ``leaves`` are the
    batch's for real, where ``host`` is to make what is needed of their values.
    """

    structure: Structure
    returned: Returned | None = None
    outside = of_ones = repeats = False
    leaves: list[Any] | None = None
    host: HostValues | None = None
    _loss_fn: LossFn | None
    _outputs: OutputsFn | None

    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, outputs: OutputsFn | None, effects: Effects
    ) -> None:
        super().__init__()
        self.model, self.leaves_out = model, False
        vars(self)["_loss_fn"] = loss_fn  # where it is a module, none of the model's
        vars(self)["_outputs"] = outputs
        self.effects = effects

    def forward(self, rng: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        try:
            stays = isinstance(self._outputs, LossCut)
            tensors, vars(self)["structure"] = split(self._wanted(rng, args, kwargs), stays=stays)
            for flag in self.effects.finite:
                tensors = [torch.where(flag, x, torch.nan) if _is_float(x) else x for x in tensors]
        except GuardOnDataDependentSymNode as error:  # as it is, export would print the graph so far
            raise _untraceable(error, self.model) from None
        return tensors

    def _wanted(self, rng: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Where modules are shared, an attribute that is one is export's stand-in, of a class of its own: it
        # is called, so that nodes have its path, and the module's class, which others inherit, is patched.
        model = vars(self)["_modules"]["model"]
        given = kwargs.get("position_ids") is not None
        with (
            replaced(REFUSED),
            forward_runs(),
            fake_kernels_named(),
            self.effects.noted(model, takes_finite=self.leaves is not None),
            self._watched(args, kwargs),
        ):
            taken, named, rest = (args, kwargs, ())
            if divides(kwargs, self._loss_fn, self._outputs):
                function = self._outputs or self._loss_fn
                taken, named, rest = divide(model, args, kwargs, function)
            padding = kwargs.get("attention_mask") if self.leaves_out else None
            layers = RepeatedLayers(model, rng).patches() if self.repeats else ()
            of_ones = self.of_ones
            with (
                our_operators(model, rng, positions_given=given, padding=padding, of_ones=of_ones),
                replaced(layers),
            ):
                if isinstance(self._outputs, LossCut):
                    return self._outputs.forward(self.model, taken, named)
                outputs = self.model(*taken, **named)
            if (self._outputs or self._loss_fn) not in (None, all_outputs):
                vars(self)["returned"] = returned(outputs)
            if self._outputs is not None:
                return self._outputs(outputs, given_batch(args, kwargs))
            if self._loss_fn is None:
                return find_loss(outputs)
            return apply_loss(self._loss_fn, outputs, args, kwargs, rest)

    def _watched(self, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        if self.leaves is None:
            return nullcontext()
        vars(self)["host"] = host = HostValues(self.model, self.leaves)
        return host.watching(pytree.tree_leaves((args, kwargs)))


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point()


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    forms: Mapping[str, Form],
    trained: Collection[str] | None = None,
    loss_fn: LossFn | None = None,
    evaluate: bool = False,
    outputs: OutputsFn | None = None,
    padded_right: bool = False,
    hides_nothing: bool = False,
    reads_values: bool = False,
    parts: Mapping[str, str] = _NO_PARTS,
) -> Captured:
    """Trace ``loss(model(*args, **kwargs))`` in the model's present train/eval mode.

    ``trained`` names the parameters that get a gradient; None: all that require one. ``evaluate``
    traces in eval mode and without gradients instead. What ``outputs`` makes of the forward, if it is given,
    takes the place of the loss. ``padded_right`` says that :func:`is_padded_right` holds of the batch, of
    which the graph may then make use; ``hides_nothing`` that its mask is all ones. ``reads_values``: what the
    forward reads of the batch's values is computed by a prologue; else it is refused. ``parts`` are the paths
    of frozen modules that run in eager PyTorch, and why each cannot be traced.

    Raises :class:`CaptureError` where the forward branches on data, mutates a buffer, draws random
    numbers that are not ours, returns no scalar loss, or one without a gradient for what is trained.
    """
    define_grouped_gradient()
    if trained is None:
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
    options = (loss_fn, evaluate, outputs, padded_right, hides_nothing, reads_values, parts)
    if not reads_values:
        with suppress(LayersDifferError):
            return _captured(model, args, kwargs, forms, trained, *options, repeats=True)
    return _captured(model, args, kwargs, forms, trained, *options, repeats=False)


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    forms: Mapping[str, Form],
    trained: Collection[str],
    loss_fn: LossFn | None,
    evaluate: bool,
    outputs: OutputsFn | None,
    padded_right: bool,
    hides_nothing: bool,
    reads_values: bool,
    parts: Mapping[str, str],
    *,
    repeats: bool,
) -> Captured:
    """Trace a model of which a copy is made, whose equal layers may be traced once."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copied = fake_copy(model, forms, mode, trained)
    if evaluate:
        copied.eval().requires_grad_(False)
    _no_cache(copied)
    _no_draws(copied)
    run_parts_for_real(copied, parts)
    effects = Effects()
    forward = _Forward(copied, loss_fn, outputs, effects)
    forward.repeats = repeats
    vars(forward)["leaves"] = pytree.tree_leaves((args, kwargs)) if reads_values else None
    with mode:
        rng = torch.zeros(2, dtype=torch.int64)
        args, kwargs = pytree.tree_map_only(Tensor, _fake_leaf, (args, kwargs))
    inputs = (rng, args, kwargs)
    forward.outside = outputs is not None and not evaluate
    forward.leaves_out = padded_right or hides_nothing
    forward.of_ones = hides_nothing
    captured = _trace(forward, inputs, model)
    if padded_right and not reads_no_padding(captured, args, kwargs):
        forward.leaves_out = False
        captured = _trace(forward, inputs, model)
    changed = effects.first
    if changed:  # by the first forward: all later ones must compute the same
        effects.apply(copied)
        first = forward.host
        again = _trace(forward, inputs, model)
        other = first is not None and forward.host is not None and not first.same_as(forward.host)
        refuse_other_forward(captured.graph, again.graph, changed, changed if other else effects.first)
    if trained and not evaluate and not captured.trainable:
        raise _without_gradient("loss" if outputs is None else "output", model)
    return captured


def _without_gradient(what: str, model: nn.Module) -> CaptureError:
    return CaptureError(
        f"The {what} of {type(model).__name__} has no gradient for any parameter that the optimizer "
        "trains: look for a detach, a no_grad or an argmax on the way to it."
    )


def _trace(forward: _Forward, inputs: tuple[Any, ...], model: nn.Module) -> Captured:
    try:
        with warnings.catch_warnings(), _quiet(*_LOGS), replaced(_FLAGS):
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # torch copies its own classes
            warnings.filterwarnings("ignore", message=".*assigned during export.*")  # ``effects`` judges it
            with graphs_alone():
                exported = torch.export.export(forward, inputs, strict=False)
            for part in exported.graph_module.modules():
                if isinstance(part, fx.GraphModule):
                    return_writes(part.graph)
            refuse_constants(exported, model, forward.effects.replaced)
            refuse_writes(exported)
            refuse_sparse(exported)
            graph, signature = functionalise(exported)
    except CaptureError as error:
        raise error.with_traceback(None) from None  # torch's frames tell nothing
    except MemoryError as error:
        raise BudgetError(
            f"The host has no memory left to capture {type(model).__name__}: raise the limit of this process."
        ) from error
    except Exception as error:
        raise _untraceable(error, forward.model) from None
    return _flatten(graph, signature, exported.constants, forward, model)


def _fake_leaf(leaf: Tensor) -> Tensor:
    """A fake tensor of its own for each leaf: one object passed twice would become one input."""
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Silence what torch logs of a failure: it says less than the error that is raised for it."""
    logs = [logging.getLogger(name) for name in names]
    before = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        yield
    finally:
        for log, disabled in zip(logs, before, strict=True):
            log.disabled = disabled


def _as_they_are(_theirs: Callable[..., Any], *flags: Any) -> tuple[Any, ...]:
    """Export sets cuDNN's flags and sets them back: it reads TF32's older flag, which torch refuses where the
    newer ones say another, and its write fixes them for whatever a user sets later.
    """
    return flags


_FLAGS = (Patch(torch.backends.cudnn, "set_flags", _as_they_are, "TF32 would not be restored"),)


def _no_cache(model: nn.Module) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        for part in (config, getattr(config, "text_config", None)):
            if part is not None and getattr(part, "use_cache", False):
                part.use_cache = False


def _no_draws(model: nn.Module) -> None:
    """Let PEFT's LoHa and LoKr, which draw whether to drop an adapter, know that they never do."""
    for module in model.modules():
        dropouts = [getattr(module, name, None) for name in ("module_dropout", "rank_dropout")]
        if all(isinstance(values, dict) and not any(values.values()) for values in dropouts):
            module.training = False  # its parts stay as they are


def _flatten(
    graph: fx.Graph,
    signature: ExportGraphSignature,
    held: Mapping[str, Any],
    forward: _Forward,
    original: nn.Module,
) -> Captured:
    refuse_mutations(signature)
    write_changes(graph, signature, original)
    model = forward.model
    nodes = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    names: dict[InputKind, dict[str, Any]] = defaultdict(dict)  # what each placeholder is, by its kind
    for spec in signature.input_specs:
        names[spec.kind][spec.arg.name] = str(spec.target)
    parameters = _merge_tied(model, names[InputKind.PARAMETER], nodes)
    buffers = {name: strip(target) for name, target in names[InputKind.BUFFER].items()}
    rng, *leaves = names[InputKind.USER_INPUT]
    constants = {
        name: held[target]
        for kind, targets in names.items()
        for name, target in targets.items()
        if kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER_INPUT)
    }
    made = [name for name, value in constants.items() if forward.host and forward.host.makes(value)]
    fake_mode = next(n.meta["val"].fake_mode for n in nodes.values() if "val" in n.meta)
    if forward._outputs is not None:
        copy_results(graph, fake_mode, shared=forward.outside)
    replace_draws(graph, nodes[rng])
    clean(graph)
    _choose_by_masks(graph)
    _refuse_masked_writes(graph, parameters)
    if forward.host:
        _rejoin(graph)
    refuse_mixed_products(graph)
    used = {n.name for n in graph.nodes if n.op == "placeholder"} | {rng}
    made = [name for name in made if name in used]
    prologue = forward.host.prologue([constants[name] for name in made]) if forward.host else None
    given = {parameters[node.name] for node in given_gradients(graph) if node.name in parameters}
    return Captured(
        graph=graph,
        parameters={n: p for n, p in parameters.items() if n in used},
        buffers={n: b for n, b in buffers.items() if n in used},
        inputs={n: i for i, n in enumerate([*leaves, *made]) if n in used},
        constants={n: c for n, c in constants.items() if n in used and n not in made},
        rng=rng,
        trainable=frozenset(n for n, p in model.named_parameters() if p.requires_grad and n in given),
        fake_mode=fake_mode,
        structure=forward.structure,
        outside=forward.outside,
        blind=forward.leaves_out,
        returned=forward.returned,
        prologue=prologue,
    )


def _rejoin(graph: fx.Graph) -> None:
    """Leave out splits whose pieces are put together again, so that their sizes are not the graph's."""
    for node in list(graph.nodes):
        pieces = node.args[0] if node.target is aten.cat.default else ()
        items = [piece for piece in pieces if piece.target is operator.getitem]
        splits = {item.args[0] for item in items}
        split = splits.pop() if len(splits) == 1 and len(items) == len(pieces) else None
        if split is None or split.target is not aten.split_with_sizes.default:
            continue
        parts, joined = split.meta["val"], [item.args[1] for item in items]
        dims = {
            (of.args[at] if len(of.args) > at else 0) % parts[0].dim() for of, at in ((split, 2), (node, 1))
        }
        if joined == list(range(len(parts))) and len(dims) == 1:
            node.replace_all_uses_with(split.args[0])
    graph.eliminate_dead_code()


def _merge_tied(model: nn.Module, targets: Mapping[str, str], nodes: Mapping[str, fx.Node]) -> dict[str, str]:
    """The parameter's first name by placeholder, of which each parameter object keeps one."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    first_name = {id(p): n for n, p in model.named_parameters()}
    by_object: dict[int, fx.Node] = {}
    merged: dict[str, str] = {}
    for name, target in targets.items():
        parameter = tensors[strip(target)]
        original = by_object.setdefault(id(parameter), nodes[name])
        if original is not nodes[name]:
            nodes[name].replace_all_uses_with(original)
        else:
            merged[name] = first_name[id(parameter)]
    return merged


_AT_RANDOM = "dropped at random are not supported"


def _untraceable(error: Exception, model: nn.Module) -> CaptureError:
    """Return the error to raise; to read values of the batch does not help where modules are dropped."""
    text = _explain(error, model)
    if _AT_RANDOM in text or isinstance(error, DecidesError):
        return CaptureError(text)
    return UntraceableError(text, module=_module_of(list(traceback.walk_tb(error.__traceback__)), model))


def _explain(error: Exception, model: nn.Module) -> str:
    """Return one sentence that names the line of the user's code, and the module, at which tracing failed."""
    stack = list(traceback.walk_tb(error.__traceback__))
    summary = traceback.StackSummary.extract(iter(stack))
    where = _line(summary)
    at = f" at {where}{_of(_module_of(stack, model))}" if where else ""
    called = next((note for note in getattr(error, "__notes__", ()) if note.startswith(CALLED)), "")
    what = "loss_fn" if called else f"The forward of {type(model).__name__}"
    hint = "its control flow and shapes must not depend on the values of tensors"
    if any(frame.filename.endswith("flex_attention.py") for frame in summary):
        return f"{what} calls flex attention{at}, {FLEX}."
    if isinstance(error, DecidesError):
        return decides(at)
    if isinstance(error, GuardOnDataDependentSymNode):
        made = _making(error)
        if (origin := _line(made)) not in ("", where):
            maker = _of(_module_of(_still_running(stack, made), model))
            return (
                f"{what} cannot be captured: {origin}"
                f"{maker} makes a size that depends on the values "
                f"of tensors, and {where} needs it. Keep all rows there, and hide some by a mask, or select "
                "them before the batch comes to the program."
            )
        if "layerdrop" in at:
            hint = f"layers that are {_AT_RANDOM}: set layerdrop to 0"
        elif "module_dropout" in at:
            hint = f"adapters that are {_AT_RANDOM}: set both their dropouts to 0"
        return f"{what} cannot be captured{at}: {hint}."
    first_line = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
    if isinstance(error, (TypeError, AttributeError, LookupError)):  # as it would raise without us
        return f"{what} fails{at}: {type(error).__name__}: {first_line}{called and f'; {called}'}."
    if re.search(r"dtype int|types: Long", first_line):
        hint = "token ids and labels of classes are whole numbers: give them as .long()"
    elif "cast NotImplemented" in first_line:
        hint = (
            "a tensor subclass, as torchao's weights are, lacks this operation in plain PyTorch, too: give "
            "its dequantize(), or load the model without quantization_config"
        )
    elif "should be the same" in first_line or "dtype" in first_line:
        hint = "the batch's floats must have the dtype in which the model computes, compute_dtype="
    elif called:
        hint = called
    return f"{what} cannot be captured{at}: {first_line}; {hint}."


def _line(stack: Iterable[traceback.FrameSummary]) -> str:
    """Return the file, number and text of the innermost line of the user's code, or nothing."""
    torch_root = str(Path(inspect.getfile(torch)).parent)
    here = str(Path(__file__).parents[1])
    frames = [
        frame
        for frame in stack
        if not frame.filename.startswith((torch_root, here)) and "<" not in frame.filename
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


def _module_of(stack: Iterable[tuple[FrameType, int]], model: nn.Module) -> str:
    """Return the path of the module below the model, the innermost, in which a stack is."""
    names = {id(vars(module)): name for name, module in model.named_modules() if name}  # export's stand-ins'
    frames = [getattr(frame.f_locals.get("self"), "__dict__", None) for frame, _ in stack]
    inside = [names.get(id(attributes), "") for attributes in frames]
    return next((name for name in reversed(inside) if name), "")


def _of(module: str) -> str:
    return module and f" of {module}"


def _still_running(
    stack: list[tuple[FrameType, int]], earlier: list[traceback.FrameSummary]
) -> list[tuple[FrameType, int]]:
    """Return the part of a stack that was under way at an earlier moment."""
    running: list[tuple[FrameType, int]] = []
    for (frame, line), before in zip(stack, earlier, strict=False):
        if frame.f_code.co_name != before.name:
            break
        running.append((frame, line))
        if line != before.lineno:
            break
    return running


def _making(error: GuardOnDataDependentSymNode) -> list[traceback.FrameSummary]:
    """Return the stack, from our forward on, at which the size was made that an error does not know."""
    mode = detect_fake_mode()
    made = mode.shape_env.var_to_stack if mode is not None and mode.shape_env is not None else {}
    symbol = min((s for s in error.cond.free_symbols if s in made), key=str, default=None)
    frames = list(made[symbol].summary()) if symbol is not None else []  # type: ignore[no-untyped-call]
    ours = [i for i, f in enumerate(frames) if f.filename == __file__ and f.name == _Forward.forward.__name__]
    return frames[ours[-1] :] if ours else []
