"""What a forward does besides computing: it trains as eager PyTorch would, or is refused by name."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from numpy.random import PCG64
from torch import Tensor, nn
from torch.nn.utils import prune

import megacompile
from tests.support.reference import EagerTrainer, check_beside_eager

BATCH = {"x": torch.linspace(-1, 1, 32).view(4, 8)}
GENERATOR = numpy.random.default_rng(0)
Forward = Callable[[Any, Tensor], Tensor]


class Given(nn.Module):
    """Three layers and a forward of the test's own."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.given, self.count, self.listed, self.kept = forward, 0, [0.0], torch.zeros(4, 8)
        self.state: Tensor | None = None
        self.generator, self.held = random.Random(0), {"deep": [numpy.random.default_rng(0)]}
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.given(self, x).square().mean()


def compiled(model: nn.Module) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return megacompile.compile(
        model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, planner="full-recompute"
    )


def check_as_eager(model: nn.Module, eager: nn.Module) -> None:
    trainer = EagerTrainer(eager, torch.optim.AdamW(eager.parameters(), lr=1e-2, weight_decay=0.1))
    check_beside_eager(compiled(model), trainer, [BATCH] * 3)


def without_gradient_first(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.a(x)
    return m.c(m.b(h))


def teacher(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        target = m.b(h)
    return m.c(h) - target


def gradient_inside(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.a(x)
        with torch.enable_grad():
            h = h + m.b(x)
    return m.c(h)


def same_tensor_inside(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        scale = m.b(h.to(h.dtype).contiguous()).abs().max()
        copied = h.to(h.dtype, copy=True)
    return m.c(h) * scale - copied


def mask_made_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        mask = torch.ones_like(h)
        mask[:, 0] = 0
    return m.b(h * mask)


def written_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h[:, 0] = 0
    h[:, 1:3] *= 2
    return m.b(h)


def kept_for_later(m: Any, x: Tensor) -> Tensor:
    m.seen = m.kept = m.state = m.a(x)
    m.count = x.shape[0]
    return m.b(m.seen)


def checked(m: Any, x: Tensor) -> Tensor:
    torch._check((x >= -1).sum().item() == x.numel())
    m.c.eval()  # which changes nothing that it computes
    return m.a(x)


def reorders_its_parameters(m: Any, x: Tensor) -> Tensor:
    m.hooked = True
    m.a._parameters["weight"] = m.a._parameters.pop("weight")  # as a parametrization that is taken off
    return m.b(m.a(x))


@pytest.mark.parametrize(
    "forward",
    [
        reorders_its_parameters,
        without_gradient_first,
        teacher,
        gradient_inside,
        same_tensor_inside,
        mask_made_in_place,
        written_in_place,
        kept_for_later,
        checked,
        lambda m, x: m.b(m.a(x)) - m.a(x).data,
        lambda m, x: nn.functional.linear(m.a(x), m.b.weight.data) + m.c(x),
    ],
)
def test_trains_as_eager_does(forward: Forward) -> None:
    torch.manual_seed(0)
    model = Given(forward)
    check_as_eager(model, copy.deepcopy(model))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize(
    "change", [nn.utils.weight_norm, lambda m: prune.random_unstructured(m, "weight", 0.5)]
)
def test_weights_that_a_hook_computes_train_as_eagers_do(change: Callable[[nn.Module], Any]) -> None:
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        pair.append(Given(lambda m, x: m.b(m.a(x))))
        change(pair[-1].a)
    check_as_eager(*pair)


def test_arrays_are_read_where_they_are() -> None:
    torch.manual_seed(0)
    model: Any = Given(lambda m, x: m.a(x) * torch.from_numpy(m.array))
    model.array = numpy.ones(8, dtype=numpy.float32)
    program = compiled(model)
    first = float(program.evaluate(BATCH))
    model.array.fill(2.0)
    assert float(program.evaluate(BATCH)) == pytest.approx(4 * first, rel=1e-6)
    program.close()


def counts(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return m.a(x) * m.count


def fills_a_list(m: Any, x: Tensor) -> Tensor:
    m.listed.append(1.0)
    return m.a(x) * len(m.listed)


def averages(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.kept = 0.9 * m.kept + h.detach()
    return h - m.kept


def averages_in_a_buffer(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.mean = 0.9 * m.mean + h.mean(0).detach()
    return h - m.mean


def remembers(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) if m.state is None else m.a(x) + m.state
    m.state = h.detach()
    return h


def remembers_once_it_is_there(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) + m.before if hasattr(m, "before") else m.a(x)
    m.before = h.detach()
    return h


def sets_a_mode(m: Any, x: Tensor) -> Tensor:
    scale = 2 if m.b.training else 1
    m.b.eval()
    return m.a(x) * scale


def freezes(m: Any, x: Tensor) -> Tensor:
    m.a.weight.requires_grad_(False)
    h = m.a(x)
    m.a.weight.requires_grad = True
    return h


def detaches_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    target = m.b(h)
    target.detach_()
    return m.c(h) - target


def writes_without_gradient(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        h.mul_(2)
    return m.b(h)


def writes_behind_autograd(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.data[:, 0] = 0
    return m.b(h)


def assigns_data(m: Any, x: Tensor) -> Tensor:
    m.a.weight.data = m.a.weight.data.clamp(-0.1, 0.1)
    return m.a(x)


def infers(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        target = m.b(x)
    return m.a(x) - target.clone()


def packs(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: 0 * t, lambda t: t):
        return m.b(torch.tanh(m.a(x)))


def writes_into_the_batch(m: Any, x: Tensor) -> Tensor:
    return m.a(x.mul_(2))


@pytest.mark.parametrize(
    ("forward", "named"),
    [
        (counts, "changes count"),
        (fills_a_list, "changes listed"),
        (averages, "kept"),
        (averages_in_a_buffer, "assigns the buffer mean"),
        (remembers, "state"),
        (remembers_once_it_is_there, "before"),
        (sets_a_mode, r"changes b\.training"),
        (freezes, "requires_grad"),
        (detaches_in_place, "detach_"),
        (writes_without_gradient, "mul_"),
        (writes_behind_autograd, "__setitem__"),
        (assigns_data, r"\.data"),
        (infers, "inference_mode"),
        (packs, "saved_tensors_hooks"),
        (writes_into_the_batch, "x of the batch"),
        (lambda m, x: m.a(x) * float(random.random()), "draws random numbers"),
        (lambda m, x: m.a(x) * float(numpy.random.default_rng().random()), "Python or NumPy"),
        (lambda m, x: m.a(x) * float(GENERATOR.random()), "Python or NumPy"),
        (lambda m, x: m.a(x) * m.generator.random(), "Python or NumPy"),
        (lambda m, x: m.a(x) * m.held["deep"][0].random(), "Python or NumPy"),
        (lambda m, x: m.a(x) * random.Random().random(), "Python or NumPy"),
        (lambda m, x: m.a(x) * random.SystemRandom().random(), "Python or NumPy"),
        (lambda m, x: m.a(x) * float(numpy.random.RandomState().rand()), "Python or NumPy"),
        (lambda m, x: m.a(x) * float(numpy.random.Generator(PCG64()).random()), "Python or NumPy"),
        (lambda m, x: m.a(x) * m.a(x).sum().item(), "takes a number out of a tensor"),
    ],
)
def test_refused_by_name(forward: Forward, named: str) -> None:
    with pytest.raises(megacompile.MegacompileError, match=named):
        compiled(Given(forward)).train_step(copy.deepcopy(BATCH))


def test_seeded_numbers_and_generators_that_nobody_draws_from_are_no_draws() -> None:
    other = random.Random(1)

    def forward(m: Any, x: Tensor) -> Tensor:
        assert other
        return m.a(x) * random.Random(2).random() * float(numpy.random.default_rng(3).random())

    model = Given(forward)
    check_as_eager(model, copy.deepcopy(model))


def test_a_parameter_that_a_hook_closes_over_is_refused_by_name() -> None:
    model = Given(lambda m, x: m.b(m.a(x)))
    other = model.b
    model.a.register_forward_hook(lambda module, args, out: out * other.weight.sum())
    with pytest.raises(megacompile.MegacompileError, match=r"b\.weight"):
        compiled(model).train_step(BATCH)


def test_a_table_that_looks_up_renormalises_is_refused_by_name() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 8, max_norm=1.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x.abs().long()).square().mean()

    with pytest.raises(megacompile.MegacompileError, match=r"table\.weight"):
        compiled(Table()).train_step(BATCH)


def test_sparse_gradients_and_lazy_modules_are_refused_by_name() -> None:
    class Table(Given):
        def __init__(self) -> None:
            super().__init__(lambda m, x: m.table(x.abs().long()))
            self.table = nn.Embedding(9, 8, sparse=True)

    with pytest.raises(megacompile.MegacompileError, match="table is an embedding with sparse=True"):
        compiled(Table()).train_step(BATCH)
    with pytest.raises(megacompile.MegacompileError, match=r"1\.weight of a lazy module"):
        compiled(nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8)))


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_a_batch_that_trains_more_than_the_first_one() -> None:
    class Flagged(Given):
        def forward(self, x: Tensor, frozen: bool) -> Tensor:  # type: ignore[override]
            h = self.a(x)
            return self.b(h.detach() if frozen else h).square().mean()

    model = Flagged(lambda m, x: x)
    eager = copy.deepcopy(model)
    trainer = EagerTrainer(eager, torch.optim.AdamW(eager.parameters(), lr=1e-2, weight_decay=0.1))
    batches = [BATCH | {"frozen": frozen} for frozen in (True, False, True, False)]
    check_beside_eager(compiled(model), trainer, batches)
