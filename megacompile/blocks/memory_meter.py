"""Count the bytes of tensors that operators allocate, storage by storage, as they live and die.

The same meter predicts (run on fake tensors at compile time) and measures (run on real tensors by the CPU
backend). It sees inside our own operators; scratch memory inside torch's kernels is not a tensor and is not
seen, but for what :mod:`~megacompile.blocks.kernel_scratch` knows of a GPU's.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from megacompile.blocks.kernel_scratch import scratch
from megacompile.errors import BudgetExceededError
from megacompile.kernels._triton import Gpu, recording
from megacompile.kernels.registry import called
from megacompile.kernels.torch_sdpa import ALIGNED

aten = torch.ops.aten


OVERSIZED = frozenset(
    (
        aten.mse_loss.default,
        aten.smooth_l1_loss.default,
        aten.binary_cross_entropy.default,
        aten.soft_margin_loss.default,
        aten.col2im.default,
    )
)
"""Operators whose result stands in memory of their first argument's size, which fake tensors do not show."""
_BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)


def is_oversized(node: fx.Node) -> bool:
    """Return whether a result stands in more memory than its fake tensor shows."""
    if node.target is operator.getitem and node.args[1] == 1:
        return isinstance(node.args[0], fx.Node) and node.args[0].target in _BAGS
    return node.target in OVERSIZED


Requests = list[tuple[int, int]]
"""What an allocator is asked for: (number of a storage, its bytes, or 0 where it is given back)."""
_SEEN: dict[Any, tuple[int, Requests, Requests, int]] = {}
"""By operator, GPU and the form of its arguments: the most bytes that a call took; (number,
bytes) of each result; its requests; how many numbers they take. Numbers count from those before the call."""


