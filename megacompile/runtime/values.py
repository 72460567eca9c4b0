"""Values of a model by its own names, wherever they are: in the host state, or still in the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from megacompile.errors import MegacompileError
from megacompile.host.state import HostState, Weights, set_value
from megacompile.runtime import ownership


class ModelValues:
    """Reads and writes a model's parameters (FP32 masters) and persistent buffers.

    ``source`` gives the values of parameters on the meta device until a program takes the model over.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, source: Weights | None) -> None:
        self.model, self._optimizer = model, optimizer
        self._source = source
        self._state: HostState | None = None
        self._homes: Mapping[str, Sequence[tuple[int, int]]] = {}

    def take_over(self, state: HostState, homes: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Move the values into a program's state; the model keeps none of those that have a home there."""
        state.take(self.model, homes, self._source)
        self._source = None  # and with it what it may hold
        self._state, self._homes = state, homes
        ownership.take(self.model, self._optimizer)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter in FP32 by its name, tied ones once; copies, one at a time."""
        return ((name, self._read(name, p)) for name, p in self.model.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """FP32 masters and persistent buffers by the model's names, buffers copied."""
        return dict(self.parameters()) | {n: b.clone() for n, b in self.buffers().items()}

    def buffers(self) -> dict[str, Tensor]:
        """The persistent buffers themselves."""
        kept = ownership.persistent_buffers(self.model)
        return {n: b.detach() for n, b in self.model.named_buffers() if n in kept}

    def loose(self) -> dict[str, Tensor]:
        """What the state does not hold: buffers, parameters that no block uses."""
        unused = {n: p.detach() for n, p in self.model.named_parameters() if n not in self._homes}
        return unused | self.buffers()

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Set all parameters and persistent buffers; nothing is set if a name or a shape is wrong."""
        targets: dict[str, Tensor] = dict(self.model.named_parameters()) | self.buffers()
        if set(values) != set(targets):
            raise MegacompileError(f"The state does not fit the model at {min(set(values) ^ set(targets))}.")
        for name, value in values.items():
            if value.shape != targets[name].shape:
                raise MegacompileError(
                    f"{name} has shape {tuple(value.shape)} in the state and {tuple(targets[name].shape)} in "
                    "the model."
                )
        for name, value in values.items():
            self._write(name, targets[name], value)

    def copy_to(self, model: nn.Module) -> None:
        """Set the parameters of a model of the same shapes; the model itself is an ordinary one after it."""
        targets = dict(model.named_parameters())
        for name, value in self.parameters():
            target = targets[name]
            if target.is_meta or (model is self.model and name in self._homes):
                set_value(target, value)
            else:
                target.data.copy_(value)
        if model is self.model:
            ownership.give_back(model, self._optimizer)

    def _read(self, name: str, parameter: nn.Parameter) -> Tensor:
        if name in self._homes:
            assert self._state is not None
            return self._state.read_whole(self._homes[name])
        empty = parameter.is_meta and self._source is not None
        value = self._source(name) if empty else parameter.detach().clone()  # type: ignore[misc]
        return value.float() if value.is_floating_point() else value

    def _write(self, name: str, target: Tensor, value: Tensor) -> None:
        if name in self._homes:
            assert self._state is not None
            self._state.write_whole(self._homes[name], value)
        elif isinstance(target, nn.Parameter) and target.is_meta:
            set_value(target, value.clone())
        else:
            target.data.copy_(value)
