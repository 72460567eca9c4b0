"""What kernels would have computed: the CPU's operator over the same bytes, in the order of the stream.

Every operator runs twice. First the real CUDA one: it checks, allocates, and launches kernels that do
nothing. Then a host function on the same stream runs the CPU's operator over views of the device's bytes.
It holds addresses and strides and no tensor, as a launched kernel does, so the allocator's reuse of memory
is really tested. Enter :class:`Numbers` around what computes on the device, not around a capture.
"""

from __future__ import annotations

import ctypes
import itertools
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

aten = torch.ops.aten
_LAUNCH_FAILURE = 719
_STATISTICS_ROWS = 32  # rows of log-sum-exps that efficient attention pads to


class Runtime:
    """The simulated runtime's own functions; see ``runtime/kernels.c``."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcudart.so.13")
        for name in ("used", "copies", "launches", "page_locked", "contexts", "calls", "requests"):
            getattr(self._library, f"cudasim_{name}").restype = ctypes.c_long
        self._library.cudasim_shift.restype = ctypes.c_uint64
        self._library.cudasim_violations.restype = ctypes.c_char_p
        self.shift = int(self._library.cudasim_shift())

    def set(self, **settings: int) -> None:
        """Change settings of the device, by the names in ``runtime/sim.h``."""
        for name, value in settings.items():
            self._library.cudasim_set(name.encode(), ctypes.c_long(value))

    def count(self, what: str) -> int:
        """``used`` device bytes, ``page_locked`` host bytes, ``copies``, ``launches``, ``calls`` of any kind
        or ``requests`` for memory so far; ``contexts`` as a bit for each device that has one."""
        return int(getattr(self._library, f"cudasim_{what}")())

    def violations(self) -> str:
        """What a real device forbids or leaves undefined, a line each."""
        return bytes(self._library.cudasim_violations()).decode()

    def forget(self) -> None:
        """Forget violations, and an error of the device."""
        self._library.cudasim_forget()

    def enqueue(self, callback: Any, key: int) -> None:
        """Run a host function on the current stream, in its order."""
        stream = torch.cuda.current_stream().cuda_stream
        self._library.cudaLaunchHostFunc(ctypes.c_void_p(stream), callback, ctypes.c_void_p(key))

    def dry(self, on: bool) -> None:
        """While on, copies and memsets on the device that this thread issues do nothing."""
        self._library.cudasim_dry(int(on))


runtime = Runtime()
failures: list[str] = []  # of the CPU's operators, with their traces
_tasks: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # type: ignore[untyped-decorator]
def _run(key: int) -> None:
    try:
        with torch.no_grad():
            _tasks.pop(key)()
    except BaseException:
        failures.append(traceback.format_exc())
        runtime.set(sticky=_LAUNCH_FAILURE)


def _enqueue(task: Callable[[], None]) -> None:
    key = next(_numbers)
    _tasks[key] = task
    runtime.enqueue(_run, key)


class _Place:
    """Where a device tensor lies, and whether its bytes are those of its conjugate or its negative."""

    def __init__(self, x: Tensor) -> None:
        self._form = (x.data_ptr() + runtime.shift, _span(x), x.dtype, tuple(x.shape), x.stride())
        self._conjugate, self._negative = x.is_conj(), x.is_neg()

    def view(self) -> Tensor:
        address, span, dtype, shape, stride = self._form
        if not span:
            return torch.empty(shape, dtype=dtype)
        memory = (ctypes.c_uint8 * (span * dtype.itemsize)).from_address(address)
        seen = torch.frombuffer(memory, dtype=dtype, count=span).as_strided(shape, stride)
        seen = seen.conj() if self._conjugate else seen
        return torch._neg_view(seen) if self._negative else seen


def _span(x: Tensor) -> int:
    """Elements from the first to the last."""
    return 1 + sum((s - 1) * k for s, k in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def _dense(x: Tensor) -> bool:
    return x.numel() == 0 or _span(x) == x.numel()


def _as_launched(x: Any) -> Any:
    """An argument as a launch takes it: device memory by address, host values as they are now."""
    if isinstance(x, Tensor):
        return _Place(x) if x.is_cuda else x.clone()
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _replayed(x: Any) -> Any:
    return x.view() if isinstance(x, _Place) else x


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *_: Any, scale: Any = None
) -> Any:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cq: Any, ck: Any, mq: int,
    mk: int, dropout: float, causal: bool, *_: Any, scale: Any = None,
) -> Any:  # fmt: skip
    heads, groups = q.shape[1], k.shape[1]
    wide = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = back(grad, q, *wide, out, lse, 0.0, causal, scale=scale)
    if heads != groups:
        dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, want: bool, p: float = 0.0, causal: bool = False, *,
    scale: Any = None,
) -> Any:  # fmt: skip
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    rows = -q.shape[2] % _STATISTICS_ROWS
    return out, torch.nn.functional.pad(lse, (0, rows), value=float("inf")) if want else None


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed: Any,
    offset: Any, p: float, mask: list[bool], causal: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    if bias is None or not mask[3]:
        lse = lse[..., : q.shape[2]].contiguous()
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return back(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
        again = torch.nn.functional.scaled_dot_product_attention(
            *leaves[:3], attn_mask=leaves[3], scale=scale
        )
        return torch.autograd.grad(again, leaves, grad)


def _norm_backward(grad: Tensor, x: Tensor, shape: Any, mean: Tensor, rstd: Tensor, *rest: Any) -> Any:
    """CUDA keeps float32 statistics of 16-bit rows, the CPU the rows' dtype."""
    return aten.native_layer_norm_backward(grad, x, shape, mean.to(x.dtype), rstd.to(x.dtype), *rest)


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """CUDA keeps no exponential for the backward."""
    return aten.log_sigmoid_forward(x)[0], x.new_empty(0)


