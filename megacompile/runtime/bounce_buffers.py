"""Host buffers that gradients pass through on their way from a GPU into another dtype or a sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megacompile.runtime.cuda_streams import Flag
from megacompile.runtime.host_memory import HostMemory

BOUNCE_BUFFERS = 2


class BounceBuffer:
    """A host buffer that gradients pass through on their way into another dtype or a sum."""

    def __init__(self) -> None:
        self.free = Flag()
        self.free.set()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self) -> None:
        """Return when what was here before has gone on."""
        self.free.wait()
        self.free.clear()

    def like(self, like: Sequence[Tensor], host: HostMemory) -> list[Tensor]:
        """Host tensors like those given, over the whole buffer."""
        forms = [torch.empty_like(t, device="meta") for t in like]
        sizes = [-(-f.untyped_storage().nbytes() // 256) * 256 for f in forms]
        if self._buffer.nbytes < sum(sizes):
            host.free(self._buffer)
            self._buffer = host.empty(sum(sizes))
        pieces = torch.split(self._buffer[: sum(sizes)], sizes)
        return [
            p.view(f.dtype).as_strided(f.shape, f.stride(), p.storage_offset() // f.dtype.itemsize)
            for p, f in zip(pieces, forms, strict=True)
        ]
