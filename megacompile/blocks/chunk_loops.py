"""Compute a block function in loops over chunks of the sequence, where its operators allow it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.blocks.codegen import DEVICE, call_text, comment, target_name
from megacompile.blocks.costs import is_heavy
from megacompile.blocks.joint_graph import Joint, joint_of
from megacompile.blocks.partition import Template
from megacompile.graph.captured import is_view, reached
from megacompile.kernels.registry import called

# ------------------------------------------------------------------------------------------------------------
# Which operators of a template act on each position of a sequence alone: its joint graph at two lengths.
#
# In: a template of one sequence. Out: its joint graph, where each node's ``meta["along"]`` says which
# dimension of its value is the sequence's (:data:`WHOLE` where that is not one dimension of just that size),
# and :func:`role`, which sorts nodes into those that may run chunk by chunk, those that sum over positions,
# and the rest. Each rule is a sufficient condition; what no rule knows mixes positions, which is always
# right.


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
        return "sum" if all(_before(a) == 1 for a in args[:2]) else "mixing"
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
        return _aligned(node, out)
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
        return along is not None and along < _dim(first) - 1 and all(_before(a) == 1 for a in rows)
    if call is not None and call.spec.along == "elements":
        behind = {_dim(a) - a.meta["along"] for a in node.all_input_nodes if a.meta["along"] is not None}
        return along is not None and len(behind) == 1
    return along is not None and _keeps_dimension(node, args, along, out)


def _keeps_dimension(node: fx.Node, args: list[Any], along: int, out: Any) -> bool:
    """Return whether an operator of one tensor, or with others like it, leaves the sequence's dimension
    alone."""
    target, first = node.target, args[0]
    if target in _RESHAPES:
        return out is not None and _before(first) == _before(node)
    if target in (*_MOVES, *_ALIKE, aten.expand.default):
        return out is not None
    if target in _OF_ONE_DIMENSION:
        place = _PLACE.get(target, 1)
        dim = args[place] if len(args) > place else 0
        outs = out if isinstance(out, tuple) else (out,)
        given = target not in _SPREADS  # the dimension counts in what it is given, not in the result
        return None not in outs and bool(dim % _dim(first if given else node) != (along if given else out))
    if target in _SOFTMAX_BACKWARDS:
        return bool(args[2] % _dim(first) != along) and _aligned(node, out)
    if target is aten.native_layer_norm.default:
        return along < _dim(first) - len(args[1])
    return target is aten.native_layer_norm_backward.default and along < _dim(first) - len(args[2])


def _aligned(node: fx.Node, out: Along) -> bool:
    """Return whether each argument that has positions has them where the result does, from the right."""
    if out is None:
        return False
    behind = len(node.meta["val"].shape) - out
    given = [a for a in node.all_input_nodes if a.meta["along"] is not None]
    return all(_dim(a) - a.meta["along"] == behind for a in given)


def _dim(node: fx.Node) -> int:
    return len(node.meta["val"].shape)


def _before(node: fx.Node) -> int:
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


# ------------------------------------------------------------------------------------------------------------
# Stages: which nodes of a block function's graph run in which loop over chunks, and which values are whole.
#
# In: a graph whose nodes :mod:`~megacompile.blocks.chunk_loops` has noted. Out: :class:`Stages`. Even ones
# run operators on whole values once, odd ones are loops. What such an operator or the result reads is whole;
# of what a later loop reads again, a value with a product on the way to it is whole, and the rest is derived
# again there.


class Stages:
    """The stage of each node of one graph.

    ``stage`` is the earliest, ``home`` of a local one the latest at which all its readers are served;
    ``whole`` are the local ones that loops write for what comes after them.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes = [n for n in graph.nodes if n.op == "call_function"]
        self.roles = {n: role(n) for n in graph.nodes}
        results: Any = graph.output_node().args[0]
        self.results: list[Any] = list(results)
        self.stage: dict[fx.Node, int] = {}
        self.home: dict[fx.Node, int] = {}
        self.whole: set[fx.Node] = set()
        self._sort()
        self._whole()
        for loop in reversed(self.loops):
            self.sinks(loop)

    @property
    def loops(self) -> range:
        return range(1, max(self.stage.values(), default=0) + 1, 2)

    @property
    def worthwhile(self) -> bool:
        """Return whether any loop has a product."""
        return any(is_heavy(n) for loop in self.loops for n in self._inside(self.sinks(loop), loop))

    def _sort(self) -> None:
        """The earliest stage of each node, then for local ones the latest at which all readers are served."""
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.stage[node] = 0
            elif node.op == "call_function":
                local = self.roles[node] != "mixing"
                self.stage[node] = max([int(local), *(self._after(a, local) for a in node.all_input_nodes)])
        for node in reversed(self.nodes):
            if self.roles[node] == "local":
                latest = [self._served(node, user) for user in node.users]
                self.home[node] = min(latest, default=self.stage[node])

    def _after(self, argument: fx.Node, local: bool) -> int:
        at = self.stage[argument]
        if self.roles[argument] == "local":
            return at if local else at + 1
        if self.roles[argument] == "sum":
            return at + 2 if local else at + 1
        return at + 1 if local else at

    def _served(self, node: fx.Node, user: fx.Node) -> int:
        if user.op == "output":
            return self.stage[node]
        if self.roles[user] == "local":
            return self.home[user]
        return self.stage[user] - (self.roles[user] == "mixing")

    def _whole(self) -> None:
        for node in self.nodes:
            if self.roles[node] == "mixing":
                for argument in node.all_input_nodes:
                    self._make_whole(argument)
        for node in self.results:
            if isinstance(node, fx.Node):
                self._make_whole(node)

    def _make_whole(self, node: fx.Node) -> None:
        """A local view is rebuilt from its base, which is whole instead."""
        while self.roles[node] == "local" and is_view(node):
            node = node.all_input_nodes[0]
        if self.roles[node] == "local" and isinstance(node.meta["val"], Tensor):
            self.whole.add(node)

    def _is_whole(self, node: fx.Node) -> bool:
        return self.roles[node] != "local" or node in self.whole

    def _derived_cheaply(self, node: fx.Node) -> bool:
        """Return whether no product is on the way to a local node from what is whole."""
        seen, pending = set[fx.Node](), [node]
        while pending:
            current = pending.pop()
            if current in seen or self._is_whole(current):
                continue
            seen.add(current)
            if is_heavy(current):
                return False
            pending += current.all_input_nodes
        return True

    def sinks(self, loop: int) -> list[fx.Node]:
        """Return the results of a loop: whole values and sums; values of earlier loops that it reads become
        whole."""
        sinks = [n for n in self.nodes if self._ends_in(n, loop)]

        def onward(node: fx.Node) -> list[fx.Node]:
            derived = []
            for argument in (a for a in node.all_input_nodes if self._in_loop(a, loop)):
                if self._stays(argument, loop):
                    self.whole.add(argument)
                else:
                    derived.append(argument)
            return derived

        reached(sinks, onward)
        return sinks

    def _stays(self, node: fx.Node, loop: int) -> bool:
        """Return whether an earlier loop leaves a node whole for this one, as that costs less than to derive
        it."""
        made = self.home[node] < loop and isinstance(node.meta["val"], Tensor) and not is_view(node)
        return made and not self._derived_cheaply(node)

    def before(self, node: fx.Node, loop: int) -> bool:
        """Return whether a local node is whole when a loop begins."""
        return node in self.whole and self.home[node] < loop

    def _in_loop(self, node: fx.Node, loop: int) -> bool:
        return self.roles[node] == "local" and not self.before(node, loop)

    def _ends_in(self, node: fx.Node, loop: int) -> bool:
        if self.roles[node] == "sum":
            return self.stage[node] == loop
        return node in self.whole and self.home[node] == loop

    def _inside(self, sinks: list[fx.Node], loop: int) -> set[fx.Node]:
        """Return the nodes that a loop computes for its sinks, these included."""
        return reached(sinks, lambda n: [a for a in n.all_input_nodes if self._in_loop(a, loop)])


