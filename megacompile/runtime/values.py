"""Values of a model by its own names, wherever they are: in the host state, or still in the model."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.capture.coded_weights import (
    copied_weight,
    is_of_bitsandbytes,
    is_packed,
    stored_shape,
    stored_value,
)
from megacompile.capture.wrappers import unwrapped
from megacompile.errors import MegacompileError, ProgramError
from megacompile.host.arena import trim_heap
from megacompile.host.optimizer import refuse_moments
from megacompile.host.parameters import empty, is_exact, set_value
from megacompile.host.state import HostState, Weights
from megacompile.runtime import ownership
from megacompile.units import RESERVE, format_bytes, host_available


class Lending:
    """Who may use the values that a program lends: any thread, or the one that trains, while it does."""

    def __init__(self) -> None:
        self._trains: int | None = None  # which thread does

    @property
    def trains(self) -> bool:
        """Whether a training is under way, between two steps of it."""
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
    ``lending``, if it is set before that, has each parameter lent to the model when it is touched, until the
    program is called next; ``lent`` are their names. ``give_up`` then ends the program, where another one is
    to have the model.
    """

    lending: Lending | None = None
    give_up: Callable[[], None]

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, source: Weights | None) -> None:
        self.model, self._optimizer = model, optimizer
        self._source = source
        self._owns = False
        self._state: HostState | None = None
        self._homes: Mapping[str, Sequence[tuple[int, int]]] = {}
        self._named: Mapping[str, nn.Parameter] = {}  # as they were taken over
        self.lent: set[str] = set()
        self._caller: int | None = None  # the thread that is in a call of the program

    def refuse_taken(self) -> None:
        """Refuse a model that another program has taken over, and an optimizer that was stepped already."""
        if ownership.is_owned(self.model):
            raise MegacompileError("Another program has taken over this model: use that one.")
        refuse_moments(self._optimizer)

    def take_over(
        self,
        state: HostState,
        homes: Mapping[str, Sequence[tuple[int, int]]],
        reading: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Move the values into a program's state; the model keeps none of those that have a home there.

        Within ``reading`` all updates of the state are over.
        """
        _move(self.model, state, homes, self._source)
        self._source = None  # and with it what it may hold
        self._state, self._homes = state, homes
        for buffer in self.model.buffers() if state.world.size > 1 else ():
            buffer.data.copy_(state.world.broadcast(buffer.data))
        self._reading = weakref.WeakMethod(reading)  # of what holds these values itself
        self._named, alone = dict(self.model.named_parameters()), state.world.size == 1
        if self.lending is not None and alone:
            self._reads = reading  # which the model now keeps
        lender = self if self.lending is not None and alone else None  # ranks would have to read together
        ownership.take(self.model, self._optimizer, homes, self.copied, alone=alone, lender=lender)
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
        with self._reads():
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
            ownership.lend(parameter, trains=self.lending.trains)
            self.lent.add(name)

    def _take_back(self, name: str) -> None:
        parameter = self._named[name]
        ownership.refuse_own_gradient(parameter, name)
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
        ownership.take_again(parameter)
        self.lent.remove(name)

    def copied(self, name: str) -> nn.Parameter:
        """A parameter of a plain copy of the model."""
        if self._state is not None and self._state.world.size > 1:
            raise MegacompileError(
                "Copying a model that several ranks train is not there: make another one, and call "
                "program.sync_to(it) on all ranks."
            )
        reading, parameter = self._reading(), self._named[name]
        with reading() if reading is not None else nullcontext():
            lent = name in self.lent
            if is_of_bitsandbytes(parameter):
                return copied_weight(parameter, self._read(name, parameter))
            value = parameter.detach().clone() if lent else self._read(name, parameter).to(parameter.dtype)
            return nn.Parameter(value, parameter.requires_grad)

    def exact(self, names: Iterable[str]) -> list[str]:
        """Those of the parameters, none of which was taken over, whose values bfloat16 holds as they are."""
        return [name for name in names if is_exact(self._own(name, self.model.get_parameter(name)))]

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
        kept = ownership.persistent_buffers(self.model)
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
        if ownership.is_owned(model) and not (model is self.model and self._owns):
            raise MegacompileError(
                f"This {type(model).__name__} belongs to another program: give one that holds its own values."
            )
        if model is self.model:
            named = self._named or dict(model.named_parameters())
            for name, value in self._everywhere():
                if named[name].is_meta or (name in self._homes and name not in self.lent):
                    set_value(named[name], value)
            self.lent.clear()
            ownership.give_back(model, named.values(), self._optimizer)
            self._owns = False
            return
        targets = self._counterparts(model)
        for name, value in itertools.chain(self._everywhere(), self.buffers().items()):
            for target in targets[name]:
                _set(target, value)

    def _everywhere(self) -> Iterator[tuple[str, Tensor]]:
        """What :meth:`parameters` gives the first of several ranks, on each of them."""
        for name, value in self.parameters():
            if self._state is not None and name in self._homes:
                given = torch.empty(value.shape, dtype=value.dtype) if value.is_meta else value
                value = self._state.world.broadcast(given)
            yield name, value

    def release(self) -> None:
        """The model alone holds its values."""
        if self._owns:
            self.copy_to(self.model)
        self._state, self._homes, self._named = None, {}, {}

    def _counterparts(self, model: nn.Module) -> dict[str, list[Tensor]]:
        """What holds each of our values in another model, if neither has more than the other."""
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

    def _own(self, name: str, parameter: nn.Parameter) -> Tensor:
        """A parameter's value that no program has."""
        if parameter.is_meta and self._source is not None:
            return self._source(name)
        return stored_value(parameter)

    def _write(self, name: str, target: Tensor, value: Tensor) -> None:
        if name in self._homes:
            assert self._state is not None
            self._state.write_whole(self._homes[name], value)
        else:
            _set(target, value)


def _set(target: Tensor, value: Tensor) -> None:
    """Write a value where a parameter or buffer is, if it is anywhere."""
    if target.is_meta or is_of_bitsandbytes(target):
        set_value(target, value.clone())
    else:
        target.data.copy_(value)


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
    kept = ownership.persistent_buffers(model)
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
