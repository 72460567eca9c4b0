"""The weights of a model that PEFT's adapters are on, each with its adapters merged into it.

In: a session between two steps. Out: the weights of the model without adapters, under its own names, in its
order, on the device, as a server of it takes them. PEFT merges, in a copy of one layer at a time: beside this
layer's weights the device holds what PEFT makes on the way, a few tensors of the weight's size.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.api.device_weights import FULL, DeviceWeights
from megacompile.api.session import Session
from megacompile.capture.quantized_weights import is_coded
from megacompile.errors import MegacompileError


class MergedWeights(DeviceWeights):
    """As :class:`~megacompile.api.device_weights.DeviceWeights`, of the model without adapters, which are
    merged.

    Raises :class:`~megacompile.errors.MegacompileError` for adapters that cannot be.
    """

    def __init__(self, session: Session) -> None:
        self._model: Any = session.model
        self._layers = layers_to_merge(self._model)
        super().__init__(session)

    def each(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all, each under its name in the model that the adapters are on."""
        begun = set[str]()
        for name in self.names:
            layer = next((layer for layer in self._layers if name.startswith(f"{layer}.")), None)
            own = self._own_name(name)
            if layer is None and own is not None:
                yield own, self.fetch(name)
            if layer is not None and layer not in begun:
                begun.add(layer)
                yield from self._merged(layer)

    def _merged(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of one layer."""
        layer = self._layers[name]
        values = {
            id(parameter): nn.Parameter(self.fetch(f"{name}.{own}"), requires_grad=False)
            for own, parameter in layer.named_parameters()
        }
        merged = self.around(layer, values)
        del values
        with self.room_for(f"the weight of {name} and what its adapters add"), torch.no_grad():
            _merge(merged, name)
        owned = [(self._own_name(f"{name}.{inner}"), p.data) for inner, p in merged.named_parameters()]
        del merged
        weights = [(own, weight) for own, weight in reversed(owned) if own is not None]
        del owned
        while weights:
            yield weights.pop()

    def _own_name(self, name: str) -> str | None:
        """The name without what PEFT puts into it; none for what the model alone does not have."""
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        for adapter in self._model.active_adapters:
            name = name.replace(f".modules_to_save.{adapter}.", ".")
        added = (f".{self._model.prefix}", ".original_module.", ".modules_to_save.")
        return None if any(part in name for part in added) else name


def layers_to_merge(model: Any) -> dict[str, Any]:
    """Return the layers that PEFT's adapters are in, by name, those within others left out.

    Raises MegacompileError where merged adapters would not be the model that is trained.
    """
    if model.active_peft_config.is_prompt_learning:
        raise MegacompileError(
            f"{model.active_peft_config.peft_type.value} learns what is put before each row, which cannot be "
            "merged into weights for a server: learn other adapters, or generate without one."
        )
    layers, wrapped = dict[str, Any](), importlib.import_module("peft.utils.other")
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{layer}.") for layer in layers)
        if isinstance(module, _layer_class()) and not inner:
            layers[name] = module
        if isinstance(module, wrapped.AuxiliaryTrainingWrapper) and not isinstance(
            module, wrapped.ModulesToSaveWrapper
        ):
            raise MegacompileError(
                f"A {type(module).__name__} at {name} cannot be merged into weights for a server: leave out "
                "trainable_token_indices, or generate without a server."
            )
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, layer in layers.items():
        for own, parameter in layer.named_parameters():
            if uses[id(parameter)] > 1 or is_coded(parameter):
                why = "is kept in codes" if is_coded(parameter) else "is the weight of another layer, too"
                raise MegacompileError(
                    f"{name}.{own} {why}, so adapters cannot be merged into it for a server: take {name} "
                    "out of target_modules, or generate without a server."
                )
    return layers


def _layer_class() -> Any:
    return importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer


def _merge(layer: nn.Module, name: str) -> None:
    """Merge the active adapters, as PEFT's ``merge_adapter`` does."""
    try:
        for part in list(layer.modules()):
            if isinstance(part, _layer_class()):
                part.merge()
    except FULL:
        raise
    except Exception as error:  # of PEFT, which not for all adapters can
        raise MegacompileError(
            f"PEFT does not merge the adapters of {name} for a server: {str(error) or type(error).__name__}"
        ) from error
