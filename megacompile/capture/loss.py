"""How a batch becomes a loss: what of it the forward takes, and what ``loss_fn`` is called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megacompile.capture.outputs import OutputsFn, all_outputs
from megacompile.errors import CaptureError, MegacompileError

LossFn = Callable[..., Tensor]


def divides(kwargs: dict[str, Any], loss_fn: LossFn | None, outputs: OutputsFn | None) -> bool:
    """Whether a batch may hold more than the forward takes, for a function of the user's: of a tuple, only
    ``loss_fn`` can tell what."""
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
    """The loss by a function of (outputs, batch), or by a module, a criterion, of outputs and ``rest``."""
    if not isinstance(loss_fn, nn.Module):
        loss = loss_fn(outputs, given_batch(args, kwargs))
    elif rest:
        loss = loss_fn(outputs, *rest)
    else:
        raise MegacompileError(
            f"loss_fn is a module ({type(loss_fn).__name__}), which is called with the outputs and what the "
            "forward does not take of the batch, and the forward takes all: give a function of (outputs, "
            "batch)."
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise CaptureError(f"loss_fn returned {_kind(loss)}: it must return one number, as a tensor.")
    return _real(loss)


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
    return "none" if value is None else f"a {type(value).__name__}"
