"""Functions with a gradient of their own, ``torch.autograd.Function``, beside eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import megacompile
from megacompile.errors import BudgetError, CaptureError

Batch = tuple[Tensor, Tensor]


class Straight(Function):
    """Round, and pass the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class Reversal(Function):
    """Hand the argument on, its gradient reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, constant: float) -> Tensor:
        ctx.constant = constant
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return -ctx.constant * grads[0], None


class Scaled(Function):
    """Set the context up apart, and read a tensor made in the backward."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * torch.tensor(ctx.factor), None


class Quantised(Function):
    """Quantise by a learnt step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, top: int) -> Tensor:
        ctx.save_for_backward(x, step)
        ctx.top, ctx.scale = top, (x.numel() * top) ** -0.5
        return (x / step).round().clamp(-top, top) * step

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, step = ctx.saved_tensors
        places = x / step
        low, high = places < -ctx.top, places > ctx.top
        inside = ~(low | high)
        of_step = (high.float() - low.float()) * ctx.top + inside * (places.round() - places)
        return inside * grads[0], ((of_step * grads[0]).sum() * ctx.scale).unsqueeze(0), None


class Norm(Function):
    """Normalise by the root of the mean square; keep the statistic, and write over what is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        deviation = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight)
        ctx.deviation = deviation
        return x * deviation * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        normed = x * ctx.deviation
        of_weight = (grad * normed).flatten(0, -2).sum(0)
        grad = grad * weight
        grad.sub_(normed * (grad * normed).mean(-1, keepdim=True)).mul_(ctx.deviation)
        return grad, of_weight, None


class Gated(Function):
    """SwiGLU of two arguments, computed again in its backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            gate, up = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            return torch.autograd.grad(F.silu(gate) * up, (gate, up), grads[0])


class Sorted(Function):
    """Return several results, one of them without a gradient; keep an intermediate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, order = x.sort(-1)
        ctx.save_for_backward(order)
        ctx.mark_non_differentiable(order)
        return values, order, x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True,)
        return torch.zeros_like(grads[0]).scatter(-1, order, grads[0]) + 3 * grads[2]


