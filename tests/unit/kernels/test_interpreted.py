"""Runs ``interpreted/`` in a process of its own, where triton starts as an interpreter.

By hand: ``TRITON_INTERPRET=1 python -m pytest tests/unit/kernels/interpreted``.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from torch._library.custom_ops import OPDEFS

import megacompile.kernels  # noqa: F401  registers the operators

FOLDER = Path(__file__).parent / "interpreted"
COMMAND = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
ENVIRONMENT = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
TYPES = {"float16", "bfloat16", "float32"}
VALUES = {"odd columns", "empty", "large", "zeros", "denormal"}
NAMES = {
    name.split("::")[1]
    for name, operator in OPDEFS.items()
    if operator._init_fn.__module__.startswith("megacompile.kernels.")
} | {"flash_attention_forward", "flash_attention_backward", "dropout"}
NAMES -= {"recurrent_layer", "recurrent_layer_backward"}  # which are torch's operators on any device
NAMES -= {"attention", "attention_backward"}  # which choose among ours and torch's
NAMES -= {"head_tile", "head_tile_backward", "take_rows", "put_rows"}  # which are torch's operators, too
NAMES -= {"linear_cross_entropy_with_gradients"}  # whose kernels are those of the two passes
NAMES -= {"uniform", "decode_4bit", "decode_8bit"}  # which are given no floating-point numbers
EVERY = {*TYPES, *VALUES, "float64", "one row", "199 rows", "4096 columns", "strided"}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="triton is missing (pip install triton), or interprets this very process",
)


def interpreted(kind: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Tests of that kind, in one process, as importing torch and triton takes long."""
    command = [*COMMAND, "-m", kind, FOLDER]
    return subprocess.run(
        command, env=ENVIRONMENT | more, capture_output=True, text=True, timeout=3000, check=False
    )


def test_kernels_in_the_interpreter(tmp_path: Path) -> None:
    """And every kernel is given every kind of input; ``-s`` prints the table of these, as calls left it."""
    usual = interpreted("not slow", MEGACOMPILE_SEEN=str(tmp_path))
    assert usual.returncode == 0 and " passed" in usual.stdout, usual.stdout[-6000:]
    seen: dict[str, set[str]] = defaultdict(set)
    for file in tmp_path.glob("*.json"):
        for name, kinds in json.loads(file.read_text()).items():
            seen[name] |= set(kinds)
    columns = sorted(set().union(*seen.values()))
    print("\n| kernel | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for name, kinds in sorted(seen.items()):
        print(f"| {name} | " + " | ".join("yes" if c in kinds else "" for c in columns) + " |")
    holes = {name: sorted(missing) for name in NAMES if (missing := wanted(name) - seen[name])}
    assert not holes


@pytest.mark.nightly
def test_further_shapes_in_the_interpreter() -> None:
    further = interpreted("slow")
    assert further.returncode == 0 and " passed" in further.stdout, further.stdout[-6000:]


def wanted(name: str) -> set[str]:
    """What an operator must have been given in some test."""
    if name.startswith(("flash_attention", "gated_delta_rule", "mamba2_chunk_scan")):
        return EVERY - {"4096 columns"}  # their columns are those of one head
    if name.endswith("_") and name != "adamw_":
        return TYPES  # the kernel of their twin, over its input
    if f"{name}_backward" in NAMES or name.endswith("_backward"):
        return EVERY
    return VALUES
