"""What is captured in the place of the loss: outputs of the forward, tensors and the structure around them.

In: what a forward returned, or what a function of the user's made of it. Out: its tensors, which a program
computes, and :class:`Structure`, which puts their values back into tuples, dicts and a model's own classes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from megacompile.errors import CaptureError
from megacompile.graph.node_storage import is_view

OutputsFn = Callable[[Any, Any], Any]
"""(what the forward returned, the batch) -> tensors in tuples, lists and dicts."""
_CONSTANTS = (bool, int, float, complex, str, torch.dtype, type(None))
_HERE = object()  # where a tensor stands


def all_outputs(outputs: Any, batch: Any) -> Any:
    """Return the forward's outputs, as they are."""
    return outputs


@dataclass(frozen=True)
class Structure:
    """The structure that surrounds the tensors of an output: containers, numbers, None."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def around(self, tensors: Sequence[Tensor]) -> Any:
        """The output with these tensors in it."""
        rest = iter(tensors)
        return pytree.tree_unflatten([next(rest) if x is _HERE else x for x in self.leaves], self.spec)

    @property
    def names(self) -> list[str]:
        """Return how each tensor is reached in the output: ``['logits']``."""
        numbered = pytree.tree_unflatten(range(len(self.leaves)), self.spec)
        found = pytree.tree_flatten_with_path(numbered)[0]
        return [pytree.keystr(path) for path, i in found if self.leaves[i] is _HERE]


@dataclass(frozen=True)
class Returned:
    """The outputs of a forward: the shape and dtype of each tensor, and what surrounds them."""

    structure: Structure
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]


def returned(outputs: Any) -> Returned | None:
    """Describe the outputs of a forward; None where they hold something else than tensors and plain
    values."""
    try:
        tensors, structure = split(outputs)
    except CaptureError:
        return None
    return Returned(structure, tuple((x.shape, x.dtype) for x in tensors))


def split(outputs: Any, *, stays: bool = False) -> tuple[list[Tensor], Structure]:
    """The tensors of an output and what surrounds them; it may be anything in what ``stays`` within."""
    leaves, spec = pytree.tree_flatten(outputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if not (stays or isinstance(leaf, (Tensor, *_CONSTANTS))):
            raise CaptureError(
                f"The output holds a {type(leaf).__name__}, which a program cannot give back: give predict "
                "outputs=, a function that returns tensors in tuples, lists and dicts."
            )
    if not tensors:
        raise CaptureError("The output holds no tensor: return at least one.")
    return tensors, Structure(spec, tuple(_HERE if isinstance(x, Tensor) else x for x in leaves))


def identity(function: Callable[..., Any]) -> Any:
    """Return what a function computes with, the same for one that is written inline and made again and again:
    code, defaults, what it closes over."""
    if isinstance(function, functools.partial):
        return identity(function.func), function.args, function.keywords
    if isinstance(function, types.MethodType):
        return identity(function.__func__), function.__self__
    if not isinstance(function, types.FunctionType):
        return function
    closed = [cell.cell_contents for cell in function.__closure__ or ()]
    return function.__code__, function.__defaults__, function.__kwdefaults__, closed


def copy_results(graph: fx.Graph, mode: FakeTensorMode, *, shared: bool) -> None:
    """Copy each result that is an input, or a view of something larger, so that all are dense in memory of
    their own.

    So is, where ``shared``, what something else in the graph reads: no other gradient is added to a result's.
    """
    output = graph.output_node()
    dense: dict[str, Any] = {"memory_format": torch.contiguous_format}
    for node in dict.fromkeys(output.all_input_nodes):
        own = node.op != "placeholder" and not is_view(node) and not (shared and len(node.users) > 1)
        if not own or not node.meta["val"].is_contiguous():
            before = output if node.op == "placeholder" else node.next
            with graph.inserting_before(before):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,), dense)
            with mode:
                copy.meta = {**node.meta, "val": node.meta["val"].clone(**dense)}
            output.replace_input_with(node, copy)
