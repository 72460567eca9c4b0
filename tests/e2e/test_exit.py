"""The process ends as its program says, whatever the worker threads are at."""

from __future__ import annotations

import pytest

from tests.support.scripts import run_script

SCRIPT = """
import atexit
import sys
import threading
import time

import torch
from torch import nn

import megacompile
from megacompile.state.masters import HostState

LAYERS = 6
update = HostState.update
ending = threading.Event()


def slow(*arguments, **keywords):
    worker = threading.current_thread() is not threading.main_thread()
    if worker and sys.argv[1] != "dropped":
        ending.wait()
    until = time.monotonic() + 0.2
    while time.monotonic() < until:  # a thread that the interpreter ends in here aborts the process
        torch.zeros(1 << 20).add_(1)
    update(*arguments, **keywords)
    print("updated", flush=True)


def train():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    program = megacompile.compile(
        model,
        "200KB",
        optimizer=torch.optim.AdamW(model.parameters()),
        loss_fn=lambda out, batch: out.square().mean(),
        max_grad_norm=1.0,
    )
    HostState.update = slow
    program.train_step(torch.randn(2, 64, dtype=torch.bfloat16))
    atexit.register(ending.set)  # called before what megacompile registered
    return program


if sys.argv[1] == "dropped":
    train()
else:
    program = train()
if sys.argv[1] == "raised":
    raise SystemExit(7)
"""
LAYERS = 6


def updates_of_a_process(way: str, code: int) -> int:
    """How many updates ended in a process that does not wait for them, and exits with ``code``."""
    result = run_script(SCRIPT, way)
    assert result.returncode == code, result.stderr
    return result.stdout.count("updated")


def test_a_process_ends_without_the_updates_that_nobody_can_read() -> None:
    assert updates_of_a_process("kept", 0) < LAYERS
    assert updates_of_a_process("raised", 7) < LAYERS


@pytest.mark.slow
def test_a_dropped_program_finishes_its_updates_before_the_process_ends() -> None:
    assert updates_of_a_process("dropped", 0) == LAYERS
