"""Convolve by cuDNN in the order and the precision that the CPU has too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Within, cuDNN convolves without TF32, which it takes unless told, and deterministically.

    Recurrent layers are set with them, as torch takes unlike settings of the two for a mistake.
    """
    cudnn: Any = torch.backends.cudnn
    kinds = cudnn.conv, cudnn.rnn
    before = [kind.fp32_precision for kind in kinds], cudnn.deterministic, cudnn.benchmark
    try:
        for kind in kinds:
            kind.fp32_precision = "ieee"
        cudnn.deterministic, cudnn.benchmark = True, False
        yield
    finally:
        for kind, precision in zip(kinds, before[0], strict=True):
            kind.fp32_precision = precision
        _, cudnn.deterministic, cudnn.benchmark = before
