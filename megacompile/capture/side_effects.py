"""What a forward does besides computing, and what autograd does not see: refused by name, with the way out.

A captured graph would hold neither: a program would do it once, or never. :class:`Effects` watches a
forward as it runs; ``refuse_constants`` looks at what it read, ``refuse_other_forward`` at what it computes
the next time.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import pickle
import random
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode

from megacompile.capture.call_tensors import storage_id, storage_of
from megacompile.capture.fingerprint import attributes, tensors_of
from megacompile.errors import CaptureError, UntraceableError
from megacompile.graph.captured import strip

_WAY_OUT = "a program would not, so pass what changes in the batch, or change it between steps."


_OF_ELEMENTS = {"isfinite": True, "isinf": False, "isnan": False}


class _EffectsWatch(TorchFunctionMode):
    """Refuses calls whose effect on gradients is lost, and takes ``.data`` for ``detach()``.

    Where a forward asks whether all elements of a tensor are finite, they are, and ``finite`` keeps what says
    so; None: such a question is not answered.
    """

    def __init__(self, finite: list[Tensor] | None) -> None:
        super().__init__()
        self._detached: dict[int, torch.UntypedStorage] = {}  # of tensors that have a gradient elsewhere
        self._finite = finite
        self._asked: dict[int, tuple[Tensor, bool]] = {}  # by id, what each holds where all is finite

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            func, name = Tensor.detach, "detach"
        elif func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise CaptureError("The forward assigns the .data of a tensor: compute a new tensor instead.")
        elif name == "detach_":
            raise CaptureError("The forward calls detach_(), which is lost: write t = t.detach().")
        elif func in (Tensor.requires_grad_, Tensor.requires_grad.__set__):  # type: ignore[attr-defined]
            _refuse_toggle(args[0], bool(args[1]) if len(args) > 1 else True)
        elif args and isinstance(args[0], Tensor) and writes(name):
            self._refuse_hidden_write(args[0], name)
        elif self._finite is not None and name == "__bool__" and id(args[0]) in self._asked:
            flag, holds = self._asked[id(args[0])]
            self._finite.append(flag if holds else ~flag)
            return holds
        elif name in _OF_ELEMENTS or (name in ("all", "any") and id(args[0]) in self._asked and not args[1:]):
            result = func(*args, **(kwargs or {}))
            holds = _OF_ELEMENTS.get(name, name == "all")
            if name in _OF_ELEMENTS or self._asked[id(args[0])][1] == holds:
                self._asked[id(result)] = result, holds
            return result
        if name == "detach" and args[0].requires_grad:
            storage = storage_of(args[0])
            self._detached[storage._cdata] = storage
        return func(*args, **(kwargs or {}))

    def _refuse_hidden_write(self, target: Tensor, name: str) -> None:
        unseen = target.requires_grad and not torch.is_grad_enabled()
        behind = not target.requires_grad and storage_id(target) in self._detached
        if unseen or behind:
            raise CaptureError(
                f"The forward calls {name} on a tensor of shape {tuple(target.shape)} that has a gradient, "
                "where autograd does not see it: compute a new tensor instead."
            )


def writes(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name in vars(Tensor))


def _refuse_toggle(tensor: Tensor, wanted: bool) -> None:
    if isinstance(tensor, nn.Parameter) and tensor.requires_grad != wanted:
        raise CaptureError(
            f"The forward sets requires_grad of a parameter of shape {tuple(tensor.shape)} to {wanted}: set "
            "it before compile, or detach what shall have no gradient."
        )


_GENERATORS = (random.Random, numpy.random.BitGenerator)
_GLOBAL: tuple[Any, ...] = random._inst, numpy.random.mtrand._rand._bit_generator
_CLOSED = (*_GENERATORS, types.ModuleType, type, Tensor)
_LIBRARIES = {"torch", "numpy", "transformers", *sys.stdlib_module_names}
_DEEP, _LARGE = 8, 2000  # levels that are looked into, and items of one that may hold a generator
DRAWS = (
    "The forward draws random numbers from Python or NumPy by a generator that it keeps, or by a function "
    "that a program cannot call in each step: call those of numpy.random or random by the module's name, use "
    "torch.rand, or put the random numbers into the batch."
)


class Effects:
    """The effects that a forward left behind: attributes by name with what they hold now, tensors that it
    replaced; and ``finite``, what it took for true of its values."""

    def __init__(self) -> None:
        self.changed: dict[str, Any] = {}
        self.replaced: list[object] = []
        self.finite: list[Tensor] = []

    @property
    def first(self) -> str:
        """The name of one attribute that was left changed, if there is one."""
        return min(self.changed, default="")

    def apply(self, model: nn.Module) -> None:
        """Set the model's attributes as the forward left them, and forget their earlier values."""
        for name, value in self.changed.items():
            prefix, _, attribute = name.rpartition(".")
            vars(model.get_submodule(prefix))[attribute] = value
        self.changed = {}

    @contextlib.contextmanager
    def noted(self, model: nn.Module, *, takes_finite: bool = False) -> Iterator[None]:
        """Note what a forward in this thread does besides computing, and refuse what can't be noted.
        ``takes_finite``: where it asks whether numbers are finite, they are."""
        before, tensors, generators = attributes(model), tensors_of(model), _generators(model)
        states = random_states(generators)
        python, arrays = random.getstate(), numpy.random.get_state()  # noqa: NPY002
        buffers = dict(model.named_buffers())
        self.finite.clear()
        with _EffectsWatch(self.finite if takes_finite else None):
            yield
        for name, (value, described) in attributes(model).items():
            if name not in before or before[name][1] != described:
                self.changed[name] = value
        left = set(map(id, tensors_of(model)))
        self.replaced += [tensor for tensor in tensors if id(tensor) not in left]
        for name, buffer in model.named_buffers():
            if buffers.get(name) is not buffer:
                raise CaptureError(f"The forward assigns the buffer {name}: {_WAY_OUT}")
        if random_states(generators) != states:
            random.setstate(python)
            numpy.random.set_state(arrays)  # noqa: NPY002
            raise UntraceableError(DRAWS)


