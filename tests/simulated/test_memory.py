"""What the process holds: nothing gathers over programs, on the device or page-locked."""

from __future__ import annotations

import torch

from tests.simulated.numbers import runtime
from tests.support.cuda_programs import program
from tests.support.models import batch_for, build

PAGE = 20 << 20


def run_one() -> None:
    trained = program(build("plain"), "cuda", "1GB")
    trained.train_step(batch_for("plain", size=4))
    trained.close()


def test_programs_leave_nothing_behind() -> None:
    run_one()
    held, used, locked = torch.cuda.memory_reserved(), runtime.count("used"), runtime.count("page_locked")
    for _ in range(3):
        run_one()
    assert torch.cuda.memory_reserved() <= held < 2 * PAGE  # of the allocator's, not a workspace per program
    assert runtime.count("used") <= used
    assert runtime.count("page_locked") <= locked
