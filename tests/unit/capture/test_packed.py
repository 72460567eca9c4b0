"""Packed sequences: their bounds reach the operator, not a matrix of tokens by tokens."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import megacompile
from megacompile.blocks.memory_meter import StorageMeter
from megacompile.capture.attention_masks import Masks, _bounds
from megacompile.kernels import document_bounds
from megacompile.kernels._triton import Gpu, recording
from megacompile.kernels.query_chunks import MOST_BYTES
from tests.support.graphs import attention_calls, graph_of, paths_on_cuda, run
from tests.support.zoo import causal, packed_batch

OURS = torch.ops.megacompile


def dense(self: Masks, theirs: Any, *args: Any) -> Any:
    """Packs as transformers does, so that a mask is all that is known."""
    return theirs(*args)


@pytest.mark.slow_cases(r"mistral")
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mistral"])
def test_bounds_are_bitwise_the_mask(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients on a CPU, of plain causal layers, windows and softcap."""
    torch.manual_seed(0)
    model, batch = causal(model_type).train(), packed_batch(0)
    bounded = graph_of(model, batch)
    calls = attention_calls(bounded)
    assert all(call["causal"] and call["bias"] is None and call["bounds"] is not None for call in calls)
    monkeypatch.setattr(Masks, "pack", dense)
    masked = graph_of(model, batch)
    assert all(call["bias"] is not None and call["bounds"] is None for call in attention_calls(masked))
    for ours, theirs in zip(run(bounded, model, batch), run(masked, model, batch), strict=True):
        assert torch.equal(ours, theirs)
    if model_type == "llama":
        pytest.importorskip("triton", reason="triton is missing: pip install triton")
        assert (paths_on_cuda(bounded), paths_on_cuda(masked)) == ({"triton"}, {"efficient"})
        assert paths_on_cuda(bounded, torch.float32) == {"efficient"}


def test_collators_for_flash_attention_say_the_same_twice() -> None:
    """Those of transformers and TRL give cumulative lengths beside positions."""
    torch.manual_seed(0)
    model, batch = causal("llama").train(), packed_batch(0)
    lengths = torch.tensor([0, 10, 18, 24], dtype=torch.int32)
    more = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 10, "max_length_k": 10}
    captured = graph_of(model, batch | more)
    assert all(call["bounds"] is not None for call in attention_calls(captured))
    for ours, plain in zip(
        run(captured, model, batch | more), run(graph_of(model, batch), model, batch), strict=True
    ):
        assert torch.equal(ours, plain)


POSITIONS = {
    "documents": [*range(10), *range(6)],
    "plain": [*range(16)],
    "from seven on": [*range(7, 23)],
    "a gap": [*range(4), *range(9, 21)],
    "one twice": [*range(5), *range(4, 15)],
    "all one": [3] * 16,
}
_ROWS = torch.ones(2, 16, dtype=torch.int64)
MASKS: dict[str, Tensor | None] = {
    "none": None,
    "ones": _ROWS,
    "ones, bool": _ROWS.bool(),
    "padding on the right": _ROWS.masked_fill(torch.arange(16) >= 13, 0),
    "padding on the left": _ROWS.masked_fill(torch.arange(16) < 3, 0),
    "4D": torch.full((2, 1, 16, 16), -1e9).triu(1),
}


