"""Runs ``interpreted/`` in processes of their own, where triton starts as an interpreter.

By hand: ``TRITON_INTERPRET=1 python -m pytest tests/unit/kernels/interpreted``.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._library.custom_ops import OPDEFS

import megacompile.kernels  # noqa: F401  registers the operators

FOLDER = Path(__file__).parent / "interpreted"
SHARDS = 2
COMMAND = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
ENVIRONMENT = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
TYPES = {"float16", "bfloat16", "float32"}
VALUES = {"odd columns", "empty", "large", "zeros", "denormal"}
NAMES = {
    name.split("::")[1]
    for name, operator in OPDEFS.items()
    if operator._init_fn.__module__.startswith("megacompile.kernels.")
} | {"flash_attention_forward", "flash_attention_backward", "dropout"}
EVERY = {*TYPES, *VALUES, "float64", "one row", "199 rows", "4096 columns", "strided"}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="triton is missing (pip install triton), or interprets this very process",
)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes leave what they saw."""
    return tmp_path_factory.mktemp("seen")


@pytest.fixture(scope="module")
def shards(records: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Every test module, dealt out by size to processes that run side by side."""
    files = sorted(FOLDER.glob("test_*.py"), key=lambda file: (-file.stat().st_size, file.name))
    environment = {**ENVIRONMENT, "MEGACOMPILE_SEEN": str(records)}
    started = [
        subprocess.Popen(
            [*COMMAND, "-m", "not slow", *files[part::SHARDS]],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in range(SHARDS)
    ]
    yield started
    for process in started:
        process.kill()


@pytest.mark.parametrize("part", range(SHARDS))
def test_kernels_in_the_interpreter(shards: list[subprocess.Popen[str]], part: int) -> None:
    output, _ = shards[part].communicate(timeout=3000)
    assert shards[part].returncode == 0, output[-6000:]
    assert " passed" in output, output[-6000:]


@pytest.mark.nightly
def test_further_shapes_in_the_interpreter() -> None:
    done = subprocess.run(
        [*COMMAND, "-m", "slow", FOLDER], env=ENVIRONMENT, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:]


def wanted(name: str) -> set[str]:
    """What an operator must have been given in some test."""
    if name.startswith("flash_attention"):
        return EVERY - {"4096 columns"}  # its columns are those of one head
    if name.endswith("_") and name != "adamw_":
        return TYPES  # the kernel of their twin, over its input
    if f"{name}_backward" in NAMES or name.endswith("_backward"):
        return EVERY
    return VALUES


def test_every_kernel_was_given_every_kind_of_input(
    shards: list[subprocess.Popen[str]], records: Path
) -> None:
    """The table of kernels and inputs comes from the calls themselves; ``-s`` prints it."""
    for shard in shards:
        shard.wait(timeout=3000)
    seen: dict[str, set[str]] = defaultdict(set)
    for file in records.glob("*.json"):
        for name, kinds in json.loads(file.read_text()).items():
            seen[name] |= set(kinds)
    columns = sorted(set().union(*seen.values()))
    print("\n| kernel | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for name, kinds in sorted(seen.items()):
        print(f"| {name} | " + " | ".join("yes" if c in kinds else "" for c in columns) + " |")
    holes = {name: sorted(missing) for name in NAMES if (missing := wanted(name) - seen[name])}
    assert not holes
