"""The same work by others: same shape, tokens, AdamW and batch, each with its best settings; what cannot be
run says why.

The model's loss is taken in pieces of a row's logits, so that no peer has to hold those of all tokens: then
a micro-batch may have all rows, weights come and gradients go once a step, and nothing is summed on the host.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.correct import HeldBytes
from benchmarks.gpu.findings import Recorder
from benchmarks.gpu.work import SEQUENCE, batch_of, described, device, fill, missing

Batches = list[dict[str, Tensor]]  # micro-batches on the host
Step = Callable[[], float]  # returns the loss before its update
_PACKAGES = {"deepspeed": ["deepspeed"], "megatrain": ["infinity", "deepspeed"]}  # what a peer imports
_LR = 1e-6
_DEAREST = 12  # operators of a profile


def peer(
    to: Recorder, name: str, model: str, budget: float, tokens: int, steps: int = 5, rows: int = 1,
    profiled: bool = False, sequence: int = SEQUENCE,
) -> None:  # fmt: skip
    """Time a step of one peer, on micro-batches of ``rows`` sequences; its memory is capped at ``budget`` GB.

    ``profiled``: a further step is profiled, after what is timed: where the host and the device spend it.
    """
    title = f"{name}: {model} in {budget:g} GB, {tokens} tokens"
    with to.finding(title, peer=name, model=model, budget=f"{budget:g}GB", tokens=tokens) as finding:
        if why := missing(*_PACKAGES.get(name, ())):
            finding["not measured"] = why
            return
        with contextlib.suppress(OSError):  # where RAM ends, this process ends, and no other
            Path("/proc/self/oom_score_adj").write_text("1000")
        if device() == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget * 1e9 / total))
        with HeldBytes() as held:
            start = time.perf_counter()
            published = described(model)
            sequence = min(sequence, tokens)
            batch = batch_of(tokens, sequence, published.config.vocab_size)
            count = tokens // sequence
            batches = [{k: v[i : i + rows] for k, v in batch.items()} for i in range(0, count, rows)]
            try:
                run = PEERS[name](published, batches)
                finding["set up in s"] = time.perf_counter() - start
                seconds, finding["losses"] = _timed(to, run, steps)
                if profiled:
                    finding["dearest, ms"] = _profile(run)
            except torch.OutOfMemoryError as error:
                finding["not measured"] = f"out of device memory: {str(error).split('. ')[0]}"
                return
            flops = published.step_flops(count, sequence)
            finding |= {"step s": seconds, "tokens/s": tokens / seconds, "held": held.most,
                        "model TFLOP/s": flops / seconds / 1e12}  # fmt: skip


def compile_adam(to: Recorder) -> None:
    """Compile DeepSpeed's Adam for this processor, which takes most of a minute, without a context on the
    device: what stages beside this one hold there is measured."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with to.finding("DeepSpeed's Adam") as finding:
        if why := missing("deepspeed"):
            finding["not measured"] = why
            return
        _deepspeed_adam()([nn.Parameter(torch.zeros(8))])


def _deepspeed_adam() -> Any:
    """The class of DeepSpeed's Adam. A build that was killed has left a lock, on which the next would wait
    for ever."""
    for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR", "none")).rglob("lock"):
        lock.unlink()
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam


def _timed(to: Recorder, run: Step, steps: int) -> tuple[float, list[float]]:
    spans, losses = [], []
    for number in range(steps):
        start = time.perf_counter()
        losses.append(run())
        if device() == "cuda":
            torch.cuda.synchronize()
        spans.append(time.perf_counter() - start)
        to.note("step ended", number=number, seconds=spans[-1], loss=losses[-1])
    return statistics.median(spans[min(2, steps - 1) :]), losses


