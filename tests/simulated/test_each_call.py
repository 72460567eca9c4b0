"""One call of the device fails, whichever of those from compile to close: an error by name, a whole state,
nothing held. ``disturbed.py`` is what runs, in a process for each call."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from megacompile.runtime.staging import PIECE_BYTES, PIECES
from tests.support.cuda_programs import within
from tests.support.scripts import run_script

SECONDS = 300.0
CODE = "import sys; from tests.simulated.disturbed import run; run(sys.argv[1])"
SAMPLE = 12
REFUSED = 1 << 40  # requests, which is all


def disturbed(**faults: int) -> tuple[int, dict[str, Any], str]:
    """The run's exit code, what it told, and what it wrote on its standard error."""
    ended: list[Any] = []
    error = within(SECONDS, lambda: ended.append(run_script(CODE, json.dumps(faults))))
    assert error is None, error
    (done,) = ended
    assert done.stdout, f"ended with {done.returncode}: {done.stderr}"
    return done.returncode, json.loads(done.stdout), done.stderr


@functools.cache
def undisturbed() -> dict[str, Any]:
    code, found, said = disturbed()
    assert code == 0, said
    return found


def check_loss(**at: int) -> None:
    """The process ends with our error; the state is that before or after a step. Where the device is lost as
    the program is closed, all has been read."""
    code, found, said = disturbed(**at)
    if "error" not in found:
        assert (code, found["states"]) == (0, undisturbed()["states"]), f"{at}: {said}"
        return
    assert code == 1, f"{at}: {code} {said}"
    assert found["error"] in ("DeviceLostError", "MegacompileError"), f"{at}: {said}"
    assert f"megacompile.errors.{found['error']}: " in said
    if "left" in found:
        assert not found["inconsistent"], at
        assert found["left"] in undisturbed()["states"], at


def check_refusal(request: int, refusals: int) -> None:
    """Training goes on bit for bit, or ends by name; nothing stays held, and the next program trains."""
    expected = undisturbed()
    code, found, said = disturbed(refuse_at=request, refusals=refusals)
    at = f"request {request}: {said}"
    if "error" in found:
        assert code == 1 and refusals > 1, at
        assert found["error"] in ("BudgetError", "DeviceFullError", "MegacompileError"), at
        assert found.get("left", expected["states"][0]) in expected["states"], at
    else:
        assert found["states"] == expected["states"], at
    assert found["again"] == expected["losses"], at
    assert found["held"][:2] == expected["held"][:2], at
    staged = "What it refuses passes through" in said  # buffers that the process keeps
    rings = 2 * PIECES * PIECE_BYTES if staged else 0
    assert found["held"][2] <= expected["held"][2] + rings, at


@pytest.mark.parametrize("part", range(SAMPLE))
def test_a_device_that_is_lost_at_a_call(part: int) -> None:
    check_loss(fail_call=1 + part * undisturbed()["calls"] // SAMPLE)


@pytest.mark.parametrize("operation", [40, 150])
def test_a_device_that_is_lost_while_it_works(operation: int) -> None:
    """Whichever call is told."""
    check_loss(fail_after=operation)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(SAMPLE))
def test_a_device_that_is_lost_at_each_call(part: int) -> None:
    for call in range(1 + part, undisturbed()["calls"] + 1, SAMPLE):
        check_loss(fail_call=call)


@pytest.mark.parametrize("refusals", [1, REFUSED])
def test_each_request_for_memory_is_refused(refusals: int) -> None:
    """Alone, or with all that follow."""
    for request in range(1, undisturbed()["requests"] + 1):
        check_refusal(request, refusals)
