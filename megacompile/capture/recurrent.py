"""Recurrent layers written out step by step, in place of torch's fused ones.

torch's fused recurrent operators hide their dropout and choose their kernels by device and gradient
mode, so a recompute would not repeat them. Written out, they are products and pointwise operators like
everything else. Argument lists are those of ``torch._VF``; a sequence of T steps becomes about 10·T nodes
per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile.errors import CaptureError

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State, Sequence[Tensor]], State]
"""(input's part of the gates, state, weights of the recurrent part) -> next state, its output first."""
PACKED = (
    "The forward packs sequences (pack_padded_sequence), whose shapes depend on the data: pass the padded "
    "batch to the recurrent layer, and mask the loss."
)


def lstm(theirs: Any, input: Tensor, hx: Any, weights: Any, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``torch._VF.lstm``: (output, last hidden states, last cell states)."""
    _refuse_packed(hx, weights)
    projected = hx[0].shape[2] != hx[1].shape[2]
    output, last = _layers(_lstm_cell, input, tuple(hx), weights, *options, projected=projected)
    return output, last[0], last[1]


def gru(theirs: Any, input: Tensor, hx: Any, weights: Any, *options: Any) -> tuple[Tensor, Tensor]:
    """``torch._VF.gru``: (output, last hidden states)."""
    _refuse_packed(hx, weights)
    output, last = _layers(_gru_cell, input, (hx,), weights, *options)
    return output, last[0]


def rnn(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """``torch._VF.rnn_tanh`` and ``rnn_relu``: (output, last hidden states)."""

    def cell(given: Tensor, state: State, recurrent: Sequence[Tensor]) -> State:
        return (activation(given + F.linear(state[0], *recurrent)),)

    def run(theirs: Any, input: Tensor, hx: Any, weights: Any, *options: Any) -> tuple[Tensor, Tensor]:
        _refuse_packed(hx, weights)
        output, last = _layers(cell, input, (hx,), weights, *options)
        return output, last[0]

    return run


def _refuse_packed(hx: Any, weights: Any) -> None:
    """``torch._VF`` takes packed data as (data, batch sizes, hx, ...)."""
    if isinstance(weights, Tensor) or (isinstance(weights, tuple) and isinstance(hx, Tensor)):
        raise CaptureError(PACKED)


def _layers(
    cell: Cell,
    input: Tensor,
    hx: State,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    projected: bool = False,
) -> tuple[Tensor, State]:
    """All layers and directions; (output, last states stacked as torch stacks them)."""
    x = input.transpose(0, 1) if batch_first else input
    directions = 2 if bidirectional else 1
    each = (4 if has_biases else 2) + projected
    last: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = weights[index * each : (index + 1) * each]
            state = tuple(s[index] for s in hx)
            output, state = _scan(cell, x, state, own, has_biases, reverse=direction == 1)
            outputs.append(output)
            last.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if layer < num_layers - 1:
            x = F.dropout(x, dropout, train)
    return x.transpose(0, 1) if batch_first else x, tuple(torch.stack(s) for s in zip(*last, strict=True))


def _scan(
    cell: Cell, x: Tensor, state: State, own: Sequence[Tensor], has_biases: bool, *, reverse: bool
) -> tuple[Tensor, State]:
    """One layer in one direction over x [T, B, F]; the input's products are made for all steps at once."""
    given = F.linear(x, own[0], own[2] if has_biases else None)
    recurrent = (own[1], own[3]) if has_biases else (own[1],)
    projection = own[4 if has_biases else 2 :]
    steps = range(len(x) - 1, -1, -1) if reverse else range(len(x))
    outputs = []
    for t in steps:
        state = cell(given[t], state, recurrent)
        if projection:
            state = (F.linear(state[0], projection[0]), *state[1:])
        outputs.append(state[0])
    if reverse:
        outputs.reverse()
    return torch.stack(outputs), state


def _lstm_cell(given: Tensor, state: State, recurrent: Sequence[Tensor]) -> State:
    hidden, memory = state
    enter, forget, update, leave = (given + F.linear(hidden, *recurrent)).chunk(4, -1)
    memory = forget.sigmoid() * memory + enter.sigmoid() * update.tanh()
    return leave.sigmoid() * memory.tanh(), memory


def _gru_cell(given: Tensor, state: State, recurrent: Sequence[Tensor]) -> State:
    (hidden,) = state
    reset, update, new = given.chunk(3, -1)
    reset_h, update_h, new_h = F.linear(hidden, *recurrent).chunk(3, -1)
    update = (update + update_h).sigmoid()
    new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return (new + update * (hidden - new),)
