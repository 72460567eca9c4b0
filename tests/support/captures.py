"""Captures of equal models, remembered: most of a small test's time is tracing what another one traced.

In: what a :class:`~megacompile.api.frontend.Frontend` asks of its stages. Out: what they gave before for an
equal model, loss and batch. Only modules and functions of torch, transformers, peft, of tests where they are
no function's own, and of ours are told equal, and only while nothing but plain data is attached to them; any
other is captured anew.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as global_hooks
from torch.utils import _pytree as pytree

from megacompile.api.frontend import Frontend
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.partition import Template
from megacompile.blocks.template_cache import differentiate_once, what_decides
from megacompile.capture.attempts import Attempts, capture
from megacompile.capture.quantized_weights import coding_of
from megacompile.capture.trace import How, Reason, Request
from megacompile.graph.captured import Captured
from megacompile.kernels._triton import Gpu
from megacompile.state.model_ownership import _lend_own as lend_own
from megacompile.state.model_ownership import _Refuser as Refuser

_KNOWN = (
    "torch.",
    "transformers.",
    "peft.",
    "tests.support.",
    "megacompile.graph.forward_outputs.",
    "megacompile.api.generate_without_cache.",
    "megacompile.integrations.",
    "megacompile.cli.gpu_doctor.",
)
_OF_PLAIN_DATA = (
    "transformers.",
    "peft.",
    "megacompile.",
)  # whose objects are told by what they hold: configurations
_TORCHS = frozenset(vars(nn.Module())) | {"_flat_weight_refs"}  # of an LSTM's own parameters
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL = tuple(f"_global{name}" for name in _HOOKS[:3])


class _UnknownError(Exception):
    """A model or a batch that cannot be told equal to another."""


class Captures:
    """What capture and differentiate gave, by what they were given."""

    def __init__(self) -> None:
        self._captured: dict[Any, Attempts[How, Captured]] = {}
        self._templates: dict[Any, DifferentiatedTemplate] = {}

    def capture(self, request: Request, how: How) -> Attempts[How, Captured]:
        """As :func:`megacompile.capture.attempts.capture`."""
        try:
            key = _call(request, how)
        except _UnknownError:
            return capture(request, how)
        if key not in self._captured:
            found = capture(request, how)
            if isinstance(found.outcome, Reason) or found.how.reads_values or found.how.parts != how.parts:
                return found  # what is told of a part is told each time
            self._captured[key] = found
        return self._captured[key]

    def differentiate(
        self,
        template: Template,
        mode: FakeTensorMode,
        inductor: torch.device | None = None,
        gpu: Gpu | None = None,
        chunk: int = 0,
        *,
        check: bool = True,
        fold: bool = False,
    ) -> DifferentiatedTemplate:
        """As :func:`megacompile.blocks.template_cache.differentiate_once`."""
        key = inductor, (*what_decides(template, gpu, chunk), check, fold)
        if key not in self._templates:
            self._templates[key] = differentiate_once(
                template, mode, inductor, gpu, chunk, check=check, fold=fold
            )
        return self._templates[key]

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Programs that are compiled within take these captures."""
        stages = functools.partial(Frontend, capture=self.capture, differentiate=self.differentiate)
        with (
            mock.patch("megacompile.api.compile.Frontend", stages),
            mock.patch("megacompile.cli.repeat_layers.Frontend", stages),
            mock.patch("megacompile.cli.repeat_layers.differentiate_once", self.differentiate),
        ):
            yield


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Differentiate each template anew: what other tests left decides nothing, nor do they meet what is made
    here, maybe by code that a test has changed."""
    with mock.patch("megacompile.blocks.template_cache._is_the_same_in_every_run", lambda graph: False):
        yield


def _call(request: Request, how: How) -> Any:
    """A key that two calls of capture share only if they give the same graph."""
    if any(getattr(global_hooks, name) for name in _GLOBAL) or how.reads_values:
        raise _UnknownError
    leaves, spec = pytree.tree_flatten((request.args, request.kwargs))
    given = {k: v for k, v in vars(request).items() if k not in ("model", "args", "kwargs", "trained")}
    modes = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
    )
    leaf_keys = tuple(_tensor(x) if isinstance(x, Tensor) else _plain(x) for x in leaves)
    options = _plain(given), _plain(vars(how)), frozenset(request.trained)
    return _model(request.model), str(spec), leaf_keys, *options, modes


def _model(model: nn.Module) -> tuple[Any, ...]:
    seen: dict[int, int] = {}  # the same object under two names
    return tuple(
        (name, _module(module, seen)) for name, module in model.named_modules(remove_duplicate=False)
    )


def _module(module: nn.Module, seen: dict[int, int]) -> tuple[Any, ...]:
    kind, values = type(module), vars(module)
    hooks = [hook for name in _HOOKS for hook in (values.get(name) or {}).values()]
    if not _is_known(kind) or any(hook is not lend_own and type(hook) is not Refuser for hook in hooks):
        raise _UnknownError
    tensors = [
        (name, seen.setdefault(id(t), len(seen)), None if t is None else (*_tensor(t), t.requires_grad))
        for name, t in (*module._parameters.items(), *module._buffers.items())
    ]
    own = [(name, _plain(values[name])) for name in sorted(values.keys() - _TORCHS)]
    return kind, kind.forward, module.training, seen.setdefault(id(module), len(seen)), *tensors, *own


def _is_known(value: Any) -> bool:
    """Whether a class or a function is told from others by what it is: a test's, if no call makes it anew."""
    place = f"{value.__module__}."
    return place.startswith(_KNOWN) or (place.startswith("tests.") and "<locals>" not in value.__qualname__)


def _tensor(tensor: Tensor) -> tuple[Any, ...]:
    form = type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type
    return *form, repr(coding_of(tensor))


def _plain(value: Any) -> Any:
    """Data by type and value; functions and classes of libraries by identity."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return type(value), repr(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_plain, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_plain, value))
    if isinstance(value, Mapping):
        return type(value), tuple((_plain(k), _plain(v)) for k, v in value.items())
    if isinstance(value, functools.partial):
        return functools.partial, _plain(value.func), _plain(value.args), _plain(value.keywords)
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        return _plain(value.__func__), type(value.__self__)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        if _is_known(value):
            return value
    elif hasattr(value, "__dict__") and f"{type(value).__module__}.".startswith(_OF_PLAIN_DATA):
        return type(value), _plain({k: v for k, v in vars(value).items() if k != "_name_or_path"})
    raise _UnknownError
