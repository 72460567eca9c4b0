"""The three kinds of codings of a frozen weight: how its bytes are stored, read and decoded."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from megacompile.kernels import decode_4bit, decode_8bit

Theirs: Any = object  # the class that one of ours comes before


class WeightCoding(Protocol):
    """Tells how a weight is coded in the bytes that a program stores of it."""

    @property
    def nbytes(self) -> int:
        """Return how many these are."""

    def stored(self, parameter: Tensor) -> Tensor:
        """Return the bytes of a weight that is coded so."""

    def set(self, parameter: Tensor, stored: Tensor) -> None:
        """Set such a weight to copies of these bytes."""

    def empty(self, parameter: Tensor) -> None:
        """Leave such a weight zeros, in the memory of one element."""

    def copied(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return another weight of the same form, whose values are set next."""

    def read(self, stored: Tensor, parameter: Tensor) -> Any:
        """Return the weight of these bytes, in a graph, as whoever reads the parameter knows it."""


@dataclass(frozen=True)
class BlockCoding:
    """bitsandbytes' 4-bit codes: the weight's shape, and the elements that share a scale."""

    STATE: ClassVar[str] = "quant_state"

    shape: tuple[int, ...]
    block: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of its book, its scales and its codes."""
        return decode_4bit.stored_4bit_bytes(prod(self.shape), self.block)

    def stored(self, parameter: Tensor) -> Tensor:
        """Return its book, its scales and its codes."""
        state = vars(parameter)["quant_state"]
        codes = parameter.detach().cpu().contiguous().view(torch.uint8).view(-1)
        scales, book = (x.detach().cpu().float().contiguous() for x in (_scales(state), state.code))
        return torch.cat((book.view(torch.uint8), scales.view(torch.uint8).view(-1), codes))

    def set(self, parameter: Tensor, stored: Tensor) -> None:
        """Set a weight to these codes.

        Scales that were coded themselves stay so where these are the same. A weight that inference has packed
        is as it was loaded again, but for that.
        """
        state = vars(parameter)["quant_state"]
        parts = decode_4bit.parts_4bit(stored, prod(self.shape), self.block)
        book, scales, codes = (x.clone() for x in parts)
        _hold(
            parameter, codes.view(vars(parameter)["quant_storage"]).view(-1, 1)
        )  # as bitsandbytes makes them
        if is_packed(parameter):
            state.dtype, state.packing_format_for_cpu = state.original_dtype, False
        elif torch.equal(_scales(state).float(), scales) and torch.equal(state.code, book):
            return
        vars(state).update(absmax=scales, code=book, state2=None, offset=None, nested=False)

    def empty(self, parameter: Tensor) -> None:
        """Leave its codes zeros."""
        _hold(parameter, _zeros(parameter))

    def copied(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a weight with a quantisation state of its own."""
        fresh: nn.Parameter = type(parameter).__copy__(parameter)  # type: ignore[attr-defined]
        vars(fresh)["quant_state"] = copy.deepcopy(vars(parameter)["quant_state"])
        return fresh

    def decoded(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values."""
        weight: Tensor = torch.ops.megacompile.decode_4bit(stored, self.shape, self.block, dtype)
        return weight

    def read(self, stored: Tensor, parameter: Tensor) -> Any:
        """Return its codes, with a quantisation state of its own."""
        book, scales, codes = decode_4bit.parts_4bit(stored, prod(self.shape), self.block)
        if not is_of_class(parameter, "Params4bit"):  # but one that is planned for
            return codes
        state = copy.copy(vars(parameter)["quant_state"])
        vars(state).update(absmax=scales, code=book, state2=None, offset=None, nested=False)
        codes = codes.view(vars(parameter)["quant_storage"]).view(-1, 1)
        return _as_weight(codes, parameter, quant_state=state, module=None)

    @staticmethod
    def state(held: Any, weight: Any) -> Any:
        """Return what the layer holds of its weight: the quantisation state."""
        return weight.quant_state


_LAYERS = WeakTensorKeyDictionary()
"""The layers of 8-bit weights, by weak references: where one runs, it takes its weight's scales from it."""


@dataclass(frozen=True)
class RowCoding:
    """bitsandbytes' 8-bit codes, with a scale for each row: the weight's shape."""

    STATE: ClassVar[str] = "state"

    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of its scales and its codes."""
        return decode_8bit.stored_8bit_bytes(*self.shape)

    def stored(self, parameter: Tensor) -> Tensor:
        """Return its scales and its codes."""
        _settle(parameter)
        scales, codes = vars(parameter)["SCB"].detach().cpu().float(), parameter.detach().cpu()
        return torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in (scales, codes)])

    def set(self, parameter: Tensor, stored: Tensor) -> None:
        """Set a weight to these codes."""
        _settle(parameter)
        vars(parameter)["SCB"], codes = (x.clone() for x in decode_8bit.parts_8bit(stored, self.shape[0]))
        _hold(parameter, codes)
        vars(parameter)["CB"] = parameter.data

    def empty(self, parameter: Tensor) -> None:
        """Leave its codes zeros."""
        _settle(parameter)
        _hold(parameter, _zeros(parameter))
        vars(parameter)["CB"] = parameter.data

    def copied(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a weight without values."""
        codes = _zeros(parameter)
        fresh: nn.Parameter = type(parameter)(codes, requires_grad=False)
        vars(fresh).update(CB=codes, SCB=None, has_fp16_weights=False)
        return fresh

    def decoded(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values."""
        weight: Tensor = torch.ops.megacompile.decode_8bit(stored, self.shape, dtype)
        return weight

    def read(self, stored: Tensor, parameter: Tensor) -> Any:
        """Return its codes, with their scales."""
        scales, codes = decode_8bit.parts_8bit(stored, self.shape[0])
        return _as_weight(codes, parameter, CB=codes.detach(), SCB=scales)

    @staticmethod
    def state(held: Any, weight: Any) -> Any:
        """Return what the layer holds of its weight, once it has run."""
        state = copy.copy(held)
        state.CB, state.SCB = weight.CB, weight.SCB
        return state


@dataclass(frozen=True)
class SubclassPart:
    """A tensor that a subclass holds: its attribute, its form, and its first byte of those stored."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def stop(self) -> int:
        """The byte behind it."""
        return self.start + prod(self.shape) * self.dtype.itemsize

    def of(self, stored: Tensor) -> Tensor:
        """Return a view of it."""
        return stored[self.start : self.stop].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class SubclassCoding:
    """A tensor subclass: the tensors that it holds, and what else it needs to be put together again."""

    kind: Any
    parts: tuple[SubclassPart, ...]
    context: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors that it holds."""
        return self.parts[-1].stop

    def stored(self, parameter: Tensor) -> Tensor:
        """Return these tensors one after the other."""
        stored = torch.zeros(self.nbytes, dtype=torch.uint8)
        for part in self.parts:
            part.of(stored).copy_(getattr(parameter, part.name).detach())
        return stored

    def set(self, parameter: Tensor, stored: Tensor) -> None:
        """Set a weight to such tensors."""
        for part in self.parts:
            setattr(parameter, part.name, part.of(stored).clone())

    def empty(self, parameter: Tensor) -> None:
        """Leave each of its tensors zeros."""
        for part in self.parts:
            setattr(parameter, part.name, _zeros(getattr(parameter, part.name)))

    def copied(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a weight that holds the same tensors."""
        return nn.Parameter(self._put_together(lambda part: getattr(parameter, part.name)), False)

    def read(self, stored: Tensor, parameter: Tensor) -> Any:
        """Return the subclass itself, which decodes where it is used."""
        whole = self._put_together(lambda part: part.of(stored))
        vars(whole)["_is_param"] = True
        return whole

    def _put_together(self, held: Callable[[SubclassPart], Tensor]) -> Tensor:
        inner = {part.name: held(part) for part in self.parts}
        whole: Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.shape, self.strides)
        return whole


def _hold(parameter: Tensor, codes: Tensor) -> None:
    Tensor.data.__set__(parameter, codes)  # type: ignore[attr-defined]


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype).expand(like.shape)


