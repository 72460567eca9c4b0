"""The same work by others: same shape, tokens, AdamW and precision; what cannot be run says why."""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.correct import HeldBytes
from benchmarks.gpu.findings import Recorder
from benchmarks.gpu.work import SEQUENCE, batch_of, described, device, fill

Step = Callable[[], object]


def peer(
    to: Recorder, name: str, model: str, budget: float, tokens: int, steps: int = 5, sequence: int = SEQUENCE
) -> None:
    """Time a step of one peer, on micro-batches of one sequence; its memory is capped at ``budget`` GB."""
    make = {"plain": _plain, "fsdp2": _fsdp2, "deepspeed": _deepspeed}[name]
    title = f"{name}: {model} in {budget:g} GB, {tokens} tokens"
    with to.finding(title, peer=name, model=model, budget=f"{budget:g}GB", tokens=tokens) as finding:
        if name == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            finding["not measured"] = "deepspeed is not installed"
            return
        if device() == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget * 1e9 / total))
        with HeldBytes() as held:
            published = described(model)
            sequence = min(sequence, tokens)
            rows = tokens // sequence
            batch = batch_of(tokens, sequence, published.config.vocab_size)
            try:
                run = make(
                    published, [{k: v[i : i + 1].to(device()) for k, v in batch.items()} for i in range(rows)]
                )
                seconds = _timed(to, run, steps)
            except torch.OutOfMemoryError as error:
                finding["not measured"] = f"out of device memory: {str(error).split('. ')[0]}"
                return
            flops = published.step_flops(rows, sequence)
            finding |= {"step s": seconds, "tokens/s": tokens / seconds, "model TFLOP/s": flops / seconds /
            1e12,
                        "held": held.most}  # fmt: skip


def _timed(to: Recorder, run: Step, steps: int) -> float:
    spans = []
    for number in range(steps):
        start = time.perf_counter()
        run()
        if device() == "cuda":
            torch.cuda.synchronize()
        spans.append(time.perf_counter() - start)
        to.note("step ended", number=number, seconds=spans[-1])
    return statistics.median(spans[min(2, steps - 1) :])


def _step(module: nn.Module, batches: list[dict[str, Any]], *, autocast: bool) -> Step:
    """One optimizer step over all micro-batches, by torch's fused AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)

    def run() -> None:
        for batch in batches:
            with torch.autocast(device(), torch.bfloat16, enabled=autocast):
                loss = module(**batch).loss / len(batches)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _plain(published: Any, batches: list[dict[str, Any]]) -> Step:
    """Everything on the device: FP32 masters under autocast, layers checkpointed."""
    module = fill(published.module.train(), published.config, device())
    module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return _step(module.to(device()), batches, autocast=True)


def _fsdp2(published: Any, batches: list[dict[str, Any]]) -> Step:
    """fully_shard per layer with CPUOffloadPolicy, bf16 compute, layers checkpointed."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("cpu:gloo,cuda:nccl" if device() == "cuda" else "gloo")
    mesh = init_device_mesh(device(), (1,))
    module = fill(published.module.train(), published.config, "cpu")
    module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    offload: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if device() == "cuda" else {}
    for layer in module.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, mp_policy=policy, **offload)
    fully_shard(module, mesh=mesh, mp_policy=policy, **offload)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device())
    return _step(module, batches, autocast=False)


def _deepspeed(published: Any, batches: list[dict[str, Any]]) -> Step:
    """ZeRO-3 with parameters and optimizer on the host, pinned, overlapped, DeepSpeedCPUAdam."""
    import deepspeed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "RANK": "0", "WORLD_SIZE": "1",
                   "LOCAL_RANK": "0"}  # fmt: skip
    module = fill(published.module.train(), published.config, "cpu").bfloat16()
    module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": len(batches),
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 100_000_000,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": False}},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config, model_parameters=module.parameters())

    def run() -> None:
        for batch in batches:
            engine.backward(engine(**batch).loss)
            engine.step()

    return run
