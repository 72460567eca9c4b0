"""The operators that norm (RMSNorm alone, with a residual, with a rotation; LayerNorm), in plain torch.

Shapes, types and formulas are those of the operators. A few rows at a time; sums over rows are kept in the
type of rstd.
"""

import torch
from torch import Tensor

from megacompile.kernels._triton import by_rows, flat, wide
from megacompile.kernels.rope import rotated

Variant = tuple[float, bool]
"""offset, cast_early."""


def empty_output(x: Tensor, weight: Tensor | None, cast_early: bool) -> Tensor:
    """A contiguous tensor of y's shape and type."""
    if weight is None or not cast_early:
        return x.new_empty(x.shape)
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, cast_early: bool
) -> tuple[Tensor, Tensor]:
    """(y, rstd) in plain torch."""
    y = empty_output(x, weight, cast_early)
    rstd = x.new_empty(x.shape[:-1], dtype=wide(x.dtype))

    def rows(x: Tensor) -> tuple[Tensor, Tensor]:
        values = x.to(rstd.dtype)
        scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
        y = values * scale
        if weight is None:
            return y, scale
        if cast_early:
            return y.to(x.dtype) * (weight + offset if offset else weight), scale
        return y * (weight.to(y.dtype) + offset), scale

    by_rows(rows, (flat(x),), (flat(y), rstd.view(-1, 1)))
    return y, rstd


def rms_norm_backward_reference(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, variant: Variant
) -> tuple[Tensor, Tensor]:
    """(dx, dw) in plain torch; dw is empty where there is no weight."""
    offset, cast_early = variant
    dx, dtype = x.new_empty(x.shape), rstd.dtype
    dw = x.new_zeros(0 if weight is None else weight.shape[0], dtype=dtype)

    def rows(x: Tensor, rstd: Tensor, grad: Tensor, *grad_sum: Tensor) -> tuple[Tensor, ...]:
        normal, grad = x.to(dtype) * rstd, grad.to(dtype)
        sums: tuple[Tensor, ...] = ()
        if weight is not None:
            sums = ((grad * (normal.to(x.dtype).to(dtype) if cast_early else normal)).sum(0),)
            grad = grad * (weight.to(dtype) + offset)
        dx = (grad - normal * (grad * normal).mean(-1, keepdim=True)) * rstd
        return (sum(grad_sum, start=dx), *sums)

    given = [flat(x), rstd.reshape(-1, 1), flat(grad)]
    given += [] if grad_sum is None else [flat(grad_sum)]
    by_rows(rows, given, (flat(dx),), () if weight is None else (dw,))
    return dx, dw.to(x.dtype if weight is None else weight.dtype)


def empty_outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd), contiguous."""
    mean = x.new_empty(x.shape[:-1], dtype=wide(x.dtype))
    return x.new_empty(x.shape), mean, torch.empty_like(mean)


def layer_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) in plain torch."""
    y, mean, rstd = empty_outputs(x)

    def rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = x.to(mean.dtype)
        middle = values.mean(-1, keepdim=True)
        centred = values - middle
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        y = centred * scale
        if weight is not None:
            y = y * weight.to(y.dtype)
        return y if bias is None else y + bias.to(y.dtype), middle, scale

    by_rows(rows, (flat(x),), (flat(y), mean.view(-1, 1), rstd.view(-1, 1)))
    return y, mean, rstd


def layer_norm_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor | None, has_bias: bool, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, db) in plain torch."""
    dx, dtype = x.new_empty(x.shape), rstd.dtype
    present = weight is not None, has_bias
    dw, db = (x.new_zeros(x.shape[-1] if there else 0, dtype=dtype) for there in present)

    def rows(x: Tensor, mean: Tensor, rstd: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        normal, grad = (x.to(dtype) - mean) * rstd, grad.to(dtype)
        sums = [(grad * normal).sum(0)] if weight is not None else []
        sums += [grad.sum(0)] if has_bias else []
        if weight is not None:
            grad = grad * weight.to(dtype)
        along = (grad * normal).mean(-1, keepdim=True)
        return (grad - grad.mean(-1, keepdim=True) - normal * along) * rstd, *sums

    given = flat(x), mean.reshape(-1, 1), rstd.reshape(-1, 1), flat(grad)
    by_rows(rows, given, (flat(dx),), [s for s, there in zip((dw, db), present, strict=True) if there])
    result = x.dtype if weight is None else weight.dtype
    return dx, dw.to(result), db.to(result)


def empty_heads(x: Tensor) -> Tensor:
    """Return an empty tensor of x's [batch, heads, tokens, width], with heads next to each other in memory
    where they are in x."""
    return _empty_heads(x, x.shape[3], x.dtype)


def empty_rstd(x: Tensor) -> Tensor:
    """One value for each head and token, laid out as ``empty_heads``."""
    return _empty_heads(x, 1, wide(x.dtype))


def _empty_heads(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    batch, heads, tokens, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((batch, tokens, heads, width), dtype=dtype).transpose(1, 2)
    return x.new_empty((batch, heads, tokens, width), dtype=dtype)


def qk_norm_rope_reference(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(y, rstd) in plain torch."""
    y, rstd = empty_heads(x), empty_rstd(x)

    def rows(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        values = x.to(rstd.dtype)
        scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
        normal = values * scale * (weight.to(rstd.dtype) + offset)
        return rotated(normal, cos, sin, interleaved=False, transposed=False), scale

    by_rows(rows, _by_token(x, cos, sin), _by_token(y, rstd))
    return y, rstd


def qk_norm_rope_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """(dx, dw) in plain torch."""
    dx, dtype = empty_heads(x), rstd.dtype
    dw = x.new_zeros(weight.shape, dtype=dtype)

    def rows(x: Tensor, rstd: Tensor, grad: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        normal = x.to(dtype) * rstd
        grad = rotated(grad.to(dtype), cos, sin, interleaved=False, transposed=True)
        share = (grad * normal).sum((0, 1, 2))
        grad = grad * (weight.to(dtype) + offset)
        return (grad - normal * (grad * normal).mean(-1, keepdim=True)) * rstd, share

    by_rows(rows, _by_token(x, rstd, grad, cos, sin), _by_token(dx), (dw,))
    return dx, dw.to(weight.dtype)


def _by_token(*tensors: Tensor) -> list[Tensor]:
    """[tokens, heads, batch, width] each."""
    return [t.transpose(0, 2) for t in tensors]
