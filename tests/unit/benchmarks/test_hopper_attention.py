"""The Gluon kernels of ``benchmarks/hopper_attention.py``, run from their source by an emulator."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import hopper_attention as hopper
from megacompile.kernels import attention
from megacompile.kernels._triton import recording
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
    if name == "packed":  # the last 23 tokens are padding
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


def test_results_do_not_depend_on_who_is_first() -> None:
    """Whatever the order of warps and copies, and however many stages, the bits are the same."""
    (q, k, v, _), rule = inputs("causal, grouped heads")
    first = forward(q, k, v, rule)
    for seed, stages in ((1, 2), (2, 2), (3, 3)):
        assert all(map(torch.equal, first, forward(q, k, v, rule, seed, stages=stages)))


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


def test_what_is_taken() -> None:
    def call(width: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        x = torch.empty(1, 2, 64, width, dtype=dtype, device="meta")
        return hopper.supports(x, x, x)

    with recording(90):
        assert call(64) and call(96) and call(128) and call(128, torch.float16)
        assert not call(256) and not call(100) and not call(128, torch.float32)
    with recording(100):
        assert not call(128)
