"""Which of our operators a program calls, on which shapes, how often per step, and what they do.

In: the graphs of block functions and a plan. Out: :class:`KernelCall` with counts, which a dump
writes beside the plan, so that ``megacompile bench kernels --plan`` can time the very shapes of a program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.capture.positions import arguments
from megacompile.differentiate.costs import flops, moved, runs_our_attention, runs_recurrence_kernels


@dataclass(frozen=True, order=True)
class KernelCall:
    """One operator on tensors of these shapes; ``dtype`` is that of the largest one, ``constants`` are
    its other arguments, as text.

    ``variant`` says in the words of the ahead-of-time gate's cases what its speed depends on: sizes, an
    activation, what attention masks. ``work`` counts the bytes that its kernels move, of attention and of
    recurrences the floating-point operations of products; 0 where no kernel of ours runs them.
    """

    op: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    constants: tuple[str, ...]
    variant: str = ""
    work: int = 0


Calls = tuple[tuple[KernelCall, int], ...]


# Whose columns the states of recurrences have.
_RECURRENCES = {"gated_delta_rule": ("q", "v"), "mamba2_chunk_scan": ("B", "x")}


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
        *_variant_and_work(node),
    )


def _variant_and_work(node: fx.Node) -> tuple[str, int]:
    assert isinstance(node.target, torch._ops.OpOverload)
    op = node.target._schema.name.removeprefix("megacompile::").removesuffix("_backward")
    given = {n: a.meta["val"] if isinstance(a, fx.Node) else a for n, a in arguments(node).items()}
    if op == "attention":
        return _attention_variant(given), flops(node) if runs_our_attention(node) else 0
    if op in _RECURRENCES:
        keys, values = (given[name].shape[-1] for name in _RECURRENCES[op])
        return f"{keys}/{values}", flops(node) if runs_recurrence_kernels(node) else 0
    return _VARIANTS[op](given) if op in _VARIANTS else "", moved(node)


def _attention_variant(given: dict[str, Any]) -> str:
    """``128 window softcap``, ``192/128``, ``64 two-sided``."""
    keys, values, window = given["k"].shape, given["v"].shape[-1], given["window"]
    windowed = 0 < window < keys[2]
    has = {
        "window": windowed and given["causal"],
        "two-sided": windowed and not given["causal"],
        "softcap": given["softcap"] > 0.0,
        "sinks": given["sinks"] is not None,
        "packed": given["bounds"] is not None,
    }
    width = str(values) if values == keys[-1] else f"{keys[-1]}/{values}"
    return " ".join([width, *(name for name, there in has.items() if there)])


def _rope_variant(given: dict[str, Any]) -> str:
    """``32x128 partial``: heads, their width, and how they are turned."""
    shape = given["x" if "x" in given else "grad"].shape
    words = [f"{shape[1] if len(shape) > 3 else 1}x{shape[-1]}"]
    words += ["partial"] if given["cos"].shape[-1] < shape[-1] else []
    words += ["interleaved"] if given.get("interleaved") else []
    return " ".join(words)


def _head_variant(given: dict[str, Any]) -> str:
    more = given["label_smoothing"] > 0.0 or given["softcap"] > 0.0
    return f"{len(given['weight'])} all terms" if more else f"{len(given['weight'])}"


def _width(given: dict[str, Any]) -> str:
    return str(next(v for v in given.values() if isinstance(v, Tensor)).shape[-1])


_VARIANTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "rms_norm": _width,
    "add_rms_norm": _width,
    "layer_norm": _width,
    "glu": lambda given: str(given["activation"]),
    "clamped_glu": lambda given: "interleaved" if given["interleaved"] else "halves",
    "rope": _rope_variant,
    "qk_norm_rope": _rope_variant,
    "linear_cross_entropy": _head_variant,
}
