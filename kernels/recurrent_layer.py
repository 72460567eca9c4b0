"""One direction of a recurrent layer, LSTM, GRU or plain, over a whole sequence.

Equations are torch's (``nn.LSTM``, ``nn.GRU``, ``nn.RNN``), with [i, f, g, o] and [r, z, n] in its order:

    LSTM: c' = f * c + i * g, h' = o * tanh(c'), or its projection
    GRU:  h' = n + z * (h - n), n = tanh(given_n + r * (W_n h + b_n))
    RNN:  h' = tanh or relu of given + W h + b

given: [T, B, G * H], the input's products with its bias, in the order of the sequence; ``reverse`` walks from
its end. hidden: [B, P] and cell: [B, H], the first state. weight: [G * H, P], bias: [G * H], projection: [P,
H]. All of one dtype; P is H where nothing is projected.

Gates are saved as they are after their activations, with the cells of an LSTM, or with W_n h + b_n of a GRU:
a backward forms products for gradients alone. The gradient of the weight is one product over all steps.
cuDNN's and oneDNN's kernels for whole layers are not used: what they hold is known to them alone, and the
budget is exact; cuDNN's backward may also differ from run to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megacompile.kernels.registry import Arguments, OpPass, OpSpec, declare

aten = torch.ops.aten
GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}
_MEASURED = 3  # all later steps hold no more than the third, which meets what the two before left


def _order(given: Tensor, reverse: bool) -> list[int]:
    """The steps as a forward walks them; of fake tensors, on which only memory is measured, three."""
    length = len(given)
    steps = list(range(length - 1, -1, -1) if reverse else range(length))
    return steps[:_MEASURED] if isinstance(given, FakeTensor) else steps


def _with_bias(given: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return given.clone(memory_format=torch.contiguous_format)
    return torch.add(given, bias, out=given.new_empty(given.shape))  # whatever the strides of given


Results = tuple[Tensor, Tensor, Tensor, Tensor]
"""Output [T, B, P], last cell [B, H], gates [T, B, G * H], kept [T, B, H], empty where there is none."""


def _lstm(
    given: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, bias: Tensor | None,
    projection: Tensor | None, reverse: bool,
) -> Results:  # fmt: skip
    width = cell.shape[-1]
    gates, right = _with_bias(given, bias), weight.t()
    output, cells = (
        given.new_empty(*given.shape[:2], hidden.shape[-1]),
        given.new_empty(len(given), *cell.shape),
    )
    for t in _order(given, reverse):
        row, after = gates[t].addmm_(hidden, right), cells[t]
        enter, forget, update, leave = row.chunk(4, -1)
        row[:, : 2 * width].sigmoid_()
        update.tanh_()
        leave.sigmoid_()
        torch.mul(forget, cell, out=after).addcmul_(enter, update)
        if projection is None:
            torch.mul(leave, after.tanh(), out=output[t])
        else:
            torch.mm(after.tanh().mul_(leave), projection.t(), out=output[t])
        hidden, cell = output[t], after
    return output, cell.clone(), gates, cells


def _gru(given: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool) -> Results:
    width = hidden.shape[-1]
    gates, right = given.clone(memory_format=torch.contiguous_format), weight.t()
    output, kept = (given.new_empty(len(given), *hidden.shape) for _ in range(2))
    for t in _order(given, reverse):
        own = torch.mm(hidden, right) if bias is None else torch.addmm(bias, hidden, right)
        reset_update, new = gates[t, :, : 2 * width], gates[t, :, 2 * width :]
        reset_update.add_(own[:, : 2 * width]).sigmoid_()
        kept[t].copy_(own[:, 2 * width :])
        new.addcmul_(reset_update[:, :width], kept[t]).tanh_()
        torch.sub(hidden, new, out=output[t]).mul_(reset_update[:, width:]).add_(new)
        hidden = output[t]
        del own
    return output, given.new_empty(0), gates, kept


def _simple_rnn(
    given: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, kind: str, reverse: bool
) -> Results:
    output, right = _with_bias(given, bias), weight.t()
    for t in _order(given, reverse):
        row = output[t].addmm_(hidden, right)
        hidden = row.tanh_() if kind == "tanh" else row.relu_()
    return output, given.new_empty(0), given.new_empty(0), given.new_empty(0)


@torch.library.custom_op("megacompile::recurrent_layer", mutates_args=())
def recurrent_layer_op(
    given: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    kind: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(output [T, B, P], last cell [B, H], gates [T, B, G * H], kept [T, B, H]), empty where it has none."""
    if kind == "lstm":
        assert cell is not None
        return _lstm(given, hidden, cell, weight, bias, projection, reverse)
    if kind == "gru":
        return _gru(given, hidden, weight, bias, reverse)
    return _simple_rnn(given, hidden, weight, bias, kind, reverse)


