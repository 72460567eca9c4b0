"""Errors that a user can act on. Each message says what, where, and what to do."""

from __future__ import annotations


class MegacompileError(ValueError):
    """Base of all errors that a user's input or model can cause."""


class CaptureError(MegacompileError):
    """The model's forward cannot be captured, or would not train right if it were."""


class UntraceableError(CaptureError):
    """The forward cannot be traced, as it may if what it reads of its batch were known.

    ``module`` is the path of the innermost module in which the trace failed, if that is known.
    """

    def __init__(self, message: str, *, module: str = "") -> None:
        super().__init__(message)
        self.module = module


class BudgetError(MegacompileError):
    """A memory budget is malformed, above what exists, or below the least feasible one.

    ``least_bytes`` is the least feasible device budget if the device budget was missed, else None.
    """

    def __init__(self, message: str, *, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class BudgetExceededError(RuntimeError):
    """A step asked for more device bytes than its budget; the step stopped before it took them."""


class DeviceFullError(BudgetExceededError):
    """The device's allocator found no room for what a step asked for; ``snapshot`` is the file that shows
    what it held."""

    def __init__(self, message: str, snapshot: str) -> None:
        super().__init__(f"{message} (what it held is in {snapshot}, for pytorch.org/memory_viz)")
        self.snapshot = snapshot


class DeviceLostError(RuntimeError):
    """The device failed under a program; no call of it succeeds any more in this process."""


class ScheduleError(MegacompileError):
    """A schedule is not safe in every order that its streams allow."""


class ProgramError(RuntimeError):
    """A program is in a state in which the call cannot be served, and what to do about it."""


class DiskError(ProgramError):
    """A disk did not take a checkpoint or a model; an earlier checkpoint is still there."""


class StorageError(RuntimeError):
    """State on storage could not be read or written, or is not what was written."""
