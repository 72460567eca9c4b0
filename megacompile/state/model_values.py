"""A model's values by its own names, and who owns them: the model itself or a program."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.hooks import RemovableHandle

from megacompile.capture.module_wrappers import unwrapped
from megacompile.capture.quantized_weights import copied_weight, is_coded, stored_shape, stored_value
from megacompile.capture.weight_codings import is_packed, settle
from megacompile.errors import MegacompileError, ProgramError
from megacompile.state.host_arena import trim_heap
from megacompile.state.masters import HostState, Weights
from megacompile.state.optimizer import refuse_moments
from megacompile.state.parameter_values import computed, empty, is_exact, set_value
from megacompile.state.torch_optimizer import members_of
from megacompile.units import RESERVE, format_bytes, host_available

# ------------------------------------------------------------------------------------------------------------
# Who owns a model's values: a program takes them over, and using the model or its optimizer then says so.
#
# Names, shapes and dtypes stay known, and ``state_dict`` of a module reads the program's values, in the
# model's dtypes. What would compute with values, or change them, is refused; or the program lends the model
# each parameter that is touched, until it is called next.


_BELONGS = "This {} belongs to a megacompile program"
_USED = (
    " and holds no values: call program.train_step, evaluate, predict or generate; compute with "
    "copy.deepcopy(model), which has the values of now; or call program.sync_to(model) to get them back."
)
_LOADED = (
    " and holds no values to set: call program.load_state_dict or load, or program.sync_to(model) to get the "
    "values back."
)
_PICKLED = (
    " and holds no values to save: save program.state_dict(), or call program.save, export, or "
    "sync_to(model) and save that."
)
_STEPPED = ": call program.train_step or program.optimizer_step instead of optimizer.step."
_MOMENTS = (
    ", which holds its moments: call program.save and program.load instead of the optimizer's state_dict and "
    "load_state_dict."
)
_GROUPED = (
    ", which was compiled for its param groups: call program.sync_to(model), add the group, and compile the "
    "model again."
)
_COPIES: weakref.WeakValueDictionary[tuple[int, int], Tensor] = weakref.WeakValueDictionary()
"""What state dicts hold of parameters, by the ids of both."""
_OWNED: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()
_gradient_of: Any = Tensor.grad.__get__  # type: ignore[union-attr]  # whatever a subclass says
_EMPTY: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the parts of owned models; not their copies


class Owner(Protocol):
    """The holder of a model's values, as its parameters know it."""

    def copied(self, name: str) -> nn.Parameter:
        """Return a parameter of a plain copy of the model."""

    def drop_gradient(self, parameter: nn.Parameter) -> None:
        """Forget what was gathered for a parameter; all of it, once that is asked for all parameters."""

    def give_up(self, optimizer: Any) -> None:
        """Leave the values to the model, where its program lends them or was closed; ``optimizer`` is the one
        of the program that takes the model next."""

    def lend(self, name: str) -> None:
        """Lend the model a parameter's value; nothing within a call of the program."""


class Training(Protocol):
    """The training that gathers gradients for a model."""

    @property
    def has_gradients(self) -> bool:
        """Return whether gradients wait for an update, or were lost while they did."""

    def zero_grad(self) -> None:
        """Forget them."""

    def reading(self) -> AbstractContextManager[None]:
        """Keep calls of the program and its updates out of the context."""


