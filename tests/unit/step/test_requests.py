"""What a step asks an allocator for takes the bytes that its plan counts."""

from __future__ import annotations

import pytest
import torch

from megacompile.assemble.assembly import SEED_BYTES
from megacompile.assemble.plan import Mode
from megacompile.capture.batch import read_batch
from megacompile.frontend import Frontend
from megacompile.machine.catalog import PROFILES
from megacompile.plan.least import least
from megacompile.plan.planner import search
from megacompile.step.requests import step_requests
from tests.support.models import batch_for, build

MACHINE = PROFILES["h100-sxm"].rates("bf16")


@pytest.mark.parametrize("name", ["llama", "gpt2-dropout", "gemma3"])
@pytest.mark.parametrize("tight", [False, True])
def test_requests_take_what_the_plan_counts(name: str, tight: bool) -> None:
    """With all activations kept, and with those recomputed and offloaded that the least budget wants so."""
    model = build(name)
    batch = read_batch(batch_for(name), model)
    compiled = next(Frontend(model, torch.bfloat16, processors=132).tilings(batch, evaluate=False))
    work, mode = compiled.assembly.work, Mode("train", 3, deferred=True)
    budget = int(1.05 * least(work, mode).nbytes) if tight else 1 << 40
    planned = search(work, mode, MACHINE, budget)
    step = planned.step
    requests = step_requests(step, compiled.part, compiled.templates, compiled.assembly)
    live = most = 0
    taken: dict[int, int] = {}
    for number, nbytes in requests:
        live += nbytes or -taken.pop(number)
        if nbytes:
            taken[number] = nbytes
        most = max(most, live)
    assert not taken
    counted = planned.peak_bytes - step.slab_bytes - step.constant_bytes
    assert counted <= most <= counted + SEED_BYTES  # which plans count with what stays