class Head(Function):
    """Cross-entropy whose gradient the forward computes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        chances = logits.float().softmax(-1)
        picked = chances.gather(-1, labels[:, None])
        chances.scatter_add_(-1, labels[:, None], torch.full_like(picked, -1.0))
        ctx.save_for_backward(chances.div_(len(labels)).to(logits.dtype))
        return -picked.log().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.saved_tensors[0] * grads[0], None


class Block(nn.Module):
    """A layer of a width, with weights for those functions that have any."""

    def __init__(self, call: Callable[..., Tensor], width: int) -> None:
        super().__init__()
        self.call, self.linear = call, nn.Linear(width, width)
        self.weight, self.step = nn.Parameter(torch.ones(width)), nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.call(self, self.linear(x))


class Model(nn.Module):
    """Some layers, whose loss has a gradient of its own."""

    def __init__(self, call: Callable[..., Tensor], width: int = 16) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, width), nn.Linear(width, 5)
        self.layers = nn.ModuleList([Block(call, width) for _ in range(3)])

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return Head.apply(self.head(h).flatten(0, 1), labels.flatten())  # type: ignore[no-any-return]


def sorted_(block: Block, x: Tensor) -> Tensor:
    values, order, double = Sorted.apply(x)
    return values * (order + 1) / 16 + double


CALLS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "straight": lambda b, x: Straight.apply(x),
    "reversal": lambda b, x: Reversal.apply(x.tanh(), 0.5) * b.weight,
    "scaled": lambda b, x: Scaled.apply(x, 0.25),
    "quantised": lambda b, x: Quantised.apply(x, b.step, 7),
    "norm": lambda b, x: Norm.apply(x, b.weight, 1e-6),
    "gated": lambda b, x: Gated.apply(x, x * b.weight),
    "sorted": sorted_,
    "twice": lambda b, x: Straight.apply(Norm.apply(Straight.apply(x), b.weight, 1e-6)),
}


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(2, 6, 8, generator=generator),
            "labels": torch.randint(0, 5, (2, 6), generator=generator),
        }
        for _ in range(count)
    ]


def compiled(model: nn.Module, budget: str = "1GB", **options: Any) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = {"compute_dtype": torch.float32, "device": "cpu"} | options
    return megacompile.compile(model, budget, optimizer=optimizer, **given)


def least(model: nn.Module, batch: Any) -> str:
    with pytest.raises(BudgetError) as error:
        compiled(copy.deepcopy(model), "1kB", example_batch=batch)
    return f"{error.value.least_bytes}B"


@pytest.mark.parametrize("tight", [False, True], ids=["ample", "least"])
@pytest.mark.parametrize("name", CALLS)
def test_trains_as_eager_does(name: str, tight: bool) -> None:
    torch.manual_seed(0)
    model, micro = Model(CALLS[name]), batches(6)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    program = compiled(model, least(model, micro[:2]) if tight else "1GB")
    for step in range(0, 6, 2):
        optimizer.zero_grad()
        loss = torch.stack([eager(**batch) / 2 for batch in micro[step : step + 2]]).sum()
        loss.backward()
        optimizer.step()
        assert float(program.train_step(micro[step : step + 2]).loss) == pytest.approx(
            float(loss.detach()), abs=1e-6
        )
    values = program.state_dict()
    for parameter, value in eager.state_dict().items():
        torch.testing.assert_close(values[parameter], value, rtol=1e-5, atol=1e-5)
    assert float(program.evaluate(micro[0])) == pytest.approx(float(eager(**micro[0]).detach()), abs=1e-5)
    memory = program.memory
    assert memory.device_peak_bytes == memory.predicted_peak_bytes
    program.close()


def test_layers_share_a_block_of_plain_operators(tmp_path: Path) -> None:
    program = compiled(Model(CALLS["norm"]), example_batch=batches(1)[0], dump=tmp_path)
    (text,) = [f.read_text() for f in tmp_path.rglob("03_blocks.py")]
    assert text.count("def layers_0_forward(") == 1 and "layers_1" not in text
    assert "own_gradient" not in text
    program.close()


@pytest.mark.parametrize("name", ["norm", "gated", "quantised"])
def test_of_weights_in_bf16(name: str) -> None:
    torch.manual_seed(0)
    model = Model(CALLS[name])
    eager, batch = copy.deepcopy(model).bfloat16(), batches(1)[0]
    low = batch | {"x": batch["x"].bfloat16()}
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    program = compiled(model, compute_dtype=torch.bfloat16, max_grad_norm=1e9)
    for _ in range(3):
        optimizer.zero_grad()
        loss = eager(**low)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(eager.parameters(), 1e9)
        optimizer.step()
        made = program.train_step(batch)
        assert float(made.loss) == pytest.approx(float(loss.detach()), rel=3e-2)
        assert float(made.grad_norm) == pytest.approx(float(norm), rel=1e-1)
    program.close()


class Nothing(Function):
    """Return no gradient for its second argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def test_an_argument_without_a_gradient_is_not_updated() -> None:
    """As in eager PyTorch, where its gradient is None: no decay."""
    torch.manual_seed(0)
    model = Model(lambda b, x: Nothing.apply(x, b.weight))
    program = compiled(model)
    program.train_step(batches(1)[0])
    assert torch.equal(program.state_dict()["layers.0.weight"], torch.ones(16))
    program.close()


class Dirty(Function):
    """Write over its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 2
        ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 2 * grads[0]


class Reads(Function):
    """Read in its backward what its forward did not keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any) -> Tensor:
        ctx.block = block
        return x * block.weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.block.weight, None


class Looks(Function):
    """Look at values in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2 if float(grads[0].sum()) > 0 else grads[0]


class Halved(Function):
    """Return two results that may get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


REFUSED: dict[str, Callable[[Block, Tensor], Tensor]] = {
    r"Dirty, a torch\.autograd\.Function, which writes over an argument": lambda b, x: Dirty.apply(x),
    r"Reads, a torch\.autograd\.Function, which has a backward that cannot": lambda b, x: Reads.apply(x, b),
    r"Looks, a torch\.autograd\.Function, which has a backward that cannot": lambda b, x: Looks.apply(x),
    r"Halved, a torch\.autograd\.Function, which has several results": lambda b, x: Halved.apply(x)[0],
    r"Straight, a torch\.autograd\.Function, which is called within a transform": lambda b, x: torch.vmap(
        Straight.apply
    )(x),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        compiled(Model(REFUSED[said]), example_batch=batches(1)[0])