# ------------------------------------------------------------------------------------------------------------
# Loops: a block function's graph becomes loops over chunks of the sequence around what mixes positions.
#
# In: the extracted graph of one function, whose nodes :mod:`~megacompile.blocks.chunk_loops` has noted. Out:
# source of a function of the same arguments and results. Sums over positions are taken in FP32 over chunks
# and rounded once. Invariant: a loop reads and writes whole values at the positions of its chunk alone.


_aten = torch.ops.aten
_SIZES: dict[Any, int] = {
    _aten.view.default: 1, _aten._unsafe_view.default: 1, _aten.reshape.default: 1, _aten.expand.default: 1,
    _aten.slice_backward.default: 1, _aten.select_backward.default: 1,
}  # fmt: skip  # where an operator is given the sizes of its result
_START, _END = "start", "end"


@dataclass
class _Line:
    """A statement: its text, the names that it reads and makes; of a loop, the statements inside."""

    text: str
    reads: tuple[str, ...]
    makes: tuple[str, ...] = ()
    inside: list[_Line] = field(default_factory=list)


def looped_source(given: fx.Graph, name: str, doc: str, length: int, chunk: int) -> str | None:
    """Source of the function with loops over chunks of ``chunk`` positions; None where it would have none."""
    graph = fx.Graph()
    results: Any = graph.graph_copy(given, {})
    graph.output(results)
    means_as_sums(graph)
    stages = Stages(graph)
    return _Printer(stages, length, chunk).source(name, doc) if stages.worthwhile else None