def _scales(state: Any) -> Tensor:
    """The scale of each block, which may be coded itself, by blocks of scales around their mean."""
    scales: Tensor = state.absmax
    if state.nested:
        second = state.state2
        blocks = second.absmax.repeat_interleave(second.blocksize)[: len(scales)]
        scales = second.code[scales.long()] * blocks + state.offset
    return scales


def _settle(parameter: Tensor) -> None:
    """Move codes and scales of an 8-bit layer to its weight alone, wherever the layer has run."""
    layer = _LAYERS[parameter]() if parameter in _LAYERS else None
    if layer is not None and layer.state.CB is not None:
        vars(parameter).update(SCB=layer.state.SCB, CB=parameter.data)
        layer.state.reset_grads()


def is_of_class(thing: object, name: str) -> bool:
    """Return whether a thing is of a class of this name, whose library need not be there."""
    return any(kind.__name__ == name for kind in type(thing).__mro__)


def settle(model: nn.Module) -> None:
    """Move all codes of a model into its weights: 8-bit layers that have run hold theirs themselves."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and is_of_class(weight, "Int8Params") and is_of_class(module, "Linear8bitLt"):
            _LAYERS[weight] = weakref.ref(module)
            _settle(weight)


def is_packed(parameter: Tensor) -> bool:
    """Return whether bitsandbytes has turned a weight's codes, for inference on this CPU, into another
    order."""
    return bool(getattr(vars(parameter).get("quant_state"), "packing_format_for_cpu", False))


class _Read(Theirs):
    """Comes before the class of a weight that was read: bitsandbytes' own would copy it into memory."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of any tensor: itself, if it has that device and dtype."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        here = device in (None, self.device) and dtype in (None, self.dtype)
        return self if here else Tensor.to(self, *args, **kwargs)


def _as_weight(codes: Tensor, parameter: Tensor, **attributes: Any) -> Any:
    """Wrap codes as a weight of a parameter's class, with its attributes and these."""
    own, kind = type(codes), type(parameter)
    codes.__class__ = class_before(_Read, kind) if issubclass(kind, own) else class_before(_Read, own, kind)
    vars(codes).update({**vars(parameter), **attributes, "_is_param": True})
    return codes


@functools.cache
def class_before(*bases: type) -> Any:
    """A class that is named as the last of these, the user's own."""
    own = {"__module__": bases[-1].__module__, "__qualname__": bases[-1].__qualname__}
    return types.new_class(bases[-1].__name__, bases, exec_body=lambda names: names.update(own))
