"""The model of torch's allocator, and the requests of a step, beside the allocator itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import megacompile
from megacompile.hardware.caching_allocator import PAGE_BYTES, Pages
from megacompile.hardware.step_requests import step_requests
from megacompile.planner.too_small import fitting
from megacompile.runtime.cuda import CudaDevice
from megacompile.runtime.cuda_memory import TorchCuda, replayed
from tests.simulated.test_budgets import batch, compiled, gpt2, llama, taken_beside

LIMIT = 540 << 20
computing = CudaDevice.computing  # without numbers


@pytest.fixture
def limited() -> Iterator[None]:
    api = TorchCuda(torch.device("cuda", 0))
    torch.cuda.empty_cache()
    api.limit(LIMIT)
    yield
    api.release()


@pytest.mark.parametrize("seed", range(2))
def test_it_holds_what_the_allocator_holds(seed: int, limited: None) -> None:
    """After each of many requests on a stream of its own, near the limit: the same bytes, the same places."""
    draw, kept = random.Random(seed), torch.cuda.memory_reserved()
    pages, alive, origin = Pages(LIMIT - kept), dict[int, torch.Tensor](), dict[bool, int]()
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for number in range(1500):
            full = sum(t.nbytes for t in alive.values()) > draw.choice([300, 400, 500]) << 20
            if alive and (full or draw.random() < 0.45):
                gone = draw.choice(sorted(alive))
                del alive[gone]
                pages.give(gone)
                continue
            nbytes = int(2 ** draw.uniform(6, 26.5))
            try:
                alive[number] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                pages.trim()  # as it did
                continue
            pages.take(number, nbytes)
            address = alive[number].data_ptr() - pages.address(number)
            assert origin.setdefault(nbytes > 1 << 20, address) == address
            assert torch.cuda.memory_reserved() - kept == pages.held
        alive.clear()
    assert torch.cuda.memory_stats()["num_alloc_retries"] > before


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_step_takes_what_was_replayed(make: Callable[[], nn.Module]) -> None:
    """To a page of each pool: what kernels take in pieces is replayed as one."""
    budget = taken_beside() + (256 << 20)
    program = compiled(make(), 512, "cuda", budget)
    program.train_step(batch(0, 512))  # gives pages back before and after
    program.train_step(batch(1, 512))
    program.train_step(batch(2, 512))
    program._session.synchronize()
    held = torch.cuda.max_memory_reserved()
    scheduled = program._session.scheduled()
    step, made = scheduled.planned.step, scheduled.compiled
    asked = step_requests(step, made.part, made.templates, made.assembly)
    program.close()
    assert abs(held - replayed(budget, step, asked).peak) <= PAGE_BYTES + (2 << 20)


@pytest.mark.parametrize("mib", [760, 1208])
def test_a_larger_model_leaves_the_allocator_room(mib: int) -> None:
    """Tensors of all sizes leave parts of pages free between them: 28 MiB too many in the first plan within
    1208. What a step asks for is asked of the real allocator, under the limit of its budget: no weight is
    there, and nothing computed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        wide = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=16000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=2,
                num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=4096,
            )
        ).train()  # fmt: skip
    budget, optimizer = taken_beside() + (mib << 20), torch.optim.AdamW(wide.parameters(), lr=1e-3)
    session = megacompile.compile(
        wide, f"{budget}B", optimizer=optimizer, device="cuda", max_grad_norm=1.0, on_nonfinite="skip",
        weights=wide.get_parameter,
    )._session  # fmt: skip
    micro = session.padded(session.read(batch(0, 4096)))
    mode = session.training(micro)
    made = fitting(session.compiler.schedule(session.decided, micro[0], mode)).program(micro[0], mode)
    step, parts = made.planned.step, made.compiled
    asked = step_requests(step, parts.part, parts.templates, parts.assembly)
    assert ask_for(asked, step.constant_bytes + step.slab_bytes, budget) > mib << 19


def ask_for(requests: list[tuple[int, int]], stays: int, budget: int) -> int:
    """Make two steps' requests of the allocator of a device that is opened under a budget; the most bytes."""
    device = CudaDevice(TorchCuda(torch.device("cuda", 0)), budget)
    with computing(device):
        alive = {-1: device_bytes(stays), -2: device_bytes(32 << 20)}  # the last, cuBLAS's
        for number, nbytes in 2 * requests:
            if nbytes:
                alive[number] = device_bytes(nbytes)
            else:
                del alive[number]
    most = torch.cuda.max_memory_allocated()
    alive.clear()
    device.close()
    return most


def device_bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cuda")
