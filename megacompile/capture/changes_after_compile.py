"""What no program follows once it is compiled, refused by name: parameters, param groups, gradient hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from megacompile.capture.fingerprint import modules_of
from megacompile.errors import MegacompileError

_WAY_OUT = "undo that, or call program.sync_to(model) and compile the model, or make its trainer, again."


class Frozen:
    """The facts that a program cannot follow once it is compiled: its parameters, the trained ones among
    them, and their groups."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._parameters = list(self._find())
        self._groups = self._owners()

    def check(self, *, trains: bool) -> None:
        """Refuse, by name, a parameter that changed since compilation, and for a step that ``trains`` a param
        group or a gradient hook."""
        now = list(self._find())
        if now != self._parameters and (trains or [p for p, _ in now] != [p for p, _ in self._parameters]):
            before = dict(self._parameters)
            for name, parameter in self._model.named_parameters():
                known = before.get(id(parameter))
                if known is None:
                    raise MegacompileError(f"The parameter {name} was assigned after compilation: {_WAY_OUT}")
                if trains and known != parameter.requires_grad:
                    raise MegacompileError(
                        f"requires_grad of {name} was set to {parameter.requires_grad} after compilation: "
                        + _WAY_OUT
                    )
            raise MegacompileError(f"A parameter was moved or removed after compilation: {_WAY_OUT}")
        if not trains:
            return
        if self._owners() != self._groups:
            raise MegacompileError(f"The optimizer's param groups changed after compilation: {_WAY_OUT}")
        refuse_gradient_hooks(self._model)

    def _find(self) -> Iterator[tuple[int, bool]]:
        for module in modules_of(self._model):
            for parameter in module._parameters.values():
                if parameter is not None:
                    yield id(parameter), parameter.requires_grad

    def _owners(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Refuse, by name, hooks on gradients, which leave the device block by block and pass none."""
    if global_hooks._global_backward_hooks or global_hooks._global_backward_pre_hooks:
        raise MegacompileError(
            "A backward hook is registered for all modules, which would never run: remove it."
        )
    for module in modules_of(model):
        if module._backward_hooks or module._backward_pre_hooks:
            raise _hooked("module", "backward", module, model.named_modules())
        for p in module._parameters.values():
            if p is not None and (p._backward_hooks or p._post_accumulate_grad_hooks):
                raise _hooked("parameter", "gradient", p, model.named_parameters())


def _hooked(kind: str, hook: str, held: object, named: Iterable[tuple[str, object]]) -> MegacompileError:
    name = next(name for name, other in named if other is held) or type(held).__name__
    return MegacompileError(f"The {kind} {name} has a {hook} hook, which would never run: remove it.")
