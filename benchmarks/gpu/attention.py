"""Every path that attention takes on this device, forward and backward, beside float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import megacompile.capture.attention  # noqa: F401  registers the operator
from benchmarks.gpu.record import Result
from benchmarks.gpu.work import device

_SLACK = {torch.float32: 5e-4, torch.bfloat16: 1e-2}
CASES: dict[str, dict[str, Any]] = {
    "causal": {}, "full": {"causal": False}, "window": {"window": 37}, "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True}, "bias": {"bias": (2, 1, 1, 0)},
    "trained bias": {"bias": (1, 4, 0, 0), "trained": True},
}  # fmt: skip


def paths(tokens: int) -> Result:
    """Largest error of each case over its largest value; right where it stays within that of float32 on
    inputs rounded alike and 5e-4 (float32) or 1e-2 (bfloat16) more."""
    found: Result = {}
    for dtype, slack in _SLACK.items():
        for name, case in CASES.items():
            given = _inputs(tokens, case, dtype)
            exact = _run([x.double().cpu() for x in given], case)
            rounded = _run([x.float().cpu() for x in given], case)
            errors = []
            for ours, plain, true in zip(_run(given, case), rounded, exact, strict=True):
                scale = float(true.abs().max()) or 1.0
                allowed = float((plain.double() - true).abs().max()) / scale + slack
                errors.append((float((ours.cpu().double() - true).abs().max()) / scale, allowed))
            found[f"{name} {str(dtype).removeprefix('torch.')}"] = max(e for e, _ in errors)
            found["right"] = found.get("right", True) and all(e <= a for e, a in errors)
    return found


def _inputs(tokens: int, case: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v with grouped heads, then a bias and sinks where the case has them."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, tokens, 64), (2, 2, tokens, 64), (2, 2, tokens, 64)]
    shapes += [tuple(s or tokens for s in case["bias"])] if "bias" in case else []
    shapes += [(4,)] if "sinks" in case else []
    return [torch.randn(s, generator=generator).to(device(), dtype) for s in shapes]


def _run(given: list[Tensor], case: dict[str, Any]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in given]
    bias, sinks = leaves[3] if "bias" in case else None, leaves[3] if "sinks" in case else None
    trained = case.get("trained", False)
    if bias is not None and not trained:
        bias.requires_grad_(False)
    out, _ = torch.ops.megacompile.attention(
        *leaves[:3], bias, sinks, None, 0.125, case.get("causal", True), case.get("window", 0),
        case.get("softcap", 0.0), 0.0, 0, trained,
    )  # fmt: skip
    grad = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    wanted = [x for x in leaves if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]
