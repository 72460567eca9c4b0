"""Plans for a GPU hold the scratch of its kernels; see ``tests/simulated/test_scratch.py``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.api.pipeline import Compiled, Frontend
from megacompile.blocks.memory_meter import StorageMeter
from megacompile.capture.batch import read_batch
from megacompile.cli.estimator import Question, Study
from megacompile.hardware.catalog import PROFILES
from megacompile.kernels import _triton
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


def compiled(processors: int | None) -> Compiled:
    model = Attention()
    batch = read_batch(torch.zeros(BATCH, LENGTH, HEADS * DIM, dtype=torch.bfloat16), model)
    return next(Frontend(model, torch.bfloat16, processors=processors).tilings(batch, evaluate=False)).build()


def sums(processors: int) -> int:
    """Bytes: dq in FP32 for each of as many programs as one head has of the multiprocessors."""
    return -(-processors // (BATCH * HEADS)) * ROW * DIM


def test_the_least_peak_grows_by_what_attention_takes_beside() -> None:
    peaks = {n: least(compiled(n).assembly.work, Mode("train")).nbytes for n in (None, 108, 132)}
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
    for processors in (None, 108, 132):
        model = Biased()
        batch = read_batch(torch.zeros(1, 4096, 16, dtype=torch.bfloat16), model)
        made = next(
            Frontend(model, torch.bfloat16, processors=processors).tilings(batch, evaluate=False)
        ).build()
        peaks[processors] = least(made.assembly.work, Mode("train")).nbytes
    sums = 4 * 1024 * 64 * 128  # FP32, for each thread of the 64 thread blocks that share a column
    assert sums / 2 < peaks[132] - peaks[None] <= sums
    assert peaks[108] == peaks[132]


def test_a_sum_of_one_row_takes_nothing_beside() -> None:
    with FakeTensorMode(), StorageMeter(processors=132) as meter:
        torch.empty(1, 64).sum(0)
    assert meter.peak == 2 * 4 * 64  # a row and its sum


@pytest.mark.parametrize("groups", [HEADS, 1])
def test_a_call_measured_before_is_remembered_by_multiprocessors(groups: int) -> None:
    def peak(processors: int | None) -> int:
        with FakeTensorMode(), StorageMeter(processors=processors) as meter:
            q, out, grad = (torch.empty(BATCH, HEADS, LENGTH, DIM, dtype=torch.bfloat16) for _ in range(3))
            k, v = (torch.empty(BATCH, groups, LENGTH, DIM, dtype=torch.bfloat16) for _ in range(2))
            lse = torch.empty(BATCH, HEADS, LENGTH)
            call = (grad, q, k, v, None, None, None, out, lse, 1.0, True, 0, 0.0, 0.0, 0, False)
            torch.ops.megacompile.attention_backward(*call)
        return meter.peak

    assert peak(None) < peak(108) < peak(132)
    assert peak(132) - peak(108) == sums(132) - sums(108)


def test_estimates_are_for_the_card_that_is_asked_about() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is missing")
    from megacompile.cli.models import build

    config = transformers.CONFIG_MAPPING["llama"](
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    study = Study(build("llama", config), "bf16", lambda message: None)

    def needed(card: str) -> int:
        return study.least(Question(PROFILES[card], 1, LENGTH, 10**9))[0].device_bytes

    assert needed("b200") - needed("rtx-4090") == sums(148) - sums(128)
    assert needed("h200") == needed("h100-sxm")


def test_fused_operators_take_what_their_launchers_do() -> None:
    """On a GPU: dx, and partial sums of the weight's gradient for each multiprocessor, in FP32."""
    rows, columns = 4096, 1024

    def peak(processors: int) -> int:
        with FakeTensorMode(), _triton.recording(processors=processors), torch.no_grad():
            x, grad = (torch.empty(rows, columns, dtype=torch.bfloat16) for _ in range(2))
            weight, rstd = torch.empty(columns, dtype=torch.bfloat16), torch.empty(rows)
            meter = StorageMeter(processors=processors)
            for given in (x, grad, weight, rstd):
                meter.ignore(given)
            with meter:
                torch.ops.megacompile.rms_norm_backward(grad, x, weight, rstd, 0.0, True)
        return meter.peak

    more = peak(132) - peak(66)
    assert more > 0 and more % (4 * 66 * columns) == 0
    assert 0 <= peak(66) - 2 * rows * columns - more < more
