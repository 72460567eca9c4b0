"""Frozen parts that torch cannot trace: a module of a model that runs in eager PyTorch inside of a step.

In: a frozen module, such as a vision tower, of which a trace failed. Out: one operator in its place, which is
given the module's weights and buffers as any operator is and calls its forward for real
(:func:`~megacompile.capture.opaque_functions.run_for_real`). Nothing in it may get a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree

from megacompile.capture.opaque_functions import run_for_real
from megacompile.errors import CaptureError


def frozen_part(model: nn.Module, path: str, trained: Collection[str]) -> str | None:
    """Return the outermost part on the path to a module that has parameters, none of which is trained."""
    names = path.split(".") if path else []
    for count in range(1, len(names) + 1):
        part = ".".join(names[:count])
        own = [f"{part}.{name}" for name, _ in model.get_submodule(part).named_parameters()]
        if own and not any(name in trained for name in own):
            return part
    return None


def run_parts_for_real(copied: nn.Module, parts: Mapping[str, str]) -> None:
    """Replace parts of a model's copy by operators that run them as they are; ``parts`` says why each cannot
    be traced."""
    for path, why in parts.items():
        part = copied.get_submodule(path)
        vars(part)["forward"] = _PartForward(path, part, why)


class _PartForward:
    """The forward of a frozen part under capture."""

    def __init__(self, path: str, part: nn.Module, why: str) -> None:
        self._path, self._part, self._why = path, part, why
        self._function = _Function(path, part)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(_has_gradient(x) for x in pytree.tree_leaves((args, kwargs))):
            raise self._refusal("is given what has a gradient")
        values = dict(self._part.named_parameters()) | dict(self._part.named_buffers())
        given = args, kwargs, {name: x.detach() for name, x in values.items()}
        results, written = run_for_real(self._function, self._name, given, self._why)
        if written:
            raise self._refusal("writes into its buffers or into what it is given")
        assert self._function.returned is not None
        return pytree.tree_unflatten(results, self._function.returned)

    @property
    def _name(self) -> str:
        return f"{self._path}, a frozen {type(self._part).__name__}"

    def _refusal(self, why: str) -> CaptureError:
        return CaptureError(
            f"The forward calls {self._name}, which cannot be traced ({self._why}), and cannot run as it is: "
            f"it {why}."
        )


class _Function:
    """A frozen part as a function of its arguments, weights and buffers."""

    def __init__(self, path: str, part: nn.Module) -> None:
        self.__qualname__, self.setup_context = path, _SingleLevelFunction.setup_context
        self._runs = _Bare(part)
        self.returned: pytree.TreeSpec | None = None

    def __call__(self) -> None:
        """Only :meth:`forward` is called."""
        raise NotImplementedError

    def forward(self, _context: Any, args: Any, kwargs: Any, values: dict[str, Tensor]) -> tuple[Any, ...]:
        """Run the part; its attributes must stay what they were, as the trace does not see them change."""
        modules = dict(self._runs.part.named_modules())
        before = {name: dict(vars(module)) for name, module in modules.items()}
        named = {f"part.{name}": value for name, value in values.items()}
        output = torch.func.functional_call(self._runs, named, args, kwargs)
        for name, module in modules.items():
            now, then = vars(module), before[name]
            changed = [key for key in {**then, **now} if now.get(key) is not then.get(key)]
            if changed:
                raise CaptureError(
                    f"{self.__qualname__}, a frozen part that cannot be traced, changes {changed[0]} of "
                    f"{name or 'itself'} in its forward: return it instead."
                )
        leaves, self.returned = pytree.tree_flatten(output)
        return tuple(leaves)


class _Bare(nn.Module):
    """Calls a part's own forward without the hooks around it, which run where the part is called."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.part).forward(self.part, *args, **kwargs)


def _has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
