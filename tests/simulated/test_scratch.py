"""What torch's operators ask their allocator for on CUDA is what plans count on fake CPU tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.blocks.kernel_scratch import scratch
from megacompile.blocks.memory_meter import StorageMeter
from megacompile.kernels import _triton, torch_sdpa
from megacompile.kernels.linear_cross_entropy import add_product_
from megacompile.runtime.cuda_memory import set_allocator

aten, ours = torch.ops.aten, torch.ops.megacompile
ROUNDING = 16 * 512  # bytes: the allocator rounds each tensor up to 512, and some hold a few bytes
GPU = _triton.gpu_of(torch.device("cuda", 0))
assert GPU is not None
PROCESSORS = GPU.processors
Shape = tuple[int, int, int, int, int]  # batch, heads, heads of keys, tokens, columns
SHAPES = [(1, 8, 8, 2048, 64), (2, 12, 12, 1024, 64), (1, 8, 2, 2048, 64), (1, 32, 8, 4096, 128),
          (1, 4, 4, 300, 64), (1, 4, 4, 256, 40), (1, 1, 1, 4096, 128), (1, 2, 2, 100, 160),
          (1, 16, 16, 512, 256)]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def left_over() -> None:
    """What earlier programs held in cycles is freed now, not while something is measured."""
    gc.collect()


@pytest.fixture
def expanding() -> None:
    """Segments expand as in programs, so blocks are no larger than what was asked for."""
    set_allocator(torch.device("cuda"))


def asked_for(run: Callable[[], Any]) -> tuple[int, int]:
    """The most bytes of device memory that a call holds, and those of its results."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    peak, left = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del results
    return peak, left


def arguments(shape: Shape, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, out and its gradient, stored as [B, S, H, D], and log-sum-exps."""
    batch, heads, groups, length, dim = shape
    counts = (heads, groups, groups, heads, heads)
    made = [torch.empty(batch, length, n, dim, dtype=dtype, device=device).transpose(1, 2) for n in counts]
    return [*made, torch.empty(batch, heads, length, device=device)]


@pytest.mark.parametrize("shape", SHAPES)
def test_flash_attention_takes_what_the_formula_says(shape: Shape) -> None:
    q, k, v, out, grad, lse = arguments(shape, "cuda", torch.bfloat16)
    peak, results = asked_for(lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True))
    formula = scratch(aten._scaled_dot_product_flash_attention.default, (q, k, v), {}, PROCESSORS)
    assert 0 <= peak - results - formula < ROUNDING
    seed = torch.empty(2, dtype=torch.uint64, device="cuda")
    given = (grad, q, k, v, out, lse)
    with torch_sdpa._deterministic():
        peak, results = asked_for(
            lambda: aten._scaled_dot_product_flash_attention_backward(
                *given, None, None, shape[3], shape[3], 0.0, True, seed, seed[:0]
            )
        )
    formula = scratch(aten._scaled_dot_product_flash_attention_backward.default, given, {}, PROCESSORS)
    assert formula > 4 * q.numel()
    assert 0 <= peak - results - formula < ROUNDING


@pytest.mark.parametrize("kind", ["causal", "bias", "window", "packed", "sinks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_takes_no_more_than_is_planned(
    shape: Shape, dtype: torch.dtype, kind: str, expanding: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of torch's attentions runs on CUDA."""
    monkeypatch.setattr(_triton, "_gave_up", True)
    constants = (0.125, kind != "bias", 64 if kind == "window" else 0, 0.0, 0.0, 0, False)

    def calls(device: str) -> list[Callable[[], Any]]:
        q, k, v, out, grad, lse = arguments(shape, device, dtype)
        length = shape[3]
        bias = (
            torch.empty(shape[0], 1, length, length, dtype=dtype, device=device) if kind == "bias" else None
        )
        sinks = torch.empty(shape[1], dtype=dtype, device=device) if kind == "sinks" else None
        extra, bounds = (bias, sinks, None), None
        if kind == "packed":
            bounds = torch.empty(2, shape[0], length, dtype=torch.int32, device=device)
        return [
            lambda: ours.attention(q, k, v, *extra, *constants, bounds),
            lambda: ours.attention_backward(grad, q, k, v, *extra, out, lse, *constants, bounds),
        ]

    with FakeTensorMode() as mode:
        fakes = calls("cpu")
    for real, fake in zip(calls("cuda"), fakes, strict=True):
        meter = StorageMeter(gpu=GPU)
        with mode, _triton.recording(gpu=GPU), meter:
            fake()
        assert asked_for(real)[0] <= meter.peak + ROUNDING


COLUMNS = [(64, 1024), (1024, 1024), (4096, 1001), (4096, 4096), (65536, 128), (2000, 14336), (8192, 6)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", COLUMNS)
def test_sums_of_columns_take_what_the_formula_says(
    shape: tuple[int, int], dtype: torch.dtype, expanding: None
) -> None:
    x = torch.empty(1, *shape, dtype=dtype, device="cuda")
    for call, dims in ((aten.sum.dim_IntList, [0, 1]), (aten.sum.dim_IntList, [-1]), (aten.mean.dim, [1])):
        peak, results = asked_for(lambda call=call, dims=dims: call(x, dims))
        assert 0 <= peak - results - scratch(call, (x, dims), {}, PROCESSORS) < ROUNDING


@pytest.mark.parametrize("indices", [torch.int64, torch.int32])
@pytest.mark.parametrize("count", [3072, 3073, 8192, 65536])
@pytest.mark.parametrize("shape", [(1000, 64), (32000, 256)])
def test_gradients_of_embeddings_take_no_more_than_is_planned(
    shape: tuple[int, int], count: int, indices: torch.dtype, expanding: None
) -> None:
    grad = torch.empty(1, count, shape[1], dtype=torch.bfloat16, device="cuda")
    args = (grad, torch.empty(1, count, dtype=indices, device="cuda"), shape[0], -1, False)
    peak, results = asked_for(lambda: aten.embedding_dense_backward(*args))
    formula = scratch(aten.embedding_dense_backward.default, args, {}, PROCESSORS)
    assert peak - results <= formula <= 1.1 * (peak - results) + 48 * count + (96 << 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(1000, 8), (16, 4096), (1, 8192), (1, 300000), (64, 8192), (1000, 5000)])
def test_sorts_take_no_more_than_is_planned(
    shape: tuple[int, int], dtype: torch.dtype, expanding: None
) -> None:
    x = torch.empty(shape, dtype=dtype, device="cuda")
    peak, results = asked_for(lambda: aten.sort(x, -1))
    formula = scratch(aten.sort.default, (x, -1), {}, PROCESSORS)
    assert peak - results <= formula + ROUNDING and formula <= 2.3 * (peak - results) + (96 << 10)
    if shape[0] == 1:
        table = torch.empty(1000, 8, dtype=torch.float32, device="cuda")
        args = (table, [x[0].long()], torch.empty(shape[1], 8, device="cuda"), True)
        peak, results = asked_for(lambda: aten.index_put(*args))
        formula = scratch(aten.index_put.default, args, {}, PROCESSORS)
        assert peak - results <= formula <= 2 * (peak - results) + (96 << 10)


def test_a_head_adds_to_its_float32_sum_without_memory(expanding: None) -> None:
    """Within cuBLAS's product: a product of its own would be as large as the sum."""
    total = torch.empty(512, 256, device="cuda")
    a, b = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in ((512, 1024), (1024, 256)))
    add_product_(total, a, b)  # cuBLAS's workspace
    assert asked_for(lambda: add_product_(total, a, b)) == (0, 0)
