"""Modules whose weights are stored bytes: those of a traced copy of a model, and of one on the device."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megacompile.capture.weight_codings import BlockCoding, RowCoding, Theirs, WeightCoding, class_before
from megacompile.errors import CaptureError

_CODINGS = "_megacompile_codings"  # the attribute of a traced module that has coded weights
_LAYER_STATES = "_megacompile_states"  # and of what else bitsandbytes' layers hold of their weights
_STORED = "_megacompile_stored"  # the attribute of a weight that was read: the bytes that it is a view of


class _Coded(Theirs):
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
        if name in vars(self).get(_LAYER_STATES, ()):
            coding = _coding_of_layer(self)
            assert coding is not None
            return coding.state(vars(self)[_LAYER_STATES][name], self.weight)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self).get(_CODINGS, ()):
            super().__setattr__(name, value)
        elif getattr(value, _STORED, None) is not self._parameters[name]:  # PEFT assigns weight.to(device)
            raise CaptureError(
                f"The forward assigns the {name} of a {type(self).__name__}, which is kept in codes: compute "
                "with a tensor of its own."
            )


def mark(module: nn.Module, codings: dict[str, tuple[WeightCoding, Tensor]]) -> None:
    """Tell a module that its parameters of these names are the bytes of coded ones, given with them."""
    vars(module)[_CODINGS] = codings
    coding, states = _coding_of_layer(module), dict[str, Any]()
    if coding is not None and coding.STATE in vars(module):
        states[coding.STATE] = vars(module).pop(coding.STATE)
    vars(module)[_LAYER_STATES] = states
    kind: Any = type(module)
    module.__class__ = class_before(_Coded, kind)


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