@recurrent_layer_op.register_fake
def _(
    given: Tensor, hidden: Tensor, cell: Tensor | None, weight: Tensor, bias: Tensor | None,
    projection: Tensor | None, kind: str, reverse: bool,
) -> Results:  # fmt: skip
    length, batch, wide = given.shape
    output = given.new_empty(length, batch, hidden.shape[-1])
    if kind in ("tanh", "relu"):
        return output, given.new_empty(0), given.new_empty(0), given.new_empty(0)
    last = given.new_empty(0) if cell is None else given.new_empty(cell.shape)
    return output, last, given.new_empty(given.shape), given.new_empty(length, batch, wide // GATES[kind])


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Those of (given, hidden, cell, weight, bias, projection), empty where there is none."""


def _state_before(first: Tensor, states: Tensor, t: int, reverse: bool) -> Tensor:
    """The state that step t began from."""
    start = len(states) - 1 if reverse else 0
    return first if t == start else states[t + 1 if reverse else t - 1]


def _of_weights(
    d_own: Tensor, hidden: Tensor, output: Tensor, bias: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias, from that of ``W h + b`` at all steps."""
    start, later, earlier = (
        (-1, slice(0, -1), slice(1, None)) if reverse else (0, slice(1, None), slice(0, -1))
    )
    d_weight = torch.mm(d_own[later].flatten(0, 1).t(), output[earlier].flatten(0, 1))
    d_weight.addmm_(d_own[start].t(), hidden)
    return d_weight, d_own.new_empty(0) if bias is None else d_own.sum((0, 1))


def _lstm_backward(
    grad: Tensor, d_cell: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, bias: Tensor | None,
    projection: Tensor | None, output: Tensor, gates: Tensor, cells: Tensor, reverse: bool,
) -> Gradients:  # fmt: skip
    width = cell.shape[-1]
    d_gates, d_hidden = torch.empty_like(gates), hidden.new_zeros(hidden.shape)
    d_cell = d_cell.clone(memory_format=torch.contiguous_format)
    d_output = grad if projection is None else torch.empty_like(output)
    for t in reversed(_order(gates, reverse)):
        enter, forget, update, leave = gates[t].chunk(4, -1)
        d_enter, d_forget, d_update, d_leave = d_gates[t].chunk(4, -1)
        d_hidden = d_hidden.add_(grad[t])
        if projection is not None:
            d_output[t].copy_(d_hidden)
            d_hidden = torch.mm(d_hidden, projection)
        tanh = cells[t].tanh()
        torch.mul(d_hidden, tanh, out=d_leave)
        d_cell.add_(aten.tanh_backward(d_hidden.mul_(leave), tanh))
        torch.mul(d_cell, update, out=d_enter)
        torch.mul(d_cell, _state_before(cell, cells, t, reverse), out=d_forget)
        torch.mul(d_cell, enter, out=d_update)
        both, d_both = gates[t, :, : 2 * width], d_gates[t, :, : 2 * width]
        aten.sigmoid_backward.grad_input(d_both, both, grad_input=d_both)
        aten.tanh_backward.grad_input(d_update, update, grad_input=d_update)
        aten.sigmoid_backward.grad_input(d_leave, leave, grad_input=d_leave)
        d_cell.mul_(forget)
        d_hidden = torch.mm(d_gates[t], weight)
        del tanh
    d_projection = gates.new_empty(0)
    if projection is not None:
        inner = cells.tanh().mul_(gates[..., 3 * width :])
        d_projection = torch.mm(d_output.flatten(0, 1).t(), inner.flatten(0, 1))
        del inner
    d_weight, d_bias = _of_weights(d_gates, hidden, output, bias, reverse)
    return d_gates, d_hidden, d_cell, d_weight, d_bias, d_projection


def _gru_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, gates: Tensor,
    kept: Tensor, reverse: bool,
) -> Gradients:  # fmt: skip
    width = hidden.shape[-1]
    d_given, d_own = torch.empty_like(gates), torch.empty_like(gates)  # they differ in the part of n alone
    d_hidden = hidden.new_zeros(hidden.shape)
    for t in reversed(_order(gates, reverse)):
        reset, update, new = gates[t].chunk(3, -1)
        d_reset, d_update, d_new = d_given[t].chunk(3, -1)
        d_hidden = d_hidden.add_(grad[t])
        torch.sub(_state_before(hidden, output, t, reverse), new, out=d_update).mul_(d_hidden)
        torch.addcmul(d_hidden, d_hidden, update, value=-1, out=d_new)
        aten.tanh_backward.grad_input(d_new, new, grad_input=d_new)
        torch.mul(d_new, kept[t], out=d_reset)
        both, d_both = gates[t, :, : 2 * width], d_given[t, :, : 2 * width]
        aten.sigmoid_backward.grad_input(d_both, both, grad_input=d_both)
        d_own[t, :, : 2 * width].copy_(d_both)
        torch.mul(d_new, reset, out=d_own[t, :, 2 * width :])
        d_hidden = d_hidden.mul_(update).addmm_(d_own[t], weight)
    d_weight, d_bias = _of_weights(d_own, hidden, output, bias, reverse)
    return d_given, d_hidden, gates.new_empty(0), d_weight, d_bias, gates.new_empty(0)


