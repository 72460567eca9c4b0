"""The GPU suite on a CPU: every part runs in small, results are kept, tables say what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import record
from benchmarks.gpu.bound import beside_bound
from benchmarks.gpu.cases import PARTS, cases
from benchmarks.gpu.record import Case, markdown, rates, run_case
from megacompile.assemble.plan import Mode
from megacompile.machine.rates import Machine
from megacompile.schedule.schedule import Schedule
from tests.support.problems import chain, uniform


def test_every_part_has_cases_in_both_sizes() -> None:
    for dry in (True, False):
        found = cases(dry=dry)
        assert {case.part for case in found} == set(PARTS)
        assert len({(case.part, case.name) for case in found}) == len(found)
        assert all(case.seconds <= 480 for case in found)


@pytest.mark.parametrize("part", PARTS)
def test_dry_run(part: str, tmp_path: Path) -> None:
    for case in cases(dry=True):
        if case.part == part:
            result = run_case(case, tmp_path, apart=False)
            assert "failed" not in result, result
            assert result.get("right") is not False, result
    kept = json.loads((tmp_path / f"{part}.json").read_text())
    assert set(kept) == {case.name for case in cases(dry=True) if case.part == part}


RATES = {"gemm_tflops": 1e-6, "h2d_gbps": 1e-6, "d2h_gbps": 2e-6, "host_adam_1_threads_gbps": 1e-6,
         "host_adam_4_threads_gbps": 26e-6}  # fmt: skip


def schedule(state: str = "host", *, clip: bool = False) -> Schedule:
    """Four layers of 250 fp32 parameters; ``state`` is where the last two keep theirs."""
    work = chain(4)
    plan = uniform(work)
    groups = (*plan.groups[:2], *(replace(g, state=state) for g in plan.groups[2:]))
    machine = Machine("m", 1.0, 1.0, 1.0, 1.0, 1.0)
    mode = Mode("train", deferred=clip)
    return Schedule("t", work, replace(plan, groups=groups), mode, machine, 10**6)  # type: ignore[arg-type]


def test_the_bound_of_a_step_follows_from_measured_rates() -> None:
    """By hand: 1000 parameters are 4000 bytes down at 1 kB/s; Adam moves 26 bytes of each at 26 kB/s."""

    def found(one: Schedule, flops: float, *, adam: bool = True) -> tuple[float, str]:
        result = beside_bound(one, flops, 8.0, RATES, adam=adam)
        assert result["fraction_of_bound"] == result["lower_bound_seconds"] / 8.0
        assert result["bound_from"] == "measured rates"
        return pytest.approx(result["lower_bound_seconds"]), result["bound_by"]

    assert found(schedule(), 3e6) == (4.0, "weights down")
    assert found(schedule(), 9e6) == (9.0, "compute")
    assert found(schedule(clip=True), 9e6) == (6.0 + 4.0, "backward, then weights down")
    assert found(schedule("device"), 1e5) == (2.0, "weights down")
    quick = RATES | {"h2d_gbps": 1.0, "d2h_gbps": 1.0}
    assert beside_bound(schedule(), 0.0, 8.0, quick, adam=True)["lower_bound_seconds"] == pytest.approx(1.0)
    assert beside_bound(schedule(), 0.0, 8.0, quick, adam=False)["lower_bound_seconds"] < 1e-5
    assert beside_bound(schedule(), 0.0, 8.0, {}, adam=True)["bound_from"] == "m"


def test_what_is_there_is_not_run_again_and_what_failed_is(tmp_path: Path) -> None:
    case = Case("machine", "one", "nothing.here", {})
    assert "failed" in run_case(case, tmp_path, apart=False)
    (tmp_path / "machine.json").write_text(json.dumps({"one": {"value": 1.5}}))
    assert run_case(case, tmp_path, apart=False) == {"value": 1.5}
    assert rates(tmp_path) == {}
    (tmp_path / "machine.json").write_text(
        json.dumps({"rates": {"h2d_gbps": 1.5, "registration_gbps": None}})
    )
    assert rates(tmp_path) == {"h2d_gbps": 1.5}


def test_a_case_apart_ends_in_time_and_tells_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = [sys.executable, "-c", "import time; time.sleep(600)"]
    bad = [sys.executable, "-c", "raise SystemExit('no such device')"]
    good = [sys.executable, "-c", "print('noise'); print('{\"value\": 2}')"]
    results = []
    for command, seconds in ((slow, 1), (bad, 100), (good, 100)):
        start = subprocess.Popen
        monkeypatch.setattr(record.subprocess, "Popen", lambda _, c=command, s=start, **k: s(c, **k))
        results.append(record.run_apart(Case("machine", "x", "machine.rates", {}, seconds=seconds)))
        monkeypatch.undo()
    assert results[0]["failed"] == "not over after 1 s"
    assert "no such device" in results[1]["failed"]
    assert results[2]["value"] == 2


def test_tables_say_what_was_not_measured(tmp_path: Path) -> None:
    (tmp_path / "hardware.json").write_text(json.dumps({"device": "NVIDIA H200"}))
    rows = {
        "a": {"step_seconds": 1.25, "right": True},
        "b": {"not measured": "deepspeed is not installed"},
        "c": {"failed": "exit status 1: out of memory", "log": "…"},
    }
    (tmp_path / "peers.json").write_text(json.dumps(rows))
    page = markdown(tmp_path, PARTS)
    assert "# Measured on NVIDIA H200" in page
    assert "| a | 1.25 | True |" in page
    assert "- b: not measured: deepspeed is not installed" in page
    assert "- c: not measured: exit status 1: out of memory" in page
    assert page.count("Not measured.") == len(PARTS) - 1