class _StorageWatch(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that remembers which storage it stood for."""

    __slots__ = ("key", "number")
    key: int
    number: int


class StorageMeter(TorchDispatchMode):
    """Live and peak bytes of the storages that operators create while the meter is entered.

    A storage is counted once, however many views show it, from the operator that returns it until the last
    reference is gone, even after the meter was left. ``limit`` in bytes stops the run with
    :class:`BudgetExceededError` as soon as live bytes exceed it. ``gpu``: count what the kernels of that GPU
    take beside, and keep in ``requests`` what its allocator is asked for, in order. ``varies`` becomes True
    where an operator ran whose bytes depend on values.
    """

    def __init__(self, limit: int | None = None, gpu: Gpu | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.varies = False
        self.limit = limit
        self.requests: Requests = []
        self._gpu = gpu
        self._count = 0
        self._live = 0
        self._known: dict[int, tuple[int, _StorageWatch]] = {}
        # dead storages queue here through a C function: a Python callback would swallow a Ctrl-C
        self._dead: deque[_StorageWatch] = deque()

    def stop_above(self, limit: int) -> None:
        """Stop a run as soon as more bytes than these are alive."""
        self.limit = limit

    def forget_peak(self) -> None:
        """Look for the highest from now on."""
        self.peak = self.live

    @property
    def live(self) -> int:
        """Bytes alive now."""
        while self._dead:
            nbytes, watch = self._known.pop(self._dead.popleft().key)
            self._live -= nbytes
            if nbytes:
                self._ask(watch.number, 0)
        return self._live

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage: those that were met first come first."""
        return self._known[tensor.untyped_storage()._cdata][1].number

    def _ask(self, number: int, nbytes: int) -> None:
        if self._gpu is not None:
            self.requests.append((number, nbytes))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inner = implementation(func)
        if inner is not None:
            return self._inside(func, inner, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        for i, item in enumerate(tensors_of(out)):
            self.track(item, _at_least(func, i, args))
        if self._gpu is not None:
            self._take_beside(scratch(func, args, kwargs or {}, self._gpu.processors))
        return out

    def _take_beside(self, nbytes: int) -> None:
        """Count what a kernel takes beside its results, and gives back."""
        self.peak = max(self.peak, self.live + nbytes)
        if nbytes:
            self._ask(self._count, nbytes)
            self._ask(self._count, 0)
            self._count += 1

    def _inside(
        self, func: torch._ops.OpOverload, inner: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run one of our operators as its Python body. On fake tensors, whose body computes nothing, what a
        call like it took before is counted instead: its highest bytes, and those that its results stand in.
        """
        ours = called(func)
        self.varies |= ours is not None and ours.spec.varies
        returns = bool(func._schema.returns)
        fresh = not (returns and func._schema.is_mutable)  # what it returns, if anything, is its own
        fake = fresh and any(isinstance(t, FakeTensor) for t in tensors_of(args))
        key = (func, self._gpu, _tensor_form(args), _tensor_form(kwargs)) if fake else None
        before, highest, first, begin = self.live, self.peak, self._count, len(self.requests)
        if key in _SEEN:
            taken, standing, requests, numbers = _SEEN[key]
            out = func(*args, **kwargs) if returns else None
            self.peak = max(highest, before + taken)
            self.requests += [(first + number, nbytes) for number, nbytes in requests]
            self._count += numbers
            for item, (number, nbytes) in zip(tensors_of(out), standing, strict=True):
                self._watch(item.untyped_storage(), nbytes, first + number)
            return out
        self.peak = before
        with self:
            out = inner(*args, **kwargs)
        taken = self.peak - before
        self.peak = max(highest, self.peak)
        for item in tensors_of(out):
            self.track(item)
        if key is not None:
            standing = [(self.number(t) - first, t.untyped_storage().nbytes()) for t in tensors_of(out)]
            requests = [(number - first, nbytes) for number, nbytes in self.requests[begin:]]
            _SEEN[key] = taken, standing, requests, self._count - first
        return out

    def track(self, tensor: Tensor, at_least: int = 0) -> None:
        """Count a tensor's storage from now on, unless it is counted already."""
        storage = tensor.untyped_storage()
        self._watch(storage, max(storage.nbytes(), at_least))
        if self.limit is not None and self._live > self.limit:
            raise BudgetExceededError(
                f"A block asked for {self._live} bytes of temporaries and saved activations where the plan "
                f"leaves {self.limit}: please report this schedule."
            )

    def withdraw(self) -> None:
        """Leave, wherever an interrupt struck."""
        while self in _get_current_dispatch_mode_stack():
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def ignore(self, tensor: Tensor) -> None:
        """Never count this tensor's storage: it is accounted for elsewhere."""
        self._watch(tensor.untyped_storage(), 0)

    def _watch(self, storage: torch.UntypedStorage, nbytes: int, number: int | None = None) -> None:
        """Count a storage that is not known yet; one with a number was asked for already."""
        live = self.live if self._dead else self._live  # dead ones first: their addresses may be in use again
        key = storage._cdata
        if key in self._known:
            return
        watch = _StorageWatch(storage, self._dead.append)
        watch.key, watch.number = key, self._count if number is None else number
        self._count += number is None
        self._known[key] = (nbytes, watch)
        self._live = live = live + nbytes
        if live > self.peak:
            self.peak = live
        if nbytes and number is None:
            self._ask(watch.number, nbytes)


def implementation(func: Any) -> Callable[..., Any] | None:
    """The Python body of one of our operators, so that what it allocates is seen; else None."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "megacompile":
        return None
    definition = OPDEFS.get(func._schema.name)
    return None if definition is None else definition._init_fn


def call_bytes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Tensor], mode: FakeTensorMode
) -> tuple[int, list[int]]:
    """Return the bytes that a call on fake tensors takes on a CPU: its peak as Python code, and the storage
    of each of its ``results``."""
    if implementation(func) is None:
        stored = [t.untyped_storage().nbytes() for t in results]
        return 0, [max(nbytes, _at_least(func, i, args)) for i, nbytes in enumerate(stored)]
    key = func, None, _tensor_form(_without_defaults(func, args)), _tensor_form(kwargs)
    if key in _SEEN:
        taken, standing, *_ = _SEEN[key]
        return taken, [nbytes for _, nbytes in standing]
    meter = StorageMeter()
    for tensor in tensors_of((*args, *kwargs.values())):
        meter.ignore(tensor)
    with mode, torch.no_grad(), recording(), meter:
        out = tensors_of(func(*args, **kwargs))
    return meter.peak, [t.untyped_storage().nbytes() for t in out]


def _without_defaults(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as a mode is given them: those at the end that are as the schema has them are left out."""
    count = len(args)
    for value, argument in reversed(list(zip(args, func._schema.arguments, strict=False))):
        if isinstance(value, Tensor) or not argument.has_default_value() or value != argument.default_value:
            break
        count -= 1
    return args[:count]


def _at_least(func: Any, index: int, args: tuple[Any, ...]) -> int:
    """Bytes that a result of torch's stands in, whatever its fake tensor shows."""
    if func in OVERSIZED:
        return int(args[0].untyped_storage().nbytes())
    bags = index == 1 and func in _BAGS  # one entry more than there are indices
    return int(args[1].nbytes + args[1].itemsize) if bags else 0


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors among what an operator takes or gives."""
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in tensors_of(item)] if isinstance(value, (tuple, list)) else []


def _tensor_form(value: Any) -> Any:
    """Return what the memory of a call depends on: of tensors shape, strides, alignment, dtype and device."""
    if isinstance(value, Tensor):
        place = value.storage_offset() * value.element_size() % ALIGNED  # kernels take a copy of odd ones
        return tuple(value.shape), tuple(value.stride()), place, value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(_tensor_form(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _tensor_form(item)) for name, item in sorted(value.items()))
    return value
