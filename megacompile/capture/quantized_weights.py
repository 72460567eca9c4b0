"""Frozen weights in codes: bitsandbytes' ``Linear4bit`` and ``Linear8bitLt``, and tensor subclasses such as
torchao's, as adapters are trained over.

A program keeps such a weight as one tensor of bytes: a frozen parameter of uint8, which is stored and
streamed as it is. Its decoding is part of the graph, so a block derives the weight on the device where it
reads it, and again in its backward. bitsandbytes' layers decode by an operator each
(:mod:`~megacompile.kernels.dequantize`). A subclass is put together
again from the tensors that it holds, and computes by its own code, whose operators are traced. Code outside
of the layer, as of DoRA's adapters, reads the weight that it knows: the codes, with their attributes, as
views of the bytes. Neither library is ever imported: a model that has its weights did.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from megacompile.errors import CaptureError
from megacompile.kernels import dequantize
from megacompile.kernels.registry import OpSpec, declare

_CODINGS = "_megacompile_codings"  # the attribute of a traced module that has coded weights
_STATES = "_megacompile_states"  # and of what else bitsandbytes' layers hold of their weights
_STORED = "_megacompile_stored"  # the attribute of a weight that was read: the bytes that it is a view of
_PLANNED = "_megacompile_planned"  # the attribute of a weight that stands for a coded one
_ALIGNED = 16  # bytes, of each tensor that a subclass holds


class WeightCoding(Protocol):
    """Tells how a weight is coded in the bytes that a program stores of it."""

    @property
    def nbytes(self) -> int:
        """Return how many these are."""

    def stored(self, parameter: Tensor) -> Tensor:
        """Return the bytes of a weight that is coded so."""

    def set(self, parameter: Tensor, stored: Tensor) -> None:
        """Make such a weight hold copies of these bytes."""

    def empty(self, parameter: Tensor) -> None:
        """Leave such a weight zeros, in the memory of one element."""

    def copied(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return another weight of the same form, whose values are set next."""

    def read(self, stored: Tensor, parameter: Tensor) -> Any:
        """Return the weight of these bytes, in a graph, as whoever reads the parameter knows it."""


@torch.library.custom_op("megacompile::decode_4bit", mutates_args=())
def decode_4bit(stored: Tensor, shape: list[int], block: int, dtype: torch.dtype) -> Tensor:
    """Decode a weight of 4-bit codes; it has no gradient."""
    return dequantize.decode_weight(stored, shape, block, dtype)


@decode_4bit.register_fake
def _(stored: Tensor, shape: list[int], block: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=stored.device)


