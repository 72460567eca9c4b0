"""Own a model's values: a program takes them over, and using the model or its optimizer then says so.

Names, shapes and dtypes stay known, and ``state_dict`` of a module reads the program's values, in the
model's dtypes. What would compute with values, or change them, is refused; or the program lends the model
each parameter that is touched, until it is called next.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.hooks import RemovableHandle

from megacompile.errors import ProgramError
from megacompile.state.several_optimizers import members_of

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
_COPIED_VALUES: weakref.WeakValueDictionary[tuple[int, int], Tensor] = weakref.WeakValueDictionary()
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


@dataclass
class _Hold:
    """A program's hold on a parameter: its ``owner``, if that still exists, and its name there.

    Where it ``lends``, the parameter gets its value when it is touched; else touching is refused.
    """

    owner: Callable[[], Owner | None]
    name: str
    lends: bool

    def copied(self, memo: Any) -> nn.Parameter:
        """Return a parameter of a plain copy of the model, as its ``__deepcopy__``."""
        owner = self.owner()
        if owner is None:
            raise ProgramError(
                f"The program that held the values of {self.name} is gone: there is nothing to copy."
            )
        return owner.copied(self.name)


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
            copy = _COPIED_VALUES.get(ids)
            if copy is None or not any(value is copy for value in state.values()):
                copy = _COPIED_VALUES[ids] = vars(parameter)["__deepcopy__"](None).detach()
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
    _OWNED[model] = handles
    for each in {optimizer, *members_of(optimizer)}:
        handles += [
            each.register_step_pre_hook(step),
            each.register_state_dict_pre_hook(moments),
            each.register_load_state_dict_pre_hook(moments),
        ]
        each.add_param_group = types.MethodType(_Refuser(_GROUPED), each)  # type: ignore[method-assign]
    for name, parameter in model.named_parameters():
        if name in held and type(parameter) is nn.Parameter:
            parameter.__class__ = _OwnedParameter
        reduced = types.MethodType(_pickled, parameter) if lends else pickled
        parameter.__reduce_ex__ = reduced  # type: ignore[method-assign]
        known = (lambda: owner) if lends else weakref.ref(owner)
        vars(parameter)["_hold"] = hold = _Hold(known, name, lends and name in held)
        vars(parameter)["__deepcopy__"] = hold.copied


def keep(parameters: Iterable[nn.Parameter], owner: Owner) -> None:
    """Hold a closed program's values as long as the model is there, for the program that takes it next."""
    for parameter in parameters:
        vars(parameter)["_hold"].owner = lambda: owner


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
        for name in ("__reduce_ex__", "__deepcopy__", "_hold"):
            vars(parameter).pop(name, None)


def reclaim(model: nn.Module, optimizer: Any) -> None:
    """Return its values to a model that is compiled with ``optimizer``, from closed programs and from those
    that lend."""
    for parameter in model.parameters():
        owner = _owner_of(parameter)
        if owner is not None:
            owner.give_up(optimizer)


def is_owned(model: nn.Module) -> bool:
    """Return whether a program already owns this model, or a part of it."""
    return any("_hold" in vars(parameter) for parameter in model.parameters())


def _borrowed(values: Any) -> bool:
    """Borrow all parameters that are among these; returns whether all now have their values."""
    owned = [value for value in pytree.tree_leaves(values) if isinstance(value, _OwnedValues)]
    for value in owned:
        _borrow(value)
    return not any(isinstance(value, _OwnedValues) for value in owned)


def _borrow(value: Tensor) -> None:
    """Borrow a parameter's value from its program, if that lends; what was detached of one stays without."""
    hold = _hold_of(value)
    if hold is not None and hold.lends and (owner := hold.owner()) is not None:
        owner.lend(hold.name)


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


def _hold_of(parameter: Tensor) -> _Hold | None:
    return vars(parameter).get("_hold")


def _owner_of(parameter: Tensor) -> Owner | None:
    hold = _hold_of(parameter)
    return None if hold is None else hold.owner()


def _drop_gradient(parameter: nn.Parameter) -> None:
    owner = _owner_of(parameter)
    if owner is not None:
        owner.drop_gradient(parameter)


@dataclass(frozen=True)
class ZeroGrad:
    """Stands for ``zero_grad`` of an optimizer whose parameters hold values beside those of a program: drops
    the gradients of both."""

    owner: weakref.ref[Owner]

    def __call__(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        type(optimizer).zero_grad(optimizer, set_to_none)
        owner = self.owner()
        if owner is not None:
            for parameter in parameters_of(optimizer):
                owner.drop_gradient(parameter)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