def _log_sigmoid_backward(grad: Tensor, x: Tensor, _: Tensor) -> Any:
    return aten.log_sigmoid_backward(grad, x, aten.log_sigmoid_forward(x)[1])


_OTHER = {
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.log_sigmoid_backward.default: _log_sigmoid_backward,
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.native_layer_norm_backward.default: _norm_backward,
}
_SHAPED_BY_DATA = {
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.repeat_interleave.Tensor,
    aten.bincount.default, aten.masked_scatter_backward.default, aten.equal.default,
}  # fmt: skip
_WITHOUT_KERNEL = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.record_stream.default, aten._local_scalar_dense.default,
    aten.is_pinned.default, aten._pin_memory.default,
}  # fmt: skip
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class Numbers(TorchDispatchMode):
    """Gives the operators on the simulated device the numbers that the CPU's give."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, spec = tree_flatten((args, kwargs))
        on = [x for x in flat if isinstance(x, Tensor) and x.is_cuda]
        if func.namespace == "c10d":  # NCCL moves the bytes itself
            return func(*args, **kwargs)
        if func is aten.copy_.default and len(on) == 1:
            return self._across(*args)
        if (
            func is aten._to_copy.default
            and on
            and torch.device(kwargs.get("device") or "cuda").type == "cpu"
        ):
            return self._to_host(args[0], kwargs)
        if func in _SHAPED_BY_DATA and on:
            return _computed_now(func, args, kwargs)
        if func in _INDEXED and any(_is_mask(x) for x in args[1]):
            return self._indexed(func, args, kwargs)
        before = [_as_launched(x) for x in flat]
        runtime.dry(True)
        try:
            out = func(*args, **kwargs)
        finally:
            runtime.dry(False)
        results = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        silent = func in _WITHOUT_KERNEL or func.is_view or (func is aten._to_copy.default and not on)
        if silent or not (on or any(x.is_cuda for x in results)):
            return out
        homes = {x.untyped_storage().data_ptr() for x in on if x.numel()}
        fresh = [
            _Place(x) if x.is_cuda and x.untyped_storage().data_ptr() not in homes else None for x in results
        ]
        if func._schema.is_mutable or any(fresh):
            _enqueue(lambda: _replay(_OTHER.get(func, func), before, spec, fresh))
        return out

    def _across(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """A copy over the link: what one memcpy cannot do is cut into a part on the device and a memcpy."""
        alike = (target.dtype, target.shape, target.stride()) == (source.dtype, source.shape, source.stride())
        if alike and _dense(target):
            return target.copy_(source, non_blocking)
        if target.is_cuda:
            part = torch.empty(source.shape, dtype=target.dtype, device=target.device)
            part.copy_(source.to(target.dtype).contiguous(), non_blocking)
            with self:
                target.copy_(part)
        else:
            with self:
                part = source.to(target.dtype).contiguous()
            target.copy_(part, non_blocking)
        return target

    def _to_host(self, x: Tensor, kwargs: Any) -> Tensor:
        dtype = kwargs.get("dtype") or x.dtype
        if dtype != x.dtype or not _dense(x):
            with self:
                x = x.to(dtype).contiguous()
        return aten._to_copy.default(x, **kwargs)  # type: ignore[no-any-return]

    def _indexed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Masks become positions, whose number depends on data."""
        with self:
            at: list[Any] = []
            for x in args[1]:
                at += x.nonzero().unbind(1) if _is_mask(x) else [x]
            return func(args[0], at, *args[2:], **kwargs)


def _is_mask(x: Any) -> bool:
    return x is not None and x.dtype in (torch.bool, torch.uint8)


def _computed_now(func: Any, args: Any, kwargs: Any) -> Any:
    """Results whose shape depends on data: computed on the host, when all before it is over."""
    torch.cuda.current_stream().synchronize()
    host = tree_map(lambda x: _replayed(_as_launched(x)), (args, kwargs))
    return tree_map(lambda x: x.cuda() if isinstance(x, Tensor) else x, func(*host[0], **host[1]))


def _replay(run: Any, before: list[Any], spec: Any, fresh: list[_Place | None]) -> None:
    args, kwargs = tree_unflatten([_replayed(x) for x in before], spec)
    kwargs.pop("pin_memory", None)
    results = [x for x in tree_flatten(run(*args, **kwargs))[0] if isinstance(x, Tensor)]
    for place, x in zip(fresh, results, strict=False):  # flash attention has results that nobody reads
        if place is not None:
            place.view().copy_(x)
