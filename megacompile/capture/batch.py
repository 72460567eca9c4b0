"""Batches: the arguments of one call of a model, and which program fits them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megacompile.capture.fingerprint import ModelSettings, model_settings
from megacompile.capture.loss_value import divide
from megacompile.errors import MegacompileError
from megacompile.graph.forward_outputs import OutputsFn
from megacompile.graph.right_padding import is_padded_right

_NOWHERE = "nowhere"
_MISSPELT = 0.8  # how alike a key is to the name that was meant


class BatchKey(NamedTuple):
    """Names what a batch's program depends on: its structure, what each leaf is (:func:`described`), what the
    model is set to, and whether it is in eval mode.

    ``padded`` is True if all padding is at the ends of rows, and no label is there; ``"nowhere"`` if a mask
    is kept and hides nothing. ``read`` numbers the graphs of a forward that reads values of the batch; None
    if it reads none, or did not run yet.
    """

    structure: str
    leaves: tuple[tuple[Any, ...], ...]
    settings: ModelSettings
    evaluates: bool
    padded: bool | str
    read: int | None = None


@dataclass(frozen=True)
class Batch:
    """One micro-batch: the call's arguments, all their leaves, and the key of its program.

    Two batches have equal keys only if one program is right for both; what the model is set to is in it.
    ``outputs`` is what the program computes of the forward in the place of the loss; of what it gives for a
    batch that was padded, the last ``added`` positions are not the batch's own. ``withheld`` are entries that
    a loss outside of the program is given, and no program. Where the forward reads
    values of the batch, what the host makes of it follows its own leaves, and the key tells what was read.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    key: BatchKey
    outputs: OutputsFn | None = None
    added: int = 0
    withheld: Mapping[str, Any] = field(default_factory=dict)

    def own(self, output: Tensor) -> Tensor:
        """Return the part of an output that is not of padding."""
        cut = self.added > 0 and output.dim() > 1
        return output[:, : -self.added].contiguous() if cut else output

    @property
    def tokens(self) -> int:
        """Real tokens: ones in a two-dimensional attention mask, else elements of the first leaf."""
        mask = self.kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return int(mask.sum())
        first = self.kwargs.get("input_ids", self.tensors[0])
        return int(first.numel()) if first.dim() <= 2 else int(first.shape[0])

    @property
    def settings(self) -> ModelSettings:
        """The settings of the model when the batch was read."""
        return self.key.settings

    @property
    def evaluates(self) -> bool:
        """Return whether it is for the model in eval mode."""
        return self.key.evaluates

    @property
    def padded_right(self) -> bool:
        """Return whether all of its padding is at the ends of rows, and no label there."""
        return self.key.padded is True

    @property
    def hides_nothing(self) -> bool:
        """Return whether its attention mask is kept, and is all ones."""
        return self.key.padded == _NOWHERE

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors of the batch itself."""
        own = self.leaves[: len(self.key.leaves)]
        return [leaf for leaf in own if isinstance(leaf, Tensor)]


def of_one_kind(micro: Sequence[Batch]) -> list[Batch]:
    """The micro-batches of one step, on one program where they differ in the place of their padding alone."""
    if len({batch.key for batch in micro}) == 1:  # as in most steps
        return list(micro)
    alike = padded_anywhere(micro)
    return alike if len({batch.key for batch in alike}) == 1 else list(micro)


def padded_anywhere(micro: Sequence[Batch]) -> list[Batch]:
    """The micro-batches on programs that serve any place of their padding."""
    return [replace(batch, key=batch.key._replace(padded=False)) for batch in micro]


def is_transformers(model: nn.Module) -> bool:
    """Return whether the model keeps transformers' conventions on masks, padding and labels."""
    bases = {base.__module__.split(".")[0] for base in type(model).__mro__}
    return not bases.isdisjoint({"transformers", "peft"})


