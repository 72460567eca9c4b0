"""Functions with a gradient of their own, ``torch.autograd.Function``, and operators of others, beside eager
PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import megacompile
from megacompile.errors import BudgetError, BudgetExceededError, CaptureError, MegacompileError

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
        self.layers = nn.ModuleList([Block(call, width) for _ in range(2)])

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


class Arrays(Function):
    """Compute with NumPy, and keep an array."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        a = x.detach().numpy()
        ctx.gate = 1 / (1 + numpy.exp(-a))
        ctx.save_for_backward(x)
        return torch.from_numpy(a * ctx.gate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a = ctx.saved_tensors[0].detach().numpy()
        return torch.from_numpy(grads[0].numpy() * ctx.gate * (1 + a * (1 - ctx.gate)))


class Item(Function):
    """Take a number out of a tensor, and keep it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.scale = x.abs().max().item() + eps
        y = x / ctx.scale
        ctx.save_for_backward(y, weight)
        return y * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, weight = ctx.saved_tensors
        return grads[0] * weight / ctx.scale, (grads[0] * y).flatten(0, -2).sum(0), None


class Dirty(Function):
    """Write over its argument, and return it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2).add_(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 2 * grads[0]


class Views(Function):
    """Return two results, the second an argument, keep a view, and take gradients in its backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(gate.view(-1, gate.shape[-1]), up)
        assert gate.detach().numpy().any()
        return F.silu(gate) * up, gate

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            gate, up = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            product = F.silu(gate).view_as(up) * up
            of_gate, of_up = torch.autograd.grad(product, (gate, up), grads[0])
        return of_gate.view_as(up) + grads[1], of_up


class Over(Function):
    """Put its derivative where its argument was, as fused heads do, and its gradient where that was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sigmoid()
        x.detach().numpy()[...] = (y * (1 - y)).numpy()
        ctx.save_for_backward(x.detach())
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grads[0].numpy()[...] *= ctx.saved_tensors[0].numpy()
        return grads[0]


class Looks(Function):
    """Look at values in its backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2 if float(grads[0].sum()) > 0 else grads[0]


class Noise(Function):
    """Drop what NumPy draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = torch.from_numpy(numpy.random.rand(*x.shape) > 0.2)  # noqa: NPY002
        return x * ctx.kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.kept


class Grows(Function):
    """Allocate much where a value is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2 + torch.zeros(1 << 20 if float(x.max()) > 10 else 1)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2


class Chosen(Function):
    """Give what no operator can, or, if it is to, only where a value is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: int) -> Tensor:
        most = float(x.max())
        if way == 1:
            return x[x > most / 2]
        if way == 2:
            ctx.state = object()
        if way == 3:
            raise ValueError("no such way")
        return x[:1] if most > 10 else x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2, None


OPAQUE: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "arrays": lambda b, x: Arrays.apply(x),
    "item": lambda b, x: Item.apply(x, b.weight, 1e-6),
    "dirty": lambda b, x: dirty(x * 1.5),
    "views": lambda b, x: torch.stack(Views.apply(x, x * b.weight)).sum(0),
    "shared": lambda b, x: torch.cat(Views.apply(*x.chunk(2))),
    "same": lambda b, x: Views.apply(x, x)[0],
    "over": lambda b, x: Over.apply(x * 2) * b.weight,
    "looks": lambda b, x: Looks.apply(x),
    "noise": lambda b, x: Noise.apply(x),
}
"""Functions that torch cannot trace."""


def dirty(x: Tensor) -> Tensor:
    y = Dirty.apply(x)
    return x + y


@torch.library.custom_op("test_own_gradients::silu", mutates_args=())
def silu(x: Tensor) -> Tensor:
    a = x.float().numpy()
    return torch.from_numpy(a / (1 + numpy.exp(-a))).to(x.dtype)


@torch.library.custom_op("test_own_gradients::silu_backward", mutates_args=())
def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    a = x.float().numpy()
    gate = 1 / (1 + numpy.exp(-a))
    return torch.from_numpy(grad.float().numpy() * gate * (1 + a * (1 - gate))).to(x.dtype)


@torch.library.custom_op("test_own_gradients::silu_into", mutates_args={"out"})
def silu_into(x: Tensor, out: Tensor, scale: float = 1.0) -> None:
    out.copy_(scale * silu(x))


@torch.library.custom_op("test_own_gradients::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.float().square().mean(-1) + eps)
    return (x * scale[..., None] * weight).to(x.dtype), scale


@torch.library.custom_op("test_own_gradients::norm_backward", mutates_args={"of_x", "of_weight"})
def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, of_x: Tensor, of_weight: Tensor
) -> Tensor:
    """Write gradients where they are to be, as flash attention's backward does."""
    normed = x.float() * scale[..., None]
    of_weight.copy_((grad * normed).flatten(0, -2).sum(0))
    by_weight = grad.float() * weight
    of_x.copy_((by_weight - normed * (by_weight * normed).mean(-1, keepdim=True)) * scale[..., None])
    return scale.clone()


silu.register_fake(torch.empty_like)
silu_backward.register_fake(lambda grad, x: torch.empty_like(x))
silu_into.register_fake(lambda x, out, scale=1.0: None)
norm.register_fake(lambda x, *_: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)))
norm_backward.register_fake(lambda grad, x, weight, scale, *_: torch.empty_like(scale))


