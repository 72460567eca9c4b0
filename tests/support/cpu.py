"""CPU seconds of the suite, children included: ``pytest --cpu`` prints them by folder, and with
``--cpu-record FILE`` each test's go to a file. ``make durations`` makes ``tests/cpu_seconds.tsv`` so.

A test's seconds go from the process that ran it to the one that reports, beside its outcome; what workers
spent on imports and collection has a row of its own.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

_KEY = "cpu seconds"


def spent() -> float:
    """CPU seconds of this process, of its children that have ended, and of the fork server with its own."""
    return sum(os.times()[:4]) + _of_fork_server()


def _of_fork_server() -> float:
    """As the kernel counts them: the server lives as long as the process that started it."""
    try:
        text = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/stat").read_text()
    except FileNotFoundError:  # no test has needed one, or this is no Linux
        return 0.0
    ticks = text.rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def write(path: Path, seconds: Mapping[str, float]) -> None:
    """Write a line for each test: its CPU seconds, a tab, its name; by name."""
    path.write_text("".join(f"{seconds[test]:.2f}\t{test}\n" for test in sorted(seconds)))


class CpuSeconds:
    """Counts in every process; the first one prints a table if it ``prints``, and writes a ``record``."""

    def __init__(self, *, prints: bool, record: Path | None = None) -> None:
        self._prints = prints
        self._record = record
        self._tests: dict[str, float] = {}
        self._processes: list[float] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = spent()
        item.stash[_START] = before
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when == "teardown":
            report.user_properties.append((_KEY, spent() - item.stash[_START]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties).get(_KEY)
        if report.when == "teardown" and isinstance(found, float):
            self._tests[report.nodeid] = found

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_KEY] = spent()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._processes.append(getattr(node, "workeroutput", {}).get(_KEY, 0.0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._record is not None:
            write(self._record, self._tests)
        if not self._prints:
            return
        whole = spent() if not self._processes else sum(self._processes)
        folders: dict[str, list[float]] = defaultdict(list)
        for test, seconds in self._tests.items():
            folders[str(PurePosixPath(test.partition("::")[0]).parent)].append(seconds)
        terminalreporter.write_line("\n| folder | tests | CPU s |\n|---|--:|--:|")
        for folder, each in sorted(folders.items()):
            terminalreporter.write_line(f"| {folder} | {len(each)} | {sum(each):.0f} |")
        rest = whole - sum(self._tests.values())
        terminalreporter.write_line(f"| imports, collection | | {rest:.0f} |")
        terminalreporter.write_line(f"| all | {len(self._tests)} | {whole:.0f} |")


_START = pytest.StashKey[float]()
