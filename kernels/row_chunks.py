"""Run a plain torch reference a few rows at a time, so that its float32 copies stay small.

A reference computes in float32 on the whole of what it is given. Given a 32nd of the rows at a time it
holds a 32nd of the copies, and its results stay the same: what it returns for a row depends on that row
alone, and sums over rows are accumulated in the wide type.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megacompile.kernels._triton import on_gpu

PARTS, LEAST = 32, 1 << 13
_MEASURED = 2  # all later chunks hold no more than the second, which meets what the first left


def chunks(x: Tensor, row_elements: int | None = None) -> Iterator[slice]:
    """Slices of the rows of ``x``, of as many elements as it has in one, or of ``row_elements``: at most 32,
    each of at least 8k elements (and one row).

    Fake tensors, which only measure the memory of a CPU's run, have two.
    """
    elements = x[:1].numel() if row_elements is None else row_elements
    step = max(1, -(-len(x) // PARTS), LEAST // max(elements, 1))
    starts = range(0, len(x), step)
    for start in itertools.islice(starts, _MEASURED if isinstance(x, FakeTensor) and not on_gpu(x) else None):
        yield slice(start, min(start + step, len(x)))


def by_rows(
    run: Callable[..., Sequence[Tensor]],
    given: Sequence[Tensor],
    outs: Sequence[Tensor],
    sums: Sequence[Tensor] = (),
) -> None:
    """Fill ``outs`` and add to ``sums`` what ``run`` returns for chunks of the rows of ``given``.

    ``given`` and ``outs`` share their first dimension; ``run`` returns one tensor for each of
    ``outs`` and ``sums``, in this order.
    """
    for part in chunks(given[0]):
        results = run(*(x[part] for x in given))
        for out, result in zip(outs, results, strict=False):
            out[part] = result
        for total, result in zip(sums, results[len(outs) :], strict=True):
            total += result


def flat(x: Tensor) -> Tensor:
    """x as [rows, columns]; a copy only where no view does."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])
