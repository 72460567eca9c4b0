"""The suite's options, and what every process of it keeps to: one thread, repeatable problems, no heirs."""

import gc
import itertools
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; workers and our own threads share the cores

from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

from tests.support import processes
from tests.support.captures import Captures, nothing_kept
from tests.support.cpu import CpuSeconds
from tests.support.slow import mark_slow_cases

# Random problems are the same in every run; ``--hypothesis-profile=explore`` looks for new ones.
_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", _COMMON, derandomize=True)
settings.register_profile("explore", _COMMON)
settings.register_profile("unshrunk", _COMMON, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.load_profile("repeatable")
# It draws the constants of imported modules too, which are others after other tests in the same process.
providers._get_local_constants = lambda: providers._local_constants

# Plans and kernels of this run alone, which its workers share: what a user's own runs left decides nothing.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="megacompile-tests-", ignore_cleanup_errors=True)
    os.environ["XDG_CACHE_HOME"] = _CACHE.name

HERE = Path(__file__).parent
ANEW = (
    *(
        f"tests/unit/capture/test_{name}.py"
        for name in (
            *("calls", "draws", "effects", "functional", "layouts", "loss", "patching"),
            *("repeated_layers", "rotary", "snapshot", "substitute"),
        )
    ),
    "tests/unit/blocks/",
    "tests/e2e/test_calls.py::test_calls_of_several_threads_come_one_after_the_other",
    "tests/e2e/test_calls.py::test_trains_as_ever_in_modes_of_torch",
    "tests/e2e/test_faults.py::test_models_are_captured_in_two_threads_at_once",
    "tests/e2e/test_plain_modules.py",
    "tests/e2e/test_program.py::test_dump_is_complete_and_deterministic",
    "tests/e2e/test_values.py",
)
"""Tests of capture itself, of how often it is the same, or of where it is called from."""

_captures = Captures()
_tests = itertools.count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="K/N", help="of N equal parts of the tests, by their names, part K")
    parser.addoption("--cpu", action="store_true", help="print CPU seconds by folder")
    parser.addoption("--cpu-record", metavar="FILE", type=Path, help="write each test's CPU seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(
        CpuSeconds(prints=config.getoption("--cpu"), record=config.getoption("--cpu-record"))
    )
    config.pluginmanager.register(processes)


@pytest.hookimpl(tryfirst=True)  # before ``-m`` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unmatched = mark_slow_cases(items)
    if unmatched and [Path(argument).resolve() for argument in config.args] == [HERE]:
        raise pytest.UsageError(f"slow_cases of {min(unmatched)} matches none of its cases")
    if config.getoption("--slice"):
        part, parts = map(int, config.getoption("--slice").split("/"))
        others = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts != part % parts]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def pytest_collection_finish() -> None:
    """Look for garbage seldom, and never among what was imported: that took a twelfth of all time, and a
    tenth more where accelerate asks for it before and after each training."""
    gc.set_threshold(30_000, 10, 20)
    _set_aside()
    if "accelerate.utils.memory" in sys.modules:
        sys.modules["accelerate.utils.memory"].gc = SimpleNamespace(collect=lambda: 0)  # type: ignore[attr-defined]


def _set_aside() -> None:
    """Look for garbage no more among what there is: above all, the captures that are remembered."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries report at exit what they think has leaked


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Programs of equal models take one capture, but for tests of what capture does."""
    if next(_tests) % 32 == 0:
        _set_aside()
    if item.nodeid.startswith(ANEW):
        with nothing_kept():
            return (yield)
    with _captures.shared():
        return (yield)
