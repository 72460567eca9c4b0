"""The table of seeded faults is of this tree, and each fault is caught."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support import seeded_faults
from tests.support.seeded_faults import FAILED, FAULTS, ROOT, Fault


def test_each_fault_has_its_place_and_its_tests() -> None:
    for number, fault in enumerate(FAULTS):
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, (number, fault.file, fault.old)
        assert fault.new != fault.old
        for test in fault.tests:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text()
            assert re.search(rf"^def {re.escape(name.partition('[')[0])}", text, re.MULTILINE), (number, test)


def test_what_is_not_caught_is_counted_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [Fault(room, "file", "1", new, ("test",)) for room, new in (("a", "2"), ("a", "3"), ("b", "2"))]
    (tmp_path / "file").write_text("1")
    broken: list[str] = []

    def run_tests(tree: Path, tests: Sequence[str]) -> int:
        return FAILED if (tree / "file").read_text() == "2" or broken else 0

    for name, value in (("copied_tree", lambda: nullcontext(tmp_path)), ("run_tests", run_tests)):
        monkeypatch.setattr(seeded_faults, name, value)
    monkeypatch.setattr(seeded_faults._context, "set_forkserver_preload", lambda modules: None)

    def said(*options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["seeded_faults", *options])
        return seeded_faults.main(), capsys.readouterr().out.splitlines()[-1]

    monkeypatch.setattr(seeded_faults, "FAULTS", faults)
    assert said() == (1, "caught 2 of 3, not [1]")
    assert said("--only", "0", "2") == said("--only", "2", "0") == (0, "caught 2 of 2")
    assert (tmp_path / "file").read_text() == "1"
    broken.append("without a fault")
    assert said("--room", "b") == (1, "caught 0 of 1, not [2]")


@pytest.mark.nightly
def test_each_fault_is_caught() -> None:
    """By tests in forks of a server of their own, as in a suite that nobody else runs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "tests.support.seeded_faults"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
