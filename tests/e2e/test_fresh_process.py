"""What holds in a process that Python starts for it alone: its imports, without Triton, under another seed
of hashes. One process answers all of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.passes.test_passes import all_waits

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
CODE = """
import sys
sys.modules["triton"] = None
import torch
import megacompile.kernels as kernels
dynamo = "torch._dynamo" in sys.modules
shape = list(kernels.rms_norm(torch.randn(3, 5), torch.ones(5)).shape)
operator = torch.ops.megacompile.rms_norm.default
__import__("kernels")  # as transformers does where it looks for a library of this name
again = operator is torch.ops.megacompile.rms_norm.default

import transformers, megacompile
batch = torch.ones(2, 4), torch.ones(2, 1)
megacompile.compile(torch.nn.Linear(4, 1), "1GB", loss_fn=torch.nn.MSELoss(), compute_dtype=torch.float32,
                    device="cpu", example_batch=batch).close()
imported = [name for name in ("modeling_utils", "modeling_outputs") if f"transformers.{name}" in sys.modules]

import contextlib, io, json
from megacompile.cli.main import main
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    code = main(["plan", "--model", sys.argv[1], "--machine", "h200", "--seq", "64", "--json"])

from tests.unit.passes.test_passes import all_waits
print(json.dumps({"dynamo": dynamo, "again": again, "shape": shape, "imported": imported, "code": code,
                  "answer": json.loads(printed.getvalue()), "waits": str(all_waits())}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    config = tmp_path_factory.mktemp("model") / "config.json"
    config.write_text(json.dumps(CONFIG))
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", CODE, str(config)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_kernels_are_imported_without_triton_and_cheaply(told: dict[str, Any]) -> None:
    """No triton, no dynamo, and the operators still run; they stay what they are where a checkout's folder is
    imported by its name."""
    assert told["shape"] == [3, 5]
    assert told["again"], "an operator was registered again"
    assert not told["dynamo"], "importing the kernels must not start dynamo"


def test_a_capture_imports_no_module_of_transformers(told: dict[str, Any]) -> None:
    """Within an export their outputs are not made known to pytree, and no later capture could return one."""
    assert told["imported"] == []


def test_planning_needs_no_triton(told: dict[str, Any]) -> None:
    assert not told["code"]
    assert told["answer"]["fits"] is True
    assert told["answer"]["with_clipping"]["step_seconds"] > 0


def test_synchronize_is_the_same_in_every_process(told: dict[str, Any]) -> None:
    """Waits come in one order, whatever seed Python hashes strings with."""
    assert told["waits"] == str(all_waits())
