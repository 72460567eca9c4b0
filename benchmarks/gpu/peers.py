"""The same work by others: same shape, dtype, tokens, optimizer; each only where it can be imported.

What cannot be run is a row that says why; nothing is guessed. All keep FP32 masters and moments.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.record import Result
from benchmarks.gpu.work import batch_of, device, shaped, tiny

Step = Callable[[], object]


def peer(name: str, model: str, tokens: int, sequence: int, repeats: int, budget_gb: float) -> Result:
    """Median step time and peaks of one peer; ``budget_gb`` caps torch's allocator where it can be."""
    maker = {"plain": _plain, "fsdp2": _fsdp2, "deepspeed": _deepspeed, "superoffload": _superoffload,
             "megatrain": _megatrain}[name]  # fmt: skip
    if name == "megatrain":
        return _megatrain(model, tokens, sequence, repeats, budget_gb)
    missing = _missing(name)
    if missing:
        return {"not measured": missing}
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_gb * 1e9 / total))
    described, module = (None, tiny("llama")) if model == "tiny" else shaped(model)
    vocabulary = 512 if described is None else described.config.vocab_size
    rows, length = max(1, tokens // sequence), min(tokens, sequence)
    flops = 0.0 if described is None else described.step_flops(rows, length)
    batch = {k: v.to(device()) for k, v in batch_of(tokens, sequence, vocabulary).items()}
    try:
        seconds = _timed(maker(module, batch), repeats)
    except torch.OutOfMemoryError as error:
        return {"not measured": f"out of device memory ({str(error).split('. ')[0]})"}
    peak = torch.cuda.max_memory_reserved() / 1e9 if torch.cuda.is_available() else None
    return {"tokens": tokens, "step_seconds": seconds, "real_tokens_per_second": tokens / seconds,
            "model_tflops": flops / seconds / 1e12, "device_peak_gb": peak}  # fmt: skip


def _missing(name: str) -> str | None:
    needs = {"deepspeed": "deepspeed", "superoffload": "deepspeed"}.get(name)
    if needs and importlib.util.find_spec(needs) is None:
        return f"{needs} is not installed"
    return None


def _timed(step: Step, repeats: int) -> float:
    def run() -> float:
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    run()
    run()
    return statistics.median(run() for _ in range(repeats))


def _step(forward: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step() -> object:
        loss = forward()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _plain(module: nn.Module, batch: dict[str, Any]) -> Step:
    """Resident, FP32 masters under autocast, torch.compile, fused AdamW, layers checkpointed."""
    module = module.float().to(device())
    module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    on_gpu = torch.cuda.is_available()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(module) if on_gpu else module

    def loss() -> Tensor:
        with torch.autocast(device(), torch.bfloat16):
            return forward(**batch).loss  # type: ignore[no-any-return]

    return _step(loss, optimizer)


def _fsdp2(module: nn.Module, batch: dict[str, Any]) -> Step:
    """fully_shard per layer with CPUOffloadPolicy, bf16 compute, fused AdamW on the host."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    mesh = init_device_mesh(device(), (1,))
    module = module.float()
    module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    offload: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if torch.cuda.is_available() else {}
    for layer in module.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, mp_policy=policy, **offload)
    fully_shard(module, mesh=mesh, mp_policy=policy, **offload)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    return _step(lambda: module(**batch).loss, optimizer)


def _deepspeed(module: nn.Module, batch: dict[str, Any], *, more: dict[str, Any] | None = None) -> Step:
    """ZeRO-3 with parameters and optimizer on the host, pinned, overlapped, DeepSpeedCPUAdam."""
    import deepspeed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "RANK": "0", "WORLD_SIZE": "1",
                   "LOCAL_RANK": "0"}  # fmt: skip
    rows = len(batch["input_ids"])
    module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    zero = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 100_000_000,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    } | (more or {})
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": False}},
        "wall_clock_breakdown": False,
    }
    engine, *_ = deepspeed.initialize(model=module, config=config, model_parameters=module.parameters())

    def step() -> object:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _superoffload(module: nn.Module, batch: dict[str, Any]) -> Step:
    """DeepSpeed's SuperOffload: optimizer steps on the host overlap the backward."""
    offload = {"device": "cpu", "pin_memory": True, "ratio": 0.9, "super_offload": True,
               "cpuadam_cores_perc": 0.9}  # fmt: skip
    return _deepspeed(module, batch, more={"offload_optimizer": offload, "offload_param": {"device": "none"}})


def _megatrain(model: str, tokens: int, sequence: int, repeats: int, budget_gb: float) -> Result:
    """Its own benchmark script in a checkout named by MEGATRAIN_HOME, which prints seconds per step."""
    home = os.environ.get("MEGATRAIN_HOME")
    if not home or not Path(home).is_dir():
        return {"not measured": "MEGATRAIN_HOME names no checkout"}
    script = os.environ.get("MEGATRAIN_COMMAND")
    if not script:
        return {"not measured": "MEGATRAIN_COMMAND is not set (it must print seconds per step last)"}
    command = script.format(model=model, tokens=tokens, sequence=sequence, steps=repeats, budget=budget_gb)
    done = subprocess.run(command, shell=True, cwd=home, capture_output=True, text=True)
    if done.returncode:
        return {"not measured": f"it ended with status {done.returncode}: {done.stderr.strip()[-200:]}"}
    seconds = float(done.stdout.split()[-1])
    return {"tokens": tokens, "step_seconds": seconds, "real_tokens_per_second": tokens / seconds}
