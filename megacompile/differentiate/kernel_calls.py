"""Which of our operators a program calls, on which shapes, how often per step.

In: the graphs of block functions and a plan. Out: :class:`KernelCall` with counts, as JSON beside the
plan, so that ``megacompile bench kernels --plan`` can time the very shapes of a program.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, fx

from megacompile.errors import MegacompileError


@dataclass(frozen=True, order=True)
class KernelCall:
    """One operator on tensors of these shapes; ``dtype`` is that of the largest one, ``constants`` are
    its other arguments, as text."""

    op: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    constants: tuple[str, ...]


Calls = tuple[tuple[KernelCall, int], ...]


def kernel_calls(graph: fx.Graph) -> Calls:
    """The calls of our operators in a graph whose nodes carry their values."""
    return total([(_call(node), 1) for node in graph.nodes if is_ours(node)])


def total(calls: Iterable[tuple[KernelCall, int]]) -> Calls:
    """Equal calls added up, in a fixed order."""
    counts: Counter[KernelCall] = Counter()
    for call, count in calls:
        counts[call] += count
    return tuple(sorted(counts.items()))


def is_ours(node: fx.Node) -> bool:
    """Whether a node calls one of our operators."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "megacompile"


def _call(node: fx.Node) -> KernelCall:
    assert isinstance(node.target, torch._ops.OpOverload)
    tensors = [a.meta["val"] for a in node.args if isinstance(a, fx.Node)]
    tensors = [t for t in tensors if isinstance(t, Tensor)]
    floats = [t for t in tensors if t.is_floating_point()]
    dtype = max(floats or tensors, key=Tensor.numel).dtype
    constants = [repr(a) for a in node.args if not isinstance(a, fx.Node)]
    return KernelCall(
        node.target._schema.name.removeprefix("megacompile::"),
        str(dtype).removeprefix("torch."),
        tuple(tuple(t.shape) for t in tensors),
        tuple(constants),
    )


def to_json(calls: Calls) -> str:
    """The file ``kernel_calls.json`` of a dump."""
    return json.dumps([{**asdict(call), "calls": count} for call, count in calls], indent=1) + "\n"


def read_calls(plan: Path) -> Calls:
    """The calls of the program whose plan this is, from the file that its dump wrote beside it."""
    path = plan.with_name("kernel_calls.json")
    if not plan.is_file():
        raise MegacompileError(f"--plan {plan}: there is no such file.")
    if not path.is_file():
        raise MegacompileError(
            f"--plan {plan}: the shapes of a plan stand in kernel_calls.json beside it, which is missing: "
            "give the plan.json of a dump (megacompile.compile(..., dump=folder))."
        )
    try:
        return total(_read(item) for item in json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise MegacompileError(f"{path} is no list of kernel calls: {error}.") from error


def _read(item: dict[str, object]) -> tuple[KernelCall, int]:
    fields = dict(item)
    count = fields.pop("calls")
    shapes = tuple(tuple(int(n) for n in shape) for shape in fields.pop("shapes"))  # type: ignore[attr-defined]
    constants = tuple(str(c) for c in fields.pop("constants"))  # type: ignore[attr-defined]
    return KernelCall(str(fields["op"]), str(fields["dtype"]), shapes, constants), int(str(count))
