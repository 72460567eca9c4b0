"""One short training run in a process of its own, in which one call of the device goes wrong.

In: settings of the simulated device, as JSON, from the first call on. Out: a line of JSON that says what came
of it; the error that ended training, if one did, ends the process.
"""

from __future__ import annotations

import gc
import hashlib
import json
import traceback
from typing import Any

import pytest
import torch

import megacompile
from megacompile.api.pipeline import Compiler
from megacompile.runtime.device_failures import failure_of
from tests.simulated.device import simulated
from tests.simulated.numbers import runtime
from tests.support.cuda_programs import program
from tests.support.models import Plain, batch_for

STEPS = 2
NONE = {"fail_call": 0, "fail_after": 0, "refuse_at": 0, "refusals": 1}


def made() -> megacompile.Program:
    torch.manual_seed(0)
    model = Plain(width=512, depth=1)  # buffers of more than 1 MiB, which are page-locked
    return program(model, "cuda", "1GB", planner="double-buffer", max_grad_norm=0.5)


def digest(state: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, value in state.items():
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()[:16]


def trained(found: dict[str, Any]) -> None:
    """Compile, train, read the state, close."""
    found["losses"] = []
    found["open"] = model = made()
    found["states"] = [digest(model.state_dict())]
    for step in range(STEPS):
        out = model.train_step(batch_for("plain", step))
        found["losses"].append(float(out.loss))
        found["states"].append(digest(model.state_dict()))
    model.close()
    del found["open"]


def after(found: dict[str, Any]) -> None:
    """What the state is when training has ended early, and whether the program can be closed."""
    model = found.pop("open", None)
    if model is None:
        return
    found["inconsistent"] = not model._closed and model._session.inconsistent
    found["left"] = digest(model.state_dict())
    model.close()


def held(error: BaseException | None) -> list[int]:
    """Bytes that are allocated and reserved on the device, and page-locked, when nobody looks at an error."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()  # frames that an error passed through may hold each other
    torch.cuda.empty_cache()
    return [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), runtime.count("page_locked")]


def run(faults: str) -> None:
    """Train with these settings of the device; once more without them where it has not failed, if only as
    it was closed."""
    found: dict[str, Any] = {}
    error: BaseException | None = None
    with pytest.MonkeyPatch.context() as patch, simulated(patch, lag_us=0):
        patch.setattr(Compiler, "_may_reside", lambda *_: ())
        before = runtime.count("calls"), runtime.count("requests")
        runtime.set(**NONE | json.loads(faults))
        try:
            trained(found)
        except Exception as raised:
            error = raised
            found["error"] = type(raised).__name__
        found["calls"], found["requests"] = (
            runtime.count("calls") - before[0],
            runtime.count("requests") - before[1],
        )
        runtime.set(**NONE)
        after(found)
        found["held"] = []
        if not failure_of(torch.device("cuda")):
            found["held"] = held(error)
            again: dict[str, Any] = {}
            trained(again)
            found["again"] = again["losses"]
    print(json.dumps(found), flush=True)
    if error is not None:
        raise error
