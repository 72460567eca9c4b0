"""Buffers that a forward changes: running statistics, counters, moving averages, beside eager PyTorch.

What cannot be changed so is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megacompile
from megacompile.errors import BudgetError, CaptureError, ProgramError, ScheduleError
from megacompile.planner.arrangements import Shape, uniform
from megacompile.planner.baselines import Planner
from megacompile.schedule.op_table import Buffers
from megacompile.schedule.verify import verify
from tests.support.reference import HostAdamW

Batch = tuple[Tensor, Tensor]


class Residual(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        down = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.down = down if width != out else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(self.relu(self.norms[0](self.first(x)))))
        y += self.down(x)
        return self.relu(y)  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """A small ResNet."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.layers = nn.Sequential(Residual(4, 4), Residual(4, 8, 2))
        self.head = nn.Linear(8, 10)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = momentum

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(images)).mean((2, 3)))  # type: ignore[no-any-return]


def images(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator))
        for _ in range(count)
    ]


def cross_entropy(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch[1])


def compiled(model: nn.Module, budget: str = "1GB", **options: Any) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = {"compute_dtype": torch.float32, "device": "cpu", "loss_fn": cross_entropy} | options
    return megacompile.compile(model, budget, optimizer=optimizer, **given)


def least(model: nn.Module, batch: Any, **options: Any) -> str:
    with pytest.raises(BudgetError) as error:
        compiled(copy.deepcopy(model), "1kB", example_batch=batch, **options)
    return f"{error.value.least_bytes}B"


class Eager:
    """Plain PyTorch beside a program."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Batch], Tensor] = cross_entropy) -> None:
        self.model, self.loss = copy.deepcopy(model), loss
        self.optimizer = HostAdamW(self.model.parameters(), lr=1e-3)

    def forward_backward(self, batch: Batch, weight: float = 1.0) -> float:
        loss = self.loss(self.model(batch[0]), batch) * weight
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def step(self, micro: list[Batch]) -> float:
        self.optimizer.zero_grad()
        loss = sum(self.forward_backward(batch, 1 / len(micro)) for batch in micro)
        self.optimizer.step()
        return loss

    def evaluate(self, batch: Batch) -> float:
        with torch.no_grad():
            return float(self.loss(copy.deepcopy(self.model).eval()(batch[0]), batch))

    @property
    def buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())


def assert_buffers(program: megacompile.Program, eager: Eager) -> None:
    values = program.state_dict()
    for name, buffer in eager.buffers.items():
        assert torch.equal(values[name], buffer), name
        assert torch.equal(program.model.get_buffer(name), buffer), name


def assert_close(program: megacompile.Program, eager: Eager) -> None:
    values = program.state_dict()
    for name, value in eager.model.state_dict().items():
        torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.slow_cases(r"(False|True-0)")
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("tight", [False, True])
def test_a_classifier_trains_as_eager_does(momentum: float | None, tight: bool) -> None:
    torch.manual_seed(0)
    model, batches = Classifier(momentum), images(4)
    eager = Eager(model)
    program = compiled(model, least(model, batches[:2]) if tight else "1GB")
    for step in (batches[:2], batches[2:]):
        assert float(program.train_step(step).loss) == pytest.approx(eager.step(step), abs=1e-6)
    assert_close(program, eager)
    assert float(program.evaluate(batches[0])) == pytest.approx(eager.evaluate(batches[0]), abs=1e-5)
    memory = program.memory
    assert memory.device_peak_bytes == memory.predicted_peak_bytes
    program.close()


@pytest.mark.parametrize("micro", [1, 3])
def test_statistics_are_bitwise_those_of_eager(micro: int) -> None:
    """Of equal weights, which those of a first step are, however its micro-batches come."""
    torch.manual_seed(0)
    model, batches = Classifier(), images(micro)
    eager = Eager(model)
    eager.step(batches)
    program = compiled(model, planner="full-recompute")
    program.train_step(batches)
    assert any(op.kind == "recompute" for op in program.schedule.step.ops)
    assert_buffers(program, eager)
    program.close()


def test_gradients_gathered_by_hand_change_statistics_once_for_each_batch() -> None:
    torch.manual_seed(0)
    model, batches = Classifier(), images(3)
    eager = Eager(model)
    program = compiled(model)
    for batch in batches:
        loss = float(program.forward_backward(batch, weight=0.5).loss)
        assert loss == eager.forward_backward(batch, 0.5)
        assert torch.equal(model.stem[1].running_mean, eager.model.stem[1].running_mean)  # type: ignore
    program.drop_gradients()
    assert_buffers(program, eager)
    program.close()


def test_a_loss_outside_of_the_program_changes_statistics_once() -> None:
    torch.manual_seed(0)
    model, (batch,) = Classifier(), images(1)
    eager = Eager(model)
    program = compiled(model, loss_fn=None)
    out = program.train_step(batch[0], loss=lambda i, output: F.cross_entropy(output, batch[1]))
    assert float(out.loss) == eager.step([batch])
    assert_buffers(program, eager)
    assert torch.equal(program.predict(batch[0]), program.predict(batch[0]))  # in eval mode: changes nothing
    assert_buffers(program, eager)
    program.close()


def test_a_resumed_run_goes_on_bitwise(tmp_path: Path) -> None:
    batches = images(3)
    torch.manual_seed(0)
    first = compiled(Classifier())
    first.train_step(batches[0])
    first.save(tmp_path / "checkpoint")
    first.train_step(batches[1])
    second = compiled(Classifier(), example_batch=batches[0])
    second.load(tmp_path / "checkpoint")
    second.train_step(batches[1])
    expected = first.state_dict()
    for name, value in second.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert int(expected["stem.1.num_batches_tracked"]) == 2
    loaded = Classifier().eval()
    loaded.load_state_dict(expected)
    loss = cross_entropy(loaded(batches[2][0]), batches[2])
    assert float(second.evaluate(batches[2])) == pytest.approx(float(loss.detach()), abs=1e-6)
    first.close()
    second.close()


def test_statistics_stay_fp32_beside_compute_in_bf16() -> None:
    torch.manual_seed(0)
    model, batches = Classifier(), images(2)
    eager = Eager(model)
    program = compiled(model, compute_dtype=torch.bfloat16)
    program.train_step(batches)
    eager.step(batches)
    values = program.state_dict()
    for name, buffer in eager.buffers.items():
        assert values[name].dtype == buffer.dtype
        torch.testing.assert_close(values[name], buffer, rtol=2e-2, atol=2e-2)
    assert program.memory.device_peak_bytes == program.memory.predicted_peak_bytes
    program.close()


def test_a_step_that_is_run_again_changes_statistics_once() -> None:
    """Of a mean over nothing the loss is no number, and the gradient is zero."""
    torch.manual_seed(0)
    model, ((x, y),) = Classifier(), images(1)
    eager = Eager(model)
    batch = x, torch.full_like(y, -100)
    eager.step([batch])
    program = compiled(model)
    program.train_step(batch)
    assert_buffers(program, eager)
    program.close()


def test_a_step_that_fails_changes_nothing() -> None:
    torch.manual_seed(0)
    model, ((x, y),) = Classifier(), images(1)
    program = compiled(model, example_batch=(x, y))
    with pytest.raises(ProgramError):
        program.train_step((x, y + 10))
    assert int(program.state_dict()["stem.1.num_batches_tracked"]) == 0
    eager = Eager(Classifier())
    program.sync_to(eager.model)
    program.train_step((x, y))
    eager.step([(x, y)])
    assert_buffers(program, eager)
    program.close()


class Annealed(nn.Module):
    """Reads a counter and a scale, and changes them then."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) / (1 + self.steps.float()) + self.scale.clone() * x
        self.steps.add_(1)
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.1 * y.abs().mean((0, 1)))
        return y


