"""The allocator's settings arrive, in the way that this version of torch wants to be told."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import warnings
warnings.simplefilter("error")
import torch
from megacompile.runtime.cuda_memory import TorchCuda
api = TorchCuda(torch.device("cuda", 0))
segments = torch.cuda.memory_snapshot()
assert segments and all(segment["is_expandable"] for segment in segments)
"""


def test_segments_expand_and_torch_warns_of_nothing() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], env=os.environ, check=True)


FIXED = """
import warnings
import torch
from tests.simulated.test_budgets import compiled, llama
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    program = compiled(llama(), 256, "cuda", 2 << 30)
assert sum("no segments that grow" in str(x.message) for x in told) == 1, told
kept = torch.ones(1 << 20, device="cuda")
assert not any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
assert program.memory.budget_bytes < (2 << 30) * 7 // 8 - (512 << 20)
program.close()
compiled(llama(), 256, "cuda", 2 << 30).close()
"""


def test_where_no_segment_grows_plans_leave_room_for_those_of_fixed_sizes() -> None:
    subprocess.run([sys.executable, "-c", FIXED], env=os.environ | {"CUDASIM_GROWING": "0"}, check=True)
