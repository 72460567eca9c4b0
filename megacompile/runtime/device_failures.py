"""Name a GPU that fails: CUDA says so out of whichever call comes next, as an error of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megacompile.errors import BudgetError, DeviceLostError, MegacompileError


def failure_of(device: torch.device) -> str:
    """Return what CUDA answers to everything since a device failed; empty where it works. Waits for
    nothing."""
    if device.type != "cuda" or not _begun():
        return ""
    try:
        torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        return first_line(error)
    return ""


@contextmanager
def naming_failures(device: torch.device) -> Iterator[None]:
    """Raise :class:`DeviceLostError` for whatever is raised inside because the device failed, and
    :class:`BudgetError` where it has no room outside of a step."""
    try:
        yield
    except (DeviceLostError, MegacompileError):
        raise
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"The GPU has no room for what compiling takes beside any plan ({first_line(error)}): end what "
            "else runs on it, or close the programs that this process is done with."
        ) from error
    except Exception as error:
        said = failure_of(device)
        if not said and not _begun() and isinstance(error, torch.AcceleratorError):
            said = first_line(error)  # it failed before it could be asked
        if not said:
            raise
        raise DeviceLostError(
            f"The GPU failed ({said}), and this process cannot use it any more: program.save still writes "
            "the state if the host has all of it. Start again from there, or from the last checkpoint."
        ) from error


def _begun() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def first_line(error: Exception) -> str:
    """Return what an error says, without what torch's allocator held."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.split(". Of the allocated")[0]