class _Printer:
    """Prints one graph's stages as statements."""

    def __init__(self, stages: Stages, length: int, chunk: int) -> None:
        self.stages, self.length, self.chunk = stages, length, chunk
        self.lines: list[_Line] = []
        self.placed: set[fx.Node] = set()

    def source(self, name: str, doc: str) -> str:
        stages = self.stages
        for stage in range(max(stages.stage.values()) + 1):
            if stage in stages.loops:
                self._loop(stages.sinks(stage), stage)
            else:
                for node in stages.nodes:
                    if stages.roles[node] == "mixing" and stages.stage[node] == stage:
                        self._straight(node)
        results = [self._whole_value(n) for n in stages.results]
        return "\n".join([*self._head(name, doc), *_text(self.lines, results, "    ")]) + "\n"

    def _straight(self, node: fx.Node) -> None:
        reads = tuple(self._whole_value(a) for a in node.all_input_nodes)
        self.lines.append(_Line(f"{node.name} = {call_text(node)}{comment(node)}", reads, (node.name,)))

    def _whole_value(self, node: Any) -> str:
        """The name of a whole value; views of it are rebuilt where they are first wanted."""
        if not isinstance(node, fx.Node):
            return "None"
        if self.stages.roles[node] == "local" and node not in self.stages.whole and node not in self.placed:
            assert is_view(node), node
            self.placed.add(node)
            self._straight(node)
        return node.name

    def _loop(self, sinks: list[fx.Node], loop: int) -> None:
        if not sinks:
            return
        for node in sinks:
            self.lines.append(self._fresh(node))
        body = _Body(self.stages, loop)
        for node in sinks:
            body.put(node)
        shown = self.lines[-1].makes[0]
        head = f"for {_START}, {_END} in spans({shown}, {self.length}, {self.chunk}):"
        reads = dict.fromkeys([shown, *body.outer])
        self.lines.append(_Line(head, tuple(reads), (), body.lines))
        for node in sinks:
            if self.stages.roles[node] == "sum":
                value = node.meta["val"]
                rounded = f"{target_name(_aten._to_copy.default)}(sum_{node.name}, dtype={value.dtype})"
                text = f"sum_{node.name}" if _summed(value) == value.dtype else rounded
                self.lines.append(
                    _Line(f"{node.name} = {text}{comment(node)}", (f"sum_{node.name}",), (node.name,))
                )

    def _fresh(self, node: fx.Node) -> _Line:
        value = node.meta["val"]
        if self.stages.roles[node] == "sum":
            text = f"aten.zeros.default({list(value.shape)}, dtype={_summed(value)}, device={DEVICE})"
            return _Line(f"sum_{node.name} = {text}", (), (f"sum_{node.name}",))
        form = f"{list(value.shape)}, {list(value.stride())}, dtype={value.dtype}, device={DEVICE}"
        return _Line(f"{node.name} = aten.empty_strided.default({form})", (), (node.name,))

    def _head(self, name: str, doc: str) -> list[str]:
        arguments = [n.name for n in self.stages.graph.nodes if n.op == "placeholder"]
        lines = [f"def {name}(args):", f'    """{doc}"""']
        if arguments:
            lines += [f"    {', '.join(arguments)}, = args", "    args.clear()"]
        used = {name for line in self.lines for name in line.reads}
        unused = [
            a
            for a in arguments
            if a not in used and a not in {r.name for r in self.stages.results if r is not None}
        ]
        return [*lines, f"    del {', '.join(unused)}"] if unused else lines


def _text(lines: list[_Line], results: list[str] | None, indent: str) -> list[str]:
    """Statements, each followed by the end of what no later one reads; outside a loop also of arguments."""
    last: dict[str, int] = {}
    for i, line in enumerate(lines):
        last |= dict.fromkeys((*line.makes, *line.reads), i)
    kept = set(results or ())
    made = {name for line in lines for name in line.makes}
    text = []
    for i, line in enumerate(lines):
        text.append(indent + line.text)
        text += _text(line.inside, None, indent + "    ")
        dead = [
            n for n, at in last.items() if at == i and n not in kept and (results is not None or n in made)
        ]
        if dead:
            text.append(f"{indent}del {', '.join(dead)}")
    return text if results is None else [*text, f"{indent}return [{', '.join(results)}]"]


def _summed(value: Tensor) -> torch.dtype:
    """Return the dtype that sums over chunks are taken in."""
    return torch.float32 if value.is_floating_point() and value.element_size() < 4 else value.dtype


