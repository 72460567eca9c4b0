"""Print a functional graph as a Python function, and count the bytes that the function holds."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megacompile.blocks.joint_graph import Ref
from megacompile.blocks.memory_meter import call_bytes, tensors_of
from megacompile.kernels.linear_cross_entropy import add_product_

# ------------------------------------------------------------------------------------------------------------
# Print a functional graph as a Python function that frees every tensor at its last use.
#
# torch.fx prints graphs too, but loses the names of operators outside aten and gives no boxed calling
# convention. The functions here take one list, empty it, and hold the only references to what the caller gave
# away: a donated argument dies at its last use inside.


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
        return f"{_value(source, names)}[{index}]"
    items = [_value(a, names) for a in given]
    items += [f"{key}={_value(value, names)}" for key, value in node.kwargs.items() if key != "pin_memory"]
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


def _value(value: Any, names: Callable[[fx.Node], str]) -> str:
    if isinstance(value, fx.Node):
        return names(value)
    if isinstance(value, torch.device):
        return DEVICE
    if isinstance(value, (list, tuple)):
        items = ", ".join(_value(v, names) for v in value)
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

    Of fake tensors, on which only memory is measured, the first two chunks and the last stand for all.
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


# ------------------------------------------------------------------------------------------------------------
# Lifetimes: the bytes that a printed function holds, from what its trace knows of each tensor.
#
# In: the graph of a function, as it is printed. Out: its highest bytes and those that are left at its end,
# beyond what was alive when it was called. Values of a trace share storages as those of a run on fake tensors
# do, and each is freed where the printed function frees it, so both give the same bytes; a walk takes a small
# part of the time.


_MAY_COPY = frozenset({torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default})


class _Holdings:
    """Storages that are alive, how many variables show each, and the highest sum of their bytes."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._bytes: dict[int, int] = {}
        self._shown: Counter[int] = Counter()
        self._same: dict[int, int] = {}  # storages that a trace made anew, and a run does not

    def _storage(self, tensor: Tensor) -> int:
        storage: int = tensor.untyped_storage()._cdata
        return self._same.get(storage, storage)

    def show(self, tensor: Tensor, nbytes: int, base: Tensor | None = None) -> None:
        """A variable shows a tensor; its storage takes these bytes if it is new, and not that of ``base``."""
        if base is not None:
            self._same[tensor.untyped_storage()._cdata] = self._storage(base)
        storage = self._storage(tensor)
        if not self._shown[storage]:
            self._bytes[storage] = nbytes
            self.live += nbytes
            self.peak = max(self.peak, self.live)
        self._shown[storage] += 1

    def drop(self, tensor: Tensor) -> None:
        """A variable that showed a tensor is gone."""
        storage = self._storage(tensor)
        self._shown[storage] -= 1
        if not self._shown[storage]:
            self.live -= self._bytes[storage]


def held_bytes(graph: fx.Graph, inputs: Sequence[Ref], mode: FakeTensorMode) -> tuple[int, int] | None:
    """The most bytes of a graph's function on a CPU, and those at its end.

    None where arguments share storages or show parts of them: they do not when the function is called.
    """
    arguments = [n for n in graph.nodes if n.op == "placeholder"]
    if not _are_whole([n.meta["val"] for n in arguments]):
        return None
    holdings, last = _Holdings(), last_uses(graph)
    for node, (kind, _) in zip(arguments, inputs, strict=True):
        value = node.meta["val"]
        holdings.show(value, value.untyped_storage().nbytes() if kind in ("saved", "grad") else 0)
    start = holdings.live
    _drop(holdings, [n for n in arguments if not n.users])
    for node in graph.nodes:
        if node.op == "call_function":
            _call(holdings, node, mode)
            _drop(holdings, last.get(node, []) if node.users else [*last.get(node, []), node])
    return max(0, holdings.peak - start), holdings.live - start


def _call(holdings: _Holdings, node: fx.Node, mode: FakeTensorMode) -> None:
    found = tensors_of(node.meta.get("val"))
    if node.target is operator.getitem:
        for tensor in found:
            holdings.show(tensor, 0)
        return
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    inside, standing = call_bytes(node.target, args, kwargs, found, mode)
    holdings.peak = max(holdings.peak, holdings.live + inside)
    for index, (tensor, nbytes) in enumerate(zip(found, standing, strict=True)):
        holdings.show(tensor, nbytes, _base(node.target, index, args, tensor, mode))


def _base(
    func: Any, index: int, args: tuple[Any, ...], result: Tensor, mode: FakeTensorMode
) -> Tensor | None:
    """The argument in whose memory an operator leaves a result: a view of it, or itself, written to.

    A trace may know another: of a view that was a copy when it was traced, of what is overwritten since.
    """
    returned = func._schema.returns
    alias = returned[index if len(returned) > 1 else 0].alias_info if returned else None
    for argument, value in zip(func._schema.arguments, args, strict=False):
        given = argument.alias_info
        if alias is None or given is None or not alias.before_set & given.before_set:
            continue
        if not isinstance(value, Tensor) or func not in _MAY_COPY:
            return value if isinstance(value, Tensor) else None
        with mode:
            made = func(*args)
        return value if made.untyped_storage()._cdata == value.untyped_storage()._cdata else None
    return None


def _drop(holdings: _Holdings, nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        for tensor in tensors_of(node.meta.get("val")):
            holdings.drop(tensor)


def _are_whole(values: Sequence[Tensor]) -> bool:
    """Return whether each is all of a storage of its own."""
    storages = [v.untyped_storage() for v in values]
    if len({s._cdata for s in storages}) < len(storages):
        return False
    return all(s.nbytes() == _extent(v) for s, v in zip(storages, values, strict=True))


def _extent(value: Tensor) -> int:
    if not value.numel():
        return 0
    last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return (1 + last) * value.element_size()
