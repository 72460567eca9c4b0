"""Features beside plain torch: each trains a tiny model, twice, with losses, weights and bits compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import megacompile
from benchmarks.gpu.correct import HeldBytes, kernels_found_wrong, same
from benchmarks.gpu.findings import Recorder, watch
from benchmarks.gpu.work import batch_of, device, missing, tiny
from megacompile.units import parse_bytes
from tests.support import coded_weights
from tests.support.models import gpt2

_STEPS = 3
# Rows, of 64: a table for whose state the device has room is not looked up on the host.
_TABLE = 1_200_000
_NEAR = {torch.float32: (1e-3, 1e-2), torch.bfloat16: (3e-2, 1e-1)}  # losses; weights, of how far they moved
Outcome = tuple[list[float], dict[str, Tensor], int]


@dataclass(frozen=True)
class Feature:
    """What is trained. ``used`` stands in the schedule or the source of a program that has the feature.

    ``plain`` makes the model of plain torch, where it is another. ``by_cpu``: it draws numbers as no plain
    torch does, and the CPU backend is what it is compared with. ``same_bits``: plain torch trains on the
    device too, and must give the same bits. ``package`` is what it cannot do without.
    """

    make: Callable[[], Any]
    batch: Callable[[int], Any]
    used: str = ""
    dtype: torch.dtype = torch.float32
    optimizer: Callable[[nn.Module], Any] = lambda model: _adam(model.parameters())
    plain: Callable[[], Any] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    by_cpu: bool = False
    same_bits: bool = False
    package: str = ""
    rollout: bool = False  # after the first step
    budget: str = "2GB"
    options: dict[str, Any] = field(default_factory=dict)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    """AdamW whose step has no jump where a gradient is near zero: rounding stays rounding."""
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3, eps=1e-3)


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = {n: p for n, p in model.named_parameters() if p.dim() == 2 and ".layers." in n}
    rest = [p for n, p in model.named_parameters() if n not in matrices]
    return [torch.optim.Muon(matrices.values(), lr=1e-2), _adam(rest)]


def _ids(seed: int, vocabulary: int = 512) -> dict[str, Tensor]:
    return batch_of(512, 128, vocabulary, seed)


def _adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model: Any = tiny()
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    adapted: nn.Module = get_peft_model(model, config)
    return adapted.train()


def _experts() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True, use_cache=False,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).train()


def _coded(layer: Any, dtype: torch.dtype, *, decoded: bool) -> nn.Module:
    """Adapters over layers of codes, or over layers of what these stand for."""
    torch.manual_seed(0)
    model = coded_weights.Adapted(layer)
    if not decoded:
        return model
    return coded_weights.frozen_copy(model, lambda x: coded_weights.decoded_by_hand(x).to(dtype).float())


def _rows(seed: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 64, coded_weights.WIDTH, generator=torch.Generator().manual_seed(seed)).unbind()
    return x, y


class _Given(nn.Module):
    """Matrices whose gradients are what the batch holds."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(64, 256)), nn.Parameter(torch.randn(256, 64))

    def forward(self, down: Tensor, up: Tensor) -> Tensor:
        return (self.down * down).sum() + (self.up * up).sum()


def _gradients(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, 256, generator=generator), torch.randn(256, 64, generator=generator)


class _Quantised(torch.autograd.Function):
    """Quantise by a learnt step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x, step)
        return (x / step).round().clamp(-7, 7) * step

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, step = ctx.saved_tensors
        inside = (x / step).abs() <= 7
        rest = torch.where(inside, (x / step).round() - x / step, (x / step).sign() * 7)
        return inside * grads[0], (rest * grads[0]).mean().unsqueeze(0)


class _Normed(torch.autograd.Function):
    """Normalise by the root of the mean square; the statistic is kept on the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deviation = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * ctx.deviation * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        normed, grad = x * ctx.deviation, grads[0] * weight
        of_x = (grad - normed * (grad * normed).mean(-1, keepdim=True)) * ctx.deviation
        return of_x, (grads[0] * normed).flatten(0, -2).sum(0)