def read_batch(
    batch: Any,
    model: nn.Module,
    *,
    evaluate: bool = False,
    keep_mask: bool = False,
    settings: ModelSettings | None = None,
    outputs: OutputsFn | None = None,
) -> Batch:
    """Normalise what a user passes: a mapping goes to the forward by name, a tuple by position.

    ``keep_mask`` keeps an attention mask of all ones, for a function that may read it; ``settings`` are
    the model's, where they were read already, and tell ``outputs`` from other functions.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if hasattr(batch, "items"):
        kwargs = dict(batch.items())
    elif isinstance(batch, tuple):
        args = batch
    else:
        args = (batch,)
    if is_transformers(model):
        kwargs = _plain_mask(kwargs, keep_mask)
    count = kwargs.get("num_items_in_batch")
    if isinstance(count, int) and not isinstance(count, bool):
        kwargs["num_items_in_batch"] = torch.tensor(count)  # it changes: one program serves all counts
    flat, spec = pytree.tree_flatten((args, kwargs))
    flat = [_checked(leaf) for leaf in flat]
    args, kwargs = pytree.tree_unflatten(flat, spec)
    if not any(isinstance(leaf, Tensor) for leaf in flat):
        raise MegacompileError("The batch holds no tensor: pass a dict or tuple of tensors.")
    shapes = tuple(described(leaf) for leaf in flat)
    if settings is None:
        settings = model_settings(model, evaluate=evaluate)
    padded: bool | str = not args and is_transformers(model) and is_padded_right(kwargs)
    if is_transformers(model) and not keep_mask and _is_mixed(kwargs) and _hides_nothing(kwargs):
        padded = _NOWHERE
    return Batch(args, kwargs, flat, BatchKey(str(spec), shapes, settings, evaluate, padded), outputs)


def described(leaf: Any) -> tuple[Any, ...]:
    """Describe what a program depends on: of a tensor its shape, dtype and order in memory, of a constant
    that it is this one.

    1, 1.0 and True are equal, and 0.0 and -0.0, but models compute different things with them.
    """
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, None if leaf.is_contiguous() else leaf.stride()
    return type(leaf), repr(leaf)


def _checked(leaf: Any) -> Any:
    """A leaf that a program can be given: a dense tensor on the host, or a plain constant."""
    if not isinstance(leaf, Tensor):
        if leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype)):
            return leaf
        raise MegacompileError(
            f"The batch holds a {type(leaf).__name__}: pass tensors, numbers, strings or None."
        )
    if leaf.numel() == 0:
        raise MegacompileError(f"The batch holds an empty tensor of shape {tuple(leaf.shape)}.")
    if leaf.device.type == "meta" or leaf.layout != torch.strided:
        kind = "meta" if leaf.device.type == "meta" else str(leaf.layout).removeprefix("torch.")
        raise MegacompileError(
            f"The batch holds a {kind} tensor of shape {tuple(leaf.shape)}: pass dense tensors with values."
        )
    if leaf.requires_grad:
        raise MegacompileError(
            f"The batch holds a tensor of shape {tuple(leaf.shape)} that requires a gradient, which a "
            "program does not compute: detach it, or make it a parameter of the model."
        )
    return _without_gaps(leaf if leaf.device.type == "cpu" else leaf.cpu())


def _without_gaps(leaf: Tensor) -> Tensor:
    """The tensor, or a copy without gaps of rows that were cut from longer ones or are one row repeated."""
    if leaf.is_contiguous() or leaf.stride() == torch.empty_like(leaf, device="meta").stride():
        return leaf
    return leaf.contiguous()


def _plain_mask(kwargs: dict[str, Any], kept: bool) -> dict[str, Any]:
    """Put the mask last, as padding does. Drop a mask that hides nothing, unless it is kept: transformers
    takes no mask to mean the same, and is much faster. Beside images, sound or actions, whose models may take
    positions from a mask that is there, it stays."""
    if "attention_mask" not in kwargs:
        return kwargs
    mask, others = kwargs["attention_mask"], {k: v for k, v in kwargs.items() if k != "attention_mask"}
    # only without any mask does transformers take a jump of the positions as the start of a document
    kept = kept or _is_mixed(kwargs) or _jumps(kwargs.get("position_ids"))
    return others | {"attention_mask": mask} if kept or not _hides_nothing(kwargs) else others


def _is_mixed(kwargs: Mapping[str, Any]) -> bool:
    """Return whether there are numbers beside tokens: images, sound or actions."""
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in kwargs.values())


def _hides_nothing(kwargs: Mapping[str, Any]) -> bool:
    mask = kwargs.get("attention_mask")
    return isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())


def _jumps(positions: Any) -> bool:
    """Return whether positions [B, S], or those of text among four kinds of them [4, B, S], do anything but
    rise by one from token to token."""
    if isinstance(positions, Tensor) and positions.dim() == 3 and positions.shape[0] == 4:
        positions = positions[0]  # as transformers' models of images and text read them
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return False
    return bool((positions.diff(dim=-1) != 1).any())


def documents_meet(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a batch looks packed, and has a mask [B, S], with which transformers lets attention
    cross from document to document: positions start again between two tokens that the mask shows."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if not (isinstance(mask, Tensor) and isinstance(positions, Tensor)):
        return False
    if not mask.dim() == positions.dim() == 2 or mask.shape[1] != positions.shape[1]:
        return False
    shown = mask != 0
    return bool(((positions.diff(dim=-1) < 0) & shown[:, 1:] & shown[:, :-1]).any())


def micro_weights(micro: Sequence[Batch], weights: Sequence[float] | None, *, ranks: int = 1) -> list[float]:
    """The weight of each micro-batch's loss: as given; 1 where losses count all tokens; else the mean, over
    as many micro-batches on each of the ``ranks``."""
    if weights is not None:
        if len(weights) != len(micro):
            raise MegacompileError(
                f"{len(weights)} weights for {len(micro)} micro-batches: give one for each."
            )
        return [float(w) for w in weights]
    counted = ["num_items_in_batch" in m.kwargs for m in micro]
    if any(counted) and not all(counted):
        raise MegacompileError("num_items_in_batch is in some micro-batches only: give it in all, or none.")
    return [1.0 if all(counted) else 1.0 / (len(micro) * ranks)] * len(micro)


def check_signature(model: nn.Module, batch: Batch, *, function: Any) -> None:
    """Name entries that the forward does not take, unless they are for ``function``, and missing ones."""
    args, kwargs = batch.args, {**batch.kwargs, **batch.withheld}
    if function is not None:
        args, kwargs, _ = divide(model, args, kwargs, function)
    signature, name = inspect.signature(model.forward), f"{type(model).__name__}.forward"
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    unknown = sorted(kwargs.keys() - signature.parameters.keys())
    missing = signature.parameters.keys() - kwargs.keys()
    for key in unknown:  # also where the forward would take it, and leave it unread
        words = {n for n in missing if not takes_all or n.count("_") == key.count("_")}
        if near := difflib.get_close_matches(key, words, n=1, cutoff=_MISSPELT):
            raise MegacompileError(f"{name} has no {key!r}: did you mean {near[0]!r}?")
    if unknown and not takes_all:
        raise MegacompileError(
            f"{name} takes no {', '.join(unknown)}: remove it from the batch, or give compile a loss_fn, "
            "which is given the batch."
        )
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise MegacompileError(
            f"{name} cannot be called with this batch ({error}): add what is missing, remove what is too "
            "much, or give compile a loss_fn, which is given the batch."
        ) from None