def of_norm(ctx: Any, grad: Tensor, *_: Any) -> Any:
    x, weight, scale = ctx.saved_tensors
    of_x, of_weight = torch.empty_like(x), torch.empty_like(weight)
    norm_backward(grad.contiguous(), x, weight, scale, of_weight=of_weight, of_x=of_x)
    return of_x, of_weight, None


silu.register_autograd(
    lambda ctx, grad: silu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
norm.register_autograd(
    of_norm,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2], output[1]),
)


class NormOfOperators(Function):
    """Call operators, as flash attention's function does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    backward = staticmethod(of_norm)


class SiluInto(Function):
    """Call an operator that writes its result where it is to be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        silu_into(x, out)
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return silu_backward(grads[0], *ctx.saved_tensors)


OPERATORS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "silu_operator": lambda b, x: silu(x),
    "norm_operator": lambda b, x: norm(x, b.weight, 1e-6)[0],
    "norm_of_operators": lambda b, x: NormOfOperators.apply(x, b.weight, 1e-6),
    "silu_into": lambda b, x: SiluInto.apply(x),
}
"""Operators of others, with gradients and fake kernels that they register."""

EVERY = CALLS | OPAQUE | OPERATORS


@pytest.mark.slow_cases(r"(?!(norm|item|views)-least|sorted-ample)")
@pytest.mark.parametrize("tight", [False, True], ids=["ample", "least"])
@pytest.mark.parametrize("name", EVERY)
def test_trains_as_eager_does(name: str, tight: bool) -> None:
    torch.manual_seed(0)
    model, micro = Model(EVERY[name]), batches(6)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    program = compiled(model, least(model, micro[:2]) if tight else "1GB")
    for step in range(0, 6, 2):
        numpy.random.seed(step)  # noqa: NPY002
        optimizer.zero_grad()
        loss = torch.stack([eager(**batch) / 2 for batch in micro[step : step + 2]]).sum()
        loss.backward()
        optimizer.step()
        numpy.random.seed(step)  # noqa: NPY002
        assert float(program.train_step(micro[step : step + 2]).loss) == pytest.approx(
            float(loss.detach()), rel=1e-6, abs=1e-6
        )
    values = program.state_dict()
    for parameter, value in eager.state_dict().items():
        torch.testing.assert_close(values[parameter], value, rtol=1e-5, atol=1e-5)
    if name == "noise":
        program.close()
        return
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


@pytest.mark.slow_cases(r"(?!norm\])")
@pytest.mark.parametrize(
    "name", ["norm", "gated", "quantised", "item", "looks", "silu_operator", "norm_operator"]
)
def test_of_weights_in_bf16(name: str) -> None:
    torch.manual_seed(0)
    model = Model(EVERY[name])
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


class Reads(Function):
    """Read in its backward what its forward did not keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any) -> Tensor:
        ctx.block = block
        return x * block.weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.block.weight, None


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
    r"Reads, a torch\.autograd\.Function, which cannot .* is given a Block": lambda b, x: Reads.apply(x, b),
    r"Chosen, a torch\.autograd\.Function, which cannot .* differs from call": lambda b, x: Chosen.apply(
        x, 1
    ),
    r"Chosen, a torch\.autograd\.Function, which cannot .* keeps a object": lambda b, x: Chosen.apply(x, 2),
    r"Chosen, a torch\.autograd\.Function, which cannot .* fails on made-up": lambda b, x: Chosen.apply(x, 3),
    r"Halved, a torch\.autograd\.Function, which has several results": lambda b, x: Halved.apply(x)[0],
    r"Straight, a torch\.autograd\.Function, which is called within a transform": lambda b, x: torch.vmap(
        Straight.apply
    )(x),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        compiled(Model(REFUSED[said]), example_batch=batches(1)[0])


def test_a_function_that_gives_another_shape_for_other_values_is_stopped() -> None:
    torch.manual_seed(0)
    program, (batch,) = compiled(Model(lambda b, x: Chosen.apply(x, 0).sum(0))), batches(1)
    program.train_step(batch)
    with pytest.raises(MegacompileError, match=r"Chosen, a torch\.autograd\.Function, gave .* \(forms"):
        program.train_step(batch | {"x": batch["x"] * 1000})


def test_memory_that_depends_on_values_is_counted_in_every_step() -> None:
    torch.manual_seed(0)
    program, (batch,) = compiled(Model(lambda b, x: Grows.apply(x)), "1MB"), batches(1)
    for _ in range(2):
        program.train_step(batch)
    with pytest.raises(BudgetExceededError, match="bytes of temporaries"):
        program.train_step(batch | {"x": batch["x"] * 1000})


def test_equal_layers_call_one_function_that_runs_for_real(tmp_path: Path) -> None:
    program = compiled(Model(OPAQUE["item"]), example_batch=batches(1)[0], dump=tmp_path)
    (text,) = [f.read_text() for f in tmp_path.rglob("03_blocks.py")]
    assert text.count("def layers_0_forward(") == 1 and "layers_1" not in text
    assert "megacompile.opaque.default([" in text and "megacompile.opaque_backward.default([" in text
    program.close()
