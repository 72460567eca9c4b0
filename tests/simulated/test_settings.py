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