class Codebook(nn.Module):
    """Changes an average and reads it then, in between and twice; and codes, which it has read before."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("codes", torch.randn(6, width))
        self.register_buffer("sizes", torch.zeros(6))
        self.register_buffer("last", torch.zeros(2, 5, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.mean[1:] = 0.1 * y.mean((0, 1))[1:]
        y = y - self.mean
        flat = y.flatten(0, 1)
        nearest = torch.cdist(flat.detach(), self.codes).argmin(-1)
        chosen = self.codes[nearest].view_as(y)
        with torch.no_grad():
            one_hot = F.one_hot(nearest, 6).to(y.dtype)
            self.sizes.mul_(0.8).add_(one_hot.sum(0), alpha=0.2)
            self.codes.lerp_((one_hot.T @ flat) / self.sizes.clamp_min(1e-3)[:, None], 0.2)
            self.last.copy_(y)
            self.mean[0] += y.mean()
        return x + torch.relu(y + (chosen - y).detach()) * self.mean


class Normed(nn.Module):
    """A layer whose norm others share."""

    def __init__(self, norm: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), norm

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def shared() -> Layers:
    norm = nn.BatchNorm1d(8)
    return Layers(*(Normed(norm) for _ in range(3)))


KINDS: dict[str, Callable[[], Layers]] = {
    "read, then changed": lambda: Layers(Annealed(), Annealed()),
    "changed, then read": lambda: Layers(Codebook(), Codebook()),
    "of several layers": shared,
}


def mean_square(output: Tensor, batch: Batch) -> Tensor:
    return (output - batch[1]).square().mean()


def rows(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(2, 5, 8, generator=generator), torch.randn(2, 5, 3, generator=generator))
        for _ in range(count)
    ]


def in_order(order: Any) -> Planner:
    """All blocks compute everything again, in this order of micro-batches."""
    shape = Shape(order, 1, 1)
    return lambda work, mode, machine, budget: uniform(work, shape, "least", "device", "stream")


@pytest.mark.parametrize("planner", ["search", in_order("depth"), in_order("breadth")])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "of several layers"])
def test_blocks_compute_again_with_what_they_have_read(kind: str, planner: Any) -> None:
    torch.manual_seed(0)
    model, batches = KINDS[kind](), rows(4)
    eager = Eager(model, mean_square)
    program = compiled(model, loss_fn=mean_square, planner=planner)
    for step in (batches[:2], batches[2:]):
        assert float(program.train_step(step).loss) == pytest.approx(eager.step(step), abs=1e-6)
        assert_buffers(program, eager)
    assert all(torch.equal(v, eager.model.state_dict()[n]) for n, v in program.state_dict().items())
    program.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_least_budget_computes_the_same(kind: str) -> None:
    torch.manual_seed(0)
    model, batches = KINDS[kind](), rows(2)
    eager = Eager(model, mean_square)
    program = compiled(model, least(model, batches, loss_fn=mean_square), loss_fn=mean_square)
    assert float(program.train_step(batches).loss) == pytest.approx(eager.step(batches), abs=1e-6)
    assert_buffers(program, eager)
    assert program.memory.device_peak_bytes == program.memory.predicted_peak_bytes
    program.close()


def test_buffers_of_several_blocks_take_whole_micro_batches_in_turn() -> None:
    torch.manual_seed(0)
    model, batches = shared(), rows(2)
    with pytest.raises(ScheduleError, match="is changed by forward of block 0, micro-batch 1"):
        compiled(
            copy.deepcopy(model), loss_fn=mean_square, planner=in_order("breadth"), example_batch=batches
        )
    program = compiled(model, loss_fn=mean_square, example_batch=batches)
    assert program.plan.order == "depth"
    assert program.schedule.work.changes == ((0, 2),)  # the block between them gets a value, and gives one
    program.close()


def test_the_proof_knows_what_changes_buffers() -> None:
    torch.manual_seed(0)
    program = compiled(Classifier(), example_batch=images(2))
    step, work = program.schedule.step, program.schedule.work
    program.close()
    verify(step, work)
    first, *_ = (i for i, op in enumerate(step.ops) if Buffers(0) in op.writes)
    (later,) = (i for i, op in enumerate(step.ops) if op.block == step.ops[first].block and op.micro == 1
                and op.kind == "forward")  # fmt: skip

    def with_op(index: int, **changes: Any) -> Any:
        ops = list(step.ops)
        ops[index] = ops[index].with_(**changes)
        return step.with_(ops=tuple(ops))

    def without(op: Any) -> dict[str, Any]:
        return {"reads": tuple(t for t in op.reads if t != Buffers(0)),
                "writes": tuple(t for t in op.writes if t != Buffers(0))}  # fmt: skip

    with pytest.raises(ScheduleError, match="is due"):
        verify(with_op(later, **without(step.ops[later])), work)
    with pytest.raises(ScheduleError, match="none of its own"):
        verify(step, replace(work, changes=((9,), *work.changes[1:])))
    backward = next(i for i, op in enumerate(step.ops) if op.kind == "backward" and op.block == 0)
    reads = (*step.ops[backward].reads, Buffers(0))
    with pytest.raises(ScheduleError, match=r"is due|no backward does"):
        verify(with_op(backward, reads=reads), work)


class Windows(nn.Module):
    """A buffer that shows a part of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])

    def forward(self, x: Tensor) -> Tensor:
        self.part.add_(1)
        return self.linear(x) + self.whole.sum()  # type: ignore[no-any-return]


class Instances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.InstanceNorm1d(5, track_running_stats=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))  # type: ignore[no-any-return]


class Rounded(nn.Module):
    """A norm in bfloat16 of a batch in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(5).bfloat16(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Windows, "buffer part, which shares its memory with whole: register"),
        (Instances, "norm changes its running statistics: of all norms BatchNorm alone may"),
        (Rounded, r"statistics of torch\.bfloat16 beside an input of torch\.float32"),
    ],
)
def test_what_is_refused_by_name(model: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        compiled(model(), loss_fn=mean_square, example_batch=rows(1)[0])


def test_several_ranks_are_refused() -> None:
    program = compiled(Classifier())
    program._session.compiler.frontend._distributed = True
    with pytest.raises(CaptureError, match=r"num_batches_tracked, and each of several ranks"):
        program._session.compiler.frontend.captured(program._session.read(images(1)[0])[0])


def test_a_synchronised_norm_of_one_rank_is_a_norm() -> None:
    torch.manual_seed(0)
    model, (batch,) = Classifier(), images(1)
    eager = Eager(model)
    program = compiled(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    assert float(program.train_step(batch).loss) == eager.step([batch])
    assert_buffers(program, eager)
    program.close()
