"""How a batch becomes a loss: what of it the forward takes, what ``loss_fn`` is called with, and which number
is the loss of what a forward or ``loss_fn`` returned."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from megacompile.capture.module_wrappers import unwrapped
from megacompile.errors import CaptureError, MegacompileError
from megacompile.graph.forward_outputs import OutputsFn, all_outputs

LossFn = Callable[..., Tensor]
CALLED = "loss_fn was called with"  # how a note begins on what a loss_fn raised
_TO_TAKE_ALL = "name its second parameter batch to get the whole batch"
_TO_TAKE_PART = (
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

    The forward gets the entries of a mapping that it has arguments for, except the names in the function's
    attribute ``inputs``; from a tuple, as many of the first entries as it needs.
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
        given, kind = (batch,), f"the batch, {_in_words(batch)}"
        advice = _TO_TAKE_PART
    else:
        given, kind = targets, " and ".join(map(_in_words, (*targets, *named.values())))
        kind, advice = f"what the forward leaves of the batch, {kind}", _TO_TAKE_ALL
    try:
        loss = loss_fn(outputs, *given, **named)
    except Exception as error:
        error.add_note(f"{CALLED} the outputs, {_in_words(outputs)}, and {kind}: {advice}")
        raise
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise CaptureError(f"loss_fn returned {_in_words(loss)}: it must return one number, as a tensor.")
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
            f"The forward returned no scalar loss ({_in_words(loss)}): pass labels in the batch, or "
            "loss_fn=lambda outputs, batch: ... to megacompile.compile."
        )
    return _real(loss)


def _real(loss: Tensor) -> Tensor:
    if not loss.is_floating_point():
        raise CaptureError(
            f"The loss is {loss.dtype}, which has no gradient: return a floating-point number."
        )
    return loss.reshape(())


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "none" if value is None else f"a {type(value).__name__}"
