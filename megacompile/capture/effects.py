"""What a forward does besides computing, and what autograd does not see: refused by name, with the way out.

A captured graph would hold neither: a program would do it once, or never. :class:`Effects` watches a
forward as it runs; ``refuse_constants`` looks at what it read, ``refuse_other_forward`` at what it computes
the next time.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode

from megacompile.capture.captured import strip
from megacompile.capture.snapshot import attributes, tensors_of
from megacompile.errors import CaptureError

_WAY_OUT = "a program would not, so pass what changes in the batch, or change it between steps."


class _Watch(TorchFunctionMode):
    """Refuses calls whose effect on gradients is lost, and takes ``.data`` for ``detach()``."""

    def __init__(self) -> None:
        super().__init__()
        self._detached: dict[int, torch.UntypedStorage] = {}  # of tensors that have a gradient elsewhere

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
        elif args and isinstance(args[0], Tensor) and _writes(name):
            self._refuse_hidden_write(args[0], name)
        if name == "detach" and args[0].requires_grad:
            storage = _storage(args[0])
            self._detached[storage._cdata] = storage
        return func(*args, **(kwargs or {}))

    def _refuse_hidden_write(self, target: Tensor, name: str) -> None:
        unseen = target.requires_grad and not torch.is_grad_enabled()
        behind = not target.requires_grad and _storage(target)._cdata in self._detached
        if unseen or behind:
            raise CaptureError(
                f"The forward calls {name} on a tensor of shape {tuple(target.shape)} that has a gradient, "
                "where autograd does not see it: compute a new tensor instead."
            )


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, or of what a transform such as vmap has wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


def _writes(name: str) -> bool:
    """Whether a function of this name writes into its first argument."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name in vars(Tensor))


def _refuse_toggle(tensor: Tensor, wanted: bool) -> None:
    if isinstance(tensor, nn.Parameter) and tensor.requires_grad != wanted:
        raise CaptureError(
            f"The forward sets requires_grad of a parameter of shape {tuple(tensor.shape)} to {wanted}: set "
            "it before compile, or detach what shall have no gradient."
        )


class Effects:
    """What a forward left behind: attributes by name with what they hold now, tensors that it replaced."""

    def __init__(self) -> None:
        self.changed: dict[str, Any] = {}
        self.replaced: list[object] = []

    @property
    def first(self) -> str:
        """The name of one attribute that was left changed, if there is one."""
        return min(self.changed, default="")

    def apply(self, model: nn.Module) -> None:
        """Make the model as the forward left it, and forget that it was not."""
        for name, value in self.changed.items():
            prefix, _, attribute = name.rpartition(".")
            vars(model.get_submodule(prefix))[attribute] = value
        self.changed = {}

    @contextlib.contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        """Note what a forward in this thread does besides computing, and refuse what can't be noted."""
        before, tensors, states = attributes(model), tensors_of(model), _random_states()
        buffers = dict(model.named_buffers())
        with _Watch():
            yield
        for name, (value, described) in attributes(model).items():
            if name not in before or before[name][1] != described:
                self.changed[name] = value
        left = set(map(id, tensors_of(model)))
        self.replaced += [tensor for tensor in tensors if id(tensor) not in left]
        for name, buffer in model.named_buffers():
            if buffers.get(name) is not buffer:
                raise CaptureError(f"The forward assigns the buffer {name}: {_WAY_OUT}")
        if _random_states() != states:
            raise CaptureError(
                "The forward draws random numbers from Python or NumPy, which would be the same in every "
                "step: use torch.nn.Dropout, or move the random numbers into the batch."
            )


def refuse_other_forward(first: fx.Graph, second: fx.Graph, before: str, after: str) -> None:
    """Refuse a forward that leaves an attribute changed and does not compute the same again."""
    if after or _computation(first) != _computation(second):
        raise CaptureError(f"The forward changes {before or after}, and what it computes with it: {_WAY_OUT}")


def _computation(graph: fx.Graph) -> tuple[list[str], list[str]]:
    """A graph's inputs and operations; in which order modules hold parameters, a parametrization changes."""
    inputs = sorted(str(node.format_node()) for node in graph.nodes if node.op == "placeholder")
    return inputs, [str(node.format_node()) for node in graph.nodes if node.op != "placeholder"]


def _random_states() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(numpy.random.get_state())  # noqa: NPY002


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
    owners = {p.untyped_storage()._cdata: name for name, p in model.named_parameters()}
    for spec in exported.graph_signature.input_specs:
        if spec.kind != InputKind.CONSTANT_TENSOR:
            continue
        name = strip(str(spec.target))
        constant = exported.constants[str(spec.target)]
        if isinstance(constant, FakeTensor) or any(constant is tensor for tensor in replaced):
            raise CaptureError(
                f"The forward reads a tensor that another one left behind ({name}): {_WAY_OUT}"
            )
        owner = owners.get(constant.untyped_storage()._cdata)
        if owner is not None:
            raise CaptureError(
                f"The forward reads the parameter {owner} around its module, as a function that closes over "
                "it does: read it through the module that is called."
            )
