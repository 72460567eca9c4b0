"""Host memory that a device copies to and from: ordinary, unless a backend has faster."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostMemory:
    """Ordinary memory, as a backend has it whose transfers are equally fast everywhere."""

    def own(self, tensors: Iterable[Tensor]) -> None:
        """Prepare these tensors for fast transfers."""

    def empty(self, nbytes: int) -> Tensor:
        """Return bytes (uint8) that transfers are fast to and from."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def free(self, buffer: Tensor) -> None:
        """Give back what :meth:`empty` gave; nothing may be under way to or from it."""

    def nbytes(self) -> dict[str, int]:
        """Return the bytes that the backend itself holds, by kind."""
        return {}

    @property
    def page_locked_bytes(self) -> int:
        """Bytes that are page-locked where they lie."""
        return 0

    @property
    def staged_bytes(self) -> int:
        """Bytes whose copies pass through buffers, as the system refused to page-lock them."""
        return 0
