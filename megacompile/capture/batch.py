"""Batches: the arguments of one call of a model, how they become a loss, and which program fits them."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from megacompile.capture.fingerprint import ModelSettings, model_settings
from megacompile.capture.module_wrappers import unwrapped
from megacompile.errors import CaptureError, MegacompileError
from megacompile.graph.captured import OutputsFn, all_outputs
from megacompile.graph.sequence_dimension import is_padded_right

# ------------------------------------------------------------------------------------------------------------
# How a batch becomes a loss: what of it the forward takes, and what ``loss_fn`` is called with.


LossFn = Callable[..., Tensor]
CALLED = "loss_fn was called with"  # how a note begins on what a loss_fn raised
_WHOLE = "name its second parameter batch to get the whole batch"
_PART = (
    "take from the batch what it needs, or name its second parameter target to get what the forward leaves"
)
_TARGET = re.compile("target|label|true|truth|^(y|t|gt|expected|reference)$")  # names of targets
_TORCHS = (nn.modules.loss._Loss, nn.TripletMarginWithDistanceLoss, nn.AdaptiveLogSoftmaxWithLoss)


def divides(kwargs: dict[str, Any], loss_fn: LossFn | None, outputs: OutputsFn | None) -> bool:
    """Return whether a batch may hold more than the forward takes, for a function of the user's: of a tuple,
    only ``loss_fn`` can tell what."""
    return loss_fn is not None or (outputs not in (None, all_outputs) and bool(kwargs))


def given_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The batch as such a function is given it: the mapping, the tuple, or its single entry."""
    return kwargs or (args if len(args) != 1 else args[0])


def divide(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], function: Any
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """(args, kwargs, rest): what the forward takes of a batch, and what is for the user's function alone.

    Of a mapping the forward is given the names that it takes, but for those in the function's attribute
    ``inputs``; of a tuple as many of the first entries as it needs.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = {p.kind for p in parameters}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count, own = len(args), getattr(function, "inputs", ())
    taken = {name: value for name, value in kwargs.items() if name not in own}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        names = {p.name for p in parameters}
        taken = {name: value for name, value in taken.items() if name in names}
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        needed = sum(p.default is p.empty for p in named)
        if needed < min(len(args), len(named)):
            raise MegacompileError(
                f"The batch is a tuple of {len(args)}, of which {type(model).__name__}.forward could take "
                f"{named[needed].name} or leave it to loss_fn: pass a dict, whose names tell."
            )
        count = needed
    return args[:count], taken, (*args[count:], *(v for n, v in kwargs.items() if n not in taken))


def apply_loss(
    loss_fn: LossFn, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rest: tuple[Any, ...]
) -> Tensor:
    """The loss by a function of (outputs, batch), or by a criterion of outputs and ``rest``, what the forward
    leaves of the batch; the signature decides, and a note on what the loss raises says how it was called."""
    targets, named = _targets(loss_fn, kwargs, rest)
    if targets is None:
        batch = given_batch(args, kwargs)
        given, kind = (batch,), f"the batch, {_kind(batch)}"
        advice = _PART
    else:
        given, kind = targets, " and ".join(map(_kind, (*targets, *named.values())))
        kind, advice = f"what the forward leaves of the batch, {kind}", _WHOLE
    try:
        loss = loss_fn(outputs, *given, **named)
    except Exception as error:
        error.add_note(f"{CALLED} the outputs, {_kind(outputs)}, and {kind}: {advice}")
        raise
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise CaptureError(f"loss_fn returned {_kind(loss)}: it must return one number, as a tensor.")
    return _real(loss)


def _targets(
    loss_fn: LossFn, kwargs: dict[str, Any], rest: tuple[Any, ...]
) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """What a criterion takes beside the outputs: entries of a dict by its names for them, else ``rest``. None
    for a function of (outputs, batch)."""
    function = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    module = isinstance(function, nn.Module)
    function = unwrapped(function) if isinstance(function, nn.Module) else function
    if isinstance(function, _TORCHS) or getattr(function, "__module__", "") == F.__name__:
        if not rest:
            name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
            raise MegacompileError(
                f"loss_fn is a criterion of torch ({name}), which is called with the outputs and what the "
                "forward does not take of the batch, and the forward takes all: give a function of (outputs, "
                "batch)."
            )
        return rest, {}
    others = _after_outputs(function.forward if isinstance(function, nn.Module) else loss_fn)
    if rest and module and not others:  # it takes whatever it is given
        return rest, {}
    needed = {p.name for p in others if p.default is p.empty}
    if not (rest and others and _takes_targets(others, len(needed), module=module)):
        return None, {}
    own = {p.name for p in others if any(kwargs.get(p.name) is value for value in rest)}
    if kwargs and needed and needed <= kwargs.keys():
        return (), {name: kwargs[name] for name in sorted(needed | own)}
    in_order = [p for p in others if p.kind is not p.KEYWORD_ONLY]
    fits = needed <= {p.name for p in in_order[: len(rest)]} and len(rest) <= len(in_order)
    if fits and (len(rest) == 1 or not kwargs):  # several of a dict have no order
        return rest, {}
    raise MegacompileError(
        f"loss_fn takes {', '.join(p.name for p in others)} beside the outputs, and the forward leaves "
        f"{len(rest)} of the batch's entries: take as many, in their order or by their names in a dict, or "
        "name its second parameter batch to get the whole batch."
    )


def _after_outputs(function: Any) -> list[inspect.Parameter]:
    """The named parameters of a loss beside the outputs; none where nothing is known of them."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):  # of a function that is not written in Python
        return []
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _takes_targets(others: Sequence[inspect.Parameter], needed: int, *, module: bool) -> bool:
    """Return whether a loss with these parameters beside the outputs is a criterion, by their names."""
    second = others[0]
    if "batch" in second.name:
        return False
    named = _TARGET.search(second.name) or second.annotation in (Tensor, "Tensor", "torch.Tensor")
    return bool(named) or needed > 1 or module