@torch.library.custom_op("megacompile::decode_8bit", mutates_args=())
def decode_8bit(stored: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Decode a weight of 8-bit codes; it has no gradient."""
    return dequantize.decode_rows(stored, shape, dtype)


@decode_8bit.register_fake
def _(stored: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=stored.device)


declare(OpSpec("decode_4bit", benchmarks=(dequantize.BENCHMARK_4BIT,)))
declare(OpSpec("decode_8bit", benchmarks=(dequantize.BENCHMARK_8BIT,)))


# ------------------------------------------------------------------------------------------------------------
# The three kinds of codings.


@dataclass(frozen=True)
class BlockCoding:
    """bitsandbytes' 4-bit codes: the weight's shape, and the elements that share a scale."""

    STATE: ClassVar[str] = "quant_state"

    shape: tuple[int, ...]
    block: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of its book, its scales and its codes."""
        return dequantize.stored_4bit_bytes(prod(self.shape), self.block)

    def stored(self, parameter: Tensor) -> Tensor:
        """Return its book, its scales and its codes."""
        state = vars(parameter)["quant_state"]
        codes = parameter.detach().cpu().contiguous().view(torch.uint8).view(-1)
        scales, book = (x.detach().cpu().float().contiguous() for x in (_scales(state), state.code))
        return torch.cat((book.view(torch.uint8), scales.view(torch.uint8).view(-1), codes))

    def set(self, parameter: Tensor, stored: Tensor) -> None:
        """Make a weight hold these.

        Scales that were coded themselves stay so where these are the same. A weight that inference has packed
        is as it was loaded again, but for that.
        """
        state = vars(parameter)["quant_state"]
        parts = dequantize.parts_4bit(stored, prod(self.shape), self.block)
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
        book, scales, codes = dequantize.parts_4bit(stored, prod(self.shape), self.block)
        if not _is_of(parameter, "Params4bit"):  # but one that is planned for
            return codes
        state = copy.copy(vars(parameter)["quant_state"])
        vars(state).update(absmax=scales, code=book, state2=None, offset=None, nested=False)
        codes = codes.view(vars(parameter)["quant_storage"]).view(-1, 1)
        return _like(codes, parameter, quant_state=state, module=None)

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
        return dequantize.stored_8bit_bytes(*self.shape)

    def stored(self, parameter: Tensor) -> Tensor:
        """Return its scales and its codes."""
        _settle(parameter)
        scales, codes = vars(parameter)["SCB"].detach().cpu().float(), parameter.detach().cpu()
        return torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in (scales, codes)])

    def set(self, parameter: Tensor, stored: Tensor) -> None:
        """Make a weight hold these."""
        _settle(parameter)
        vars(parameter)["SCB"], codes = (x.clone() for x in dequantize.parts_8bit(stored, self.shape[0]))
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
        scales, codes = dequantize.parts_8bit(stored, self.shape[0])
        return _like(codes, parameter, CB=codes.detach(), SCB=scales)

    @staticmethod
    def state(held: Any, weight: Any) -> Any:
        """Return what the layer holds of its weight, once it has run."""
        state = copy.copy(held)
        state.CB, state.SCB = weight.CB, weight.SCB
        return state


@dataclass(frozen=True)
class _Part:
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
    parts: tuple[_Part, ...]
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
        """Make a weight hold such tensors."""
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

    def _put_together(self, held: Callable[[_Part], Tensor]) -> Tensor:
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
    """Have an 8-bit weight alone hold its codes and scales, wherever its layer has run."""
    layer = _LAYERS[parameter]() if parameter in _LAYERS else None
    if layer is not None and layer.state.CB is not None:
        vars(parameter).update(SCB=layer.state.SCB, CB=parameter.data)
        layer.state.reset_grads()


# ------------------------------------------------------------------------------------------------------------
# A parameter's coding, and its values as a program stores them.


def _is_of(thing: object, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(thing).__mro__)


def is_coded(parameter: Tensor) -> bool:
    """Return whether a parameter's values are not its memory's own."""
    return (
        _PLANNED in vars(parameter)
        or _is_of(parameter, "Params4bit")
        or _is_of(parameter, "Int8Params")
        or is_traceable_wrapper_subclass(parameter)
    )


def rounds_inputs(parameter: Tensor) -> bool:
    """Return whether the layer of a coded weight rounds its inputs too, but where it is trained on a CPU."""
    return _is_of(parameter, "Int8Params")