class _Body:
    """The statements of one loop: each sink's, just after those that it needs."""

    def __init__(self, stages: Stages, loop: int) -> None:
        self.stages, self.loop = stages, loop
        self.lines: list[_Line] = []
        self.outer: list[str] = []
        self.names: dict[fx.Node, str] = {}

    def put(self, sink: fx.Node) -> None:
        pending = [sink]
        while pending:
            node = pending[-1]
            if node in self.names:
                pending.pop()
                continue
            missing = [a for a in node.all_input_nodes if a not in self.names and not self._fetch(a)]
            if missing:
                pending += reversed(missing)
                continue
            pending.pop()
            self._compute(node)

    def _fetch(self, node: fx.Node) -> bool:
        """Name what a chunk reads of a whole value, if the node is one before the loop."""
        if self.stages.roles[node] == "local" and not self.stages.before(node, self.loop):
            return False
        along = node.meta.get("along")
        if isinstance(along, int):
            part = f"{node.name}_part"
            text = f"{part} = aten.slice.Tensor({node.name}, {along}, {_START}, {_END})"
            self.lines.append(_Line(text, (node.name,), (part,)))
            self.names[node] = part
        else:
            self.names[node] = node.name
        self.outer.append(node.name)
        return True

    def _compute(self, node: fx.Node) -> None:
        reads = tuple(self.names[a] for a in node.all_input_nodes)
        if self.stages.roles[node] == "sum":
            self._add(node, reads)
            return
        name = f"{node.name}_part"
        self.names[node] = name
        text = call_text(node, names=self._name, arguments=self._resized(node))
        self.lines.append(_Line(f"{name} = {text}", reads, (name,)))
        if node in self.stages.whole and self.stages.home[node] == self.loop:
            along = node.meta["along"]
            place = f"aten.slice.Tensor({node.name}, {along}, {_START}, {_END})"
            self.lines.append(_Line(f"aten.copy_.default({place}, {name})", (node.name, name)))
            self.outer.append(node.name)

    def _add(self, node: fx.Node, reads: tuple[str, ...]) -> None:
        total, value = f"sum_{node.name}", node.meta["val"]
        self.names[node] = total
        self.outer.append(total)
        if node.target is _aten.mm.default:
            text = f"add_product_({total}, {', '.join(self.names[a] for a in node.args)})"  # type: ignore[index]
        else:
            made = call_text(node, names=self._name, arguments=list(node.args))
            if node.target is _aten.sum.dim_IntList and _summed(value) != value.dtype:
                made = f"{made[:-1]}, dtype={_summed(value)})"
            text = f"aten.add_.Tensor({total}, {made})"
        self.lines.append(_Line(text, (total, *reads)))

    def _name(self, node: fx.Node) -> str:
        return self.names[node]

    def _resized(self, node: fx.Node) -> list[Any]:
        """A node's arguments for one chunk: where it is told sizes, those of the chunk."""
        arguments = list[Any](node.args)
        if node.target in _SIZES:
            place = _SIZES[node.target]
            sizes = list(arguments[place])
            sizes[node.meta["along"]] = _Text(f"{_END} - {_START}")
            arguments[place] = sizes
        return arguments


class _Text(str):
    """An expression, printed as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def means_as_sums(graph: fx.Graph) -> None:
    """Rewrite mean losses of a function's graph as a sum over positions, divided by the number of labels that
    count, which depends on the labels alone: else logits of all positions would wait for it."""
    for node in list(graph.nodes):
        if node.target is not _aten.nll_loss_forward.default or node.args[2:4] != (None, MEAN):
            continue
        scores, labels, _, _, ignored = node.args
        if scores.meta["along"] != 0 or labels.meta["along"] != 0:
            continue
        dtype = scores.meta["val"].dtype
        with graph.inserting_before(node):
            counted = graph.call_function(_aten.ne.Scalar, (labels, ignored))
            number = graph.call_function(_aten.sum.default, (counted,))
            count = graph.call_function(_aten._to_copy.default, (number,), {"dtype": dtype})
        with labels.meta["val"].fake_mode:
            counted.meta = {"val": labels.meta["val"].bool(), "along": WHOLE}  # so it is made once
            number.meta = {"val": torch.empty((), dtype=torch.int64), "along": None}
            count.meta = {"val": torch.empty((), dtype=dtype), "along": None}
        node.update_arg(3, SUM)
        for user in list(node.users):
            if user.args[1] == 1:
                user.replace_all_uses_with(count)
                graph.erase_node(user)
                continue
            with graph.inserting_after(user):
                mean = graph.call_function(_aten.div.Tensor, (user, count))
            mean.meta = {**user.meta, "along": None}
            user.replace_all_uses_with(mean, lambda other, mean=mean: other is not mean)
    graph.eliminate_dead_code()
