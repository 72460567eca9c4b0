"""``megacompile doctor --gpu``: each kernel, and a tiny model trained through CUDA, beside plain PyTorch.

In: a device. Out: one line for each kernel and way of training, "OK" with the figures, or what failed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import megacompile
from megacompile.graph.fusion_rewriter import PATTERNS
from megacompile.kernels.adamw import adamw_
from megacompile.kernels.eager_check import check
from megacompile.kernels.registry import EAGER_FORMS
from megacompile.state.adam import AdamHyper, adamw_step
from megacompile.units import format_bytes

_LARGEST_SIZES = {
    "batch": 1,
    "heads": 8,
    "groups": 2,
    "tokens": 256,
    "width": 1024,
    "inner": 128,
    "vocabulary": 4096,
    "columns": 2048,
}
"""The most of each size that a kernel is tried at."""
_ROUNDED = 1e-6  # of a tensor's norm: float32 operations that round otherwise
_STEPS, _BATCH, _LENGTH, _WIDTH, _HEADS, _WORDS = 4, 4, 256, 256, 4, 500
_WAYS = (  # what, dtype, planner, most that a loss may differ, relative to plain PyTorch's in FP32
    ("float32, every weight streamed", torch.float32, "double-buffer", 1e-3),
    ("bfloat16, every weight streamed", torch.bfloat16, "double-buffer", 3e-2),
    ("bfloat16, as searched", torch.bfloat16, "search", 3e-2),
)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, _HEADS, -1)).transpose(1, 3).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        added: Tensor = self.mlp(x)
        return x + added


class _TinyModel(nn.Module):
    """A causal language model: an embedding, attention, norms and MLPs, a head with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(4))
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Finding:
    """The outcome of one way of training; ``text`` says what failed where it is not ``good``."""

    what: str
    good: bool
    text: str


def findings(device: str, budget: str = "90%") -> Iterator[Finding]:
    """Each kernel and way of training, one after the other; a failure keeps no other from running. What is
    trained does without the kernels that were found wrong, as far as they can be switched off."""
    off: dict[str, bool] = {}
    for name in sorted(EAGER_FORMS):
        found = _kernel(name, torch.device(device))
        switch = "glu" if name == "clamped_glu" else name  # which has none of its own
        if not found.good and switch in PATTERNS:
            off[switch] = False
        yield found if found.good else replace(found, text=f"{found.text}; {_without(switch)}")
    yield _update(torch.device(device))
    model, optimizer = _made()
    expected = []
    for i in range(_STEPS):
        optimizer.zero_grad()
        loss = model(**_batch(i))
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for way, dtype, planner, most in _WAYS:
        what = f"{way}, without {', '.join(off)}" if off else way
        try:
            losses, figures = _train(device, budget, dtype, planner, off)
            yield _compared(what, losses, expected, most, figures)
        except Exception as error:  # whatever it is, the screen has to show it
            yield Finding(what, False, f"{type(error).__name__}: {error}")


def _kernel(name: str, device: torch.device) -> Finding:
    """A fused operator in bfloat16, forward and backward, beside float64."""
    form = EAGER_FORMS[name]
    shape = tuple(min(size, _LARGEST_SIZES[what]) for what, size in zip(form.sizes, form.shape, strict=True))
    found = check(form, shape, torch.bfloat16, {name: form.ours}, device)
    error, wrong = found[name]
    return Finding(f"kernel {name}", not wrong, wrong or f"within {error:.1e} of float64")


def _without(switch: str) -> str:
    """Say how to train without a kernel."""
    if switch in PATTERNS:
        return f'compile(kernels={{"{switch}": False}}) does without it'
    return "nothing switches it off: train no model that needs it"


def _update(device: torch.device) -> Finding:
    """AdamW of a million parameters whose state is on the device, beside that on the host."""
    try:
        generator = torch.Generator().manual_seed(0)
        weight, grad, mean = (torch.randn(1 << 20, generator=generator) for _ in range(3))
        host = (weight, mean * 1e-3, mean.square() * 1e-6)
        moved = [x.to(device, copy=True) for x in host]
        adamw_(moved[0], None, moved[1], moved[2], grad.to(device), 1e-3, 0.9, 0.999, 1e-8, 0.1, 7, None)
        adamw_step(*host, grad, AdamHyper(1e-3, weight_decay=0.1, step=7))
        pairs = [(x.cpu(), y) for x, y in zip(moved, host, strict=True)]
        error = max(float((x - y).norm() / y.norm()) for x, y in pairs)
        same = all(torch.equal(x, y) for x, y in pairs)
    except Exception as raised:  # whatever it is, the screen has to show it
        return Finding("AdamW", False, f"{type(raised).__name__}: {raised}")
    if same:
        return Finding("AdamW", True, "bit for bit the host's")
    text = f"within {error:.1e} of the host's, not bit for bit: bits depend on where state is"
    return Finding("AdamW", error <= _ROUNDED, text)


def _compared(
    what: str, losses: list[float], expected: list[float], most: float, figures: str = ""
) -> Finding:
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    if all(d <= most for d in differences):  # NaN is not
        return Finding(
            what, True, f"{len(losses)} losses within {max(differences):.1e} of plain PyTorch's{figures}"
        )
    return Finding(what, False, f"the losses are {losses}, plain PyTorch's {expected}")


def _train(
    device: str, budget: str, dtype: torch.dtype, planner: str, off: dict[str, bool]
) -> tuple[list[float], str]:
    """Losses, and the last step beside what was predicted of it."""
    model, optimizer = _made()
    program = megacompile.compile(
        model, budget, optimizer=optimizer, device=device, compute_dtype=dtype, planner=planner,
        kernels=off or None,
    )  # fmt: skip
    before = _allocator_retries()
    with program:
        losses = [float(program.train_step(_batch(i)).loss) for i in range(_STEPS - 1)]
        program.synchronize()
        start = time.perf_counter()
        losses.append(float(program.train_step(_batch(_STEPS - 1)).loss))
        program.synchronize()
        seconds, memory = time.perf_counter() - start, program.memory
        figures = (
            f"; a step {seconds:.2g} s, predicted {program.schedule.predicted_seconds:.2g} s; peak "
            f"{format_bytes(memory.device_peak_bytes)}, predicted {format_bytes(memory.predicted_peak_bytes)}"
            f"; {_allocator_retries() - before} allocator retries"
        )
    return losses, figures


def _allocator_retries() -> int:
    """Return the number of times that torch's allocator has given pages back to find room, which waits for
    the device."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _TinyModel()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(_WORDS, (_BATCH, _LENGTH), generator=generator)}
