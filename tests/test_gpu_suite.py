"""The GPU suite on a CPU: every part runs in small, results are kept, tables say what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import record
from benchmarks.gpu.cases import PARTS, cases
from benchmarks.gpu.record import Case, markdown, run_case


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


def test_what_is_there_is_not_run_again_and_what_failed_is(tmp_path: Path) -> None:
    case = Case("machine", "one", "nothing.here", {})
    assert "failed" in run_case(case, tmp_path, apart=False)
    (tmp_path / "machine.json").write_text(json.dumps({"one": {"value": 1.5}}))
    assert run_case(case, tmp_path, apart=False) == {"value": 1.5}


def test_a_case_apart_ends_in_time_and_tells_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    bad = [sys.executable, "-c", "raise SystemExit('no such device')"]
    good = [sys.executable, "-c", "print('noise'); print('{\"value\": 2}')"]
    results = []
    for command in (slow, bad, good):
        start = subprocess.Popen
        monkeypatch.setattr(record.subprocess, "Popen", lambda _, c=command, s=start, **k: s(c, **k))
        results.append(record._apart(Case("machine", "x", "machine.rates", {}, seconds=5)))
        monkeypatch.undo()
    assert results[0]["failed"] == "not over after 5 s"
    assert "no such device" in results[1]["failed"]
    assert results[2]["value"] == 2


def test_tables_say_what_was_not_measured(tmp_path: Path) -> None:
    (tmp_path / "hardware.json").write_text(json.dumps({"device": "NVIDIA H200"}))
    rows = {"a": {"step_seconds": 1.25, "right": True}, "b": {"not measured": "deepspeed is not installed"},
            "c": {"failed": "exit status 1: out of memory", "log": "…"}}  # fmt: skip
    (tmp_path / "peers.json").write_text(json.dumps(rows))
    page = markdown(tmp_path, PARTS)
    assert "# Measured on NVIDIA H200" in page
    assert "| a | 1.25 | True |" in page
    assert "| b | not measured: deepspeed is not installed | |" in page
    assert "| c | not measured: exit status 1: out of memory | |" in page
    assert page.count("Not measured.") == len(PARTS) - 1
