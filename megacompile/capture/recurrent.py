"""Recurrent layers as operators, one for each layer and direction, in place of torch's fused ones.

torch's fused recurrent operators hide their dropout, choose their kernels by device and gradient mode, so
that a recompute would not repeat them, and are taken apart into single steps where they are traced. Here
dropout between layers is ours, and a layer is a product for the input of all steps and one operator
(:mod:`megacompile.kernels.recurrent_layer`). Argument lists are those of ``torch._VF``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile.errors import CaptureError
from megacompile.kernels.recurrent_layer import recurrent_layer

PACKED = (
    "The forward packs sequences (pack_padded_sequence), whose shapes depend on the data: pass the padded "
    "batch to the recurrent layer, and mask the loss."
)


def lstm(theirs: Any, input: Tensor, hx: Any, weights: Any, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``torch._VF.lstm``: (output, last hidden states, last cell states)."""
    _refuse_packed(hx, weights)
    hidden, cells = hx
    projected = hidden.shape[2] != cells.shape[2]
    return _recurrent_layers("lstm", input, hidden, cells, weights, *options, projected=projected)


def without_cells(kind: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """``torch._VF.gru``, ``rnn_tanh`` and ``rnn_relu``: (output, last hidden states)."""

    def run(theirs: Any, input: Tensor, hx: Any, weights: Any, *options: Any) -> tuple[Tensor, Tensor]:
        _refuse_packed(hx, weights)
        output, hidden, _ = _recurrent_layers(kind, input, hx, None, weights, *options)
        return output, hidden

    return run


def check_input(theirs: Any, layer: Any, input: Tensor, batch_sizes: Tensor | None) -> None:
    """``nn.RNNBase.check_input``, for an input that is cast to the weights' dtype, as of any product."""
    theirs(layer, input.to(layer._flat_weights[0].dtype), batch_sizes)


def _refuse_packed(hx: Any, weights: Any) -> None:
    """``torch._VF`` takes packed data as (data, batch sizes, hx, ...)."""
    if isinstance(weights, Tensor) or (isinstance(weights, tuple) and isinstance(hx, Tensor)):
        raise CaptureError(PACKED)


def _recurrent_layers(
    kind: str,
    input: Tensor,
    hidden: Tensor,
    cells: Tensor | None,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    projected: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """All layers and directions; (output, last hidden states, last cells), stacked as torch stacks them."""
    x = input.transpose(0, 1) if batch_first else input
    directions = 2 if bidirectional else 1
    each = (4 if has_biases else 2) + projected
    last_hidden, last_cells = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = weights[index * each : (index + 1) * each]
            given = F.linear(x, own[0], own[2] if has_biases else None)
            output, cell = recurrent_layer(
                given,
                hidden[index].to(given.dtype),  # states of a batch, or zeros, may come in float32
                None if cells is None else cells[index].to(given.dtype),
                own[1],
                own[3] if has_biases else None,
                own[-1] if projected else None,
                kind,
                direction == 1,
            )
            outputs.append(output)
            last_hidden.append(output[0 if direction else -1])
            last_cells.append(cell)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if layer < num_layers - 1:
            x = F.dropout(x, dropout, train)
    return x.transpose(0, 1) if batch_first else x, torch.stack(last_hidden), torch.stack(last_cells)
