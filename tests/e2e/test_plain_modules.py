"""Modules and batches of plain PyTorch, in forms that a capture or a plan may take for others."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megacompile
from tests.support.graphs import graph_of
from tests.support.reference import EagerTrainer, check_beside_eager


def train_beside_eager(model: nn.Module, batches: list[Any], budget: str = "1GB", **options: Any) -> None:
    """Each step's loss and all weights after the last, beside eager PyTorch in fp32."""
    eager = copy.deepcopy(model)
    trainer = EagerTrainer(eager, torch.optim.AdamW(eager.parameters(), lr=1e-2))
    program = megacompile.compile(
        model,
        budget,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        compute_dtype=torch.float32,
        **options,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Compiling another program")
        check_beside_eager(program, trainer, batches)


def least_budget(model: nn.Module, batch: Any) -> str:
    """The least budget, as the refusal of a smaller one names it."""
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(megacompile.BudgetError) as error:
        megacompile.compile(
            model, "1kB", optimizer=optimizer, compute_dtype=torch.float32, example_batch=batch
        )
    return f"{error.value.least_bytes}B"


class Nested(nn.Module):
    """A checkpoint inside a checkpoint, whose saved inputs torch.export takes for a no_grad region."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def inner(self, x: Tensor) -> Tensor:
        return checkpoint(self.b, torch.tanh(self.a(x)), use_reentrant=False)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.c(checkpoint(self.inner, x, use_reentrant=False)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("norm", [None, 0.1])
def test_checkpoints_inside_checkpoints(norm: float | None) -> None:
    torch.manual_seed(0)
    model = Nested()
    eager = copy.deepcopy(model)
    trainer = EagerTrainer(eager, torch.optim.AdamW(eager.parameters(), lr=1e-2), max_grad_norm=norm)
    program = megacompile.compile(
        model,
        "1GB",
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        compute_dtype=torch.float32,
        max_grad_norm=norm,
    )
    for x in torch.randn(3, 4, 8):
        assert float(program.train_step(x).loss) == trainer.train_step([x])
    program.close()


class Through(nn.Module):
    """Writes through a view that exists only where the batch lies in memory row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x.clone()
        h.reshape(-1)[:6].mul_(0)
        return self.a(h).square().mean()  # type: ignore[no-any-return]


def test_batches_of_another_order_in_memory_are_other_batches() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8, 8)
    train_beside_eager(Through(), [x[0], x[1].t(), x[2]])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) * x).square().mean()  # type: ignore[no-any-return]


def test_a_repeated_row_takes_the_memory_of_all_rows() -> None:
    torch.manual_seed(0)
    model, row = Scaled(), torch.randn(1, 8).expand(64, 8)
    train_beside_eager(model, [row, torch.randn(64, 8)], least_budget(model, row))


@pytest.mark.parametrize("mode", ["mean", "max", "sum"])
def test_bags_of_embeddings_at_the_least_budget(mode: str) -> None:
    torch.manual_seed(0)

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.l = nn.EmbeddingBag(20, 8, mode=mode), nn.Linear(8, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.l(self.e(ids)).square().mean()  # type: ignore[no-any-return]

    model, ids = Bag(), torch.arange(12).view(3, 4)
    train_beside_eager(model, [ids], least_budget(model, ids))


def test_a_mask_for_torch_s_encoder_is_never_compared_with_a_causal_one() -> None:
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layers(x, mask=mask).square().mean()  # type: ignore[no-any-return]

    causal = nn.Transformer.generate_square_subsequent_mask(5)
    other = causal.clone()
    other[0, 1] = 0.0
    train_beside_eager(Encoder(), [(torch.randn(2, 5, 8), mask) for mask in (causal, other)])


class Turn(nn.Module):
    """A layer that multiplies by a table that other layers hold too, as a rotary embedding is shared."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.layer = table, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x * self.table.get_buffer("values")))


class Turned(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Turn(table) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x) - x).square().mean()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_several_modules_hold(persistent: bool) -> None:
    torch.manual_seed(0)
    table = nn.Module()
    table.register_buffer("values", torch.rand(8), persistent=persistent)
    train_beside_eager(Turned(table), [torch.rand(4, 8) for _ in range(3)])


class Recurrent(nn.Module):
    """Recurrent layers both ways, with dropout between them, that begin from a state which is trained."""

    def __init__(self, cell: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layers = cell(6, 8, 2, bidirectional=True, dropout=0.3, batch_first=True, **options)
        self.first = nn.Parameter(torch.randn(4, 1, 8) * 0.1)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.first.expand(-1, len(x), -1).contiguous()
        output, last = self.layers(x, (first, first.tanh()) if isinstance(self.layers, nn.LSTM) else first)
        states = last if isinstance(last, tuple) else (last,)
        return self.head(output).square().mean() + torch.stack([s.square().mean() for s in states]).sum()


@pytest.mark.slow_cases(r"RNN")
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_an_operator_for_each_direction(cell: type[nn.RNNBase]) -> None:
    """However many steps there are; a program trains as eager does, in the memory that is planned."""
    torch.manual_seed(0)
    model, counts = Recurrent(cell), []
    for length in (5, 48):
        graph = graph_of(model, {"x": torch.randn(2, length, 6)}).graph
        counts.append(len(graph.nodes))
        assert sum("recurrent_layer" in str(node.target) for node in graph.nodes) == 4
    assert counts[0] == counts[1]
    batches = [torch.randn(2, 9, 6) for _ in range(3)]
    train_beside_eager(copy.deepcopy(model), batches)
    program = megacompile.compile(model, "1GB", optimizer=torch.optim.AdamW(model.parameters()))
    program.train_step(batches[0].bfloat16())
    assert program.memory.device_peak_bytes == program.memory.predicted_peak_bytes
    program.close()


class FromZero(nn.Module):
    """A recurrent layer whose first state is made in the forward."""

    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.head = cell(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(1, x.shape[1], 8)
        state = (zeros, zeros) if isinstance(self.rnn, nn.LSTM) else zeros
        return self.head(self.rnn(x, state)[0]).square().mean()


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_what_a_recurrent_layer_is_given_may_be_float32_in_a_bf16_program(cell: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model, x = FromZero(cell), torch.randn(5, 3, 6)
    expected = float(model(x).detach())
    with megacompile.compile(model, "1GB", optimizer=torch.optim.AdamW(model.parameters())) as program:
        assert float(program.train_step(x).loss) == pytest.approx(expected, rel=0.05)