class _ValuesRefused(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that see values: all but those that make a tensor like another one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.endswith("_like") or name.startswith("new_"):
            return func(*args, **(kwargs or {}))
        return _refuse_values()


class _OwnedValues(Tensor):
    """A tensor that a program keeps: its shape, dtype and device are known, and its values are not."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # by a program, or under a user's mode; of this thread, as torch's own flag for it is not
        captured = _get_current_dispatch_mode() is not None
        if func is Tensor.detach and not captured:
            if _borrowed(args):
                return func(*args)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args).as_subclass(_OwnedValues)
        with torch._C.DisableTorchFunctionSubclass():
            try:
                with nullcontext() if captured else _ValuesRefused():  # type: ignore[no-untyped-call]
                    return func(*args, **(kwargs or {}))
            except ProgramError:  # of its first operator: nothing has run yet
                if not _borrowed((args, kwargs)):
                    raise
        return func(*args, **(kwargs or {}))

    def tolist(self) -> Any:
        if not _borrowed(self):
            _refuse_values()  # which no operator would
        return self.tolist()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_values()

    def __repr__(self, **given: Any) -> str:  # type: ignore[override]
        return f"<kept by a megacompile program: shape {tuple(self.shape)}, {self.dtype}>"


class _LentParameter(nn.Parameter):
    """A parameter whose gradients a program keeps. Reading ``.grad`` would find none, and go on."""

    @property
    def grad(self) -> None:
        caller = sys._getframe(1).f_code.co_name
        if caller == "zero_grad":  # a module's or an optimizer's, whichever that is
            _drop_gradient(self)
            return
        if caller == "_apply":  # a module's: nothing to do
            return
        raise ProgramError(
            "This parameter belongs to a megacompile program, which keeps its gradients: update by "
            "program.train_step or optimizer_step, give megacompile.compile max_grad_norm to clip them, and "
            "read grad_norm of what a step returns."
        )

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise ProgramError(
                "This parameter belongs to a megacompile program: its gradients come from "
                "program.forward_backward and train_step alone."
            )
        _drop_gradient(self)


class _OwnedParameter(_OwnedValues, _LentParameter):
    """A parameter whose values a program keeps too. What is assigned to ``.data`` would be in no step."""

    @property
    def data(self) -> Tensor:
        if _borrowed(self):
            return self.data
        with torch._C.DisableTorchFunctionSubclass():  # whatever mode is on
            return self.detach().as_subclass(_OwnedValues)

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.data_ptr(), value.dtype, value.shape) != (self.data_ptr(), self.dtype, self.shape):
            if not _borrowed(self):
                _refuse_values()
            self.data = value


@dataclass(frozen=True)
class _Refuser:
    """A hook that refuses what is asked of a part of a model, no copy of one, an optimizer or a parameter."""

    reason: str

    def __call__(self, owned: Any, *given: Any) -> None:
        kind = "optimizer" if isinstance(owned, torch.optim.Optimizer) else "parameter"
        if isinstance(owned, nn.Module):
            if owned not in _EMPTY:
                return
            kind = type(owned).__name__
        raise ProgramError(_BELONGS.format(kind) + self.reason)


@dataclass  # which torch marks
class _Filler:
    """A hook that puts the program's values into a module's part of a state dict, those of a tied parameter
    once; where ``alone`` is false, what stands for them: several ranks would have to read together."""

    alone: bool

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in module._parameters.items():
            key = prefix + name
            if not isinstance(parameter, _OwnedParameter) or state.get(key, parameter) is parameter:
                continue
            if not self.alone:
                state[key] = parameter.data
                continue
            ids = id(state), id(parameter)
            copy = _COPIES.get(ids)
            if copy is None or not any(value is copy for value in state.values()):
                copy = _COPIES[ids] = vars(parameter)["__deepcopy__"](None).detach()
            state[key] = copy


def take(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    held: Container[str],
    owner: Owner,
    *,
    alone: bool,
    lends: bool,
) -> None:
    """A program does the optimizer's updates from now on, and has the values of the parameters ``held``.

    ``owner`` gives copies of parameters, for deep copies and, in a process that trains ``alone``, state
    dicts. It is held by a weak reference; where it ``lends``, by a strong one, as the model is of use where
    nobody else knows the program any more.
    """
    use, load, pickled, step, moments = map(_Refuser, (_USED, _LOADED, _PICKLED, _STEPPED, _MOMENTS))
    handles = []
    for module in model.modules():
        if next(module.parameters(), None) is not None:
            _EMPTY.add(module)
            if lends:  # also what is no plain parameter, or is used under a dispatch mode
                handles += [
                    module.register_forward_pre_hook(_lend_own),
                    module.register_state_dict_pre_hook(_lend_own),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_pre_hook(_lend_own),  # type: ignore[no-untyped-call]
                ]
                continue
            handles += [
                module.register_forward_pre_hook(use),
                module.register_state_dict_post_hook(_Filler(alone)),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(load),  # type: ignore[no-untyped-call]
            ]
    _OWNED[model] = [
        *handles,
    ]
    for each in {optimizer, *members_of(optimizer)}:
        _OWNED[model] += [
            each.register_step_pre_hook(step),
            each.register_state_dict_pre_hook(moments),
            each.register_load_state_dict_pre_hook(moments),
        ]
        each.add_param_group = types.MethodType(_Refuser(_GROUPED), each)  # type: ignore[method-assign]
    for name, parameter in model.named_parameters():
        if name in held and type(parameter) is nn.Parameter:
            parameter.__class__ = _OwnedParameter
        if name in held and lends:
            vars(parameter)["_lender"] = owner, name
        reduced = types.MethodType(_pickled, parameter) if lends else pickled
        parameter.__reduce_ex__ = reduced  # type: ignore[method-assign]
        vars(parameter)["_owner"] = weakref.ref(owner)
        vars(parameter)["__deepcopy__"] = functools.partial(_copy, weakref.ref(owner), name)


def lend(parameter: nn.Parameter, *, trains: bool) -> None:
    """The parameter holds its value, until :func:`take_again`; its gradients are the program's while that
    ``trains``."""
    if isinstance(parameter, _OwnedParameter):
        parameter.__class__ = _LentParameter if trains else nn.Parameter  # type: ignore[assignment]


def take_again(parameter: nn.Parameter) -> None:
    """The program alone has the value of a parameter that it had lent."""
    if type(parameter) in (_LentParameter, nn.Parameter):
        parameter.__class__ = _OwnedParameter


def refuse_own_gradient(parameter: nn.Parameter, name: str) -> None:
    """Refuse a gradient that code around a training has left in a parameter that was lent to it."""
    if type(parameter) is _LentParameter and _gradient_of(parameter) is not None:
        raise ProgramError(
            f"A gradient of {name} was computed outside of the program, which would not train on it: put the "
            "loss into compute_loss, or compute under torch.no_grad() or with copy.deepcopy(model)."
        )


def give_back(model: nn.Module, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """The model holds its values again, and the optimizer, without moments, may update them."""
    for handle in _OWNED.pop(model, ()):
        handle.remove()
    _EMPTY.difference_update(model.modules())
    for each in {optimizer, *members_of(optimizer)}:
        for name in ("add_param_group", "eval", "train"):
            vars(each).pop(name, None)
    for parameter in parameters:
        if isinstance(parameter, _LentParameter):
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        for name in ("__reduce_ex__", "__deepcopy__", "_lender", "_owner"):
            vars(parameter).pop(name, None)


def reclaim(model: nn.Module, optimizer: Any) -> None:
    """Give a model that is compiled with ``optimizer`` the values that closed programs hold of it, and those
    that lend."""
    for parameter in model.parameters():
        owner = _owner_of(parameter)
        if owner is not None:
            owner.give_up(optimizer)


def is_owned(model: nn.Module) -> bool:
    """Return whether a program already owns this model, or a part of it."""
    return any("__reduce_ex__" in vars(parameter) for parameter in model.parameters())


def _borrowed(values: Any) -> bool:
    """Have all parameters lent that are among these; returns whether all now have their values."""
    owned = [value for value in pytree.tree_leaves(values) if isinstance(value, _OwnedValues)]
    for parameter in owned:
        _borrow(parameter)
    return not any(isinstance(value, _OwnedValues) for value in owned)


def _borrow(parameter: Tensor) -> None:
    if "_lender" in vars(parameter):
        lender, name = vars(parameter)["_lender"]
        lender.lend(name)


def _pickled(parameter: nn.Parameter, protocol: Any) -> Any:
    """Pickle a parameter that is lent, as a plain one."""
    if not _borrowed(parameter):
        _refuse_values()
    return nn.Parameter(parameter.detach(), parameter.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _lend_own(module: nn.Module, *given: Any) -> None:
    """A hook by which a part of a model, no copy of one, has its own parameters lent before it uses them."""
    for parameter in module._parameters.values() if module in _EMPTY else ():
        if parameter is not None:
            _borrow(parameter)


def _refuse_values() -> NoReturn:
    raise ProgramError(
        "This parameter belongs to a megacompile program and holds no values: read them from "
        "program.state_dict, set them by program.load_state_dict, compute with copy.deepcopy(model), which "
        "has the values of now, or, to move or cast them, call program.sync_to(model) first."
    )


def _owner_of(parameter: Tensor) -> Owner | None:
    owner: Callable[[], Owner | None] | None = vars(parameter).get("_owner")
    return None if owner is None else owner()


def _drop_gradient(parameter: nn.Parameter) -> None:
    owner = _owner_of(parameter)
    if owner is not None:
        owner.drop_gradient(parameter)


def _copy(owner: weakref.ref[Owner], name: str, memo: Any) -> nn.Parameter:
    holder = owner()
    if holder is None:
        raise ProgramError(f"The program that held the values of {name} is gone: there is nothing to copy.")
    return holder.copied(name)


@dataclass(frozen=True)
class _ZeroGrad:
    """Stands for ``zero_grad`` of an optimizer whose parameters hold values beside those of a program: drops
    the gradients of both."""

    owner: weakref.ref[Owner]

    def __call__(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        type(optimizer).zero_grad(optimizer, set_to_none)
        owner = self.owner()
        if owner is not None:
            for parameter in _parameters_of(optimizer):
                owner.drop_gradient(parameter)


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def persistent_buffers(model: nn.Module) -> set[str]:
    """All names of the buffers that a state_dict holds."""
    names = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if buffer is not None and name not in module._non_persistent_buffers_set:
                names.add(f"{prefix}.{name}" if prefix else name)
    return names


# ------------------------------------------------------------------------------------------------------------
# Values of a model by its own names, wherever they are: in the host state, or still in the model.


class Lending:
    """The rule of who may use the values that a program lends: any thread, or the one that trains, while it
    does."""

    def __init__(self) -> None:
        self._trains: int | None = None  # which thread does

    @property
    def trains(self) -> bool:
        """Return whether a training is under way, between two steps of it."""
        return self._trains is not None

    @contextmanager
    def training(self) -> Iterator[None]:
        """The calling thread trains within the context."""
        self._trains = threading.get_ident()
        try:
            yield
        finally:
            self._trains = None

    def check(self) -> None:
        """Refuse the calling thread."""
        if self._trains not in (None, threading.get_ident()):
            raise ProgramError(
                "While it is trained, the model's own values are for callbacks alone: in compute_loss call "
                "the model that it is given, whose outputs carry gradients, and in other threads use "
                "copy.deepcopy(model)."
            )


class ModelValues:
    """Reads and writes a model's parameters (FP32 masters) and persistent buffers.

    ``source`` gives the values of parameters on the meta device until a program takes the model over.
    ``lent`` are the names of the parameters whose values the model has, by :meth:`lend_by`.
    """

    _resumed: Callable[[str, tuple[int, ...]], Tensor | None] | None = None
    _mixes = False

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, source: Weights | None) -> None:
        self.model, self._optimizer = model, optimizer
        self._source = source
        self._owns = False
        self._state: HostState | None = None
        self._homes: Mapping[str, Sequence[tuple[int, int]]] = {}
        self._named: Mapping[str, nn.Parameter] = {}  # as they were taken over
        self._training: Callable[[], Training | None] = lambda: None
        self._undropped: dict[int, nn.Parameter] = {}  # others' gradients were dropped, and these' not
        self._gives_up: Callable[[Any], None] | None = None
        self._newer = False  # than those that the model was given beside them
        self.lending: Lending | None = None
        self.lent: set[str] = set()
        self._caller: int | None = None  # the thread that is in a call of the program

    def lend_by(self, lending: Lending, give_up: Callable[[Any], None]) -> None:
        """Lend each parameter to the model when it is touched, until the program is called next. To be called
        before the model is taken over; ``give_up`` is that of :meth:`given_up_by`.
        """
        self.lending, self._gives_up = lending, give_up

    def given_up_by(self, give_up: Callable[[Any], None]) -> None:
        """Have ``give_up`` hand the values over to another program, with the optimizer that it is given. The
        model keeps them until then, so that they are not lost with the program that is over."""
        self._gives_up = give_up
        for parameter in self._named.values() if self._owns else ():
            vars(parameter)["_owner"] = lambda: self

    def give_up(self, optimizer: Any) -> None:
        """Leave the values to the model, where :meth:`given_up_by` says how."""
        if self._gives_up is not None:
            self._gives_up(optimizer)

    def changed(self) -> None:
        """Note that the program's values have become others than the model was given beside them."""
        self._newer = True

    def drop_gradient(self, parameter: nn.Parameter) -> None:
        """Forget the gradients that the program has gathered, once that was asked for all parameters."""
        training = self._training()
        if training is None or not training.has_gradients:
            return
        if not self._undropped:
            optimizers = {self._optimizer, *members_of(self._optimizer)}
            trained = (p for each in optimizers for p in _parameters_of(each) if p.requires_grad)
            self._undropped = {id(p): p for p in trained}
        self._undropped.pop(id(parameter), None)
        if not self._undropped:
            training.zero_grad()

    def forget_dropped(self) -> None:
        """Forget which gradients were dropped, as none are gathered any more."""
        self._undropped.clear()

    def refuse_dropped(self) -> None:
        """Refuse to go on with gradients that were dropped for some of the parameters, and not for others."""
        names = [name for name, parameter in self._named.items() if id(parameter) in self._undropped]
        if names:
            raise ProgramError(
                "zero_grad() or .grad = None has dropped the gradients of some parameters since "
                f"forward_backward, and not those of {names[0]}: a program drops all or none, so call "
                "zero_grad() of the model or of all optimizers, or program.drop_gradients()."
            )

    def refuse_taken(self) -> None:
        """Refuse a model that another program has taken over, and an optimizer that was stepped already."""
        if is_owned(self.model):
            raise MegacompileError("Another program has taken over this model: use that one.")
        refuse_moments(self._optimizer)

    def take_over(
        self,
        state: HostState,
        homes: Mapping[str, Sequence[tuple[int, int]]],
        training: Training,
    ) -> None:
        """Move the values into the state of a program's ``training``; the model keeps none of those that have
        a home there."""
        _move(self.model, state, homes, self._source)
        self._source = self._resumed = None  # and with it what it may hold
        self._state, self._homes = state, homes
        for buffer in self.model.buffers() if state.world.size > 1 else ():
            buffer.data.copy_(state.world.broadcast(buffer.data))
        self._training = weakref.ref(training)  # which holds these values itself
        self._named, alone = dict(self.model.named_parameters()), state.world.size == 1
        lends = self.lending is not None and alone  # ranks would have to read together
        if lends:
            self._kept_training = training  # by the model, now
        take(self.model, self._optimizer, homes, self, alone=alone, lends=lends)
        self._owns = True

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """A call of the program, within which nothing is lent to its thread."""
        outer, self._caller = self._caller, threading.get_ident()
        try:
            yield
        finally:
            self._caller = outer

    def take_back(self) -> None:
        """Take over again all values that were lent, and maybe changed."""
        for name in sorted(self.lent):
            self._take_back(name)

    def lend(self, name: str) -> None:
        """Let the model hold a parameter's value until the program is called next; nothing within a call."""
        assert self.lending is not None
        if self._caller == threading.get_ident():
            return
        self.lending.check()
        with self._kept_training.reading():
            parameter = self._named[name]
            if name in self.lent:
                return
            free = int(host_available() * (1 - RESERVE))
            if parameter.nbytes > free:
                raise ProgramError(
                    f"The model's own {name} needs {format_bytes(parameter.nbytes)} beside the program's "
                    f"values, and the host has {format_bytes(free)}: use program.generate, predict and "
                    "export, or, after training, trainer.release()."
                )
            set_value(parameter, self._read(name, parameter))
            lend(parameter, trains=self.lending.trains or self._kept_training.has_gradients)
            self.lent.add(name)

    def _take_back(self, name: str) -> None:
        parameter = self._named[name]
        refuse_own_gradient(parameter, name)
        value, kept = stored_value(parameter).cpu(), self._read(name, parameter)
        if is_packed(parameter):
            value = kept  # inference has turned the codes into an order of its own
        if value.shape != kept.shape:
            raise MegacompileError(
                f"{name} was trained in shape {tuple(kept.shape)}, and is {tuple(value.shape)} now: "
                "undo that, or make another trainer."
            )
        if not torch.equal(value, kept.to(value.dtype)):
            self._write(name, parameter, value)
        empty(parameter)
        take_again(parameter)
        self.lent.remove(name)

    def copied(self, name: str) -> nn.Parameter:
        """A parameter of a plain copy of the model."""
        if self._state is not None and self._state.world.size > 1:
            raise MegacompileError(
                "Copying a model that several ranks train is not there: make another one, and call "
                "program.sync_to(it) on all ranks."
            )
        training, parameter = self._training(), self._named[name]
        with training.reading() if training is not None else nullcontext():
            lent = name in self.lent
            if is_coded(parameter):
                return copied_weight(parameter, self._read(name, parameter))
            value = parameter.detach().clone() if lent else self._read(name, parameter).to(parameter.dtype)
            return nn.Parameter(value, parameter.requires_grad)

    def exact(self, names: Iterable[str]) -> list[str]:
        """Those of the parameters, none of which was taken over, whose values bfloat16 holds as they are, and
        will, where others are mixed into them."""
        named = ((name, self.model.get_parameter(name)) for name in names)
        return [
            name
            for name, p in named
            if (p.dtype == torch.bfloat16 or not self._mixes) and is_exact(self._own(name, p))
        ]

    def resume_from(self, read: Callable[[str, tuple[int, ...]], Tensor | None]) -> None:
        """Have the values of a checkpoint, by name and shape, until a program takes the model over and loads
        it."""
        self._resumed = read

    def expect_mixing(self) -> None:
        """Keep frozen values so that :meth:`mix` can change them."""
        self._mixes = True

    def mix(self, others: ModelValues, share: float) -> None:
        """Add ``share`` of the values of another model, of the same parameters in the same order, to the rest
        of our own, each in its model's dtype, one at a time."""
        ours, theirs = (of._named or dict(of.model.named_parameters()) for of in (self, others))
        for (name, parameter), (other, source) in zip(ours.items(), theirs.items(), strict=True):
            value = self._read(name, parameter).to(parameter.dtype)
            value.mul_(1 - share).add_(others._read(other, source).to(source.dtype), alpha=share)
            self._write(name, parameter, value)

    def parameters(self, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Each parameter, or each trained one, in FP32 by its name, tied ones once; copies, one at a time."""
        named = self._named.items() or self.model.named_parameters()
        return ((name, self._read(name, p)) for name, p in named if p.requires_grad or not trained)

    def state_dict(self, *, trained: bool = False) -> dict[str, Tensor]:
        """FP32 masters and persistent buffers by all of the model's names, tied ones as one tensor; of
        several ranks, on the first alone."""
        values = {name: value for name, value in self.parameters(trained=trained) if not value.is_meta}
        if not trained:
            values |= {n: b.clone() for n, b in self.buffers().items()}
        return {name: values[first] for name, first in first_names(self.model).items() if first in values}

    def buffers(self) -> dict[str, Tensor]:
        """The persistent buffers themselves."""
        kept = persistent_buffers(self.model)
        return {n: b.detach() for n, b in self.model.named_buffers() if n in kept}

    def check(self, values: Mapping[str, Tensor]) -> None:
        """Refuse what :meth:`load` could not set as a whole; tied values may come under any name."""
        firsts = first_names(self.model)
        unknown = sorted(set(values) - set(firsts))
        missing = sorted(set(firsts.values()) - {firsts[n] for n in values if n in firsts})
        if unknown or missing:
            what = f"holds {unknown[0]}, which is not in" if unknown else f"lacks {missing[0]} of"
            raise MegacompileError(f"The state does not fit: it {what} this {type(self.model).__name__}.")
        targets = self._targets()
        for name, value in values.items():
            _check_value(name, value, targets[firsts[name]])
            if self._state is not None and firsts[name] in self._homes:
                self._state.refuse_rounding(self._homes[firsts[name]], value)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Set all parameters and persistent buffers to values that were checked."""
        firsts, targets = first_names(self.model), self._targets()
        for name, value in values.items():
            given = self._state.world.broadcast(value) if self._state is not None else value
            self._write(firsts[name], targets[firsts[name]], given)

    def _targets(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters()) | self.buffers()

    def copy_to(self, model: nn.Module) -> None:
        """Set the values of a model like this one, on every rank; this one itself is an ordinary model after
        it."""
        model = unwrapped(model)
        if is_owned(model) and not (model is self.model and self._owns):
            raise MegacompileError(
                f"This {type(model).__name__} belongs to another program: give one that holds its own values."
            )
        if model is self.model and (self._owns or self._state is None):
            named = self._named or dict(model.named_parameters())
            for name, value in self._everywhere():
                if named[name].is_meta or (name in self._homes and name not in self.lent):
                    set_value(named[name], value)
            self.lent.clear()
            give_back(model, named.values(), self._optimizer)
            for each in {self._optimizer, *members_of(self._optimizer)}:
                each.zero_grad = types.MethodType(_ZeroGrad(weakref.ref(self)), each)  # type: ignore[method-assign]
            self._owns = self._newer = False
            return
        settle(model)
        targets = self._counterparts(model)
        for name, value in itertools.chain(self._everywhere(), self.buffers().items()):
            for target in targets[name]:
                _set(target, value)
        if model is self.model:
            self._newer = False

    def _everywhere(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what :meth:`parameters` gives the first of several ranks, on each of them."""
        for name, value in self.parameters():
            if self._state is not None and name in self._homes:
                given = torch.empty(value.shape, dtype=value.dtype) if value.is_meta else value
                value = self._state.world.broadcast(given)
            yield name, value

    def release(self) -> None:
        """The model alone holds its values, which are the program's, if these changed since the model was
        given some."""
        if self._owns or self._newer:
            self.copy_to(self.model)
        for each in {self._optimizer, *members_of(self._optimizer)}:
            vars(each).pop("zero_grad", None)
        self._state, self._homes, self._named = None, {}, {}

    def _counterparts(self, model: nn.Module) -> dict[str, list[Tensor]]:
        """Return what holds each of our values in another model, if neither has more than the other."""
        theirs = first_names(model)
        given = dict(model.named_parameters()) | dict(model.named_buffers())
        ours, targets = first_names(self.model), self._targets()
        if ours.keys() != theirs.keys():
            raise MegacompileError(
                f"The model is not like the program's {type(self.model).__name__}: only one of them has "
                f"{min(ours.keys() ^ theirs.keys())}."
            )
        found: dict[str, list[Tensor]] = defaultdict(list)
        for name, first in ours.items():
            target = given[theirs[name]]
            ours_is, theirs_is = stored_shape(targets[first]), stored_shape(target)
            if theirs_is != ours_is:
                raise MegacompileError(
                    f"{name} has shape {theirs_is} in the model and {ours_is} in the program."
                )
            found[first].append(target)
        return found

    def _read(self, name: str, parameter: nn.Parameter) -> Tensor:
        if name in self._homes:
            assert self._state is not None
            return self._state.read_whole(self._homes[name])
        value = self._own(name, parameter)
        value = value if parameter.is_meta and self._source is not None else value.clone()
        return value.float() if value.is_floating_point() else value

    def streamed_parts(self, name: str, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each part of a tensor of a parameter's stored shape, with what programs compute with there:
        a tensor on the host, until the next part is asked for."""
        if name not in self._homes:
            yield whole, computed(self._own(name, self.model.get_parameter(name)), whole.dtype)
            return
        assert self._state is not None
        for place in self._homes[name]:
            yield self._state.streamed_part(place, whole)

    def _own(self, name: str, parameter: nn.Parameter) -> Tensor:
        """A parameter's value that no program has."""
        saved = self._resumed and self._resumed(name, stored_shape(parameter))
        if saved is not None:
            return saved
        if parameter.is_meta and self._source is not None:
            return self._source(name)
        return stored_value(parameter)

    def _write(self, name: str, target: Tensor, value: Tensor) -> None:
        if name in self._homes:
            assert self._state is not None
            self.changed()
            self._state.write_whole(self._homes[name], value)
        else:
            _set(target, value)


def _set(target: Tensor, value: Tensor) -> None:
    """Write a value where a parameter or buffer is, if it is anywhere."""
    if target.is_meta or is_coded(target):
        set_value(target, value.clone())
    else:
        target.detach().copy_(value)  # not by .data: whoever has a copy sees by the version that it changed


def _move(
    model: nn.Module,
    state: HostState,
    homes: Mapping[str, Sequence[tuple[int, int]]],
    source: Weights | None,
) -> None:
    """Move each placed parameter's value into a state, one at a time, and leave NaN in its place.

    The model's storage is released parameter by parameter, so that no second copy of the model ever exists
    on the host. ``source`` gives the value of a parameter on the meta device. What does not come to its end,
    by Ctrl-C too, is undone: the model then has its values again.
    """
    taken, world = [], state.world
    try:
        for name, parameter in model.named_parameters():
            value = stored_value(parameter)
            if parameter.is_meta:
                assert source is not None
                value = source(name)
            else:
                value = world.broadcast(value)
            if name in homes:
                state.write_whole(homes[name], value)
                taken.append((name, parameter))
                empty(parameter)
            else:
                set_value(parameter, value.clone() if parameter.is_meta else value)  # its file may change
            del value
            trim_heap()
    except BaseException:
        for name, parameter in taken if world.size == 1 else ():  # else others would have to help
            set_value(parameter, state.read_whole(homes[name]))
        raise


def first_names(model: nn.Module) -> dict[str, str]:
    """All names of parameters and persistent buffers, with the first name of the same tensor."""
    kept = persistent_buffers(model)
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = ((n, b) for n, b in model.named_buffers(remove_duplicate=False) if n in kept)
    names: dict[int, str] = {}
    return {name: names.setdefault(id(t), name) for name, t in itertools.chain(parameters, buffers)}


def _check_value(name: str, value: Any, target: Tensor) -> None:
    if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
        kind = f"{value.layout} {value.device}" if isinstance(value, Tensor) else type(value).__name__
        raise MegacompileError(f"{name} is no dense tensor with values in the state ({kind}): give one.")
    if value.is_complex() != target.is_complex():
        raise MegacompileError(f"{name} is {value.dtype} in the state and {target.dtype} in the model.")
    if tuple(value.shape) != stored_shape(target):
        raise MegacompileError(
            f"{name} has shape {tuple(value.shape)} in the state and {stored_shape(target)} in the model."
        )
