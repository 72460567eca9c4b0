"""Trace equal layers once: later ones run their Python, and their calls are compared with the first's.

The first layer of each kind in a list is traced, and its calls of torch's functions are noted, with their
arguments and results. The forward of a later layer of the kind runs, too, all of its Python: whatever it
branches on, counts or hooks is as it was. But for the first layer's function with equal constants, and with
tensors in the places of the first's, it gets the first's result, and nothing is traced. What it returns comes
from one operator, ``LAYER``, in whose place the graph is written with the first's operators, on this layer's
tensors. The whole model is traced, layer by layer, if a call differs, a tensor leaves a layer otherwise than
as its result, or an operator writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megacompile.capture.call_tensors import tensors_in
from megacompile.capture.patches import Patch
from megacompile.capture.side_effects import writes
from megacompile.kernels.registry import OpSpec, declare

_FEWEST = 3  # layers of a list; of two, the first and the last differ as a rule
_FACTORIES = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy)  # of a graph's constants
_CONSTANTS = (int, float, str, bool, type(None), torch.dtype, torch.device)


class LayersDifferError(BaseException):
    """Layers differ that were taken for equal; no error of the model, whose own handlers must not take it on
    its way out of the trace."""


@torch.library.custom_op("megacompile::repeated_layer", mutates_args=())
def repeated_layer(number: int, around: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
    """Mark what a layer returns: ``results`` of the first of a kind, computed from ``around``; never runs."""
    raise NotImplementedError


@repeated_layer.register_fake
def _(number: int, around: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(r.shape, r.stride(), dtype=r.dtype, device=r.device) for r in results]


LAYER = torch.ops.megacompile.repeated_layer.default
declare(OpSpec("repeated_layer"))


def _is_wrapper(x: Tensor) -> bool:
    return is_traceable_wrapper_subclass(x) and not isinstance(x, FunctionalTensor)


class _First:
    """A traced layer: its calls that return tensors or fill one of its own by indices, the tensors that these
    made, and those from outside."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.inner: dict[int, Tensor] = {}
        self.around: dict[int, Tensor] = {}
        self.results: set[int] = set()
        self.repeats = True


class _Noting(TorchFunctionMode):
    """Notes the calls of a layer that is traced."""

    def __init__(self, first: _First) -> None:
        super().__init__()
        self._first = first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, self._first
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        fills = name == "__setitem__" and isinstance(args[1], Tensor) and id(args[0]) in first.inner
        if (
            isinstance(func, HigherOrderOperator)
            or (writes(name) and not fills)
            or name in ("__set__", "_set_grad_enabled")
            or kwargs.get("out") is not None
            or func in _FACTORIES
        ):
            first.repeats = False
        results = list(_tensors_within(out))
        if (results or fills) and first.repeats:
            for x in _tensors_within((args, kwargs)):
                if id(x) not in first.inner:
                    first.around[id(x)] = x
                    first.repeats &= not _is_wrapper(x)  # which would be given the mark
            first.inner |= {id(x): x for x in results if id(x) not in first.around}
            first.calls.append((func, *_mapped(lambda x: x, (args, kwargs, out))))
        return out


class _Following(TorchFunctionMode):
    """Answers the calls of a layer with the results of the first's."""

    def __init__(self, first: _First) -> None:
        super().__init__()
        self._first, self._calls = first, iter(first.calls)
        self._next = next(self._calls, None)
        self._own: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._next is not None:
            noted, noted_args, noted_kwargs, out = self._next
            if noted is func and self._same((noted_args, noted_kwargs), (args, kwargs)):
                self._next = next(self._calls, None)
                return _mapped(lambda x: self._own.get(id(x), x), out)
        out = func(*args, **kwargs)
        if any(True for _ in _tensors_within(out)):
            raise LayersDifferError
        return out

    def around(self) -> list[Tensor]:
        """The layer's own tensors in the place of those around the first, once it has made all its calls."""
        if self._next is not None:
            raise LayersDifferError
        return [self._own[key] for key in self._first.around]

    def _same(self, noted: Any, own: Any) -> bool:
        """Return whether an argument is what the first's was, a tensor from outside its counterpart."""
        if isinstance(noted, Tensor):
            if id(noted) in self._first.inner or not isinstance(own, Tensor):
                return noted is own
            if id(own) in self._first.inner or _tensor_layout(noted) != _tensor_layout(own):
                return False
            return self._own.setdefault(id(noted), own) is own
        if type(noted) is not type(own):
            return False
        if isinstance(noted, (tuple, list)):
            return len(noted) == len(own) and all(map(self._same, noted, own))
        if isinstance(noted, dict):
            return list(noted) == list(own) and all(map(self._same, noted.values(), own.values()))
        if isinstance(noted, slice):
            parts = ((s.start, s.stop, s.step) for s in (noted, own))
            return self._same(*parts)
        return noted is own or (isinstance(noted, _CONSTANTS) and repr(noted) == repr(own))


