"""The weights of a model on the device, as programs compute with them: read there, and what they take of it.

In: a session between two steps, whose programs have given the device back. Out: each parameter on the
device, and the bytes of those that stay in a rollout, and of those of blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from megacompile.api.session import Session
from megacompile.capture.fake_copy import copy_around
from megacompile.capture.fingerprint import tensors_of as held_tensors
from megacompile.capture.parameter_forms import Form, parameter_forms
from megacompile.capture.quantized_weights import stored_shape
from megacompile.errors import BudgetError, BudgetExceededError
from megacompile.runtime.device import Device
from megacompile.units import format_bytes

FULL = (BudgetExceededError, torch.OutOfMemoryError)  # the device's memory


class DeviceWeights:
    """The parameters of a session's model as programs compute with them, on the device, of which until
    :meth:`end` nothing else is in use."""

    def __init__(self, session: Session) -> None:
        self._values, self._budget = session.values, session.decided.room.budget_bytes
        self._forms = parameter_forms(session.model, session.compiler.frontend.compute_dtype)
        self._sizes = stored_bytes(session.model, self._forms)
        self._shapes = {name: stored_shape(p) for name, p in session.model.named_parameters()}
        session.vacate()
        runtime = session.runtime
        self._closes = runtime is None
        self._passing = runtime is not None and runtime.state.passing
        self.device: Device = session.settings.open_device() if runtime is None else runtime.device

    @property
    def names(self) -> list[str]:
        """Return those of all parameters, in the model's order."""
        return list(self._sizes)

    def nbytes_of(self, name: str) -> int:
        """Return what a parameter takes of the device."""
        return self._sizes[name]

    def read(self, name: str, place: Tensor) -> Tensor:
        """A parameter as programs compute with it, in these bytes of the device."""
        dtype, strides = self._forms[name]
        value = place.view(dtype).as_strided(self._shapes[name], strides)
        for target, source in _unmetered(self._values.streamed_parts(name, value)):
            self.device.copy([target], [source])
            if self._passing:
                self.device.streams.synchronize()  # the next part may come where this one is
        return value

    def fetch(self, name: str) -> Tensor:
        """A parameter as programs compute with it, which has its place until who takes it lets it go."""
        self.device.streams.synchronize()  # who took the last one may still read where this one comes
        with self.room_for(f"the {format_bytes(self.nbytes_of(name))} of {name}"):
            nbytes = self.nbytes_of(name)
            return self.read(name, torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch_device))

    @contextlib.contextmanager
    def room_for(self, what: str) -> Iterator[None]:
        """Within, what is allocated is the device's; raises BudgetError where it has no room."""
        try:
            with self.device.whole():
                yield
        except FULL:
            raise BudgetError(
                f"hbm_budget leaves {format_bytes(self._budget)}, without room for {what} beside weights "
                "that were taken before and not let go yet: raise it."
            ) from None

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all, each under its name."""
        for name in self.names:
            yield name, self.fetch(name)

    def around(self, module: nn.Module, parameters: Mapping[int, nn.Parameter]) -> Any:
        """A copy of a module around other parameters, given by the ids of its own, with its buffers on the
        device."""
        tensors: dict[int, Any] = dict(parameters)
        with self.device.whole():
            for tensor in (*module.buffers(), *held_tensors(module)):
                if isinstance(tensor, Tensor):
                    tensors[id(tensor)] = tensor.detach().to(self.device.torch_device, copy=True)
        return copy_around(module, tensors)

    def end(self) -> None:
        """Give the device back."""
        self.device.streams.synchronize()
        self.device.vacate()
        if self._closes:
            self.device.close()


def _unmetered(parts: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same; what is made on the host for it is not the device's, and counted by no meter."""
    while True:
        with _disable_current_modes():
            part = next(parts, None)
        if part is None:
            return
        yield part


ALIGNED = 256  # bytes, at a multiple of which each weight begins


@dataclass(frozen=True)
class WeightBytes:
    """The bytes of all weights; of those outside of blocks with the largest block's; of those that a forward
    brings where blocks are streamed."""

    whole: int
    least: int
    streamed: int


def stored_bytes(model: nn.Module, forms: Mapping[str, Form]) -> dict[str, int]:
    """Return what each parameter takes of the device."""
    shapes = {name: stored_shape(parameter) for name, parameter in model.named_parameters()}
    sizes = {name: prod(shape) * forms[name][0].itemsize for name, shape in shapes.items()}
    return {name: -(-nbytes // ALIGNED) * ALIGNED for name, nbytes in sizes.items()}


def weight_bytes(model: nn.Module, sizes: Mapping[str, int]) -> WeightBytes:
    """Add up the bytes of parameters, of which ``sizes`` has each by its name."""
    blocks, outside = split_blocks(model)
    of = {id(p): sizes[name] for name, p in model.named_parameters()}
    kept = sum(n for key, n in of.items() if key in outside)
    each = [sum(of[key] for key in {*map(id, block.parameters())} - outside) for block in blocks]
    return WeightBytes(sum(of.values()), kept + max(each, default=0), sum(each))


def split_blocks(model: nn.Module) -> tuple[list[nn.Module], set[int]]:
    """Return the blocks of a model, which are in lists of modules, and the ids of parameters outside."""
    blocks: list[nn.Module] = []
    outside: set[int] = set()

    def walk(module: nn.Module) -> None:
        outside.update(map(id, module.parameters(recurse=False)))
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                blocks.extend(child)
            else:
                walk(child)

    walk(model)
    return blocks, outside
