"""Frozen weights in codes made by hand, in layers of bitsandbytes' names, and adapters over them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The quantiles of NormalFloat, "4-bit NormalFloat" of QLoRA (arXiv 2305.14314), appendix E.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
BLOCK, WIDTH = 64, 64


class Params4bit(nn.Parameter):
    """As bitsandbytes keeps weights."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Params4bit:
        fresh = type(self)(self.data.clone(), requires_grad=False)
        vars(fresh).update(copy.deepcopy(vars(self), memo))
        return fresh


class Linear4bit(nn.Linear):
    """A layer of bitsandbytes' names with codes made by hand."""

    compute_type_is_set, compute_dtype = True, None

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.bias.requires_grad_(False)
        count = width * out
        weight = Params4bit(torch.randint(0, 256, (count // 2, 1), dtype=torch.uint8), requires_grad=False)
        scales = torch.rand(count // BLOCK) * 0.2
        shape = torch.Size((out, width))
        weight.quant_state = SimpleNamespace(
            absmax=scales, code=torch.tensor(NF4), blocksize=BLOCK, shape=shape, nested=False,
            dtype=torch.float32,
        )  # fmt: skip
        weight.quant_storage = torch.uint8
        self.weight, self.quant_state = weight, weight.quant_state


class Int8Params(nn.Parameter):
    """As bitsandbytes keeps weights of 8 bits."""


class Linear8bitLt(nn.Linear):
    """A layer of bitsandbytes' names with 8-bit codes by hand, which keeps them itself once it has run."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.bias.requires_grad_(False)
        codes = torch.randint(-127, 128, (out, width), dtype=torch.int8)
        self.weight = Int8Params(codes, requires_grad=False)
        self.weight.CB, self.weight.SCB = codes, torch.rand(out) * 0.5
        self.state = SimpleNamespace(CB=None, SCB=None, reset_grads=self.forget)

    def forget(self) -> None:
        self.state.CB = self.state.SCB = None

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if weight.CB is not None:
            self.state.CB, self.state.SCB, weight.CB, weight.SCB = weight.CB, weight.SCB, None, None
        return F.linear(x, decoded_rows(self.state.CB, self.state.SCB).to(x.dtype), self.bias)


def decoded_rows(codes: Tensor, scales: Tensor) -> Tensor:
    return codes * (scales * (1 / 127))[:, None]


def decoded_blocks(codes: Tensor, state: Any) -> Tensor:
    halves = torch.stack((codes >> 4, codes & 15), -1)
    return (
        (state.code[halves.int()].view(-1, BLOCK) * state.absmax[:, None]).view(state.shape).to(state.dtype)
    )


def library() -> ModuleType:
    """What PEFT imports of bitsandbytes to read weights, and to tell layers."""
    made: Any = ModuleType("bitsandbytes")
    made.__spec__ = ModuleSpec("bitsandbytes", None)
    made.nn = SimpleNamespace(Linear4bit=Linear4bit, Linear8bitLt=Linear8bitLt)
    made.functional = SimpleNamespace(dequantize_4bit=decoded_blocks, int8_vectorwise_dequant=decoded_rows)
    found: ModuleType = made
    return found


def decoded_by_hand(layer: Any) -> Tensor:
    """The weight of a layer's codes, by the definition."""
    if isinstance(layer, Linear8bitLt):
        return decoded_rows(layer.weight.CB, layer.weight.SCB)
    if not isinstance(layer, Linear4bit):
        return layer.weight.codes * layer.weight.scales[:, None]
    state, codes = layer.weight.quant_state, layer.weight.flatten().tolist()
    levels = torch.tensor([NF4[half] for byte in codes for half in (byte >> 4, byte & 15)])
    return (levels.view(-1, BLOCK) * state.absmax[:, None]).view(state.shape)


class Adapted(nn.Module):
    """Frozen layers with adapters beside them, and a loss."""

    def __init__(self, make: Callable[[int, int], nn.Module], layers: int = 3) -> None:
        super().__init__()
        self.bases = nn.ModuleList(make(WIDTH, WIDTH) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for base, down, up in zip(self.bases, self.downs, self.ups, strict=True):
            x = x + torch.tanh(base(x) + up(down(x)))
        return F.mse_loss(x.float(), y)


def frozen_copy(model: Adapted, decode: Callable[[Any], Tensor]) -> Adapted:
    """The same model over plain layers of the decoded weights."""
    torch.manual_seed(0)
    plain = Adapted(lambda width, out: nn.Linear(width, out).requires_grad_(False))
    state = {n: p.detach() for n, p in model.named_parameters() if not n.startswith("bases")}
    plain.load_state_dict(state, strict=False)
    for base, layer in zip(plain.bases, model.bases, strict=True):
        base.weight.data, base.bias.data = decode(layer), layer.bias.detach().clone()  # type: ignore[union-attr]
    return plain
