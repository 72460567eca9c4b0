"""The law of split masters on every FP32 bit pattern: join(split(x)) is x, for all 2**32 of them.

In:  nothing. Out: one line per backend; exit status 1 where a pattern is lost. The test suite takes a
stratified sample (`tests/unit/state/test_adam.py`); this takes them all, NaN payloads and denormals included.
"""

from __future__ import annotations

import sys
import time

import torch

from megacompile.state import adam

CHUNK = 1 << 24


def lost_patterns() -> int:
    """How many of all 2**32 patterns do not come back."""
    offsets = torch.arange(CHUNK, dtype=torch.int32)
    high, low = torch.empty(CHUNK, dtype=torch.bfloat16), torch.empty(CHUNK, dtype=torch.int16)
    back = torch.empty(CHUNK)
    lost = 0
    for start in range(-(1 << 31), 1 << 31, CHUNK):
        bits = offsets + start
        adam.split(bits.view(torch.float32), high, low)
        adam.join(high, low, back)
        lost += int((back.view(torch.int32) != bits).sum())
    return lost


def main() -> None:
    """Both backends, where there is a compiler."""
    total = 0
    for backend in ("c", "torch"):
        adam.set_backend(backend)  # type: ignore[arg-type]
        start = time.perf_counter()
        lost = lost_patterns()
        total += lost
        seconds = time.perf_counter() - start
        print(f"{backend}: {lost} of {1 << 32} bit patterns lost, {seconds:.0f} s", flush=True)
    sys.exit(total > 0)


if __name__ == "__main__":
    main()
