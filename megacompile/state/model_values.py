"""Values of a model by its own names, wherever they are: in the host state, or still in the model."""

from __future__ import annotations

import itertools
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.capture.module_wrappers import unwrapped
from megacompile.capture.quantized_weights import copied_weight, is_coded, stored_shape, stored_value
from megacompile.capture.weight_codings import is_packed, settle
from megacompile.errors import MegacompileError, ProgramError
from megacompile.state.host_arena import trim_heap
from megacompile.state.masters import HostState, Weights
from megacompile.state.model_ownership import (
    Training,
    ZeroGrad,
    give_back,
    is_owned,
    keep,
    lend,
    parameters_of,
    refuse_own_gradient,
    take,
    take_again,
)
from megacompile.state.optimizer import refuse_moments
from megacompile.state.parameter_values import computed, empty, is_exact, set_value
from megacompile.state.several_optimizers import members_of
from megacompile.units import RESERVE, format_bytes, host_available


def persistent_buffers(model: nn.Module) -> set[str]:
    """All names of the buffers that a state_dict holds."""
    names = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if buffer is not None and name not in module._non_persistent_buffers_set:
                names.add(f"{prefix}.{name}" if prefix else name)
    return names


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
        """Use ``give_up`` to hand the values over to another program, with the optimizer that it is given.

        The model keeps them until then, so that they are not lost with the program that is over.
        """
        self._gives_up = give_up
        if self._owns:
            keep(self._named.values(), self)

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
            trained = (p for each in optimizers for p in parameters_of(each) if p.requires_grad)
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
        _move_in(self.model, state, homes, self._source)
        self._source = self._resumed = None  # and with it what it may hold
        self._state, self._homes = state, homes
        for buffer in self.model.buffers() if state.world.size > 1 else ():
            buffer.data.copy_(state.world.broadcast(buffer.data))
        self._named, alone = dict(self.model.named_parameters()), state.world.size == 1
        lends = self.lending is not None and alone  # ranks would have to read together
        # the training holds these values itself; where they are lent, the model holds the training
        self._training = (lambda: training) if lends else weakref.ref(training)
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
        """Lend the model a parameter's value until the program is called next; nothing within a call."""
        assert self.lending is not None
        if self._caller == threading.get_ident():
            return
        self.lending.check()
        training = self._training()
        assert training is not None
        with training.reading():
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
            lend(parameter, trains=self.lending.trains or training.has_gradients)
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
        """Take the values of a checkpoint, by name and shape, until a program takes the model over and loads
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
                each.zero_grad = types.MethodType(ZeroGrad(weakref.ref(self)), each)  # type: ignore[method-assign]
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


def _move_in(
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