def coding_of(parameter: Tensor) -> WeightCoding | None:
    """Return how a weight is coded; None for a plain parameter."""
    if _PLANNED in vars(parameter):
        planned: WeightCoding = vars(parameter)[_PLANNED]
        return planned
    if _is_of(parameter, "Params4bit"):
        state = vars(parameter)["quant_state"]
        return BlockCoding(tuple(state.shape), state.blocksize)
    if _is_of(parameter, "Int8Params"):
        return RowCoding(tuple(parameter.shape))
    if not is_traceable_wrapper_subclass(parameter):
        return None
    names, context = parameter.__tensor_flatten__()
    parts, start = list[_Part](), 0
    for name in names:
        held = getattr(parameter, name)
        parts.append(_Part(name, tuple(held.shape), held.dtype, start))
        start = -(-parts[-1].stop // _ALIGNED) * _ALIGNED
    shape, strides = tuple(parameter.shape), tuple(parameter.stride())
    return SubclassCoding(type(parameter), tuple(parts), context, shape, strides)


def plan_as(parameter: Tensor, coding: WeightCoding) -> None:
    """Have a weight without values, of a linear layer, stand for one that is coded so."""
    vars(parameter)[_PLANNED] = coding


def why_not_coded(module: nn.Module, parameter: Tensor) -> str | None:
    """Return why a coded weight cannot be kept as codes, and the way out; None where it can."""
    if is_traceable_wrapper_subclass(parameter):
        return _why_not_parts(parameter)
    layer = "Linear4bit" if _is_of(parameter, "Params4bit") else "Linear8bitLt"
    if not _is_of(module, layer) and not _lacks_codes(parameter):
        return f"is in a {type(module).__name__}, and only {layer} is known: leave it out of quantization"
    if vars(parameter).get("has_fp16_weights"):
        return "is coded anew in each step: make its layer with has_fp16_weights=False"
    if _lacks_codes(parameter):
        return 'has no codes yet: call model.to("cpu"), which makes them'
    if is_packed(parameter):
        return "was packed for inference on this CPU: load the model anew, and compile it before it is run"
    state = vars(parameter).get("quant_state", parameter)
    if tuple(state.shape) != (module.out_features, module.in_features):
        return f"holds {list(state.shape)}, not [out_features, in_features]: load the model anew"
    return None


def _lacks_codes(parameter: Tensor) -> bool:
    if _is_of(parameter, "Params4bit"):
        return vars(parameter)["quant_state"] is None
    return parameter.dtype != torch.int8


def _why_not_parts(parameter: Any) -> str | None:
    kind = type(parameter)
    what = f"is a {kind.__name__} of {kind.__module__.partition('.')[0]}"
    way_out = "load the model without quantization_config, or give its dequantize()"
    if _is_of(parameter, "DTensor"):
        return f"{what}, a part of a tensor: give its full_tensor()"
    if parameter.requires_grad:
        return f"{what} and trained, and codes have no gradient: freeze it, or {way_out}"
    above = inspect.getattr_static(kind, "__torch_function__")
    if above in (
        inspect.getattr_static(Tensor, "__torch_function__"),
        torch._C._disabled_torch_function_impl,
    ):
        return f"{what}, and computes below autograd, which a graph does not show: {way_out}"
    held = [getattr(parameter, name) for name in parameter.__tensor_flatten__()[0]]
    if any(is_traceable_wrapper_subclass(tensor) or tensor.is_meta for tensor in held):
        return f"{what} around tensors without values of their own: {way_out}"
    return None


def settle(model: nn.Module) -> None:
    """Have the weights of a model hold all that is coded: 8-bit layers that have run do so themselves."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and _is_of(weight, "Int8Params") and _is_of(module, "Linear8bitLt"):
            _LAYERS[weight] = weakref.ref(module)
            _settle(weight)


def is_packed(parameter: Tensor) -> bool:
    """Return whether bitsandbytes has turned a weight's codes, for inference on this CPU, into another
    order."""
    return bool(getattr(vars(parameter).get("quant_state"), "packing_format_for_cpu", False))


def stored_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape in which a program stores a parameter."""
    coding = coding_of(parameter)
    return tuple(parameter.shape) if coding is None else (coding.nbytes,)


def stored_value(parameter: Tensor) -> Tensor:
    """Return a parameter's value as a program stores it: itself, or bytes that hold all of a coded one."""
    coding = coding_of(parameter)
    return parameter.detach() if coding is None else coding.stored(parameter)


def copied_weight(parameter: nn.Parameter, stored: Tensor) -> nn.Parameter:
    """Return a coded weight like this one, which holds what a program stored."""
    coding = coding_of(parameter)
    assert coding is not None
    fresh = coding.copied(parameter)
    coding.set(fresh, stored)
    return fresh


# ------------------------------------------------------------------------------------------------------------
# Modules whose weights are stored bytes: those of a traced copy of a model, and of one on the device.


_Theirs: Any = object  # the class that one of ours comes before


class _Coded(_Theirs):
    """Comes before the class of a module whose coded weights are bytes among its parameters: its forward
    decodes, and whoever reads such a weight gets the one that it knows."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the class's own forward, but for bitsandbytes', whose kernels torch cannot trace."""
        coding = _coding_of_layer(self)
        return super().forward(*args, **kwargs) if coding is None else _linear(self, coding, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get(_CODINGS, ()):  # there are none while it is copied, or a stand-in is made
            coding, parameter = vars(self)[_CODINGS][name]
            weight = coding.read(self._parameters[name], parameter)
            vars(weight)[_STORED] = self._parameters[name]
            return weight
        if name in vars(self).get(_STATES, ()):
            coding = _coding_of_layer(self)
            assert coding is not None
            return coding.state(vars(self)[_STATES][name], self.weight)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self).get(_CODINGS, ()):
            super().__setattr__(name, value)
        elif getattr(value, _STORED, None) is not self._parameters[name]:  # PEFT assigns weight.to(device)
            raise CaptureError(
                f"The forward assigns the {name} of a {type(self).__name__}, which is kept in codes: compute "
                "with a tensor of its own."
            )


class _Read(_Theirs):
    """Comes before the class of a weight that was read: bitsandbytes' own would copy it into memory."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of any tensor: itself, if it has that device and dtype."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        here = device in (None, self.device) and dtype in (None, self.dtype)
        return self if here else Tensor.to(self, *args, **kwargs)


def _like(codes: Tensor, parameter: Tensor, **attributes: Any) -> Any:
    """Make codes a weight of a parameter's class, with its attributes and these."""
    own, kind = type(codes), type(parameter)
    codes.__class__ = _class_of(_Read, kind) if issubclass(kind, own) else _class_of(_Read, own, kind)
    vars(codes).update({**vars(parameter), **attributes, "_is_param": True})
    return codes


@functools.cache
def _class_of(*bases: type) -> Any:
    """A class that is named as the last of these, the user's own."""
    own = {"__module__": bases[-1].__module__, "__qualname__": bases[-1].__qualname__}
    return types.new_class(bases[-1].__name__, bases, exec_body=lambda names: names.update(own))


def mark(module: nn.Module, codings: dict[str, tuple[WeightCoding, Tensor]]) -> None:
    """Tell a module that its parameters of these names are the bytes of coded ones, given with them."""
    vars(module)[_CODINGS] = codings
    coding, states = _coding_of_layer(module), dict[str, Any]()
    if coding is not None and coding.STATE in vars(module):
        states[coding.STATE] = vars(module).pop(coding.STATE)
    vars(module)[_STATES] = states
    kind: Any = type(module)
    module.__class__ = _class_of(_Coded, kind)


def _coding_of_layer(module: nn.Module) -> BlockCoding | RowCoding | None:
    """How the weight of one of bitsandbytes' layers is coded; None for a module that decodes by itself."""
    coding, _ = vars(module)[_CODINGS].get("weight", (None, None))
    return coding if isinstance(coding, (BlockCoding, RowCoding)) else None


def _linear(module: Any, coding: BlockCoding | RowCoding, x: Tensor) -> Tensor:
    """The forward of bitsandbytes' layers in training, in the dtype that they compute in."""
    given = x.dtype
    if getattr(module, "compute_type_is_set", False) and module.compute_dtype is not None:
        x = x.to(module.compute_dtype)
    bias = None if module.bias is None else module.bias.to(x.dtype)
    return F.linear(x, coding.decoded(module._parameters["weight"], x.dtype), bias).to(given)
