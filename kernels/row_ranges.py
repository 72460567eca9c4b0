"""The operators that move a range of rows, which experts of a bank compute.

They are custom operators, as the rows of a range of experts keep a fixed shape although their number is known
on the device alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("megacompile::take_rows", mutates_args=())
def take_rows(x: Tensor, start: Tensor, count: Tensor) -> Tensor:
    """Rows [start, start + count) of ``x`` moved to the front, zeros behind them; x's shape.

    ``start`` and ``count`` are integers of shape [1], on x's device and never read on the host.
    Linear in x; :func:`put_rows` is its adjoint.
    """
    rows = torch.arange(x.shape[0], device=x.device)
    moved = x[(rows + start) % x.shape[0]]
    return moved.masked_fill_(_column(rows >= count, x), 0)


@torch.library.custom_op("megacompile::put_rows", mutates_args=())
def put_rows(x: Tensor, start: Tensor, count: Tensor) -> Tensor:
    """The first ``count`` rows of ``x`` moved to [start, start + count), zeros elsewhere; x's shape."""
    rows = torch.arange(x.shape[0], device=x.device)
    moved = x[(rows - start) % x.shape[0]]
    return moved.masked_fill_(_column((rows < start) | (rows >= start + count), x), 0)


def _column(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(-1, *(1 for _ in x.shape[1:]))


def _fake_rows(x: Tensor, start: Tensor, count: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _take_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.megacompile.put_rows(grad, *ctx.saved_tensors), None, None


def _put_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.megacompile.take_rows(grad, *ctx.saved_tensors), None, None


take_rows.register_fake(_fake_rows)
put_rows.register_fake(_fake_rows)
take_rows.register_autograd(_take_backward, setup_context=_rows_setup)
put_rows.register_autograd(_put_backward, setup_context=_rows_setup)
TAKE_ROWS = torch.ops.megacompile.take_rows.default
PUT_ROWS = torch.ops.megacompile.put_rows.default
