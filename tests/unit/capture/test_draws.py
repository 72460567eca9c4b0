"""Random numbers of a forward: torch's distributions, numbers that a recompute repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megacompile
from megacompile import CaptureError
from megacompile.blocks.partition import partition
from megacompile.capture.batch import read_batch
from megacompile.capture.parameter_forms import parameter_forms
from megacompile.kernels.uniform import uniform_op
from tests.support.draws import OurDraws
from tests.support.graphs import capture
from tests.support.models import Through
from tests.support.reference import EagerTrainer, check_beside_eager

RNG = torch.tensor([11, 3])
MANY = (1 << 8, 1 << 8)

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(x.shape, dtype=x.dtype),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "randn_like": torch.randn_like,
    "uniform_": lambda x: torch.empty_like(x).uniform_(-2, 3),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(3),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "randint": lambda x: torch.randint(-3, 9, x.shape).to(x.dtype),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "gumbel": lambda x: F.gumbel_softmax(x, tau=2.0),
    "dropout2d": lambda x: F.dropout2d(torch.ones_like(x).view(64, -1, 2, 2), 0.3).view_as(x),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
}


@pytest.mark.slow_cases(r"(?!randn?-).*-dtype2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CALLS)
def test_draws_have_the_distribution_of_torch_s(name: str, dtype: torch.dtype) -> None:
    """The two-sample test of Kolmogorov and Smirnov on 65,536 numbers, at a level of 7e-6."""
    torch.manual_seed(0)
    x = torch.zeros(MANY, dtype=dtype)
    theirs = CALLS[name](x)
    with OurDraws(RNG):
        ours = CALLS[name](x)
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert not torch.equal(ours, theirs)
    a, b = ours.double().flatten().sort().values, theirs.double().flatten().sort().values
    below_a, below_b = (torch.searchsorted(one, torch.cat([a, b]), right=True) for one in (a, b))
    assert (below_a - below_b).abs().max() / a.numel() < 2.5 * (2 / a.numel()) ** 0.5


def test_numbers_lie_where_torch_s_do() -> None:
    x = torch.zeros(MANY)
    with OurDraws(RNG):
        drawn, low, whole = torch.rand_like(x.bfloat16()), x.clone().uniform_(-1, 1), torch.randperm(999)
        waits = x.clone().exponential_()
    assert drawn.min() == 0 and drawn.max() == 1 - 2**-8
    assert -1 <= low.min() < -0.999 and 0.999 < low.max() < 1
    assert torch.equal(whole.sort().values, torch.arange(999)) and not torch.equal(whole, torch.arange(999))
    assert waits.min() > 0 and torch.isfinite(waits.log()).all()


def test_draws_follow_the_layout_of_what_they_are_like() -> None:
    """The numbers are those of the memory's order; strides are torch's."""
    plain = torch.zeros(5, 7, 3)
    turned = plain.permute(2, 0, 1)
    with OurDraws(RNG):
        drawn = torch.rand_like(turned)
    with OurDraws(RNG):
        first, second = torch.rand_like(plain), torch.rand_like(plain)
    assert drawn.stride() == turned.stride()
    assert torch.equal(drawn.permute(1, 2, 0), first) and not torch.equal(first, second)


class DropPath(nn.Module):
    """Stochastic depth, as vision models have it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x / 0.7 * torch.floor(0.7 + torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device))


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.layer, self.path = nn.LayerNorm(16), nn.Linear(16, 16), DropPath()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.path(self.dropout(torch.relu(self.layer(self.norm(x)))))


class Variational(nn.Module):
    """Stochastic depth and dropout in equal layers, a sampled code, noise of two kinds."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(3))
        self.mean, self.spread, self.last = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = x + 0.1 * torch.empty_like(x).uniform_(-1, 1)
        for layer in self.layers:
            h = layer(h)
        mean, spread = self.mean(h), F.softplus(self.spread(h))
        code = torch.distributions.Normal(mean, spread).rsample()
        gates = F.gumbel_softmax(code, hard=True)
        return (self.last(code * gates) - x).square().mean()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.slow_cases(r"1GB")
@pytest.mark.parametrize("budget", ["1GB", "19kB"])
def test_a_program_trains_as_eager_does_with_the_same_draws(budget: str) -> None:
    torch.manual_seed(0)
    model = Variational()
    eager = Variational()
    eager.load_state_dict(model.state_dict())
    program = megacompile.compile(model, budget, optimizer=adamw(model), compute_dtype=torch.float32)
    batches = [torch.rand(4, 6, 16) for _ in range(3)]
    check_beside_eager(program, EagerTrainer(eager, adamw(eager)), batches)
    assert program.memory.device_peak_bytes == program.memory.predicted_peak_bytes


class Gated(nn.Module):
    """A gate that only a coin toss depends on, to which no gradient but zeros comes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(x) * torch.bernoulli(self.gate(x).sigmoid())).square().mean()


def test_what_only_a_coin_toss_depends_on_decays_as_in_eager() -> None:
    torch.manual_seed(0)
    model, eager = Gated(), Gated()
    eager.load_state_dict(model.state_dict())
    before = eager.gate.weight.detach().clone()
    program = megacompile.compile(model, "1GB", optimizer=adamw(model), compute_dtype=torch.float32)
    check_beside_eager(program, EagerTrainer(eager, adamw(eager)), [torch.rand(4, 8) for _ in range(3)])
    assert not torch.equal(eager.gate.weight, before)


def test_each_micro_batch_and_step_draws_anew_and_equal_layers_share_their_code() -> None:
    torch.manual_seed(0)
    model = Variational(dropout=0.0)
    program = megacompile.compile(
        model, "1GB", optimizer=torch.optim.AdamW(model.parameters(), lr=0.0), compute_dtype=torch.float32
    )
    batch = torch.rand(4, 6, 16)
    steps = [program.train_step(b) for b in (batch, batch, [(batch,), (batch,)])]
    by_hand = [program.forward_backward(batch) for _ in range(2)]
    losses = [float(loss) for out in (*steps, *by_hand) for loss in out.losses]
    assert len(set(losses)) == len(losses) == 6
    layers = [b.template for b in program._session.scheduled().compiled.part.blocks if "layers" in b.name]
    assert len(set(layers[1:])) == 1, layers
    program.close()


def test_equal_layers_share_their_code_beside_dropout() -> None:
    model = Variational()
    one = read_batch(torch.rand(4, 6, 16), model)
    part = partition(capture(model, one.args, one.kwargs, forms=parameter_forms(model, torch.float32)))
    layers = [b.template for b in part.blocks if "layers" in b.name]
    assert len(set(layers[1:])) == 1, layers


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.multinomial(x.softmax(-1), 1),
        lambda x: torch.rand(x.shape, generator=torch.Generator()),
        lambda x: torch.poisson(x.abs()),
    ],
)
def test_other_randomness_is_refused(call: Any) -> None:
    model = Through(nn.Linear(4, 4), lambda h: (h * call(h)).mean())
    with pytest.raises(CaptureError, match=r"randomness|[Gg]enerator"):
        megacompile.compile(model, "1GB", optimizer=adamw(model), example_batch=torch.rand(3, 4))


def test_uniform_is_a_proper_operator() -> None:
    torch.library.opcheck(uniform_op, (RNG, [5, 3], torch.bfloat16, 4))
