"""Print a functional graph as a Python function that frees every tensor at its last use.

torch.fx prints graphs too, but loses the names of operators outside aten and gives no boxed calling
convention. The functions here take one list, empty it, and hold the only references to what the caller gave
away: a donated argument dies at its last use inside.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from megacompile.kernels.linear_cross_entropy import add_product_

DEVICE = "DEVICE"  # the name under which a function finds the device it runs on


def function_source(graph: fx.Graph, name: str, doc: str) -> str:
    """Source of ``def name(args)``: ``args`` is a list that the function empties."""
    last = last_uses(graph)
    arguments = [n for n in graph.nodes if n.op == "placeholder"]
    lines = [f"def {name}(args):", f'    """{doc}"""']
    if arguments:
        lines += [f"    {', '.join(n.name for n in arguments)}, = args", "    args.clear()"]
        unused = [n.name for n in arguments if not n.users]
        if unused:
            lines.append(f"    del {', '.join(unused)}")
    for node in graph.nodes:
        if node.op == "call_function":
            lines.append(f"    {node.name} = {call_text(node)}{comment(node)}")
            dead = [n.name for n in last.get(node, [])] + ([] if node.users else [node.name])
            if dead:
                lines.append(f"    del {', '.join(dead)}")
        elif node.op == "output":
            items = ", ".join(n.name if isinstance(n, fx.Node) else "None" for n in node.args[0])
            lines.append(f"    return [{items}]")
    return "\n".join(lines) + "\n"


def _name(node: fx.Node) -> str:
    return node.name


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the inputs that it is the last one to read."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for argument in node.all_input_nodes:
            last[argument] = node
    dead: dict[fx.Node, list[fx.Node]] = {}
    for argument, node in last.items():
        if node.op != "output":
            dead.setdefault(node, []).append(argument)
    return dead


def call_text(
    node: fx.Node, names: Callable[[fx.Node], str] = _name, arguments: Sequence[Any] | None = None
) -> str:
    """The call of a node as an expression; ``names`` name what it reads, ``arguments`` stand for its own."""
    given = node.args if arguments is None else arguments
    if node.target is operator.getitem:
        source, index = given
        return f"{_value_text(source, names)}[{index}]"
    items = [_value_text(a, names) for a in given]
    items += [
        f"{key}={_value_text(value, names)}" for key, value in node.kwargs.items() if key != "pin_memory"
    ]
    # some kernels lay their result out in another way than fake tensors say, so that a view needs a copy
    target = torch.ops.aten.reshape.default if node.target is torch.ops.aten.view.default else node.target
    return f"{target_name(target)}({', '.join(items)})"


def target_name(target: Any) -> str:
    """The expression that names an operator: ``aten.mm.default``, ``torch.ops.ns.op.overload``."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        prefix = "aten" if namespace == "aten" else f"torch.ops.{namespace}"
        return f"{prefix}.{name}.{target._overloadname}"
    if getattr(target, "__module__", "") in ("_operator", "math", "operator"):
        return f"{target.__module__.lstrip('_')}.{target.__name__}"
    raise AssertionError(f"no name for the call target {target}")


def _value_text(value: Any, names: Callable[[fx.Node], str]) -> str:
    if isinstance(value, fx.Node):
        return names(value)
    if isinstance(value, torch.device):
        return DEVICE
    if isinstance(value, (list, tuple)):
        items = ", ".join(_value_text(v, names) for v in value)
        return f"[{items}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def comment(node: fx.Node) -> str:
    """A remark on the dtype and shape of a node's value."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f"  # {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def spans(example: Tensor, length: int, chunk: int) -> Iterator[tuple[int, int]]:
    """(first, end) of each chunk of positions.

    On fake tensors, which only measure memory, the first two chunks and the last stand for all.
    """
    starts: Sequence[int] = range(0, length, chunk)
    if isinstance(example, FakeTensor):
        starts = sorted({*starts[:2], *starts[-1:]})
    for start in starts:
        yield start, min(start + chunk, length)


def load_functions(source: str, device: torch.device) -> dict[str, Callable[[list[Any]], list[Any]]]:
    """Execute generated source; returns the functions it defines, for tensors of ``device``."""
    namespace: dict[str, Any] = {
        "torch": torch, "aten": torch.ops.aten, "operator": operator, DEVICE: device,
        "spans": spans, "add_product_": add_product_,
    }  # fmt: skip
    given = set(namespace)
    exec(compile(source, "<megacompile blocks>", "exec"), namespace)
    return {k: v for k, v in namespace.items() if k not in given and hasattr(v, "__code__")}


def identifier(name: str) -> str:
    """A name of Python for a template, in ASCII, as Python normalises other letters."""
    text = "".join(c if c.isascii() and c.isalnum() else "_" for c in name).strip("_") or "model"
    return f"block_{text}" if text[0].isdigit() else text