class _Own(nn.Module):
    """Residual layers with gradients of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.weights = nn.ParameterList(torch.ones(64) for _ in self.layers)
        self.step = nn.Parameter(torch.full((1,), 0.05))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer, weight in zip(self.layers, self.weights, strict=True):
            x = x + torch.tanh(layer(_Quantised.apply(_Normed.apply(x, weight), self.step)))
        return F.mse_loss(x, y)


class _Reader(nn.Module):
    """A table of which a batch reads few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(_TABLE, 64)
        self.mix, self.head = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.mix(self.table(ids))))
        return F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())


def _looked_up(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, _TABLE, (4, 128), generator=draw)
    ids[1, 4:9] = ids[0, 2]
    return ids, torch.randint(0, 32, ids.shape, generator=draw)


class _Pictures(nn.Module):
    """Convolutions and BatchNorm, with a residual block that reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.inner = nn.Sequential(
            nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32),
        )  # fmt: skip
        self.down = nn.Sequential(nn.Conv2d(16, 32, 1, 2, bias=False), nn.BatchNorm2d(32))
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        scores: Tensor = self.head(F.relu(self.inner(x) + self.down(x)).mean((2, 3)))
        return scores


def _pictures(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(8, 3, 16, 16, generator=draw), torch.randint(0, 10, (8,), generator=draw)


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return make().train()

    return seeded


def _images(name: str) -> Feature:
    from tests.support import vision_language

    case = vision_language.cases()[name]
    return Feature(_seeded(case.build), lambda seed: case.batch(case.sizes[0], seed, 0), dtype=torch.bfloat16)


def _codes(layer: Any) -> Feature:
    return Feature(
        lambda: _coded(layer, torch.bfloat16, decoded=False), _rows, dtype=torch.bfloat16,
        plain=lambda: _coded(layer, torch.bfloat16, decoded=True),
    )  # fmt: skip


_STREAMED = {"planner": "double-buffer"}
FEATURES: dict[str, Callable[[], Feature]] = {
    "Muon": lambda: Feature(
        tiny, _ids, "orthogonalize", torch.bfloat16, _muon, options=_STREAMED | {"max_grad_norm": 0.5}
    ),
    "Muon, of given gradients": lambda: Feature(
        _seeded(_Given), _gradients, "orthogonalize", same_bits=True,
        optimizer=lambda model: torch.optim.Muon(model.parameters(), lr=1e-2),
    ),
    "adapters over 4-bit codes": lambda: _codes(coded_weights.Linear4bit),
    "adapters over 8-bit codes": lambda: _codes(coded_weights.Linear8bitLt),
    "rows of a table": lambda: Feature(
        _seeded(_Reader), _looked_up, "rt.gather(", torch.bfloat16, options=_STREAMED, budget="1.4GB"
    ),
    "rollout": lambda: Feature(tiny, _ids, rollout=True),
    "experts": lambda: Feature(_experts, _ids, dtype=torch.bfloat16),
    "images of several sizes": lambda: _images("Qwen2.5-VL"),
    "BatchNorm": lambda: Feature(
        _seeded(_Pictures), _pictures, loss=lambda out, batch: F.cross_entropy(out, batch[1])
    ),
    "gradients of one's own": lambda: Feature(_seeded(_Own), _rows),
    "dropout": lambda: Feature(
        _seeded(lambda: gpt2(0.1)), lambda seed: batch_of(256, 64, 128, seed), by_cpu=True
    ),
    "an optimizer's own class": lambda: Feature(
        tiny, _ids, optimizer=lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-3),
        options=_STREAMED,
    ),
    "peft": lambda: Feature(_adapters, _ids, dtype=torch.bfloat16, package="peft"),
}  # fmt: skip


def features(to: Recorder) -> None:
    """Train by each feature, twice to the same bits, beside plain torch on the host, or the CPU backend.

    Weights are off by a share of how far plain torch moves them.
    """
    for name, made in FEATURES.items():
        if to.done(name):
            continue
        with to.finding(name) as finding:
            feature = made()
            if feature.package and (why := missing(feature.package)):
                finding["not measured"] = why
                continue
            ours = [_ours(feature, device(), to) for _ in range(2)]
            plain = _ours(feature, "cpu", to) if feature.by_cpu else _plain(feature)
            _compare(finding, ours, plain, feature)


def _compare(finding: dict[str, Any], ours: list[Outcome], plain: Outcome, feature: Feature) -> None:
    """Write down how far ours is from plain torch, and whether it is right."""
    most_loss, most_weight = _NEAR[feature.dtype]
    start = (feature.plain or feature.make)().state_dict()
    first, second = ours
    finding["loss off by"] = max(abs(a - b) / abs(b) for a, b in zip(first[0], plain[0], strict=True))
    moved = {n: (x.double(), start[n].double()) for n, x in plain[1].items() if n in start}
    off = sum(float((first[1][n] - x).square().sum()) for n, (x, y) in moved.items() if not torch.equal(x, y))
    far = sum(float((y - x).square().sum()) for x, y in moved.values())
    finding["weights off by"] = (off / far) ** 0.5
    finding["bits of plain torch"] = same(first, plain)
    finding["bits repeat"] = same(first, second)
    finding |= {"held": first[2], "losses": first[0]}
    near = finding["loss off by"] <= most_loss and finding["weights off by"] <= most_weight
    within = first[2] <= parse_bytes(feature.budget, what="budget", available=10**18)
    finding["right"] = bool(near and within and finding["bits repeat"])
    finding["right"] &= finding["bits of plain torch"] or not feature.same_bits
    if feature.rollout:
        finding["tokens of plain torch"] = torch.equal(first[1]["tokens"], plain[1]["tokens"])
        finding["right"] &= finding["tokens of plain torch"]


def _ours(feature: Feature, where: str, to: Recorder) -> Outcome:
    """Losses, values, and the most bytes that the whole device had in use."""
    model, values = feature.make(), {}
    options = feature.options | ({"loss_fn": feature.loss} if feature.loss else {})
    with HeldBytes() as held, warnings.catch_warnings(action="ignore"), megacompile.compile(
        model, feature.budget, optimizer=feature.optimizer(model), device=where, compute_dtype=feature.dtype,
        kernels=kernels_found_wrong(to), **options,
    ) as program:  # fmt: skip
        watch(program)
        losses = []
        for seed in range(_STEPS):
            losses.append(float(program.train_step(feature.batch(seed)).loss))
            if feature.rollout and not seed:
                with program.rollout() as rolled:
                    values = _generated(rolled)
        if feature.used and feature.used not in program.source + str(program.schedule):
            raise RuntimeError(f"The program does without it: it has no {feature.used}.")
        return losses, program.state_dict() | values, held.most


def _plain(feature: Feature) -> Outcome:
    """Losses and values of eager training in float32, on the host, or the device for the same bits."""
    where = device() if feature.same_bits else "cpu"
    model = (feature.plain or feature.make)().to(where)
    made, values = feature.optimizer(model), {}
    losses = []
    for seed in range(_STEPS):
        batch = pytree.tree_map_only(Tensor, lambda x: x.to(where), feature.batch(seed))
        if feature.loss is not None:
            loss = feature.loss(model(batch[0]), batch)
        else:
            loss = model(**batch).loss if isinstance(batch, dict) else model(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if "max_grad_norm" in feature.options:
            nn.utils.clip_grad_norm_(model.parameters(), feature.options["max_grad_norm"])
        for optimizer in made if isinstance(made, list) else [made]:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if feature.rollout and not seed:
            values = _generated(model.eval())
            model.train()
    return losses, {n: x.detach().cpu() for n, x in model.state_dict().items()} | values, 0


def _generated(model: Any) -> dict[str, Tensor]:
    """The likeliest tokens after prompts of two rows, by a cache of keys and values."""
    prompts = _ids(7)["input_ids"][:2, :16]
    tokens = model.generate(prompts, max_new_tokens=16, do_sample=False, pad_token_id=0, use_cache=True)
    return {"tokens": tokens}
