"""The tensors of a call of an operator or a function: those in what it is given, those it writes, and their
memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors among the leaves of a tree, each as often as it is there."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, or of what a transform such as vmap has wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


def storage_id(tensor: Tensor) -> int:
    """Return a number that tensors have alike if, and only if, they are in the same storage."""
    number: int = storage_of(tensor)._cdata
    return number


def given_by_name(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a call gives an operator, by the names of its arguments; defaults are left out."""
    return dict(zip((a.name for a in target._schema.arguments), args, strict=False)) | dict(kwargs)


def written_names(target: torch._ops.OpOverload) -> list[str]:
    """Return the names of the arguments into which an operator writes."""
    arguments = target._schema.arguments
    return [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