def _tensor_layout(x: Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunction():  # each attribute would pass through all the modes of a trace
        return type(x), x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value in containers of its own, as others may be changed later, with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(change, item) for item in value)
    if type(value) is dict:
        return {key: _mapped(change, item) for key, item in value.items()}
    return value


def _tensors_within(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_within(item)
    elif isinstance(value, dict):
        yield from _tensors_within(list(value.values()))
    elif isinstance(value, slice):
        yield from _tensors_within((value.start, value.stop, value.step))


class RepeatedLayers:
    """The layers of one forward; ``rng`` is its seed, by whose draws no layer equals another."""

    def __init__(self, model: nn.Module, rng: Tensor) -> None:
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) >= _FEWEST]
        self._layers = {id(vars(each)): each for layers in lists for each in layers}
        self._rng = rng
        self._firsts: dict[Any, _First] = {}
        self._inside = False

    def patches(self) -> Iterator[Patch]:
        """Yield what stands before the forwards of layers."""
        for kind in {type(each) for each in self._layers.values() if "forward" not in vars(each)}:
            yield Patch(kind, "forward", self._forward, "equal layers are traced once")

    def _forward(self, theirs: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if self._inside or transformed or id(vars(module)) not in self._layers:
            return theirs(module, *args, **kwargs)
        key = _layer_kind(theirs, module, args, kwargs)
        first = self._firsts.get(key)
        self._inside = True
        try:
            if first is None:
                first = self._firsts[key] = _First(len(self._firsts))
                with _Noting(first):
                    out = theirs(module, *args, **kwargs)
                return self._noted(first, out)
            if not first.repeats:
                return theirs(module, *args, **kwargs)
            before = _last_node()
            with _Following(first) as following:
                out = theirs(module, *args, **kwargs)
            around = following.around()
            if _last_node() is not before or not first.results >= {id(x) for x in _inner_results(first, out)}:
                raise LayersDifferError
            return _returned(first, out, around)
        finally:
            self._inside = False

    def _noted(self, first: _First, out: Any) -> Any:
        """Return what the first layer of a kind does, marked, if others can repeat it."""
        results, around = _inner_results(first, out), list(first.around.values())
        differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (*around, *results))
        agree = all(
            x.requires_grad == (differentiable and x.is_floating_point()) and not x.storage_offset()
            for x in results
        )
        drawn = any(x is self._rng for x in around)
        wrapped = map(torch._C._functorch.is_functorch_wrapped_tensor, (*around, *first.inner.values()))
        first.repeats &= bool(results) and agree and not drawn and not any(wrapped)
        if not first.repeats:
            return out
        first.results = {id(x) for x in results}
        return _returned(first, out, around)


def _layer_kind(theirs: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what layers have in common that are likely to be equal: whether they are, their calls tell."""
    modes = tuple(map(id, _get_current_function_mode_stack()))  # type: ignore[no-untyped-call]
    leaves, spec = pytree.tree_flatten((args, kwargs))
    forms = tuple(
        _tensor_layout(x) if isinstance(x, Tensor) else repr(x) if isinstance(x, _CONSTANTS) else id(x)
        for x in leaves
    )
    return layer_settings(module), modes, str(spec), forms, torch.is_grad_enabled(), torch.get_default_dtype()


def layer_settings(layer: nn.Module) -> str:
    """Return what layers that compute alike have in common: the classes of their modules by path, with their
    plain attributes. Shapes of parameters are not in it."""
    return repr([(path, type(each).__name__, _settings(each)) for path, each in layer.named_modules()])


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    """The plain attributes of a module but for its place among others."""
    own = ((k, v) for k, v in vars(module).items() if isinstance(v, _CONSTANTS))
    return [(k, v) for k, v in own if not k.endswith(("idx", "id", "index"))]


def _inner_results(first: _First, out: Any) -> list[Tensor]:
    """The tensors among the results of a layer that its calls made, each once."""
    return list({id(x): x for x in tensors_in(out) if id(x) in first.inner}.values())


def _returned(first: _First, out: Any, around: list[Tensor]) -> Any:
    """Return what a layer does, with the results of its calls as ``LAYER`` returns them."""
    results = _inner_results(first, out)
    marked = LAYER(first.number, around, results) if results else []
    own = {id(x): new for x, new in zip(results, marked, strict=True)}
    if any(_tensor_layout(x)[1:] != _tensor_layout(new)[1:] for x, new in zip(results, marked, strict=True)):
        raise LayersDifferError
    return pytree.tree_map(lambda x: own.get(id(x), x), out)


def _last_node() -> fx.Node | None:
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph._root._prev
