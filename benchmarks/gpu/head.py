"""The head whose gradients come with its loss: right beside the two passes, and how fast."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.gpu.findings import Recorder
from benchmarks.gpu.work import device, share_off
from megacompile.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_with_gradients

_MOST = 1e-2  # of the largest value, that one differs from the other


def times(to: Recorder, shapes: Sequence[Sequence[int]]) -> None:
    """Time both in bf16: milliseconds, TFLOP/s of three products, equal bits.

    A shape is tokens, width and classes; every fifth token has no label.
    """
    for tokens, width, classes in shapes:
        _time(to, tokens, width, classes)


def _time(to: Recorder, tokens: int, width: int, classes: int) -> None:
    from triton.testing import do_bench

    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(n, width).mul_(0.02).to(device(), torch.bfloat16) for n in (tokens, classes)
    )
    labels = torch.randint(0, classes, (tokens,))
    labels[::5] = -100
    labels, grad = labels.to(device()), torch.full((tokens,), 1 / tokens, device=device())

    def with_loss() -> tuple[Tensor, ...]:
        return linear_cross_entropy_with_gradients(hidden, weight, labels, grad)[:3]

    def two_passes() -> tuple[Tensor, ...]:
        given = [x.detach().requires_grad_() for x in (hidden, weight)]
        loss = linear_cross_entropy(*given, labels)
        return loss.detach(), *torch.autograd.grad(loss, given, grad)

    exact = two_passes()
    for name, run in (("gradients with the loss", with_loss), ("two passes", two_passes)):
        what = f"{name} {tokens}x{width}x{classes}"
        if to.done(what):
            continue
        with to.finding(what) as finding:
            first = run()
            finding["error"] = max(itertools.starmap(share_off, zip(first, exact, strict=True)))
            finding["bits repeat"] = all(all(map(torch.equal, first, run())) for _ in range(3))
            finding["right"] = finding["error"] < _MOST and finding["bits repeat"]
            milliseconds = do_bench(run, warmup=25, rep=100, return_mode="median")
            work = 6.0 * tokens * width * classes
            finding |= {"ms": milliseconds, "TFLOP/s": work / milliseconds / 1e9}
