"""Count the bytes that operators allocate, with the workspace that torch's CUDA kernels take beside them."""

from __future__ import annotations

import math
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

from megacompile.errors import BudgetExceededError
from megacompile.kernels._triton import Gpu, recording
from megacompile.kernels.registry import called
from megacompile.kernels.torch_sdpa import ALIGNED, is_aligned

# ------------------------------------------------------------------------------------------------------------
# Memory that torch's CUDA kernels take beside their results, which a run on fake CPU tensors does not show.
#
# In: an operator with its arguments, the device's number of multiprocessors. Out: the bytes that it holds
# while it runs. The figures are those of ``mha_fwd`` and ``mha_bwd`` in torch's ``flash_api.cpp``, of
# ``attention_backward.cu``, ``Reduce.cuh`` and ``EmbeddingBackwardKernel.cu``; for sorts they are measured.
# ``tests/simulated/test_scratch.py`` compares them with what torch asks its allocator for.
#
# What :mod:`~megacompile.kernels.sdpa` gives to torch's memory-efficient attention on CUDA runs as flash
# attention on a CPU: it is told from the rest by its type and its mask.


aten = torch.ops.aten
_ROWS = 128  # the kernels' tiles of queries
_SPLIT_ROWS = 64  # and those of a forward that splits the keys
_MOST_SPLITS = 128
_NEARLY_FULL = 0.8  # of the multiprocessors: more splits do not pay
_GOOD_ENOUGH = 0.85  # of the best use of them
_COLUMNS = 16  # memory-efficient attention's masks have a multiple of these
_IN_REGISTERS = 128  # columns of a head whose sums memory-efficient attention holds in registers
SORTED_FROM = 3073  # indices from which on the gradient of an embedding sorts them
_ROWS_PER_SUM = 10  # of which it makes one partial sum
_SHORT_ROW = 4096  # elements that a sort holds in shared memory
_SORT_TABLES = 64 << 10  # bytes of a sort's histograms, beside a quarter for each element
_THREADS = 2048  # of a multiprocessor; smaller cards have fewer
_FORWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
)
_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
)


def scratch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], processors: int) -> int:
    """Bytes that a call holds on CUDA beside its arguments and results."""
    other = _OTHERS.get(func)
    if other is not None:
        return other(processors, *args)
    if func not in _FORWARD and func not in _BACKWARD:
        return 0
    mask = kwargs.get("attn_mask")
    if mask is None and args[0].element_size() == 2:
        return (_flash_forward if func in _FORWARD else _flash_backward)(processors, *args)
    return _aligned(mask) + (_efficient_forward if func in _FORWARD else _efficient_backward)(*args)


