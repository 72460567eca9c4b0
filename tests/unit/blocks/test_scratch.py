"""Plans for a GPU hold the scratch of its kernels; see ``tests/simulated/test_scratch.py``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.api.frontend import Compiled, Frontend
from megacompile.blocks.memory_meter import StorageMeter
from megacompile.capture.batch import read_batch
from megacompile.cli.estimator import Study
from megacompile.cli.plan_answer import Question
from megacompile.hardware.catalog import PROFILES
from megacompile.kernels._triton import Gpu, recording
from megacompile.planner.min_feasible_budget import least
from megacompile.schedule.plan import Mode

BATCH, HEADS, LENGTH, DIM = 1, 2, 512, 64
ROW = 4 * BATCH * HEADS * LENGTH  # bytes of an FP32 number for each query


class Attention(nn.Module):
    """Nothing that takes as much as the backward of its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(HEADS * DIM, 3 * HEADS * DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).view(BATCH, LENGTH, 3, HEADS, DIM).transpose(1, 3).unbind(2)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).float().square().mean()


def compiled(gpu: Gpu | None) -> Compiled:
    model = Attention()
    batch = read_batch(torch.zeros(BATCH, LENGTH, HEADS * DIM, dtype=torch.bfloat16), model)
    return next(Frontend(model, torch.bfloat16, gpu=gpu).tilings(batch)).build()


def sums(processors: int) -> int:
    """Bytes: dq in FP32 for each of as many programs as one head has of the multiprocessors."""
    return -(-processors // (BATCH * HEADS)) * ROW * DIM


def test_the_least_peak_grows_by_what_attention_takes_beside() -> None:
    gpus = {None: None, 108: Gpu(108), 132: Gpu(132)}
    peaks = {n: least(compiled(gpu).assembly.work, Mode("train")).nbytes for n, gpu in gpus.items()}
    copies = 3 * ROW * DIM // 2  # of dq, dk and dv by rows, in bf16: made when the scratch is free again
    assert peaks[132] - peaks[None] == sums(132) + ROW - copies
    assert peaks[132] - peaks[108] == sums(132) - sums(108)


class Biased(nn.Module):
    """Nothing that takes as much as the sums of its bias's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x).square().mean()


def test_the_least_peak_grows_by_what_sums_of_columns_take_beside() -> None:
    peaks = {}
    for gpu in (None, Gpu(108), Gpu(132)):
        model = Biased()
        batch = read_batch(torch.zeros(1, 4096, 16, dtype=torch.bfloat16), model)
        made = next(Frontend(model, torch.bfloat16, gpu=gpu).tilings(batch)).build()
        peaks[gpu] = least(made.assembly.work, Mode("train")).nbytes
    sums = 4 * 1024 * 64 * 128  # FP32, for each thread of the 64 thread blocks that share a column
    assert sums / 2 < peaks[Gpu(132)] - peaks[None] <= sums
    assert peaks[Gpu(108)] == peaks[Gpu(132)]


def test_a_sum_of_one_row_takes_nothing_beside() -> None:
    with FakeTensorMode(), StorageMeter(gpu=Gpu(132)) as meter:
        torch.empty(1, 64).sum(0)
    assert meter.peak == 2 * 4 * 64  # a row and its sum


@pytest.mark.parametrize("groups", [HEADS, 1])
def test_a_call_measured_before_is_remembered_by_multiprocessors(groups: int) -> None:
    def peak(gpu: Gpu | None) -> int:
        with FakeTensorMode(), StorageMeter(gpu=gpu) as meter:
            q, out, grad = (torch.empty(BATCH, HEADS, LENGTH, DIM, dtype=torch.bfloat16) for _ in range(3))
            k, v = (torch.empty(BATCH, groups, LENGTH, DIM, dtype=torch.bfloat16) for _ in range(2))
            lse = torch.empty(BATCH, HEADS, LENGTH)
            call = (grad, q, k, v, None, None, None, out, lse, 1.0, True, 0, 0.0, 0.0, 0, False)
            torch.ops.megacompile.attention_backward(*call)
        return meter.peak

    assert peak(None) < peak(Gpu(108)) < peak(Gpu(132))
    assert peak(Gpu(132)) - peak(Gpu(108)) == sums(132) - sums(108)


@pytest.mark.slow
def test_estimates_are_for_the_card_that_is_asked_about() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is missing")
    from megacompile.cli.models import build

    def needed(dim: int) -> Callable[[str], int]:
        config = transformers.CONFIG_MAPPING["llama"](
            vocab_size=64,
            hidden_size=2 * dim,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
        study = Study(build("llama", config), "bf16", lambda message: None)
        return lambda card: study.least(Question(PROFILES[card], 1, LENGTH, 10**9))[0].device_bytes

    narrow, wide = needed(DIM), needed(128)
    assert narrow("b200") - narrow("rtx-4090") == sums(148) - sums(128)
    assert narrow("h200") == narrow("h100-sxm")
    assert wide("h100-sxm") < wide("a100-80gb-sxm") - sums(108)  # whose attention is torch's, with its sums


def test_fused_operators_take_what_their_launchers_do() -> None:
    """On a GPU: dx, and partial sums of the weight's gradient for each multiprocessor, in FP32."""
    rows, columns = 4096, 1024

    def peak(gpu: Gpu) -> int:
        with FakeTensorMode(), recording(gpu=gpu), torch.no_grad():
            x, grad = (torch.empty(rows, columns, dtype=torch.bfloat16) for _ in range(2))
            weight, rstd = torch.empty(columns, dtype=torch.bfloat16), torch.empty(rows)
            meter = StorageMeter(gpu=gpu)
            for given in (x, grad, weight, rstd):
                meter.ignore(given)
            with meter:
                torch.ops.megacompile.rms_norm_backward(grad, x, weight, rstd, 0.0, True)
        return meter.peak

    more = peak(Gpu(132)) - peak(Gpu(66))
    assert more > 0 and more % (4 * 66 * columns) == 0
    assert 0 <= peak(Gpu(66)) - 2 * rows * columns - more < more
