"""Copies of bytes with their CRC-32: in one pass by a C kernel, or by zlib after the copy.

In: flat tensors of bytes. Out: the same bytes elsewhere, and a checksum that is zlib's.
"""

from __future__ import annotations

import ctypes
import zlib

from torch import Tensor

from megacompile.host.adam import backend, call_kernel

_ONES = 0xFFFFFFFF


def copy_checked(to: Tensor, source: Tensor, before: int = 0) -> int:
    """Copy ``source``, less than 2 GiB, on this thread; CRC-32 of its bytes, continued from ``before``."""
    done, total = 0, source.numel()
    if backend() == "c":
        rest = (ctypes.c_uint8 * 16)()
        done = call_kernel("mc_copy_folded", to, source, total, before ^ _ONES, rest)
        before = zlib.crc32(rest, _ONES) if done else before
    to.numpy()[done:total] = source.numpy()[done:]  # torch would wake other threads
    return zlib.crc32(source[done:].numpy().data, before)
