"""Batches: what one call of a model is given, which program fits it, and padding to few lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megacompile.errors import MegacompileError

_PADDING = {"labels": -100, "attention_mask": 0}


@dataclass(frozen=True)
class Batch:
    """One micro-batch: the call's arguments, all their leaves, and the key of its program.

    Two batches have equal keys only if one program is right for both.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    key: tuple[Any, ...]

    @property
    def tokens(self) -> int:
        """Real tokens: ones in a two-dimensional attention mask, else elements of the first leaf."""
        mask = self.kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return int(mask.sum())
        first = self.kwargs.get("input_ids", self.tensors[0])
        return int(first.numel()) if first.dim() <= 2 else int(first.shape[0])

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


def is_transformers(model: nn.Module) -> bool:
    """Whether the model keeps transformers' conventions on masks, padding and labels."""
    bases = {base.__module__.split(".")[0] for base in type(model).__mro__}
    return not bases.isdisjoint({"transformers", "peft"})


def read_batch(batch: Any, model: nn.Module, *, evaluate: bool = False, keep_mask: bool = False) -> Batch:
    """Normalise what a user passes: a mapping goes to the forward by name, a tuple by position.

    ``keep_mask`` keeps an attention mask of all ones, for a loss function that may read it.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if hasattr(batch, "items"):
        kwargs = dict(batch.items())
    elif isinstance(batch, tuple):
        args = batch
    else:
        args = (batch,)
    if is_transformers(model) and not keep_mask:
        kwargs = _plain_mask(kwargs)
    args, kwargs = pytree.tree_map(_scalar_counts(kwargs), (args, kwargs))
    flat, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
    if not tensors:
        raise MegacompileError("The batch holds no tensor: pass a dict or tuple of tensors.")
    for leaf in tensors:
        if leaf.numel() == 0:
            raise MegacompileError(f"The batch holds an empty tensor of shape {tuple(leaf.shape)}.")
    shapes = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in flat)
    modes = (False,) if evaluate else tuple(m.training for m in model.modules())
    return Batch(args, kwargs, flat, (str(spec), shapes, modes, evaluate))


def _plain_mask(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop a mask that hides nothing, which transformers takes no mask to mean: much faster."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all()):
        return {k: v for k, v in kwargs.items() if k != "attention_mask"}
    return kwargs


def _scalar_counts(kwargs: dict[str, Any]) -> Any:
    """Counts that change from batch to batch enter as 0-d tensors, so that one program serves all."""
    count = kwargs.get("num_items_in_batch")

    def convert(leaf: Any) -> Any:
        if leaf is count and isinstance(leaf, int) and not isinstance(leaf, bool):
            return torch.tensor(leaf)
        return leaf

    return convert


def check_signature(model: nn.Module, batch: Batch) -> None:
    """Name entries that the forward does not take and required ones that are missing."""
    import inspect

    parameters = inspect.signature(model.forward).parameters
    kinds = {p.kind for p in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        unknown = sorted(set(batch.kwargs) - set(parameters))
        if unknown:
            raise MegacompileError(
                f"{type(model).__name__}.forward takes no {', '.join(unknown)}: remove it from the batch."
            )
    given = set(list(parameters)[: len(batch.args)]) | set(batch.kwargs)
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and name not in given
    ]
    if missing:
        raise MegacompileError(
            f"{type(model).__name__}.forward needs {', '.join(missing)}: add it to the batch."
        )


def bucket_length(length: int, *, longest: int | None = None) -> int:
    """The padded length: at most an eighth longer, so that few programs serve all lengths."""
    step = max(8, 1 << max(0, length.bit_length() - 3))
    padded = -(-length // step) * step
    return padded if longest is None else min(padded, longest)


def pad_batch(batch: Any, length: int, pad_token: int = 0) -> Any:
    """Pad the sequences of a token batch on the right to ``length``, hidden by the attention mask."""
    ids = batch["input_ids"]
    short = length - ids.shape[1]
    if short <= 0:
        return batch
    padded = dict(batch.items())
    padded.setdefault("attention_mask", torch.ones_like(ids))
    for name, value in padded.items():
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape == ids.shape:
            fill = _PADDING.get(name, pad_token)
            padded[name] = nn.functional.pad(value, (0, short), value=fill)
    return padded
