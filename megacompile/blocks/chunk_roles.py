"""Which operators of a template act on each position of a sequence alone: its joint graph at two lengths.

In: a template of one sequence. Out: its joint graph, with the sequence's dimension of each node's value in
``meta["along"]`` (:data:`WHOLE` unless one dimension has just that size). :func:`role` sorts nodes into those
that may run chunk by chunk, sums over positions, and the rest. What operators do to a dimension,
:mod:`~megacompile.graph.sequence_dimension` says. What no rule knows mixes positions, which is always right.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.blocks.joint_graph import Joint, joint_of
from megacompile.blocks.partition import Template
from megacompile.graph.sequence_dimension import carried, name_of
from megacompile.kernels.registry import called

aten = torch.ops.aten
CHUNKS = (32768, 8192, 2048)  # positions, those that are tried one after the other
WHOLE = -1
_WIDEST = 2**30  # bytes of one value of a chunk
Along = int | None  # a dimension; None: the value has none of the sequence's; WHOLE: not one of just its size
Role = Literal["local", "sum", "mixing"]
_SUMMING = aten.native_layer_norm_backward.default, aten.nll_loss_forward.default  # beside what is local
_BESIDE_SUMS = (*_SUMMING, aten.nll_loss_backward.default)
MEAN, SUM = 1, 2  # reductions of a loss


def length_of(template: Template) -> int | None:
    """The positions of a template's one sequence: a size that all of its values have, and one of them first;
    None where there is none."""
    values = [e for e, kind in zip(template.examples, template.kinds, strict=True) if kind == "value"]
    shapes = [[n for n in v.shape if n != 1] for v in (*values, *template.results) if v.dim()]
    return next((s[0] for s in shapes if s and all(s[0] in other for other in shapes)), None)


def at_length(template: Template, length: int, other: int) -> Template:
    """The template of sequences of another length: sizes and constants that are ``length`` or one off, and
    as many numbers in a row as several for each position, such as places of each token's experts.

    :func:`compare` then says whether that was right for each of them.
    """

    def constant(value: Any) -> Any:
        near = type(value) is int and abs(value - length) <= 1 and length > 2
        return value - length + other if near else value

    def count(value: Any) -> Any:
        several = type(value) is int and value > length and value % length == 0
        return value // length * other if several else constant(value)

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in template.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "call_function":
            changed = count if name_of(node) == "arange" else constant
            copies[node].args = _leaves(copies[node].args, changed)
            copies[node].kwargs = {k: _leaves(v, constant) for k, v in copies[node].kwargs.items()}

    def resized(example: Tensor) -> Tensor:
        shape = [other if n == length else n for n in example.shape]
        strides = example.stride()
        order = sorted(range(example.dim()), key=lambda d: (-strides[d], d))
        made = torch.empty([shape[d] for d in order], dtype=example.dtype, device=example.device)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return made.permute(inverse).requires_grad_(example.requires_grad)

    with template.examples[0].fake_mode:  # type: ignore[attr-defined]
        examples = tuple(
            resized(e) if kind == "value" else e
            for e, kind in zip(template.examples, template.kinds, strict=True)
        )
        results = tuple(r.detach() for r in fx.Interpreter(fx.GraphModule({}, graph)).run(*examples))
    return replace(template, graph=graph, examples=examples, results=results)


def _leaves(value: Any, change: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_leaves(item, change) for item in value)
    return change(value)


def compare(joint: Joint, length: int, other: Joint, other_length: int) -> str | None:
    """Note the sequence's dimensions in both graphs; why they are not of one program, or None."""
    pairs = list(zip(joint.graph.nodes, other.graph.nodes, strict=False))
    if len(joint.graph.nodes) != len(other.graph.nodes):
        return "its graph depends on the length"
    for a, b in pairs:
        if (a.op, a.target if a.op == "call_function" else "") != (
            b.op,
            b.target if b.op == "call_function" else "",
        ):
            return f"{a.name} is another operator at another length"
        if a.op == "output":
            continue
        found = _along(a.meta.get("val"), b.meta.get("val"), length, other_length)
        a.meta["along"] = b.meta["along"] = found
    return None