def _simple_rnn_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, kind: str,
    reverse: bool,
) -> Gradients:  # fmt: skip
    d_given, d_hidden = torch.empty_like(output), hidden.new_zeros(hidden.shape)
    for t in reversed(_order(output, reverse)):
        d_hidden = d_hidden.add_(grad[t])
        if kind == "tanh":
            aten.tanh_backward.grad_input(d_hidden, output[t], grad_input=d_given[t])
        else:
            aten.threshold_backward.grad_input(d_hidden, output[t], 0, grad_input=d_given[t])
        d_hidden = torch.mm(d_given[t], weight)
    d_weight, d_bias = _of_weights(d_given, hidden, output, bias, reverse)
    return d_given, d_hidden, output.new_empty(0), d_weight, d_bias, output.new_empty(0)


@torch.library.custom_op("megacompile::recurrent_layer_backward", mutates_args=())
def recurrent_layer_backward_op(
    grad: Tensor,
    d_cell: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    output: Tensor,
    gates: Tensor,
    kept: Tensor,
    kind: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (given, hidden, cell, weight, bias, projection), empty where there is none."""
    if kind == "lstm":
        assert cell is not None
        return _lstm_backward(
            grad, d_cell, hidden, cell, weight, bias, projection, output, gates, kept, reverse
        )
    if kind == "gru":
        return _gru_backward(grad, hidden, weight, bias, output, gates, kept, reverse)
    return _simple_rnn_backward(grad, hidden, weight, bias, output, kind, reverse)


@recurrent_layer_backward_op.register_fake
def _(
    grad: Tensor, d_cell: Tensor, hidden: Tensor, cell: Tensor | None, weight: Tensor, bias: Tensor | None,
    projection: Tensor | None, output: Tensor, *_: Any,
) -> Gradients:  # fmt: skip
    def like(x: Tensor | None) -> Tensor:
        return output.new_empty(0) if x is None else output.new_empty(x.shape)

    d_given = output.new_empty(*output.shape[:2], len(weight))
    return d_given, like(hidden), like(cell), like(weight), like(bias), like(projection)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *tensors, ctx.kind, ctx.reverse = inputs
    made, _, gates, kept = output
    ctx.mark_non_differentiable(gates, kept)
    ctx.given = [x is not None for x in tensors]
    ctx.save_for_backward(*tensors, made, gates, kept)


def _backward(ctx: Any, grad: Tensor, d_cell: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    d_given, *others = recurrent_layer_backward_op(grad, d_cell, *ctx.saved_tensors, ctx.kind, ctx.reverse)
    return d_given, *(d if there else None for d, there in zip(others, ctx.given, strict=True)), None, None


recurrent_layer_op.register_autograd(_backward, setup_context=_setup)


def recurrent_layer(
    given: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    kind: str,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """(output [T, B, P], last cell [B, H], which is empty but of an LSTM), differentiable in all tensors."""
    output, last, _, _ = recurrent_layer_op(given, hidden, cell, weight, bias, projection, kind, reverse)
    return output, last


def recurrent_layer_flops(
    given: Any, hidden: Any, cell: Any, weight: Any, bias: Any, projection: Any, *_: Any, **__: Any
) -> int:
    """Count a product with the weight, and with the projection, at each step, by shapes."""
    matrices = weight[0] * weight[1] + (0 if projection is None else projection[0] * projection[1])
    return 2 * int(given[0]) * int(given[1]) * int(matrices)


def recurrent_layer_backward_flops(grad: Any, d_cell: Any, *others: Any, **_: Any) -> int:
    """Count the products for the gradients of states and of weights."""
    return 2 * recurrent_layer_flops(grad, *others)


_CALLS_A_STEP = {
    "lstm": (8, 14),
    "gru": (9, 11),
    "tanh": (2, 3),
    "relu": (2, 3),
}  # of a step: forward, backward
_ONCE = 2, 5


def _launches(backward: int) -> Callable[[Arguments], int]:
    def count(given: Arguments) -> int:
        steps = len(given["grad" if backward else "given"])
        projects = given["projection"] is not None
        return _ONCE[backward] + steps * (_CALLS_A_STEP[given["kind"]][backward] + projects * (1 + backward))

    return count


def _moved(given: Arguments) -> int:
    """Count each tensor once, and the matrices at every step, since each waits for the step before."""
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    steps = len(next(iter(tensors)))
    matrices = [x for x in (given["weight"], given["projection"]) if x is not None]
    return int(sum(x.nbytes for x in tensors) + steps * sum(x.nbytes for x in matrices))


declare(
    OpSpec(
        "recurrent_layer",
        OpPass(recurrent_layer_flops, _launches(0), _moved),
        OpPass(recurrent_layer_backward_flops, _launches(1), _moved),
    )
)