def find_loss(outputs: Any) -> Tensor:
    """The loss in what a forward returned: a scalar tensor, ``.loss``, or the key ``"loss"``."""
    loss = outputs
    if not isinstance(outputs, Tensor):
        loss = getattr(outputs, "loss", None)
        if loss is None and isinstance(outputs, dict):
            loss = outputs.get("loss")
        if loss is None and isinstance(outputs, tuple) and outputs:
            loss = outputs[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise CaptureError(
            f"The forward returned no scalar loss ({_kind(loss)}): pass labels in the batch, or "
            "loss_fn=lambda outputs, batch: ... to megacompile.compile."
        )
    return _real(loss)


def _real(loss: Tensor) -> Tensor:
    if not loss.is_floating_point():
        raise CaptureError(
            f"The loss is {loss.dtype}, which has no gradient: return a floating-point number."
        )
    return loss.reshape(())


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "none" if value is None else f"a {type(value).__name__}"


# ------------------------------------------------------------------------------------------------------------
# Batches: what one call of a model is given and which program fits it.


_NOWHERE = "nowhere"
_MISSPELT = 0.8  # how alike a key is to the name that was meant


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
    key: tuple[Any, ...]
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
        settings: ModelSettings = self.key[2]
        return settings

    @property
    def evaluates(self) -> bool:
        """Return whether it is for the model in eval mode."""
        evaluates: bool = self.key[3]
        return evaluates

    @property
    def padded_right(self) -> bool:
        """Return whether all of its padding is at the ends of rows, and no label there."""
        return self.key[4] is True

    @property
    def hides_nothing(self) -> bool:
        """Return whether its attention mask is kept, and is all ones."""
        return bool(self.key[4] == _NOWHERE)

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors of the batch itself."""
        own = self.leaves[: len(self.key[1])]
        return [leaf for leaf in own if isinstance(leaf, Tensor)]


def of_one_kind(micro: Sequence[Batch]) -> list[Batch]:
    """The micro-batches of one step, on one program where they differ in the place of their padding alone."""
    if len({batch.key for batch in micro}) == 1 or len({batch.key[:4] for batch in micro}) > 1:
        return list(micro)
    return [replace(batch, key=(*batch.key[:4], False)) for batch in micro]


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
    return Batch(args, kwargs, flat, (str(spec), shapes, settings, evaluate, padded), outputs)


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
    return _dense(leaf if leaf.device.type == "cpu" else leaf.cpu())


def _dense(leaf: Tensor) -> Tensor:
    """The tensor, or a copy without gaps of rows that were cut from longer ones or are one row repeated."""
    if leaf.is_contiguous() or leaf.stride() == torch.empty_like(leaf, device="meta").stride():
        return leaf
    return leaf.contiguous()


def _plain_mask(kwargs: dict[str, Any], kept: bool) -> dict[str, Any]:
    """Put the mask last, as where padding adds one; unless it is kept, drop one that hides nothing, which
    transformers takes no mask to mean: much faster. Beside images, sound or actions, whose models may take
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