def fitting_chunk(joint: Joint, chunk: int) -> int:
    """``chunk`` or a half, a quarter, ... of it, so that no value of one chunk takes more than a GiB."""
    widest = 0
    for node in joint.graph.nodes:
        along, value = node.meta.get("along"), node.meta.get("val")
        if isinstance(along, int) and along != WHOLE:
            widest = max(widest, value.numel() * value.element_size() // value.shape[along])
    while chunk > 1 and widest * chunk > _WIDEST:
        chunk //= 2
    return chunk


def _along(a: Any, b: Any, length: int, other: int) -> Any:
    if isinstance(a, (list, tuple)):
        return tuple(_along(x, y, length, other) for x, y in zip(a, b, strict=True))
    if not isinstance(a, Tensor):
        return None
    if a.dim() != b.dim():
        return WHOLE
    differ = [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]
    if not differ:
        return None
    (d, *more) = differ
    return d if not more and (a.shape[d], b.shape[d]) == (length, other) else WHOLE


def role(node: fx.Node) -> Role:
    """Return how a node of a compared graph treats positions."""
    if node.op != "call_function":
        return "mixing"
    if node.target is operator.getitem:
        source: Any = node.args[0]
        call = called(source.target)
        sums = source.target in _SUMMING or (call is not None and call.part.sums)
        if sums and node.meta["along"] is None:
            return "sum" if role(source) == "local" else "mixing"
        return "local" if role(source) == "local" and node.meta["along"] is not None else "mixing"
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return "mixing"
    given = [a.meta["along"] for a in node.all_input_nodes]
    out = node.meta["along"]
    flat = out if isinstance(out, tuple) else (out,)
    if WHOLE in given or WHOLE in flat or any(isinstance(a, tuple) for a in given):
        return "mixing"
    if all(a is None for a in given):
        return "mixing"  # made of nothing that has positions: computed once
    return _role(node, out)


def _role(node: fx.Node, out: Any) -> Role:
    target, args = node.target, list[Any](node.args)
    if target is aten.embedding_dense_backward.default:
        return "sum" if all(_is_before(a) == 1 for a in args[:2]) else "mixing"
    given = {a: a.meta["along"] for a in node.all_input_nodes if a.meta["along"] is not None}
    if target in _BESIDE_SUMS or called(target) is not None:
        return "local" if _is_alone(node, out, given) else "mixing"
    ends = {carried(node, a)[along] for a, along in given.items()}
    if None not in ends and ends == set(out if isinstance(out, tuple) else (out,)):
        return "local"
    product = target is aten.mm.default and [a.meta["along"] for a in args] == [1, 0]
    return "sum" if out is None and (product or target is aten.sum.dim_IntList) else "mixing"


def _is_alone(node: fx.Node, out: Any, given: dict[fx.Node, int]) -> bool:
    """Return whether an operator of ours, or one beside whose results are sums, acts on positions alone."""
    args, call = list[Any](node.args), called(node.target)
    first, along = args[0], given.get(args[0])
    if node.target is aten.nll_loss_backward.default:
        return along is None and out == 0
    if along is None:
        return False
    if call is None:
        if node.target is aten.nll_loss_forward.default:
            return along == 0 and args[2:4] == [None, SUM]
        return along < _dim(first) - len(args[2])  # of a norm
    if call.spec.along == "rows":
        return along < _dim(first) - 1 and all(_is_before(a) == 1 for a in given)
    return call.spec.along == "elements" and len({_dim(a) - d for a, d in given.items()}) == 1


def _dim(node: fx.Node) -> int:
    return len(node.meta["val"].shape)


def _is_before(node: fx.Node) -> int:
    """Elements in front of the sequence's dimension."""
    along = node.meta["along"]
    return -1 if along is None else math.prod(node.meta["val"].shape[:along])


_RESIZED: WeakKeyDictionary[Template, dict[int, Template]] = WeakKeyDictionary()  # by length


def two_lengths(
    template: Template, mode: FakeTensorMode, lengths: Sequence[int]
) -> tuple[list[tuple[Template, Joint]], str | None]:
    """The template and its joint graph at its own length and at another; why it has no loops, or None."""
    length = length_of(template)
    if length is None:
        return [], "its values have no dimension in common that could be a sequence's"
    found = [(template, joint_of(template, mode))]
    other = next(n for n in lengths if n != length)
    try:
        resized = _RESIZED.setdefault(template, {})
        if other not in resized:
            resized[other] = at_length(template, length, other)
        found.append((resized[other], joint_of(resized[other], mode)))
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
        return (
            [],
            f"it cannot be traced at another length: {(str(error) or type(error).__name__).splitlines()[0]}",
        )
    return found, compare(found[0][1], length, found[1][1], other)
