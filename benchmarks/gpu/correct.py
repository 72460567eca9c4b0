"""Right numbers: every kernel and all paths of attention beside float64, small models beside plain torch."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch
from torch import Tensor

import megacompile
from benchmarks.gpu.findings import Recorder, watch
from benchmarks.gpu.work import batch_of, device, tiny
from megacompile.kernels.eager_check import check
from megacompile.kernels.eager_form import EagerForm
from megacompile.kernels.registry import EAGER_FORMS
from megacompile.units import parse_bytes

_DTYPES = (torch.bfloat16, torch.float32)
_ORDINARY = {"batch": 1, "heads": 8, "groups": 2, "tokens": 256, "width": 1024, "inner": 128, "vocabulary":
4096,
             "columns": 2048}  # fmt: skip
_ODD = {"batch": 1, "heads": 6, "groups": 3, "tokens": 203, "width": 776, "inner": 128, "vocabulary": 4001,
        "columns": 1530}  # fmt: skip
_HEAD_WIDTHS = (
    "rope",
    "qk_norm_rope",
    "attention",
    "capped_attention",
    "gated_delta_rule",
    "mamba2_chunk_scan",
)
_SWITCHES = ("rms_norm", "add_rms_norm", "layer_norm", "glu", "rope", "qk_norm_rope", "linear_cross_entropy")
_SLACK = {torch.float32: 5e-4, torch.bfloat16: 1e-2}
_PATHS: dict[str, dict[str, Any]] = {
    "causal": {}, "full": {"causal": False}, "window": {"window": 37}, "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True}, "bias": {"bias": (2, 1, 1, 0)},
    "trained bias": {"bias": (1, 4, 0, 0), "trained": True},
}  # fmt: skip


def kernels(to: Recorder) -> None:
    """Each fused operator beside float64, at an ordinary shape and at an odd one, in both dtypes."""
    for name, form in sorted(EAGER_FORMS.items()):
        for dtype in _DTYPES:
            for sizes in (_ORDINARY, _ODD):
                shape = _shape(form, sizes)
                what = f"kernel {name} {_short(dtype)} {'x'.join(map(str, shape))}"
                if to.done(what):
                    continue
                with to.finding(what, kernel=name) as finding:
                    errors = check(form, shape, dtype, {name: form.ours}, torch.device(device()))
                    finding["error"], wrong = errors[name]
                    finding |= {"right": not wrong} | ({"wrong": wrong} if wrong else {})


def _shape(form: EagerForm, sizes: dict[str, int]) -> tuple[int, ...]:
    """The form's usual shape, no larger than ``sizes``; heads keep the width that kernels want."""
    keep = {"width"} if form.name in _HEAD_WIDTHS else set()
    return tuple(
        size if what in keep else min(size, sizes[what])
        for what, size in zip(form.sizes, form.shape, strict=True)
    )


def kernels_found_wrong(to: Recorder) -> dict[str, bool] | None:
    """Switch off what :func:`kernels` found wrong: an argument of ``compile``; None where all are right."""
    wrong = {e["kernel"] for e in to.known() if "kernel" in e and not e["right"]}
    return dict.fromkeys(sorted(wrong & set(_SWITCHES)), False) or None


def attention(to: Recorder, tokens: int) -> None:
    """Every path of attention, forward and backward, beside float64: errors as shares of the largest value.

    Right is what stays within the error of float32 on inputs rounded alike, and 5e-4 (float32) or 1e-2 more.
    """
    for dtype, slack in _SLACK.items():
        for name, path in _PATHS.items():
            what = f"attention {name} {_short(dtype)}"
            if to.done(what):
                continue
            with to.finding(what) as finding:
                inputs = _attention_inputs(tokens, path, dtype)
                exact = _attend([x.double().cpu() for x in inputs], path)
                rounded = _attend([x.float().cpu() for x in inputs], path)
                pairs = []
                for ours, plain, true in zip(_attend(inputs, path), rounded, exact, strict=True):
                    scale = float(true.abs().max()) or 1.0
                    allowed = float((plain.double() - true).abs().max()) / scale + slack
                    pairs.append((float((ours.cpu().double() - true).abs().max()) / scale, allowed))
                finding["error"], finding["allowed"] = max(pairs, key=lambda pair: pair[0] - pair[1])
                finding["right"] = all(error <= allowed for error, allowed in pairs)


def _attention_inputs(tokens: int, path: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values with grouped heads, then a bias and sinks where the path has them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, tokens, 64), (2, 2, tokens, 64), (2, 2, tokens, 64)]
    shapes += [tuple(s or tokens for s in path["bias"])] if "bias" in path else []
    shapes += [(4,)] if "sinks" in path else []
    return [torch.randn(s, generator=generator).to(device(), dtype) for s in shapes]


