"""Right bfloat16 for triton's interpreter, which keeps its bits in uint16 and computes on those.

The interpreter truncates where the hardware rounds to nearest even, adds bit patterns and
multiplies them in ``dot`` (triton issue 11585). Here every value is decoded to float32, computed
on, and encoded with rounding; ``test_bf16_patch.py`` holds this to torch.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import seen
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    InterpreterOptions,
    ReduceOps,
    TensorHandle,
)


def pytest_sessionfinish() -> None:
    seen.write()


torch.set_num_threads(1)
np.seterr(over="ignore", under="ignore", invalid="ignore", divide="ignore")


def decode(data: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) as float32."""
    return (data.astype(np.uint32) << 16).view(np.float32)


def encode(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).reshape(values.shape)


def is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def decoded(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(decode(handle.data), tl.float32) if is_bf16(handle) else handle


def encoded(handle: TensorHandle) -> TensorHandle:
    if handle.data.dtype == np.bool_:
        return handle
    return TensorHandle(encode(handle.data), tl.bfloat16)


def _cast(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def cast(self: InterpreterBuilder, src: TensorHandle, dst: Any, *mode: Any) -> TensorHandle:
        if is_bf16(src) and dst.scalar == tl.bfloat16:
            return src
        if not is_bf16(src) and dst.scalar != tl.bfloat16:
            return original(self, src, dst, *mode)
        src = decoded(src)
        if dst.scalar == tl.bfloat16:
            return TensorHandle(encode(src.data.astype(np.float32)), tl.bfloat16)
        return src if dst.scalar == tl.float32 else original(self, src, dst, *mode)

    return cast


def _elementwise(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def apply(self: InterpreterBuilder, *args: Any) -> TensorHandle:
        *handles, op = args
        if not any(is_bf16(handle) for handle in handles):
            return original(self, *args)
        return encoded(original(self, *map(decoded, handles), op))

    return apply


def _reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(self: ReduceOps, value: Any, *args: Any, **kwargs: Any) -> Any:
        first = value[0] if isinstance(value, tuple) else value
        assert first.dtype != tl.bfloat16, "reduce in float32, not in bfloat16"
        return original(self, value, *args, **kwargs)

    return reduce


def _dot(self: InterpreterBuilder, a: Any, b: Any, d: Any, *_: Any) -> TensorHandle:
    """The products exact in float32 (float64 for float64), as tensor cores accumulate them."""
    dtype = d.data.dtype
    product = np.matmul(decoded(a).data.astype(dtype), decoded(b).data.astype(dtype))
    return TensorHandle(product + d.data, d.dtype.scalar)


_patched: set[Any] = set()


def _call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """Call a helper, patching the language for it once.

    The stock version does so at every call, though the launch around it has; a third of the time.
    """
    if self.fn not in _patched and self.fn.__module__.startswith("triton."):
        interpreter._patch_lang(self.fn)
        _patched.add(self.fn)
    return self.rewrite()(*args, **kwargs)


InterpretedFunction.__call__ = _call
InterpreterBuilder.cast_impl = _cast(InterpreterBuilder.cast_impl)
InterpreterBuilder.create_fp_to_fp = _cast(InterpreterBuilder.create_fp_to_fp)
InterpreterBuilder.binary_op = _elementwise(InterpreterBuilder.binary_op)
InterpreterBuilder.unary_op = _elementwise(InterpreterBuilder.unary_op)
InterpreterBuilder.create_dot = _dot
ReduceOps.sum = _reduction(ReduceOps.sum)
ReduceOps.min_max = _reduction(ReduceOps.min_max)
# What the stock version computes at every sum of integers and asserts only in its debugging mode.
interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
# The stock version makes its table of types anew at every load and every product.
_of_scalar = functools.cache(interpreter._get_np_dtype)
interpreter._get_np_dtype = lambda t: np.dtype(np.uint64) if t.scalar.is_ptr() else _of_scalar(t.scalar)
# The stock version calls math.erf element by element: two seconds for a thousand rows.
interpreter.np_erf_fp32 = lambda x: torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy()
interpreter.np_erf_fp64 = interpreter.np_erf_fp32


_blocks: dict[Any, dict[str, Any]] = {}
_block_type, _broadcast = tl.block_type.__init__, interpreter.interpreter_semantic.broadcast_impl_value


def _block(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    """Take what an equal type found of its shape: each of a kernel's operations makes some of few types."""
    key = id(element_ty), *(s if isinstance(s, int) else s.value for s in shape)
    if key not in _blocks:
        _block_type(self, element_ty, shape)  # the stored type keeps the identity of its element's
        sizes = tl.tuple([tl.constexpr(s) for s in self.shape])
        _blocks[key] = vars(self) | {"of_tensors": (sizes, tl.constexpr(self.numel))}
    vars(self).update(_blocks[key])


_of_scalars = tl.tuple([]), tl.constexpr(1)


def _tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensors if type.is_block() else _of_scalars


def _broadcast_value(lhs: Any, rhs: Any) -> Any:
    """Nothing to do for equal shapes, and the stock version compares them size by size."""
    shape = getattr(lhs.type, "shape", None)
    if shape is not None and shape is getattr(rhs.type, "shape", None):
        return lhs, rhs
    return _broadcast(lhs, rhs)


_unwrap, _wraps = tl.core._unwrap_if_constexpr, (tl.constexpr, tl.tuple, tuple, list)


def _unwrapped(value: Any) -> Any:
    """Most values are tensors, which the stock version asks four times what they are."""
    return _unwrap(value) if isinstance(value, _wraps) else value


_equal = tl.dtype.__eq__
tl.dtype.__eq__ = lambda self, other: self is other or _equal(self, other)
tl.core._unwrap_if_constexpr = _unwrapped
tl.block_type.__init__ = _block
tl.tensor.__init__ = _tensor
interpreter.interpreter_semantic.broadcast_impl_value = _broadcast_value
