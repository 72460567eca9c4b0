"""The Gluon kernels of ``benchmarks/hopper_attention.py``, run from their source by an emulator."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks import hopper_attention as hopper
from benchmarks.gpu import hopper as campaign
from benchmarks.gpu.findings import Recorder
from megacompile.kernels import attention
from megacompile.kernels._triton import Launch, recording
from megacompile.kernels.attention import Rule, document_bounds
from tests.support.gluon_emulator import Barrier, Deadlock, Program, emulate

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is missing: pip install triton"
)

Shape = tuple[int, int, int, int, int, int, int]  # batch, heads, key heads, queries, keys, widths
SHAPES: dict[str, tuple[Shape, Rule]] = {
    "causal, grouped heads": ((2, 4, 2, 300, 300, 64, 64), Rule(0.125)),
    "full, wide": ((1, 2, 1, 203, 203, 128, 128), Rule(0.09, False)),
    "more keys than queries": ((1, 2, 1, 70, 331, 96, 64), Rule(0.1, False)),
    "softcap": ((1, 1, 1, 203, 203, 64, 64), Rule(0.125, softcap=5.0)),
    "window": ((1, 2, 2, 303, 303, 64, 64), Rule(0.125, window=37)),
    "two-sided window": ((1, 2, 1, 303, 303, 64, 64), Rule(0.125, False, window=140)),
    "sinks": ((1, 2, 1, 140, 140, 64, 64), Rule(0.125, sinks=torch.tensor([0.5, -2.0]))),
    "packed": ((2, 2, 1, 303, 303, 64, 64), Rule(0.125)),
    "packed, full": ((1, 2, 1, 303, 303, 64, 64), Rule(0.125, False)),
}


def inputs(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], Rule]:
    """Queries, keys, values and a gradient, laid out as models have them: [B, S, H, D]."""
    (batch, heads, groups, queries, keys, width, inner), rule = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(batch, tokens, n, columns, generator=generator).to(dtype).transpose(1, 2)
        for tokens, n, columns in (
            (queries, heads, width), (keys, groups, width), (keys, groups, inner), (queries, heads, inner)
        )
    ]  # fmt: skip
    if name.startswith("packed"):  # the last 23 tokens are padding
        bounds = document_bounds(torch.tensor([0, 50, 210, 280], dtype=torch.int32), queries)
        rule = replace(rule, bounds=bounds)
    return made, rule


def forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule, seed: int = 0, **more: Any) -> tuple[Tensor, Tensor]:
    with recording(90) as launches:
        out, lse = hopper.hopper_attention_forward(q, k, v, rule, **more)
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    for launch in launches:
        emulate(launch, seed)
    return out, lse


def backward(grad: Tensor, given: list[Tensor], rule: Rule, seed: int = 0, **more: Any) -> list[Tensor]:
    """Gradients of queries, keys and values, from a forward in float32 that rounds its result."""
    out, lse = attention.forward_reference(*(x.float() for x in given), rule)
    delta = (out.to(grad.dtype).float() * grad.float()).sum(-1)
    with recording(90) as launches, mock.patch.object(attention, "_delta", lambda *_: delta):
        found = hopper.hopper_attention_backward(grad, *given, out.to(grad.dtype), lse, rule, **more)
    for x in found[:3]:
        x.fill_(torch.nan)
    for launch in launches:
        emulate(launch, seed)
    return list(found[:3])


def close(ours: Tensor, exact: Tensor) -> bool:
    """Within 1e-2 of the tensor's scale, the rule of all kernels."""
    return bool((ours.double() - exact).abs().max() <= 1e-2 * exact.abs().max())


