"""The candidate for Hopper's attention: right beside float64, equal bits a thousand times, and how fast.

Findings decide whether ``benchmarks/hopper_attention.py`` takes the place of our Triton kernels on such a
card. It has a stage of its own, because what has never run may hang.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import hopper_attention as hopper
from benchmarks.gpu.findings import Recorder
from benchmarks.gpu.work import device
from megacompile.kernels import attention
from megacompile.kernels.attention import Rule, document_bounds

_MOST = 1e-2  # of the largest value, from float64
_SHAPE = 2, 8, 2, 512, 512, 128  # batch, heads, key heads, queries, keys, width
_CASES: dict[str, tuple[tuple[int, ...], Rule]] = {
    "causal": (_SHAPE, Rule(0.09)),
    "causal, odd": ((1, 6, 3, 203, 203, 128), Rule(0.09)),
    "causal, 64 wide": ((2, 4, 4, 1000, 1000, 64), Rule(0.125)),
    "causal, 96 wide": ((1, 4, 1, 333, 333, 96), Rule(0.1)),
    "causal, three queries": ((1, 2, 1, 3, 3, 128), Rule(0.09)),
    "full": (_SHAPE, Rule(0.09, False)),
    "full, more keys": ((2, 4, 2, 70, 515, 128), Rule(0.09, False)),
    "window": ((1, 4, 2, 1000, 1000, 128), Rule(0.09, window=200)),
    "two-sided window": ((1, 4, 2, 1000, 1000, 64), Rule(0.125, False, 37)),
    "softcap": ((1, 4, 2, 400, 400, 128), Rule(0.09, softcap=5.0)),
    "sinks": ((1, 4, 2, 400, 400, 64), Rule(0.125)),
    "packed": ((2, 4, 2, 700, 700, 128), Rule(0.09)),
    "all": ((1, 4, 2, 700, 700, 128), Rule(0.09, window=150, softcap=5.0)),
}
Results = tuple[Tensor, ...]


def check(to: Recorder, shapes: Sequence[Sequence[int]], repeats: int) -> None:
    """Compare all cases with float64; then, by shape, many runs with the first one, and times.

    A shape is batch, heads, key heads, tokens and width; causal. The first is run ``repeats`` times, the
    others 20 times. Times stand beside those of our Triton kernels.
    """
    for name in _CASES:
        what = f"attention by Hopper's kernels, {name}"
        if to.done(what):
            continue
        with to.finding(what) as finding:
            given, rule = _inputs(name)
            errors = list(map(_error, _run(given, rule), _exact(given, rule)))
            finding |= {"error": max(errors), "errors": errors}
            finding["right"] = all(error <= _MOST for error in errors)
    for place, shape in enumerate(shapes):
        _time(to, tuple(shape), 20 if place else repeats)


def _inputs(name: str) -> tuple[list[Tensor], Rule]:
    """The output's gradient, queries, keys and values, laid out as [B, S, H, D] like a model's."""
    (batch, heads, groups, queries, keys, width), rule = _CASES[name]
    generator = torch.Generator().manual_seed(0)
    sizes = (queries, heads), (queries, heads), (keys, groups), (keys, groups)
    given = [
        torch.randn(batch, tokens, n, width, generator=generator).to(device(), torch.bfloat16).transpose(1, 2)
        for tokens, n in sizes
    ]
    if name in ("sinks", "all"):
        rule = replace(rule, sinks=torch.randn(heads, generator=generator).to(device(), torch.bfloat16))
    if name in ("packed", "all"):
        ends = torch.tensor([0, 50, 51, 400, queries - 23], dtype=torch.int32, device=device())
        rule = replace(rule, bounds=document_bounds(ends, queries))
    return given, rule


def _run(given: Sequence[Tensor], rule: Rule) -> Results:
    """Return (out, lse, dq, dk, dv, and dsinks where there are any), written to memory that held NaN."""
    grad, q, k, v = given
    poison = [torch.full_like(x, torch.nan) for x in (*given, grad[..., 0].float())]
    del poison
    out, lse = hopper.hopper_attention_forward(q, k, v, rule)
    poison = [torch.full_like(x, torch.nan) for x in (*given, grad[..., 0].float())]
    del poison
    gradients = hopper.hopper_attention_backward(grad, q, k, v, out, lse, rule)
    return out, lse, *(x for x in gradients if x.numel())


def _exact(given: Sequence[Tensor], rule: Rule) -> Results:
    grad, q, k, v = (x.double() for x in given)
    out, lse = attention.forward_reference(q, k, v, rule)
    gradients = attention.backward_reference(grad, q, k, v, out, lse, rule)
    return out, lse, *(x for x in gradients if x.numel())


def _error(ours: Tensor, exact: Tensor) -> float:
    """The largest difference as a share of the largest value; infinite where only one of them is finite."""
    finite = exact.isfinite()
    if not torch.equal(ours.isfinite(), finite):
        return float("inf")
    ours, exact = (x.double().where(finite, 0.0) for x in (ours, exact))
    return float((ours - exact).abs().max() / exact.abs().max())


def _time(to: Recorder, shape: tuple[int, ...], repeats: int) -> None:
    """Equal bits of many runs, then milliseconds and TFLOP/s of both passes, by stages."""
    from triton.testing import do_bench

    batch, heads, groups, tokens, width = shape
    text = "x".join(map(str, shape))
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, n, tokens, width, device=device(), dtype=torch.bfloat16)
        for n in (heads, groups, groups, heads)
    )
    rule = Rule(width**-0.5)
    out, lse = hopper.hopper_attention_forward(q, k, v, rule)
    calls: dict[str, Callable[[], Any]] = {
        **{
            f"Hopper's forward, {n} stages": partial(hopper.hopper_attention_forward, q, k, v, rule, n)
            for n in (2, 3)
        },
        "Triton's forward": lambda: attention.flash_attention_forward(q, k, v, rule),
        **{
            f"Hopper's backward, {n} stages": partial(
                hopper.hopper_attention_backward, grad, q, k, v, out, lse, rule, n
            )
            for n in (2, 3)
        },
        "Triton's backward": lambda: attention.flash_attention_backward(grad, q, k, v, out, lse, rule),
    }  # fmt: skip
    flops = 2.0 * batch * heads * tokens**2 * width
    for name, run in calls.items():
        what = f"{name} {text}"
        if to.done(what):
            continue
        with to.finding(what) as finding:
            first = [x.clone() for x in run() if x.numel()]
            times = range(repeats if "Hopper" in name else 3)
            finding["bits repeat"] = all(all(map(torch.equal, first, run())) for _ in times)
            other = calls[f"Triton's {'forward' if 'forward' in name else 'backward'}"]()
            finding["error"] = max(itertools.starmap(_error, zip(first, other, strict=True)))
            finding["right"] = finding["bits repeat"] and finding["error"] < 2 * _MOST
            milliseconds = do_bench(run, warmup=25, rep=100, return_mode="median")
            work = flops if "forward" in name else 2.5 * flops
            finding |= {"ms": milliseconds, "TFLOP/s": work / milliseconds / 1e9}
