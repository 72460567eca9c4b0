"""Casts of operands in a model's forward: float32 beside weights of a lower precision, as autocast treats it.

A batch's floats come in float32, whatever the model computes in. Where a product gets them beside a tensor
of bfloat16 or float16, they are cast down to it. Where a norm gets them beside weights of such a
dtype, the weights are cast up. Without this, each such call is an error of
torch's. Operands that agree stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_LOW = (torch.bfloat16, torch.float16)
_PRODUCTS = frozenset(
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
        if func in _PRODUCTS:
            args, kwargs = _lowered(args, kwargs)
        elif func in _NORMS:
            args, kwargs = _raised(args, kwargs)
        return func(*args, **kwargs)


def _lowered(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The operands, those of float32 in the lower dtype that stands beside them."""
    low = {x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dtype in _LOW}
    if len(low) != 1:
        return args, kwargs
    dtype = low.pop()

    def cast(x: Tensor) -> Tensor:
        # a parameter that is kept in float32 is the model's choice, and its product an error of the model's
        return x.to(dtype) if x.dtype == torch.float32 and not isinstance(x, nn.Parameter) else x

    lowered: tuple[Any, Any] = pytree.tree_map_only(Tensor, cast, (args, kwargs))
    return lowered


def _raised(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The operands of a norm, its weights in float32 where its input is."""
    first = args[0] if args else kwargs.get("input")
    if not isinstance(first, Tensor) or first.dtype != torch.float32:
        return args, kwargs
    raised: tuple[Any, Any] = pytree.tree_map_only(
        Tensor, lambda x: x.float() if x.dtype in _LOW else x, (args, kwargs)
    )
    return raised