def refuse_other_forward(first: fx.Graph, second: fx.Graph, before: str, after: str) -> None:
    """Refuse a forward that leaves an attribute changed and does not compute the same again."""
    if after or computation(first) != computation(second):
        raise CaptureError(f"The forward changes {before or after}, and what it computes with it: {_WAY_OUT}")


def computation(graph: fx.Graph) -> tuple[list[str], list[str]]:
    """A graph's inputs and operations; in which order modules hold parameters, a parametrization changes."""
    inputs = sorted(str(node.format_node()) for node in graph.nodes if node.op == "placeholder")
    return inputs, [str(node.format_node()) for node in graph.nodes if node.op != "placeholder"]


def _generators(model: nn.Module) -> list[Any]:
    """Return Python's and NumPy's generators: the global ones, and those that modules, the files of their
    forwards, and what these hold and call hold."""
    found = [*_GLOBAL]
    level: list[Any] = [space for m in model.modules() for space in (vars(m), _globals_of(m))]
    seen: set[int] = set()
    for _ in range(_DEEP):
        level = [x for x in {id(x): x for x in level if gc.is_tracked(x)}.values() if id(x) not in seen]
        seen.update(map(id, level))
        found += [x for x in level if isinstance(x, _GENERATORS)]
        inside = [gc.get_referents(x) for x in level if not isinstance(x, _CLOSED) and not _of_library(x)]
        level = [x for held in inside if len(held) <= _LARGE for x in held]
    return found


def _of_library(x: Any) -> bool:
    """Return whether something is a function that draws from no generator of a model's."""
    return isinstance(x, types.FunctionType) and str(x.__module__).partition(".")[0] in _LIBRARIES


def _globals_of(module: nn.Module) -> dict[str, Any] | None:
    return getattr(inspect.unwrap(type(module).forward), "__globals__", None)


def random_states(generators: Sequence[Any] = _GLOBAL) -> bytes:
    """Return the states of generators, of those of a class of its own what the base class knows."""
    python = [x for x in generators if isinstance(x, random.Random)]
    others = [x for x in generators if not isinstance(x, random.Random)]
    states = [super(random.Random, x).getstate() for x in python]
    return pickle.dumps((states, [x.state for x in others]))


def unseeded(theirs: Any, generator: random.Random, a: Any = None, version: int = 2) -> None:
    """``random.Random.seed``, refused without a seed: its numbers are others in each step."""
    if a is None:
        raise UntraceableError(DRAWS)
    theirs(generator, a, version)


def no_inference(theirs: Any, context: torch.inference_mode) -> None:
    """``torch.inference_mode``, refused where it is one."""
    if context.mode:
        raise CaptureError("The forward enters torch.inference_mode: use torch.no_grad() there.")
    theirs(context)


def no_packing(theirs: Any, context: saved_tensors_hooks) -> None:
    """``saved_tensors_hooks``, refused but for torch's own."""
    if not type(context).__module__.startswith("torch.") or type(context) is saved_tensors_hooks:
        raise CaptureError(
            "The forward enters saved_tensors_hooks, which would never run: remove them, as the plan decides "
            "what is kept."
        )
    theirs(context)


def refuse_constants(
    exported: torch.export.ExportedProgram, model: nn.Module, replaced: list[object]
) -> None:
    """Refuse a forward that reads tensors which are others the next time, or are parameters."""
    owners = {storage_id(p): name for name, p in model.named_parameters()}
    for spec in exported.graph_signature.input_specs:
        if spec.kind != InputKind.CONSTANT_TENSOR:
            continue
        name = strip(str(spec.target))
        constant = exported.constants[str(spec.target)]
        if isinstance(constant, FakeTensor) or any(constant is tensor for tensor in replaced):
            raise CaptureError(
                f"The forward reads a tensor that another one left behind ({name}): {_WAY_OUT}"
            )
        owner = owners.get(storage_id(constant))
        if owner is not None:
            raise CaptureError(
                f"The forward reads the parameter {owner} around its module, as a function that closes over "
                "it does: read it through the module that is called."
            )