def evaluated(model: nn.Module) -> megacompile.Program:
    """A program that is planned fast and trains nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    return megacompile.compile(
        model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, planner="full-recompute"
    )


@pytest.mark.slow_cases(r"(gemma2|llama-(none|ones, bool|padding|4D))")
@pytest.mark.filterwarnings("ignore:position_ids start again")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_mask_beside_positions_means_what_it_does_in_plain_transformers(model_type: str, mask: str) -> None:
    """Attention is cut at jumps of positions where there is no mask; a mask of ones is one."""
    torch.manual_seed(0)
    model, given = causal(model_type).eval(), MASKS[mask]
    eager, program = copy.deepcopy(model), evaluated(model)
    ids = torch.randint(3, 64, (2, 16))
    labels = ids.masked_fill(torch.arange(16) < 11, -100)
    if given is not None and given.dim() == 2:
        labels = labels.masked_fill(given == 0, -100)
    for positions in POSITIONS.values():
        rows = torch.tensor([positions, POSITIONS["plain"]])
        batch = {"input_ids": ids, "labels": labels, "position_ids": rows}
        batch |= {} if given is None else {"attention_mask": given}
        wanted = float(eager(**batch, use_cache=False).loss.detach())
        assert float(program.evaluate(batch)) == pytest.approx(wanted, rel=1e-6)
    program.close()


def told(batch: dict[str, Tensor]) -> list[str]:
    """The warnings about documents of a run on two such batches."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = evaluated(causal("llama"))
        for _ in range(2):
            program.evaluate(batch)
    program.close()
    return [str(w.message) for w in caught if "documents" in str(w.message)]


def test_documents_that_see_each_other_are_told_of_once() -> None:
    batch = packed_batch(0)
    assert not told(batch)
    (text,) = told(batch | {"attention_mask": torch.ones_like(batch["input_ids"])})
    assert "position_ids start again" in text and "attention_mask is left out" in text


@pytest.mark.slow_cases(r"right")
@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_that_start_again_at_padding_are_no_documents(side: str) -> None:
    """As generate and TRL make them of a mask."""
    batch = packed_batch(0)
    mask = torch.ones_like(batch["input_ids"])
    mask[:, slice(3) if side == "left" else slice(-3, None)] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    assert not told(batch | {"position_ids": positions, "attention_mask": mask})


def test_bounds_are_those_of_cumulative_lengths() -> None:
    lengths = (10, 8, 6)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    cumulative = torch.tensor([0, 10, 18, 24])
    assert torch.equal(_bounds(documents), document_bounds(cumulative, 24))
    assert torch.equal(_bounds(documents.expand(2, -1))[:, 1], document_bounds(cumulative, 24)[:, 0])


def call(device: str, tokens: int, dtype: torch.dtype, window: int = 0) -> tuple[Tensor, ...]:
    """Forward and backward of packed rows; all that the backward returns."""
    q, k, v = (torch.empty(1, tokens, n, 64, dtype=dtype, device=device).transpose(1, 2) for n in (8, 2, 2))
    bounds = torch.empty(2, 1, tokens, dtype=torch.int32, device=device)
    constants = 0.125, True, window, 0.0, 0.0, 0, False, bounds
    out, lse = OURS.attention(q, k, v, None, None, None, *constants)
    found: tuple[Tensor, ...] = OURS.attention_backward(out, q, k, v, None, None, None, out, lse, *constants)
    return found


def test_a_plan_for_a_gpu_counts_what_the_kernel_takes() -> None:
    """In proportion to the tokens, where a CPU holds a chunk's scores beside."""
    peaks = {}
    for gpu in (Gpu(132), None):
        for tokens in (8192, 16384):
            meter = StorageMeter(gpu=gpu)
            with FakeTensorMode(), recording(gpu=gpu), meter:
                call("cpu", tokens, torch.bfloat16)
            peaks[gpu, tokens] = meter.peak
    assert peaks[Gpu(132), 16384] == 2 * peaks[Gpu(132), 8192] and peaks[Gpu(132), 8192] < 8192**2
    assert peaks[None, 8192] > peaks[Gpu(132), 8192] + MOST_BYTES


def test_the_operator_is_registered_right() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 12, 8, requires_grad=True) for n in (4, 2, 2))
    bounds = document_bounds(torch.tensor([0, 5, 12]), 12)
    arguments = q, k, v, None, None, None, 0.3, True, 0, 0.0, 0.0, 0, False, bounds
    torch.library.opcheck(OURS.attention.default, arguments)
