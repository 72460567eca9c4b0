"""Host memory of a GPU: page-locked where it lies, or copied through buffers where the system refuses."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from megacompile.runtime.cuda_memory import CudaMemory
from megacompile.runtime.cuda_streams import OnComplete
from megacompile.runtime.host_memory import HostMemory
from megacompile.runtime.staging import Staging, flat_bytes
from megacompile.state.host_arena import HostArena
from megacompile.state.master_layout import is_dense


class CudaHostMemory(HostMemory):
    """Registered host memory, and the copies between it and the device."""

    def __init__(self, api: CudaMemory) -> None:
        self._api = api
        self._staging = Staging(api)
        self._borders: set[int] = set()  # addresses that no copy may cross, between page-locked pieces

    def own(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            start, ends = tensor.data_ptr(), self._api.register(tensor)
            self._borders |= {start + end for end in ends if end < tensor.nbytes}
            locked = ends[-1] if ends else 0
            if locked < tensor.nbytes:
                self._staging.add(start + locked, start + tensor.nbytes)

    def empty(self, nbytes: int) -> Tensor:
        buffer = HostArena(nbytes).tensor
        self.own([buffer])
        return buffer[:nbytes]

    def free(self, buffer: Tensor) -> None:
        """The system may give its addresses to other memory, which CUDA would take for page-locked."""
        self._api.unregister(buffer)
        self._staging.remove(buffer)
        start = buffer.data_ptr()
        self._borders = {border for border in self._borders if not start < border < start + buffer.nbytes}

    def nbytes(self) -> dict[str, int]:
        return {"staging (host memory is not page-locked)": self._staging.nbytes}

    @property
    def page_locked_bytes(self) -> int:
        return self._api.page_locked_bytes()

    @property
    def staged_bytes(self) -> int:
        return self._staging.staged_bytes

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> OnComplete | None:
        """Copy between it and the device; returns what finishes the copies that pass through buffers."""
        callbacks: list[OnComplete] = []
        try:
            for target, source in self._pieces(targets, sources):
                if self._staging.holds(source):
                    self._staging.upload(target, source)
                elif self._staging.holds(target):
                    callbacks.append(self._staging.download(target, source))
                else:
                    self._api.copy(target, source)
        except BaseException:
            _run_all(callbacks)  # they give buffers back
            raise
        return functools.partial(_run_all, callbacks) if callbacks else None

    def _pieces(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Copies as pieces that cross no border."""
        for target, source in zip(targets, sources, strict=True):
            starts = target.data_ptr(), source.data_ptr()
            cuts = sorted(b - a for a in starts for b in self._borders if a < b < a + source.nbytes)
            if cuts and is_dense(target) and is_dense(source):
                yield from zip(
                    flat_bytes(target).tensor_split(cuts), flat_bytes(source).tensor_split(cuts), strict=True
                )
            else:
                yield target, source


def _run_all(callbacks: Sequence[OnComplete]) -> None:
    for on_complete in callbacks:
        on_complete()
