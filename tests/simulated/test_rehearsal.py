"""A campaign on a GPU, in small: what fails, hangs or loses the device costs no other stage its result."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.campaign import OK, entries
from benchmarks.gpu.page import page
from tests.simulated.rehearsal import FAULTS, rehearse, rehearsed

_STAGES = ("where", "primitives", *FAULTS, "tiny in 1 GB", "plain tiny")


def test_stages_that_fail_cost_no_other_one_its_result(tmp_path: Path) -> None:
    """``make rehearsal`` runs all of them."""
    status = rehearse(tmp_path, 600, _STAGES)  # without "small models", which take a minute here
    assert [status[name] for name in ("raises", "loses the device")] == ["failed", "failed"]
    assert status["hangs"].startswith("not over after ")
    assert {status[name] for name in _STAGES if name not in FAULTS} == {OK}
    told = entries(tmp_path)
    step = next(e for e in told if str(e.get("what")).startswith("step: tiny"))
    assert step["step s"] > 0 and step["predicted s"] > 0 and step["held"] <= 1e9
    hanging = [e for e in told if e["stage"] == "hangs"]
    assert any(e.get("what") == "nearly out of time" and "used" in e["memory"] for e in hanging)
    assert "rehearsal.py" in hanging[-1]["tail"]  # where its threads were
    assert "| plain | tiny | 4GB | 128 |" in page(tmp_path, rehearsed())
