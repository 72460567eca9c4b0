"""The loss cut: a model's own loss that cannot be traced runs outside of the program, in eager PyTorch.

In: a model whose forward calls ``self.loss_function``, as transformers' do, and a batch. Out: a graph that
ends there. What that call is given are the graph's results; the loss, computed from them on the host, gives
the gradients from which the backward starts, as a ``loss=`` of the user's does. Entries of the batch that the
forward hands on as they are never reach the program. Invariant: the forward returns that loss as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megacompile.capture.host_values import outside_tracing
from megacompile.capture.patches import Patch, replaced
from megacompile.capture.refusals import none_refused
from megacompile.errors import CaptureError, UntraceableError
from megacompile.units import format_bytes

_NAME = "loss_function"


@dataclass(frozen=True)
class Withheld:
    """Stands for the entry of a batch that the loss alone is given."""

    name: str


@dataclass(frozen=True)
class LossCall:
    """A call of the loss, which stands at ``place`` in what it returns."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: tuple[Any, ...]

    def run(self, withheld: Mapping[str, Any]) -> Tensor:
        """The loss of a batch, given its entries that were withheld."""
        loss: Tensor = dict(_placed(_called(self.function, self.args, self.kwargs, withheld)))[self.place]
        return loss


pytree.register_dataclass(LossCall, field_names=["args", "kwargs", "function", "place"])


@dataclass(eq=False)
class LossCut:
    """Stands for a model's loss: a program computes what that is given. ``example`` are the entries of a
    batch that its forward is not given."""

    example: dict[str, Any]
    nbytes: int = 0
    _made: list[tuple[LossCall, list[tuple[Any, Any]]]] = field(default_factory=list)

    def __call__(self, outputs: Any, batch: Any) -> Any:
        raise AssertionError("a forward that is cut returns nothing")

    def divided(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what the forward is given of a batch, and what is withheld."""
        withheld = {name: value for name, value in batch.items() if name in self.example}
        withheld = pytree.tree_map_only(Tensor, Tensor.cpu, withheld)
        return {name: value for name, value in batch.items() if name not in withheld}, withheld

    def forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LossCall:
        """Trace a forward, and return the call of its loss."""
        owners = {k for m in model.modules() for k in type(m).__mro__ if _NAME in vars(k)}
        patches = [
            Patch(kind, _NAME, self._recorder(vars(kind)[_NAME]), "it runs outside of the program")
            for kind in owners
        ]
        self._made.clear()
        with replaced(patches):
            outputs = model(*args, **kwargs, **{name: Withheld(name) for name in self.example})
        if len(self._made) != 1:
            raise UntraceableError("The forward does not call its loss_function once.")
        ((call, results),) = self._made
        returned = outputs.get("loss") if hasattr(outputs, "get") else outputs[0]
        place = next((path for path, x in results if x is returned), None)
        if place is None:
            raise UntraceableError("The forward computes its loss further from what loss_function returns.")
        self.nbytes = sum(x.nbytes for x in _tensors(call))
        return LossCall(call.function, call.args, call.kwargs, place)

    def _recorder(self, theirs: Any) -> property:
        """A property or method in whose place calls of this thread are noted."""
        thread = threading.get_ident()

        def of(model: Any) -> Any:
            function = theirs.__get__(model)
            if threading.get_ident() != thread:
                return function
            return lambda *args, **kwargs: self._record(function, args, kwargs)

        return property(of)

    def _record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a call, and return tensors like those that it returns for a batch."""

        def like(x: Tensor) -> Tensor:
            filling = 0.5 if x.is_floating_point() else 0
            return torch.full(tuple(x.shape), filling, dtype=x.dtype)

        with outside_tracing(), none_refused():
            real_args, real_kwargs = pytree.tree_map_only(Tensor, like, (args, kwargs))
            result = _called(function, real_args, real_kwargs, self.example)
        made = pytree.tree_map_only(Tensor, lambda x: torch.zeros(tuple(x.shape), dtype=x.dtype), result)
        self._made.append((LossCall(function, args, kwargs, ()), _placed(made)))
        return made


def _called(function: Any, args: Any, kwargs: Any, withheld: Mapping[str, Any]) -> Any:
    args, kwargs = pytree.tree_map_only(Withheld, lambda x: withheld[x.name], (args, kwargs))
    return function(*args, **kwargs)


def _placed(tree: Any) -> list[tuple[Any, Any]]:
    return pytree.tree_flatten_with_path(tree)[0]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def cuts(batch: Any) -> list[LossCut]:
    """The ways in which the loss of a batch may be cut off, the best first: labels withheld, or traced."""
    if not hasattr(batch, "items"):
        return []
    labels = {name: value for name, value in batch.items() if "label" in name}
    return [LossCut(names) for names in (labels, {})] if labels else []


def warning(model: nn.Module, cut: LossCut, error: CaptureError) -> str:
    """Say how a loss runs that was cut off, and why."""
    return (
        f"The loss of {type(model).__name__} cannot be traced ({str(error).rstrip('.')}): its loss_function "
        f"runs outside of the program, in eager PyTorch on the CPU, between forward and backward of each "
        f"micro-batch. What it is given, {format_bytes(cut.nbytes)}, is copied to the host for it."
    )
