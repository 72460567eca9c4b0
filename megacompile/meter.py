"""Count the bytes of tensors that operators allocate, storage by storage, as they live and die.

The same meter predicts (run on fake tensors at compile time) and measures (run on real tensors by the
CPU backend). It sees inside our own operators; scratch memory inside torch's kernels is not a tensor
and is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from megacompile.errors import BudgetExceededError


class StorageMeter(TorchDispatchMode):
    """Live and peak bytes of the storages that operators create while the meter is entered.

    A storage is counted once, however many views show it, from the operator that returns it until the
    last reference is gone, even where that happens after the meter was left. ``limit`` in bytes stops
    the run with :class:`BudgetExceededError` as soon as live bytes exceed it.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.limit = limit
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inner = _implementation(func)
        if inner is not None:
            with self:
                out = inner(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.track(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, Tensor):
                    self.track(item)
        return out

    def track(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now on, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes()
        self._known[key] = nbytes
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key)
        if self.limit is not None and self.live > self.limit:
            raise BudgetExceededError(
                f"A block asked for {self.live} bytes of temporaries and stashes where the plan "
                f"leaves {self.limit}: please report this schedule."
            )

    def ignore(self, tensor: Tensor) -> None:
        """Never count this tensor's storage: it is accounted for elsewhere."""
        key = tensor.untyped_storage()._cdata
        if key not in self._known:
            self._known[key] = 0
            weakref.finalize(tensor.untyped_storage(), self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._known.pop(key)


def _implementation(func: Any) -> Callable[..., Any] | None:
    """The Python body of one of our operators, so that what it allocates is seen; else None."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "megacompile":
        return None
    definition = OPDEFS.get(func._schema.name)
    return None if definition is None else definition._init_fn
