"""Loops: a block function's graph becomes loops over chunks of the sequence around what mixes positions.

In: the extracted graph of one function, whose nodes :mod:`~megacompile.blocks.chunk_roles` has noted. Out:
source of a function of the same arguments and results. Sums over positions are taken in FP32 over chunks
and rounded once. Invariant: a loop reads and writes whole values at the positions of its chunk alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.blocks.chunk_roles import MEAN, SUM, WHOLE
from megacompile.blocks.chunk_stages import Stages
from megacompile.blocks.codegen import DEVICE, call_text, comment, target_name
from megacompile.graph.node_storage import is_view

aten = torch.ops.aten
_SIZE_OPERATORS: dict[Any, int] = {
    aten.view.default: 1, aten._unsafe_view.default: 1, aten.reshape.default: 1, aten.expand.default: 1,
    aten.slice_backward.default: 1, aten.select_backward.default: 1,
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
                rounded = f"{target_name(aten._to_copy.default)}(sum_{node.name}, dtype={value.dtype})"
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
        if node.target is aten.mm.default:
            text = f"add_product_({total}, {', '.join(self.names[a] for a in node.args)})"  # type: ignore[index]
        else:
            made = call_text(node, names=self._name, arguments=list(node.args))
            if node.target is aten.sum.dim_IntList and _summed(value) != value.dtype:
                made = f"{made[:-1]}, dtype={_summed(value)})"
            text = f"aten.add_.Tensor({total}, {made})"
        self.lines.append(_Line(text, (total, *reads)))

    def _name(self, node: fx.Node) -> str:
        return self.names[node]

    def _resized(self, node: fx.Node) -> list[Any]:
        """A node's arguments for one chunk: where it is told sizes, those of the chunk."""
        arguments = list[Any](node.args)
        if node.target in _SIZE_OPERATORS:
            place = _SIZE_OPERATORS[node.target]
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
        if node.target is not aten.nll_loss_forward.default or node.args[2:4] != (None, MEAN):
            continue
        scores, labels, _, _, ignored = node.args
        if scores.meta["along"] != 0 or labels.meta["along"] != 0:
            continue
        dtype = scores.meta["val"].dtype
        with graph.inserting_before(node):
            counted = graph.call_function(aten.ne.Scalar, (labels, ignored))
            number = graph.call_function(aten.sum.default, (counted,))
            count = graph.call_function(aten._to_copy.default, (number,), {"dtype": dtype})
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
                mean = graph.call_function(aten.div.Tensor, (user, count))
            mean.meta = {**user.meta, "along": None}
            user.replace_all_uses_with(mean, lambda other, mean=mean: other is not mean)
    graph.eliminate_dead_code()
