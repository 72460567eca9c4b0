"""Which operators of a template act on each position of a sequence alone: its joint graph at two lengths.

In: a template of one sequence. Out: its joint graph, where each node's ``meta["along"]`` says which
dimension of its value is the sequence's (:data:`WHOLE` where that is not one dimension of just that size),
and :func:`role`, which sorts nodes into those that may run chunk by chunk, those that sum over positions,
and the rest. Each rule is a sufficient condition; what no rule knows mixes positions, which is always
right.
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
from megacompile.kernels.registry import called

aten = torch.ops.aten
CHUNKS = (32768, 8192, 2048)  # positions, those that are tried one after the other
WHOLE = -1
_WIDEST = 2**30  # bytes of one value of a chunk
Along = int | None  # a dimension; None: the value has none of the sequence's; WHOLE: not one of just its size
Role = Literal["local", "sum", "mixing"]
_ALIKE = (aten.clone.default, aten._to_copy.default, aten.detach.default, aten.alias.default)
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_MOVES = (aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default)
_OF_ONE_DIMENSION = (
    aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.squeeze.dim, aten._softmax.default,
    aten._log_softmax.default, aten.slice_backward.default, aten.select_backward.default,
)  # fmt: skip
_PLACE = {aten.split.Tensor: 2, aten.slice_backward.default: 2, aten.select_backward.default: 2}
_SUMMING = aten.native_layer_norm_backward.default, aten.nll_loss_forward.default  # beside what is local
MEAN, SUM = 1, 2  # reductions of a loss
_SPREADS = (aten.slice_backward.default, aten.select_backward.default)
_SOFTMAX_BACKWARDS = (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
_OVER_DIMENSIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)


def length_of(template: Template) -> int | None:
    """The positions of a template's one sequence: a size that all of its values have, and one of them first;
    None where there is none."""
    values = [e for e, kind in zip(template.examples, template.kinds, strict=True) if kind == "value"]
    shapes = [[n for n in v.shape if n != 1] for v in (*values, *template.results) if v.dim()]
    return next((s[0] for s in shapes if s and all(s[0] in other for other in shapes)), None)


def at_length(template: Template, length: int, other: int) -> Template:
    """The template of sequences of another length: sizes and constants that are ``length`` or one off.

    :func:`compare` then says whether that was right for each of them.
    """

    def constant(value: Any) -> Any:
        near = type(value) is int and abs(value - length) <= 1 and length > 2
        return value - length + other if near else value

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in template.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "call_function":
            copies[node].args = _leaves(copies[node].args, constant)
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
    first = args[0]
    if target in (aten.mm.default, aten.bmm.default):
        return _of_product(first, args[1], out, rows=int(target is aten.bmm.default))
    if target is aten.addmm.default:
        local = first.meta["along"] is None and _of_product(args[1], args[2], out, rows=0) == "local"
        return "local" if local else "mixing"
    if target in _OVER_DIMENSIONS:
        given = args[1] if len(args) > 1 and args[1] else range(_dim(first))
        if first.meta["along"] not in {d % max(1, _dim(first)) for d in given}:
            return "local"
        return "sum" if target is aten.sum.dim_IntList else "mixing"
    if target is aten.embedding_dense_backward.default:
        return "sum" if all(_is_before(a) == 1 for a in args[:2]) else "mixing"
    return "local" if _is_local(node, out) else "mixing"


def _of_product(a: fx.Node, b: fx.Node, out: Along, rows: int) -> Role:
    """Rows of the left are positions; or both sides are summed over them."""
    left, right = a.meta["along"], b.meta["along"]
    if (left, right, out) == (rows, None, rows):
        return "local"
    return "sum" if (left, right, out) == (rows + 1, rows, None) and rows == 0 else "mixing"


def _is_local(node: fx.Node, out: Any) -> bool:
    target, args = node.target, list[Any](node.args)
    assert isinstance(target, torch._ops.OpOverload)
    first = args[0]
    if target is aten.cat.default:
        dim = args[1] if len(args) > 1 else 0
        return bool(all(a.meta["along"] == out for a in first) and dim % _dim(node) != out)
    if torch.Tag.pointwise in target.tags:
        return _same_dimension(node, out)
    if not isinstance(first, fx.Node):
        return False  # a list, as of what is stacked
    along = first.meta["along"]
    if target is aten.embedding.default:
        return along is None and out is not None
    if target is aten.nll_loss_forward.default:
        return along == 0 and args[2] is None and args[3] == SUM
    if target is aten.nll_loss_backward.default:
        return along is None and out == 0
    call = called(target)
    if call is not None and call.spec.along == "rows":
        rows = [a for a in node.all_input_nodes if a.meta["along"] is not None]
        return along is not None and along < _dim(first) - 1 and all(_is_before(a) == 1 for a in rows)
    if call is not None and call.spec.along == "elements":
        behind = {_dim(a) - a.meta["along"] for a in node.all_input_nodes if a.meta["along"] is not None}
        return along is not None and len(behind) == 1
    return along is not None and _keeps_dimension(node, args, along, out)


def _keeps_dimension(node: fx.Node, args: list[Any], along: int, out: Any) -> bool:
    """Return whether an operator of one tensor, or with others like it, leaves the sequence's dimension
    alone."""
    target, first = node.target, args[0]
    if target in _RESHAPES:
        return out is not None and _is_before(first) == _is_before(node)
    if target in (*_MOVES, *_ALIKE, aten.expand.default):
        return out is not None
    if target in _OF_ONE_DIMENSION:
        place = _PLACE.get(target, 1)
        dim = args[place] if len(args) > place else 0
        outs = out if isinstance(out, tuple) else (out,)
        given = target not in _SPREADS  # the dimension counts in what it is given, not in the result
        return None not in outs and bool(dim % _dim(first if given else node) != (along if given else out))
    if target in _SOFTMAX_BACKWARDS:
        return bool(args[2] % _dim(first) != along) and _same_dimension(node, out)
    if target is aten.native_layer_norm.default:
        return along < _dim(first) - len(args[1])
    return target is aten.native_layer_norm_backward.default and along < _dim(first) - len(args[2])


def _same_dimension(node: fx.Node, out: Along) -> bool:
    """Return whether each argument that has positions has them where the result does, from the right."""
    if out is None:
        return False
    behind = len(node.meta["val"].shape) - out
    given = [a for a in node.all_input_nodes if a.meta["along"] is not None]
    return all(_dim(a) - a.meta["along"] == behind for a in given)


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