@pytest.mark.parametrize("name", SHAPES)
def test_forward_is_right_beside_float64(name: str) -> None:
    (q, k, v, _), rule = inputs(name)
    out, lse = forward(q, k, v, rule)
    exact, exact_lse = attention.forward_reference(q.double(), k.double(), v.double(), rule)
    assert close(out, exact)
    assert torch.equal(lse.isfinite(), exact_lse.isfinite())
    assert close(lse.nan_to_num(neginf=0.0), exact_lse.nan_to_num(neginf=0.0))


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_right_beside_float64(name: str) -> None:
    (q, k, v, grad), rule = inputs(name)
    exact = [x.double() for x in (grad, q, k, v)]
    out, lse = attention.forward_reference(*exact[1:], rule)
    expected = attention.backward_reference(*exact, out, lse, rule)
    for ours, right in zip(backward(grad, [q, k, v], rule), expected, strict=False):
        assert close(ours, right)


def test_results_do_not_depend_on_who_is_first() -> None:
    """Whatever the order of warps and copies, and however many stages, the bits are the same."""
    (q, k, v, grad), rule = inputs("full, wide")
    first, gradients = forward(q, k, v, rule), backward(grad, [q, k, v], rule)
    for seed, stages in ((1, 2), (2, 2), (3, 3)):
        assert all(map(torch.equal, first, forward(q, k, v, rule, seed, stages=stages)))
        assert all(map(torch.equal, gradients, backward(grad, [q, k, v], rule, seed, stages=stages)))


def test_what_cannot_be_copied_by_tiles_is_laid_out_anew() -> None:
    (q, k, v, _), rule = inputs("softcap")
    wide = torch.cat((q.new_zeros(*q.shape[:-1], 1), q), -1)[..., 1:]  # rows that start at odd elements
    assert wide.data_ptr() % 16 and torch.equal(wide, q)
    assert torch.equal(forward(wide, k, v, rule)[0], forward(q, k, v, rule)[0])


def test_a_stage_that_is_never_given_back_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v, _), rule = inputs("full, wide")
    arrive, count = Program.arrive, iter(range(100))
    monkeypatch.setattr(Program, "arrive", lambda *given, **named: next(count) and arrive(*given, **named))
    with pytest.raises(Deadlock, match="wait for what nothing ends"):
        forward(q, k, v, rule, stages=1)


@pytest.mark.parametrize("arrivals", [1, 2], ids=["read before it is there", "filled before it is read"])
def test_a_wait_left_out_shows_in_the_results(arrivals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiles that arrive (one arrival), or of stages that are empty (one of each group)."""
    (q, k, v, _), rule = inputs("more keys than queries")
    wait = Program.wait

    def hasty(program: Program, barrier: Barrier, phase: int) -> None:
        if barrier.arrivals != arrivals:
            wait(program, barrier, phase)

    monkeypatch.setattr(Program, "wait", hasty)
    with pytest.raises(AssertionError):
        out, _ = forward(q, k, v, rule)
        exact, _ = attention.forward_reference(q.double(), k.double(), v.double(), rule)
        assert close(out, exact)


def test_the_campaign_tells_right_from_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(kernel: Any, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
        emulate(Launch(kernel, grid, given, constants, 4, 2))

    monkeypatch.setattr(hopper, "launch", run)
    monkeypatch.setattr(attention, "_delta", lambda out, grad, _: (out.float() * grad.float()).sum(-1))
    cases = {
        "causal, three queries": ((1, 2, 1, 3, 3, 128), Rule(0.09)),
        "all": ((1, 4, 2, 450, 450, 64), Rule(0.125, window=70, softcap=5.0)),
    }
    monkeypatch.setattr(campaign, "_CASES", cases)
    to = Recorder(tmp_path, "right")
    campaign.check(to, [], 0)
    assert to.all_right and len(to.known()) == len(cases)
    assert all(e["error"] <= 1e-2 for e in to.known())

    monkeypatch.setattr(attention, "_delta", lambda out, grad, _: out.float().sum(-1))
    to = Recorder(tmp_path, "wrong")
    campaign.check(to, [], 0)
    assert not to.some_right


def test_what_is_taken() -> None:
    def call(width: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        x = torch.empty(1, 2, 64, width, dtype=dtype, device="meta")
        return hopper.supports(x, x, x)

    with recording(90):
        assert call(64) and call(96) and call(128) and call(128, torch.float16)
        assert not call(256) and not call(100) and not call(128, torch.float32)
    with recording(100):
        assert not call(128)
