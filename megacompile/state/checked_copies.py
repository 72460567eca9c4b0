"""Copy bytes with their CRC-32: in one pass by a C kernel, or by zlib after the copy.

In: flat tensors of bytes. Out: the same bytes elsewhere, and a checksum that is zlib's.
"""

from __future__ import annotations

import ctypes
import zlib

from torch import Tensor

from megacompile.state.adam import backend, call_kernel

_ONES = 0xFFFFFFFF
_LINE = 64  # bytes of a line of the cache


def copy_checked(to: Tensor, source: Tensor, before: int = 0) -> int:
    """Copy ``source``, less than 2 GiB, on this thread; CRC-32 of its bytes, continued from ``before``."""
    done, total = 0, source.numel()
    if backend("copy") == "c":
        done = min(total, -to.data_ptr() % _LINE)
        before = _copied(to[:done], source[:done], before)
        rest = (ctypes.c_uint8 * 16)()
        arguments = (to[done:], source[done:], total - done, before ^ _ONES, rest)
        moved = call_kernel("mc_copy_folded", *arguments, kernel="copy")
        before = zlib.crc32(rest, _ONES) if moved else before
        done += moved
    return _copied(to[done:total], source[done:], before)


def _copied(to: Tensor, source: Tensor, before: int) -> int:
    to.numpy()[:] = source.numpy()  # torch would wake other threads
    return zlib.crc32(source.numpy().data, before)
