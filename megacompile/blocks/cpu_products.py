"""Products in bfloat16 on CPUs that have none: computed in float32 and rounded once, as a GPU does.

In: calls of operators inside of :func:`float32_products`. Out: their results; no other operator is touched.
On a CPU without bf16 instructions torch falls back to plain loops, about 50 times slower than a float32
product. Copies in float32 are made piece by piece inside of a call, so they are scratch of a library's, which
the budget of the CPU backend leaves out. On a CPU with such products nothing is entered.

In products of matrices each element of a result is one sum in float32; only rows and columns are cut.
Attention is computed some heads at a time, convolutions whole: their kernels take less in float32 than their
loops do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

aten = torch.ops.aten
_PIECE = 1 << 24  # float32 elements of an operand that are copied at a time: 64 MiB


def has_bf16_products() -> bool:
    """Return whether torch's library computes bf16 products on this CPU, rather than plain loops."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def float32_products() -> AbstractContextManager[object]:
    """Compute bf16 products inside in float32, on a CPU that has none; else a context without effect.

    Enter it before a :class:`~megacompile.blocks.memory_meter.StorageMeter`, which then does not see inside.
    """
    return nullcontext() if has_bf16_products() else Float32Products()  # type: ignore[no-untyped-call]


class Float32Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes products of bf16 CPU tensors in float32, with one rounding, also inside of operators whose
    body is Python."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run, kwargs = _IN_FLOAT32.get(func), kwargs or {}
        if run is not None and _is_narrow(args[0]) and _is_narrow(args[1]):
            return run(*args, **kwargs)
        parts = _body_of(func)
        if parts is None or any(isinstance(a, FakeTensor) for a in args):
            return func(*args, **kwargs)
        with self:
            return parts(*args, **kwargs)


@functools.cache
def _body_of(func: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Return the function of an operator that calls others through torch, which a mode can see: the body of
    one in Python, and torch's composites, such as matmul inside of such a body; None for all others."""
    definition = OPDEFS.get(func._schema.name)
    if definition is not None:
        body: Callable[..., Any] = definition._init_fn
        return body
    return func.decompose if func._can_decompose() else None


def withdraw_products() -> None:
    """Leave the mode, wherever an interrupt struck."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Float32Products):
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _is_narrow(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not isinstance(x, FakeTensor)


def _wide(value: Any) -> Any:
    """Return a bf16 tensor in float32, anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _narrow(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) else value


def _pieces(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, max(1, size)))


def _product(a: Tensor, b: Tensor, added: Tensor | None, out: Tensor, beta: Any, alpha: Any) -> Tensor:
    """Fill ``out`` [M, N] with beta * added + alpha * a @ b, or a @ b where nothing is added."""
    (rows, inner), columns = a.shape, b.shape[1]
    wide = min(columns, max(1, _PIECE // max(1, inner)))
    tall = min(rows, max(1, _PIECE // max(1, inner, wide)))
    added = None if added is None else added.expand(rows, columns)
    for some in _pieces(rows, tall):
        left = a[some].float()
        for others in _pieces(columns, wide):
            right = b[:, others].float()
            if added is None:
                out[some, others] = torch.mm(left, right)
            else:
                part = added[some, others].float()
                out[some, others] = torch.addmm(part, left, right, beta=beta, alpha=alpha)
    return out


def _mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _product(a, b, None, a.new_empty(a.shape[0], b.shape[1]) if out is None else out, 1, 1)


def _addmm(
    added: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor | None = None
) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
    return _product(a, b, added, out, beta, alpha)


def _addmm_(added: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Tensor:
    return _addmm(added, a, b, out=added, **factors)


def _bmm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    out = a.new_empty(*a.shape[:2], b.shape[2]) if out is None else out
    for some in _matrices(a, b, out):
        if some.stop - some.start == 1:
            _product(a[some.start], b[some.start], None, out[some.start], 1, 1)
        else:
            out[some] = torch.bmm(a[some].float(), b[some].float())
    return out


def _baddbmm(
    added: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor | None = None
) -> Tensor:
    out = a.new_empty(*a.shape[:2], b.shape[2]) if out is None else out
    added = added.expand_as(out)
    for some in _matrices(a, b, out):
        sums = added[some].float(), a[some].float(), b[some].float()
        out[some] = torch.baddbmm(*sums, beta=beta, alpha=alpha)
    return out


def _baddbmm_(added: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Tensor:
    return _baddbmm(added, a, b, out=added, **factors)


def _matrices(*stacks: Tensor) -> Iterator[slice]:
    """As many matrices of each stack at a time as fit a piece."""
    return _pieces(len(stacks[0]), max(1, _PIECE // max(1, *(x[:1].numel() for x in stacks))))


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Products of groups of rows, of columns, or of parts of the sum, that end at ``offs``."""
    if offs is None or bias is not None:
        return _narrow(aten._grouped_mm.default(_wide(a), _wide(b), offs, _wide(bias)))  # type: ignore[no-any-return]
    ends = offs.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if a.dim() == b.dim() == 2:
        out = a.new_empty(len(ends), a.shape[0], b.shape[1])
        for group, span in zip(out, spans, strict=True):
            _product(a[:, span], b[span], None, group, 1, 1)
        return out
    out = a.new_zeros(a.shape[-2], b.shape[-1])
    for i, span in enumerate(spans):
        if a.dim() == 2:
            _product(a[span], b[i], None, out[span], 1, 1)
        else:
            _product(a[i], b[:, span], None, out[:, span], 1, 1)
    return out


def _heads(q: Tensor) -> Iterator[slice]:
    return _pieces(q.shape[1], max(1, _PIECE // max(1, q[:, :1].numel())))


def _of_heads(value: Any, some: slice) -> Any:
    return _wide(value[:, some]) if isinstance(value, Tensor) else value


def _attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """(out [B, H, S, D], log-sum-exp [B, H, S] in float32), in memory as torch's are."""
    batch, heads, length, _ = q.shape
    out, lse = torch.empty_like(q), q.new_empty(batch, length, heads, dtype=torch.float32).transpose(1, 2)
    for some in _heads(q):
        given = (_of_heads(x, some) for x in (q, k, v))
        options = {name: _of_heads(value, some) for name, value in kwargs.items()}
        out[:, some], lse[:, some] = aten._scaled_dot_product_flash_attention_for_cpu(
            *given, *args, **options
        )
    return out, lse


def _attention_backward(grad: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    results = tuple(x.new_empty(x.shape[0], *x.shape[2:0:-1], x.shape[3]).transpose(1, 2) for x in args[:3])
    for some in _heads(grad):
        given = (_of_heads(x, some) for x in (grad, *args))
        options = {name: _of_heads(value, some) for name, value in kwargs.items()}
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, **options)
        for result, part in zip(results, found, strict=True):
            result[:, some] = part
    return results


def _whole(func: Any) -> Callable[..., Any]:
    """Return the operator between copies in float32 and results in bf16."""

    def run(*args: Any) -> Any:
        results = func(*map(_wide, args))
        return tuple(map(_narrow, results)) if isinstance(results, tuple) else _narrow(results)

    return run


_IN_FLOAT32: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.mm.out: _mm,
    aten.addmm.default: _addmm,
    aten.addmm.out: _addmm,
    aten.addmm_.default: _addmm_,
    aten.bmm.default: _bmm,
    aten.bmm.out: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.baddbmm.out: _baddbmm,
    aten.baddbmm_.default: _baddbmm_,
    aten._grouped_mm.default: _grouped_mm,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.convolution.default: _whole(aten.convolution.default),
    aten.convolution_backward.default: _whole(aten.convolution_backward.default),
}
