"""Report the bytes that a program measured, beside those predicted."""

from __future__ import annotations

from dataclasses import dataclass

from megacompile.units import format_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes on the device, measured beside predicted, and on the host by kind.

    A GPU copies ``page_locked_bytes`` of the host's bytes in place; ``staged_bytes``, which the system
    refused to page-lock, pass through buffers.

    ``resident_peak_bytes`` is of the whole process, Python and torch included.
    """

    budget_bytes: int
    device_peak_bytes: int
    predicted_peak_bytes: int
    host_bytes: dict[str, int]
    host_budget_bytes: int
    resident_peak_bytes: int
    storage_bytes: int = 0
    traffic: str = ""
    page_locked_bytes: int = 0
    staged_bytes: int = 0

    def __str__(self) -> str:
        host = ", ".join(f"{k} {format_bytes(v)}" for k, v in self.host_bytes.items() if v)
        host += (
            f"; budget {format_bytes(self.host_budget_bytes)}; the whole process held "
            f"{format_bytes(self.resident_peak_bytes)} at most"
        )
        if self.page_locked_bytes or self.staged_bytes:
            host += (
                f"; {format_bytes(self.page_locked_bytes)} are page-locked, copies of "
                f"{format_bytes(self.staged_bytes)} pass through buffers"
            )
        if self.storage_bytes:
            host += f"\nstorage: {format_bytes(self.storage_bytes)} in scratch files\n{self.traffic}"
        return (
            f"device: peak {format_bytes(self.device_peak_bytes)} measured, "
            f"{format_bytes(self.predicted_peak_bytes)} predicted, budget "
            f"{format_bytes(self.budget_bytes)}\nhost: {host}"
        )
