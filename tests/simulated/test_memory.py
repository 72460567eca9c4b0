"""What the process holds: nothing gathers over programs, on the device or page-locked."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import torch

from tests.simulated.numbers import runtime
from tests.support.cuda_programs import program
from tests.support.models import batch_for, build

PAGE = 12 << 20


def run_one() -> None:
    trained = program(build("plain"), "cuda", "1GB")
    trained.train_step(batch_for("plain", size=4))
    trained.close()


def test_programs_leave_nothing_behind() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()  # by the tests that this process ran before
    run_one()
    held, used, locked = torch.cuda.memory_reserved(), runtime.count("used"), runtime.count("page_locked")
    for _ in range(3):
        run_one()
    reserved = torch.cuda.memory_reserved()
    assert reserved <= held < before + 2 * PAGE  # of the allocator's, not a workspace per program
    assert runtime.count("used") <= used
    assert runtime.count("page_locked") <= locked


def test_a_card_without_flash_attention_is_opened() -> None:
    """The device's properties are read once in a process, so this takes one of its own."""
    script = (
        "from megacompile.runtime.cuda_memory import TorchCuda, torch; TorchCuda(torch.device('cuda', 0))"
    )
    subprocess.run([sys.executable, "-c", script], env=os.environ | {"CUDASIM_CC": "75"}, check=True)
