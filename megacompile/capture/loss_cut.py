"""The loss cut: a model's own loss that cannot be traced runs outside of the program, in eager PyTorch.

In: a model whose forward calls ``self.loss_function``, as transformers' do, or hands its labels to functions
of its own files, and a batch. Out: a graph that ends there. What these calls are given are the graph's
results. They run on the host, and so does all that the forward computes with what they return. The loss gives
the gradients from which the backward starts, as a ``loss=`` of the user's does. Entries of the batch that the
forward hands on as they are never reach the program. Invariant: the forward returns a tensor so computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from megacompile.capture.call_tensors import tensors_in
from megacompile.capture.host_values import own_functions
from megacompile.capture.patches import Patch, replaced, unpatched
from megacompile.capture.refused_calls import none_refused, outside_tracing
from megacompile.errors import CaptureError, UntraceableError
from megacompile.units import format_bytes

_LOSS_FUNCTION = "loss_function"
_READ = (Tensor.dtype, Tensor.device, Tensor.requires_grad, Tensor._version, Tensor.untyped_storage)


@dataclass(frozen=True)
class Withheld:
    """Stands for what is known outside of the program alone: an entry of the batch, by its name, or what a
    call returned, by the call's number and the place in its result."""

    name: Any


@dataclass(frozen=True)
class _LossCall:
    """A call that runs outside, with or without gradients, and what the forward knew of its result."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradients: bool
    known: Mapping[Any, Any]


@dataclass(frozen=True)
class LossCall:
    """The calls that give a loss, in order, and its name among what they return; ``traced`` is the copy of
    the model ``original`` that the calls are bound to."""

    calls: tuple[_LossCall, ...]
    name: Any
    traced: nn.Module
    original: nn.Module

    def run(self, withheld: Mapping[str, Any]) -> Tensor:
        """Return the loss of a batch, given its entries that were withheld."""
        values: dict[Any, Any] = dict(withheld)
        with _with_buffers(self.traced, self.original):
            for number, call in enumerate(self.calls):
                with torch.set_grad_enabled(call.gradients and torch.is_grad_enabled()):
                    found = _placed(_called(call.function, call.args, call.kwargs, values))
                if len(self.calls) > 1 and _structure(found) != call.known:
                    raise CaptureError(
                        f"{call.function.__name__}, which runs outside of the program, returns other numbers "
                        "or another structure than for the first batch, and the forward computes with them: "
                        "let it return as many tensors for each batch, and nothing else."
                    )
                values |= {(number, place): leaf for place, leaf in found.items()}
        loss: Tensor = values[self.name]
        return loss


for _kind in (_LossCall, LossCall):
    pytree.register_dataclass(_kind, field_names=list(_kind.__dataclass_fields__))


class _Later(Tensor):
    """A tensor that a call outside returns, with values that come of made-up ones: what is computed with it
    is computed outside too."""

    cut: LossCut
    withheld: Withheld

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", func) in _READ:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        later = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, _Later))
        result = later.cut.outside(func, args, kwargs or {})
        if not all(isinstance(x, Tensor) for x in pytree.tree_leaves(result)):
            raise UntraceableError("The forward reads numbers or shapes of what a loss outside returns.")
        return result


@dataclass(eq=False)
class LossCut:
    """Stands for a model's loss: a program computes what that is given. ``example`` are the entries of a
    batch that its forward is not given; ``original`` is the model."""

    example: dict[str, Any]
    original: nn.Module
    nbytes: int = 0
    _traced: nn.Module | None = None
    _calls: list[_LossCall] = field(default_factory=list)
    _values: dict[Any, Any] = field(default_factory=dict)  # of what is withheld, for made-up arguments

    def __call__(self, outputs: Any, batch: Any) -> Any:
        raise AssertionError("a forward that is cut returns nothing")

    def divided(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what the forward is given of a batch, and what is withheld."""
        withheld = {name: value for name, value in batch.items() if name in self.example}
        withheld = pytree.tree_map_only(Tensor, Tensor.cpu, withheld)
        return {name: value for name, value in batch.items() if name not in withheld}, withheld

    def forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LossCall:
        """Trace a forward, and return the calls of its loss."""
        owners = {k for m in model.modules() for k in type(m).__mro__ if _LOSS_FUNCTION in vars(k)}
        why = "it runs outside of the program"
        patches = [
            Patch(kind, _LOSS_FUNCTION, self._recorder(vars(kind)[_LOSS_FUNCTION]), why) for kind in owners
        ]
        plain = {type(m) for m in model.modules() if next(m.parameters(), None) is None}
        others = [*own_functions(model), *((kind, "forward") for kind in plain)]
        patches += [Patch(*of, self._given, why) for of in others if of[1] != _LOSS_FUNCTION]
        self._traced, self._values = model, dict(self.example)
        self._calls.clear()
        with replaced(patches):
            outputs = model(*args, **kwargs, **{name: Withheld(name) for name in self.example})
        returned = outputs.get("loss") if hasattr(outputs, "get") else outputs[0]
        if not isinstance(returned, _Later):
            raise UntraceableError("The forward does not compute its loss outside of the program.")
        self.nbytes = sum(x.nbytes for x in tensors_in([(call.args, call.kwargs) for call in self._calls]))
        return LossCall(tuple(self._calls), returned.withheld.name, model, self.original)

    def _recorder(self, theirs: Any) -> property:
        """A property or method in whose place calls of this thread are noted."""
        thread = threading.get_ident()

        def of(model: Any) -> Any:
            function = theirs.__get__(model)
            if threading.get_ident() != thread:
                return function
            return lambda *args, **kwargs: self.outside(function, args, kwargs)

        return property(of)

    def _given(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the model's, outside if it is given what is withheld, and no parameter."""
        if any(isinstance(x, Withheld) for x in pytree.tree_leaves((args, kwargs))):
            with suppress(Exception):
                return self.outside(unpatched(theirs), args, kwargs)
        return theirs(*args, **kwargs)

    def outside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a call, and return what it returns for made-up values."""

        def like(x: Tensor) -> Tensor:
            filling = 0.5 if x.is_floating_point() else 0
            return torch.full(tuple(x.shape), filling, dtype=x.dtype)

        if any(isinstance(x, nn.Parameter) for x in pytree.tree_leaves((args, kwargs))):
            raise UntraceableError("The forward computes with parameters behind its loss.")
        args, kwargs = pytree.tree_map_only(_Later, lambda x: x.withheld, (args, kwargs))
        number, gradients = len(self._calls), torch.is_grad_enabled()
        assert self._traced is not None
        buffers = _with_buffers(self._traced, self.original, copied=True)
        with outside_tracing(), none_refused(), torch.random.fork_rng(devices=[]), buffers:
            real_args, real_kwargs = pytree.tree_map_only(Tensor, like, (args, kwargs))
            result = _called(function, real_args, real_kwargs, self._values)
            found = _placed(result)
            if any(isinstance(x, FakeTensor) for x in found.values()):
                raise UntraceableError(
                    "The loss reads parameters, or tensors of the trace, around the program."
                )
            if any(x._version for x in tensors_in((real_args, real_kwargs))):
                raise UntraceableError("The loss writes into what it is given.")
            self._values |= {(number, place): leaf for place, leaf in found.items()}
            self._calls.append(_LossCall(function, args, kwargs, gradients, _structure(found)))

            def later(place: Any, leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    return leaf
                made = leaf.detach().as_subclass(_Later)
                made.requires_grad_(gradients and leaf.is_floating_point())
                made.cut, made.withheld = self, Withheld((number, place))
                return made

            return pytree.tree_map_with_path(later, result)


@contextmanager
def _with_buffers(traced: nn.Module, original: nn.Module, *, copied: bool = False) -> Iterator[None]:
    """Give the copy of a model that was traced the original's buffers, or copies of them, in the context."""
    own = {name: x.detach().cpu() for name, x in original.named_buffers()}
    if copied:
        own = {name: x.clone() for name, x in own.items()}
    versions = [x._version for x in own.values()]
    with _reparametrize_module(traced, own):
        yield
        now = dict(traced.named_buffers())
        for (name, x), version in zip(own.items(), versions, strict=True):
            if now.get(name) is not x or x._version != version:
                raise CaptureError(f"The loss, which runs outside of the program, changes the buffer {name}.")


def _called(function: Any, args: Any, kwargs: Any, values: Mapping[Any, Any]) -> Any:
    args, kwargs = pytree.tree_map_only(Withheld, lambda x: values[x.name], (args, kwargs))
    return function(*args, **kwargs)


def _placed(tree: Any) -> dict[Any, Any]:
    return dict(pytree.tree_flatten_with_path(tree)[0])


def _structure(found: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what a forward knows of a result: its structure, and what is no tensor."""
    return {place: Tensor if isinstance(leaf, Tensor) else leaf for place, leaf in found.items()}


def cuts(batch: Any, model: nn.Module) -> list[LossCut]:
    """The ways in which the loss of a batch may be cut off, the best first: labels withheld, or traced."""
    if not hasattr(batch, "items"):
        return []
    labels = {name: value for name, value in batch.items() if "label" in name}
    return [LossCut(names, model) for names in (labels, {})] if labels else []


def warning(model: nn.Module, cut: LossCut, error: CaptureError) -> str:
    """Say how a loss runs that was cut off, and why."""
    return (
        f"The loss of {type(model).__name__} cannot be traced ({str(error).rstrip('.')}): it is computed "
        f"outside of the program, in eager PyTorch on the CPU, between forward and backward of each "
        f"micro-batch. What it is given, {format_bytes(cut.nbytes)}, is copied to the host for it."
    )