def _flash_forward(processors: int, q: Tensor, k: Tensor, *_: Any) -> int:
    """Partial results of each split of the keys, where there are too few queries for all multiprocessors."""
    batch, heads, length, dim = q.shape
    keys_per_tile = 256 if dim <= 64 else 128 if dim <= 128 else 64
    tiles, programs = -(-k.shape[2] // keys_per_tile), batch * heads * -(-length // _SPLIT_ROWS)
    splits = _splits(programs, 2 * processors, tiles)
    return splits * batch * heads * length * (1 + _width(dim)) * 4 if splits > 1 else 0


def _splits(programs: int, processors: int, tiles: int) -> int:
    """The fewest splits, of those that differ, that use the multiprocessors about as well as any."""
    if programs >= _NEARLY_FULL * processors:
        return 1
    use = {}
    for splits in range(1, min(_MOST_SPLITS, processors, tiles) + 1):
        if splits == 1 or -(-tiles // splits) != -(-tiles // (splits - 1)):
            waves = programs * splits / processors
            use[splits] = waves / math.ceil(waves)
    return next(splits for splits, share in use.items() if share >= _GOOD_ENOUGH * max(use.values()))


def _flash_backward(
    processors: int, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *_: Any
) -> int:
    """FP32 sums of dq, one for each program that adds to them in an order of its own, dk and dv of each query
    head where heads share keys, row sums, and copies of what is not stored as [B, S, H, D]."""
    batch, heads, length, dim = q.shape
    rows = batch * heads * -(-length // _ROWS) * _ROWS
    sums = -(-processors // (batch * heads)) * rows * _width(dim)
    copies = sum(x.nbytes for x in (grad, out) if not x.transpose(1, 2).is_contiguous())
    expanded = 2 * (k.nbytes // k.shape[1]) * heads if k.shape[1] != heads else 0
    return 4 * (rows + sums) + copies + expanded


def _aligned(mask: Tensor | None) -> int:
    """A mask whose rows begin at odd places, or not side by side, once more."""
    if mask is None or (mask.shape[-1] % _COLUMNS == 0 and is_aligned(mask)):
        return 0
    rows = math.prod(n for n, stride in zip(mask.shape, mask.stride()[:-1], strict=False) if stride)
    stored = max(mask.untyped_storage().nbytes(), rows * mask.shape[-1] * mask.element_size())
    return stored // mask.shape[-1] * (mask.shape[-1] + _COLUMNS)


def _efficient_forward(q: Tensor, *_: Any) -> int:
    """Sums of wide heads, and log-sum-exps of whole tiles."""
    batch, heads, length, dim = q.shape
    return 4 * batch * heads * -(-length // _ROWS) * _ROWS * (1 + (_width(dim) if dim > _IN_REGISTERS else 0))


def _efficient_backward(grad: Tensor, q: Tensor, *_: Any) -> int:
    """FP32 sums of dq, or the products of which row sums are made; row sums and log-sum-exps; of wide heads a
    tile of dk and of dv."""
    batch, heads, length, dim = q.shape
    tiles = -(-length // _ROWS) + (2 if dim > _IN_REGISTERS else 0)
    return 4 * batch * heads * tiles * _ROWS * (_width(dim) + 3)


def _width(dim: int) -> int:
    """The columns of a head as the kernels round them."""
    unit = 32 if dim <= 128 else 64
    return -(-dim // unit) * unit


def _column_sums(processors: int, x: Tensor, dims: Sequence[int] | None = None, *_: Any) -> int:
    """Partial results of thread blocks that share a column: torch keeps room for all threads of each."""
    reduced = {d % x.dim() for d in dims or range(x.dim())} if x.dim() else set()
    long = [d for d in range(x.dim()) if x.shape[d] > 1]
    kept = [x.stride(d) for d in long if d not in reduced]
    summed = [x.stride(d) for d in long if d in reduced]
    if not kept or not summed or not x.numel() or min(kept) > min(summed):
        return 0  # of rows there are few
    inputs = math.prod(x.shape[d] for d in reduced)
    outputs = x.numel() // inputs
    vector = next(n for n in (4, 2, 1) if outputs % n == 0) if min(kept) == 1 else 1
    most = 512 // vector
    columns, rows = (min(most, _power(n)) for n in (outputs // vector, inputs))
    height = min(rows, most // min(columns, 32))
    width = min(columns, most // height)
    each, grid = -(-inputs // height), -(-outputs // (vector * width))
    wanted = processors * (_THREADS // (width * height))
    if inputs < 16 * height or each < 256 or grid > wanted:
        return 0
    sharing = max(min(-(-wanted // grid), -(-each // 16)), -(-each // 256))
    element = 4 if x.is_floating_point() and x.element_size() <= 4 else 8
    return element * outputs * sharing * width * vector + 4 * grid if sharing > 1 else 0


def _power(n: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << (n.bit_length() - 1)


def _embedding_backward(
    _: int, grad: Tensor, indices: Tensor, weights: int, padding: int = -1, by_count: bool = False
) -> int:
    """FP32 sums of ten rows at most, for each row that is looked up one at least, and sorted indices."""
    count = indices.numel()
    if count < SORTED_FROM:
        return 0
    sums = min(count, weights) + count // _ROWS_PER_SUM
    sorts = indices.element_size() * (6 + by_count) * count + count
    return 4 * sums * grad.shape[-1] + sorts + _SORT_TABLES


def _sort(_: int, x: Tensor, *rest: Any) -> int:
    """Keys and positions before and after, where a row is too long for shared memory."""
    dim = next((a for a in reversed(rest) if type(a) is int), -1)
    row = x.shape[dim] if x.dim() else 1
    if row <= _SHORT_ROW:
        return 8 * row
    each = 16 + x.element_size() if x.numel() == row else 24 + 2 * x.element_size()
    return x.numel() * each + x.numel() // 3 + _SORT_TABLES


def _index_put(_: int, x: Tensor, indices: Any, values: Tensor, accumulate: bool = False, *__: Any) -> int:
    """Count the scratch of rows that are added up: their places, sorted."""
    given = [i for i in indices if i is not None]
    if not accumulate:
        return 0
    places: tuple[int, ...] = torch.broadcast_shapes(*(i.shape for i in given))  # type: ignore[no-untyped-call]
    return (33 + 16 * len(given)) * math.prod(places) + _SORT_TABLES


_OTHERS: dict[Any, Callable[..., int]] = {
    **dict.fromkeys(
        (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default), _column_sums
    ),
    aten.embedding_dense_backward.default: _embedding_backward,
    **dict.fromkeys((aten.sort.default, aten.sort.stable), _sort),
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default), _index_put),
}


# ------------------------------------------------------------------------------------------------------------
# Count the bytes of tensors that operators allocate, storage by storage, as they live and die.
#
# The same meter predicts (run on fake tensors at compile time) and measures (run on real tensors by the CPU
# backend). It sees inside our own operators; scratch memory inside torch's kernels is not a tensor and is not
# seen, but for what :mod:`~megacompile.blocks.memory_meter` knows of a GPU's.


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


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that remembers which storage it stood for."""

    __slots__ = ("key", "number")
    key: int
    number: int


class StorageMeter(TorchDispatchMode):
    """Live and peak bytes of the storages that operators create while the meter is entered.

    A storage is counted once, however many views show it, from the operator that returns it until the
    last reference is gone, even where that happens after the meter was left. ``limit`` in bytes stops
    the run with :class:`BudgetExceededError` as soon as live bytes exceed it. ``gpu``: count what the
    kernels of that GPU take beside, and keep in ``requests`` what its allocator is asked for, in order.
    ``varies`` becomes True where an operator ran whose bytes depend on values.
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
        self._known: dict[int, tuple[int, _Watch]] = {}
        # dead storages queue here through a C function: a Python callback would swallow a Ctrl-C
        self._dead: deque[_Watch] = deque()

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
        key = (func, self._gpu, _form(args), _form(kwargs)) if fake else None
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
        watch = _Watch(storage, self._dead.append)
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
    """Return the bytes that a call on fake tensors takes on a CPU: its highest where it runs as Python, and
    those that each of its ``results`` stands in."""
    if implementation(func) is None:
        stored = [t.untyped_storage().nbytes() for t in results]
        return 0, [max(nbytes, _at_least(func, i, args)) for i, nbytes in enumerate(stored)]
    key = func, None, _form(_without_defaults(func, args)), _form(kwargs)
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


def _form(value: Any) -> Any:
    """Return what the memory of a call depends on: of tensors shape, strides, alignment, dtype and device."""
    if isinstance(value, Tensor):
        place = value.storage_offset() * value.element_size() % ALIGNED  # kernels take a copy of odd ones
        return tuple(value.shape), tuple(value.stride()), place, value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(_form(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _form(item)) for name, item in sorted(value.items()))
    return value