def _attend(inputs: list[Tensor], path: dict[str, Any]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    bias, sinks = leaves[3] if "bias" in path else None, leaves[3] if "sinks" in path else None
    trained = path.get("trained", False)
    if bias is not None and not trained:
        bias.requires_grad_(False)
    out, _ = torch.ops.megacompile.attention(
        *leaves[:3], bias, sinks, None, 0.125, path.get("causal", True), path.get("window", 0),
        path.get("softcap", 0.0), 0.0, 0, trained,
    )  # fmt: skip
    grad = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    wanted = [x for x in leaves if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


_WAYS = (  # what, dtype, options of compile, most that a loss may differ from eager's in float32, relative
    (
        "float32 streamed, no fused kernels",
        torch.float32,
        {"kernels": False, "planner": "double-buffer"},
        1e-4,
    ),
    ("float32 streamed", torch.float32, {"planner": "double-buffer"}, 1e-3),
    ("bfloat16 streamed", torch.bfloat16, {"planner": "double-buffer"}, 3e-2),
    ("bfloat16 as searched", torch.bfloat16, {}, 3e-2),
    ("bfloat16 as searched, clipped", torch.bfloat16, {"max_grad_norm": 1e9}, 3e-2),
)
_TOKENS, _LENGTH, _VOCABULARY = 1024, 256, 512


def small_models(to: Recorder, budget: str, steps: int) -> None:
    """Train a small Llama in several ways, beside plain torch on the device; each twice, to the same bits."""
    exact = _plain(steps)
    for what, dtype, options, most in _WAYS:
        if to.done(what):
            continue
        with to.finding(what) as finding:
            first, second = (_ours(dtype, budget, steps, options) for _ in range(2))
            finding["loss off by"] = max(abs(a - b) / abs(b) for a, b in zip(first[0], exact[0], strict=True))
            finding["weights off by"] = max(float((first[1][n] - w).abs().max()) for n, w in exact[1].items())
            finding["bits of plain torch"] = same(first, exact)
            finding["bits repeat"] = same(first, second)
            finding |= {"held": first[2], "losses": first[0]}
            within = finding["loss off by"] <= most and first[2] <= parse_bytes(
                budget, what="budget", available=10**18
            )
            finding["right"] = bool(within and finding["bits repeat"])
    if not any("losses" in e for e in to.known() if e["stage"] == to.stage):
        raise RuntimeError("No way of training ends a step.")


def races(to: Recorder, seeds: int, steps: int, budget: str) -> None:
    """The same run with random delays of every copy: all bits must be the same."""
    with to.finding("bits under delayed copies") as finding:
        runs = [_ours(torch.bfloat16, budget, steps, {"max_grad_norm": 1.0}, seed) for seed in range(seeds)]
        finding |= {"runs": seeds, "right": all(same(run, runs[0]) for run in runs)}


def same(a: Any, b: Any) -> bool:
    """Whether the losses of two runs, and all their values, have the same bits."""
    return a[0] == b[0] and all(torch.equal(value, b[1][name]) for name, value in a[1].items())


def _plain(steps: int) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses and weights of eager training in float32, on the device."""
    model = tiny().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        batch = {k: v.to(device()) for k, v in batch_of(_TOKENS, _LENGTH, _VOCABULARY, step).items()}
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach().cpu() for name, p in model.named_parameters()}, 0


def _ours(
    dtype: torch.dtype, budget: str, steps: int, options: dict[str, Any], delayed: int = 0
) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, weights, and the most bytes that the whole device had in use."""
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with HeldBytes() as held, megacompile.compile(
        model, budget, optimizer=optimizer, device=device(), compute_dtype=dtype,
        example_batch=batch_of(_TOKENS, _LENGTH, _VOCABULARY), **options,
    ) as program:  # fmt: skip
        watch(program)
        if delayed:
            _delay_copies(program, random.Random(delayed))
        losses = [
            float(program.train_step(batch_of(_TOKENS, _LENGTH, _VOCABULARY, step)).loss)
            for step in range(steps)
        ]
        return losses, program.state_dict(), held.most


def _delay_copies(program: Any, chance: random.Random) -> None:
    """Delay copies: the device idles on their stream for up to half a millisecond."""
    target = program._session.runtime.device
    copy = target.copy

    def late(*arguments: Any) -> Any:
        if device() == "cuda":
            torch.cuda._sleep(chance.randrange(1_000_000))  # type: ignore[no-untyped-call]
        return copy(*arguments)

    target.copy = late


class HeldBytes(threading.Thread):
    """The most bytes of the whole device in use within, contexts and libraries included; 0 on a CPU."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self._over = 0, threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.02):
            free, total = torch.cuda.mem_get_info()
            self.most = max(self.most, total - free)

    def __enter__(self) -> HeldBytes:
        if device() == "cuda":
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
