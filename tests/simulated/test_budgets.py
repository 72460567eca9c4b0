"""Small budgets: what a program is planned for, torch's allocator and operators can keep to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import megacompile
from megacompile.api.pipeline import Compiler
from megacompile.runtime.cuda_memory import LOOSE_BYTES, spare_bytes
from tests.simulated.numbers import runtime

CONTEXT = 64 << 20  # bytes: a small one, so that budgets are mostly the plan's
VOCABULARY = 1000
BESIDE = LOOSE_BYTES + spare_bytes(0)  # for libraries and pages, of a small budget


@pytest.fixture(autouse=True)
def small_context(device: None) -> Iterator[None]:
    runtime.set(context=CONTEXT)
    yield
    runtime.set(context=512 << 20)


def llama(layers: int = 2, width: int = 128) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
            num_attention_heads=width // 64, max_position_embeddings=2048,
        )
    )  # fmt: skip


def compiled(model: nn.Module, length: int, device: str, budget: int) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    return megacompile.compile(
        model, f"{budget}B", optimizer=optimizer, device=device, example_batch=batch(0, length)
    )


def batch(seed: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def least_budget(model: nn.Module, length: int) -> int:
    """The one that the error names."""
    with pytest.raises(megacompile.BudgetError, match="has to be at least") as error:
        compiled(model, length, "cuda", CONTEXT + BESIDE + (1 << 20))
    assert error.value.least_bytes is not None
    return error.value.least_bytes


def losses(program: megacompile.Program, length: int, steps: int) -> list[float]:
    found = [float(program.train_step(batch(i, length)).loss) for i in range(steps)]
    program.close()
    return found


def test_the_least_budget_trains() -> None:
    """Deterministic flash attention takes 35 MB beside its results here: 33 sums of dq in FP32."""
    torch.manual_seed(0)
    model = llama(layers=3, width=256)
    budget = least_budget(model, 1024)
    found = losses(compiled(model, 1024, "cuda", budget), 1024, 2)
    torch.manual_seed(0)
    assert found == losses(compiled(llama(layers=3, width=256), 1024, "cpu", 1 << 30), 1024, 2)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=128, n_layer=2, n_head=2, n_positions=512,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


@pytest.mark.parametrize("make", [gpt2, llama])
def test_every_budget_from_the_least_on_trains(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the CPU backend's losses. No state stays on the device, whose AdamW rounds otherwise."""
    monkeypatch.setattr(Compiler, "_may_reside", lambda *_: ())

    def trained(device: str, budget: int) -> list[float]:
        torch.manual_seed(0)
        return losses(compiled(make(), 512, device, budget), 512, 2)

    least, expected = least_budget(make(), 512), trained("cpu", 1 << 30)
    beside = taken_beside()
    for factor in (1.0, 1.02, 1.1, 1.5, 2.0):
        budget = beside + int((least - beside) * factor)
        assert trained("cuda", budget) == expected, factor


def taken_beside() -> int:
    """What a budget holds beside the plan's bytes."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() + BESIDE
