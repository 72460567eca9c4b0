"""Casts of operands in a model's forward: float32 beside weights of a lower precision, as autocast treats it.

A batch's floats come in float32, whatever the model computes in. Where a product gets them beside a tensor
of bfloat16 or float16, they are cast down to it. Where a norm gets them beside weights of such a dtype, the
weights are cast up. A parameter that is kept in float32 is never cast: a product casts up what it gets
beside it. Without this, each such call is an error of torch's. Operands that agree stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megacompile.capture.call_tensors import tensors_in
from megacompile.errors import CaptureError

_LOW = (torch.bfloat16, torch.float16)
_CAST_PRODUCTS = frozenset(
    {
        F.linear, F.bilinear, torch.bilinear, F.scaled_dot_product_attention,
        torch.conv1d, torch.conv2d, torch.conv3d,
        torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
        torch.matmul, torch.mm, torch.bmm, torch.mv, torch.addmm, torch.addmv, torch.addbmm, torch.baddbmm,
        torch.einsum, torch.chain_matmul, torch.prelu,
        torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu,
        Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.mv, Tensor.addmm,
        Tensor.addmv, Tensor.addbmm, Tensor.baddbmm,
    }
)  # fmt: skip
_NORMS = frozenset({F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.rms_norm, torch.layer_norm,
                    torch.group_norm, torch.batch_norm, torch.instance_norm, torch.rms_norm})  # fmt: skip


class MixedDtypes(TorchFunctionMode):
    """Cast mixed operands of products and norms within."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CAST_PRODUCTS:
            args, kwargs = _in_one_dtype(args, kwargs)
        elif func in _NORMS:
            if func in (F.batch_norm, torch.batch_norm) and _trains(args, kwargs):
                return _by_its_own_statistics(func, args, kwargs)
            args, kwargs = _raised(args, kwargs)
        return func(*args, **kwargs)


def _in_one_dtype(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The operands, those of float32 in the lower dtype that stands beside them; all in float32 where a
    parameter is."""
    tensors = tensors_in((args, kwargs))
    low = {x.dtype for x in tensors if x.dtype in _LOW}
    if len(low) != 1:
        return args, kwargs
    (before, after) = torch.float32, low.pop()
    # codes are decoded in the dtype that the subclass around them chooses
    given = [x for x in tensors if x.dtype == before and not is_traceable_wrapper_subclass(x)]
    if any(isinstance(of, nn.Parameter) for x in given for of in (x, x._base)):
        before, after = after, before

    def cast(x: Tensor) -> Tensor:
        return x.to(after) if x.dtype == before and not is_traceable_wrapper_subclass(x) else x

    return pytree.tree_map_only(Tensor, cast, (args, kwargs))  # type: ignore[no-any-return]


def _trains(args: Any, kwargs: Any) -> bool:
    """Return whether a batch norm is one by the batch's own statistics."""
    return bool(kwargs.get("training", args[5] if len(args) > 5 else False))


def _by_its_own_statistics(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A batch norm in float32 where its weights or running statistics are: of an input in 16 bits, torch's
    fake operators give mean and deviation in so few, and its kernels do not.

    Refuse one that would change a raised copy of its running statistics, and not these.
    """
    first, *others = tensors_in((args, kwargs))
    low = [x for x in others if x.dtype in _LOW and not isinstance(x, nn.Parameter)]
    if low and first.dtype == torch.float32:
        raise CaptureError(
            f"A batch norm has running statistics of {low[0].dtype} beside an input of torch.float32: call "
            "float() on that module."
        )
    if first.dtype not in _LOW or all(x.dtype in _LOW for x in others):
        args, kwargs = _raised(args, kwargs)
        return func(*args, **kwargs)
    args, kwargs = pytree.tree_map(lambda x: x.float() if x is first else x, (args, kwargs))
    return func(*args, **kwargs).to(first.dtype)


def _raised(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The operands of a norm, its weights in float32 where its input is."""
    first = args[0] if args else kwargs.get("input")
    if not isinstance(first, Tensor) or first.dtype != torch.float32:
        return args, kwargs
    raised: tuple[Any, Any] = pytree.tree_map_only(
        Tensor, lambda x: x.float() if x.dtype in _LOW else x, (args, kwargs)
    )
    return raised