def _profile(run: Step) -> dict[str, list[float]]:
    """Milliseconds of the host and of the device, by operator without what it calls, and by part of the step
    as a whole; the dearest of either."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device() == "cuda" else [])]
    with profile(activities=activities) as profiled:
        run()
    found: dict[str, list[float]] = {}
    averages = profiled.key_averages()
    for kind in ("cpu", "device"):
        dearest = sorted(averages, key=lambda e: -getattr(e, f"self_{kind}_time_total"))[:_DEAREST]
        for entry in [e for e in averages if e.key in _PARTS] + dearest:
            whole = "" if entry.key in _PARTS else "self_"
            host, card = (getattr(entry, f"{whole}{k}_time_total") / 1e3 for k in ("cpu", "device"))
            found[entry.key] = [host, card]
    return found


_PARTS = ("forward", "backward", "update")
_part = torch.profiler.record_function


def _head_in_pieces(module: Any) -> Any:
    """Replace a causal language model's forward: its mean loss, with the logits of one row at a time."""

    def piece(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(module.lm_head(hidden).float(), labels, reduction="sum")

    def forward(input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = module.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
        losses = [
            checkpoint(piece, h, y, use_reentrant=False)
            for h, y in zip(hidden.unbind(), labels[:, 1:].unbind(), strict=True)
        ]
        return torch.stack(losses).sum() / labels[:, 1:].numel()

    module.forward = forward
    module.gradient_checkpointing_enable({"use_reentrant": False})
    return module


def _step(module: nn.Module, batches: Batches, *, autocast: bool) -> Step:
    """One optimizer step over all micro-batches, by torch's fused AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=_LR, fused=True)

    def run() -> float:
        total = 0.0
        for batch in batches:
            moved = {k: v.to(device()) for k, v in batch.items()}
            with _part("forward"), torch.autocast(device(), torch.bfloat16, enabled=autocast):
                loss = module(**moved) / len(batches)
            with _part("backward"):
                loss.backward()
            total += float(loss.detach())
        with _part("update"):
            optimizer.step()
            optimizer.zero_grad()
        return total

    return run


def _plain(published: Any, batches: Batches) -> Step:
    """Everything on the device: FP32 masters under autocast, layers checkpointed."""
    module = _head_in_pieces(fill(published.module.train(), published.config, device()))
    return _step(module.to(device()), batches, autocast=True)


def _fsdp2(published: Any, batches: Batches) -> Step:
    """fully_shard per layer with CPUOffloadPolicy, page-locked, bf16 compute, layers checkpointed.

    A second micro-batch would cost most of a step: torch then copies each gradient in FP32 to pageable memory
    that it has just been given, waits, and adds it on the host (``foreach_reduce``).
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _alone(29511)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device() == "cuda" else "gloo")
    mesh = init_device_mesh(device(), (1,))
    module = _head_in_pieces(fill(published.module.train(), published.config, "cpu"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    offload: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if device() == "cuda" else {}
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, **offload)
    fully_shard(module, mesh=mesh, mp_policy=policy, **offload)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device())
    return _step(module, batches, autocast=False)


def _deepspeed(published: Any, batches: Batches) -> Step:
    """ZeRO-3 with parameters and optimizer on the host, page-locked, overlapped, DeepSpeedCPUAdam."""
    import deepspeed

    _deepspeed_adam()
    _alone(29512)
    module = _head_in_pieces(fill(published.module.train(), published.config, "cpu").bfloat16())
    config = {
        "train_micro_batch_size_per_gpu": len(batches[0]["input_ids"]),
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
        "optimizer": {"type": "AdamW", "params": {"lr": _LR, "torch_adam": False}},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config, model_parameters=module.parameters())

    def run() -> float:
        total = 0.0
        for batch in batches:
            with _part("forward"):
                loss = engine(**{k: v.to(device()) for k, v in batch.items()})
            with _part("backward"):
                engine.backward(loss)
            total += float(loss.detach()) / len(batches)
            with _part("update"):
                engine.step()
        return total

    return run


def _megatrain(published: Any, batches: Batches) -> Step:
    """MegaTrain's own step, as its examples/sft/train.py makes it, with its defaults: bf16 masters, moments
    of DeepSpeed's CPUAdam in FP32.

    Faster than there: nothing is clipped, gradients keep their memory from step to step, and attention is
    causal by the fastest of torch's kernels, where a mask of ones would choose a slow one. It takes all rows
    at once, and only where CUDA is.
    """
    from infinity import CPUMasterConfig, CPUMasterModel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    (batch,) = batches
    module = fill(published.module.train().bfloat16(), published.config, "cpu")
    module.config._attn_implementation = "sdpa"
    count, length = batch["input_ids"].shape
    config = CPUMasterConfig(
        model_name=published.name, dataset_path="none", batch_size=count, max_seq_len=length,
        attn_implementation="sdpa",
    )  # fmt: skip
    master = CPUMasterModel(module, config)
    optimizer = _deepspeed_adam()(master.get_parameters(), lr=_LR, weight_decay=0.01, adamw_mode=True)
    kernels = [SDPBackend.CUDNN_ATTENTION] if torch.backends.cuda.cudnn_sdp_enabled() else []
    kernels += [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def run() -> float:
        with sdpa_kernel(kernels, set_priority=True):
            loss, *_ = master.forward_and_backward(batch["input_ids"], _NoMask(), batch["labels"])
        with _part("update"):
            optimizer.step()
            master._sync_params_to_gpu()
            master.zero_grad()
        return float(loss)

    return run


class _NoMask:
    """A mask that is None wherever it is moved to."""

    def to(self, where: Any) -> None:
        return None


def _alone(port: int) -> None:
    """Name this process the only one of its group."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1",
                   "LOCAL_RANK": "0"}  # fmt: skip


PEERS = {"plain": _plain, "fsdp2": _fsdp2, "deepspeed": _deepspeed, "megatrain": _megatrain}
