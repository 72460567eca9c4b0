"""Every architecture that trains on the CPU backend (docs/models.md) trains on the device, with its bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import megacompile
from megacompile.api.pipeline import Compiler
from tests.e2e.test_architectures import BF16, FP32
from tests.simulated.test_budgets import taken_beside
from tests.support.cuda_programs import program
from tests.support.judge_eager import cast_floats
from tests.support.zoo import Case, cases

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
DISTANCE = r"(?:bitwise|\de[-+]\d+)"
ROW = re.compile(r"^\| (.+?) \|(?: \D[^|]* \|)?? ([^|]+) \| ([^|]+) \| [^|]+ \| [^|]+ \|$", re.MULTILINE)
"""A model, what float32 comes to and what bfloat16, then both with kernels."""
OFTEN = [("qwen3_moe", "float32"), ("lfm2", "bfloat16")]  # experts, convolutions
SLOW = [*((n, "float32") for n in FP32), *((n, "bfloat16") for n in (*BF16, "qwen3_next"))]


def parameters() -> list[Any]:
    """All pairs of an architecture and a dtype that train, most of them ``nightly``."""
    found = []
    rows = ROW.findall(PAGE.read_text())
    for dtype, distances in (
        ("float32", {n: d for n, d, _ in rows}),
        ("bfloat16", {n: d for n, _, d in rows}),
    ):
        for pair in ((n, dtype) for n, d in distances.items() if re.fullmatch(DISTANCE, d)):
            mark = pytest.mark.slow if pair in SLOW else pytest.mark.nightly
            found.append(pytest.param(*pair, marks=() if pair in OFTEN else mark))
    return found


def train(
    case: Case, device: str, budget: str = "1GB", steps: int = 3, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], tuple[int, ...]]:
    """Losses, state, and the groups whose state stays on the device."""
    trained = program(case.build(), device, budget, max_grad_norm=0.5, **options)
    batches = cast_floats([case.batch(i) for i in range(steps)], options["compute_dtype"])
    losses = [float(trained.train_step(batch).loss) for batch in batches]
    state, resident = trained.state_dict(), trained._session.scheduled().planned.step.resident
    trained.close()
    return losses, state, resident


@pytest.mark.parametrize(("name", "dtype"), parameters())
def test_it_trains_streamed_at_its_least_budget_and_resident(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, options = cases()[name], {"compute_dtype": getattr(torch, dtype)}
    with monkeypatch.context() as patch:
        patch.setattr(Compiler, "_may_reside", lambda *_: ())
        check_streamed(case, options)
    check_resident(case, options)


def check_streamed(case: Case, options: dict[str, Any]) -> None:
    little = f"{taken_beside() + (16 << 10)}B"
    (batch,) = cast_floats([case.batch(0)], options["compute_dtype"])
    with pytest.raises(megacompile.BudgetError, match="has to be at least") as error:
        program(case.build(), "cuda", little, example_batch=batch, **options)
    expected, state, _ = train(case, "cpu", planner="double-buffer", **options)
    losses, ours, _ = train(case, "cuda", f"{error.value.least_bytes}B", **options)
    assert losses == expected
    assert all(torch.equal(ours[n], v) for n, v in state.items())


def check_resident(case: Case, options: dict[str, Any]) -> None:
    """The device's AdamW rounds otherwise: values are near the host's, by the rule of ``judge.py``."""
    expected, state, _ = train(case, "cpu", steps=1, planner="double-buffer", **options)
    losses, ours, resident = train(case, "cuda", steps=1, **options)
    assert resident
    assert losses == expected
    for name, value in state.items():
        bound = 1e-3 * 1e-3 + 4 * torch.finfo(torch.float32).eps * value.abs()
        assert bool(((ours[name] - value).abs() <= bound).all()), name
