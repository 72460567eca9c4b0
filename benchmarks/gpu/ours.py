"""What is measured of megacompile itself: correctness, races, steps, endurance."""

from __future__ import annotations

import copy
import itertools
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import megacompile
from benchmarks.gpu.bound import beside_bound
from benchmarks.gpu.record import Result
from benchmarks.gpu.work import batch_of, device, shaped, tiny
from megacompile.program import Program


def compiled(model: nn.Module, budget: str, **options: Any) -> Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return megacompile.compile(model, budget, optimizer=optimizer, device=device(), **options)


def against_eager(model: str, dtype: str, kernels: bool, steps: int, budget: str) -> Result:
    """Losses of ``steps`` steps beside eager fp32, and beside eager in the same dtype."""
    kind = getattr(torch, dtype)
    batches = [batch_of(256, 64, 512, seed) for seed in range(steps)]
    exact = _eager_losses(tiny(model), batches, torch.float32)
    plain = _eager_losses(tiny(model), batches, kind)
    program = compiled(tiny(model), budget, compute_dtype=kind, kernels=kernels)
    ours = [float(program.train_step(batch).loss) for batch in batches]
    program.close()
    error = max(abs(a - b) for a, b in zip(ours, exact, strict=True))
    margin = {"float32": 5e-4, "bfloat16": 1e-2}[dtype] * abs(exact[0])
    allowed = max(abs(a - b) for a, b in zip(plain, exact, strict=True)) + margin
    return {"last_loss": ours[-1], "largest_error": error, "allowed": allowed, "right": error <= allowed}


def _eager_losses(model: nn.Module, batches: list[Any], dtype: torch.dtype) -> list[float]:
    """FP32 masters under AdamW, forward and backward in ``dtype``."""
    where = torch.device(device())
    model = model.to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches:
        given = {k: v.to(where) for k, v in batch.items()}
        with torch.autocast(where.type, dtype, enabled=dtype != torch.float32):
            loss = model(**given).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def races(seeds: int, steps: int, budget: str) -> Result:
    """The same run with random delays on every copy: all bits must be the same."""
    states = []
    for seed in range(seeds):
        program = compiled(tiny("llama"), budget, max_grad_norm=1.0, example_batch=batch_of(512, 64, 512))
        runtime = program._session.runtime
        assert runtime is not None
        if seed:
            _delay(runtime.device, random.Random(seed))
        for step in range(steps):
            program.train_step(batch_of(512, 64, 512, step))
        states.append(program.state_dict())
        program.close()
    same = all(torch.equal(state[n], v) for state in states[1:] for n, v in states[0].items())
    return {"runs": seeds, "steps": steps, "right": same}


def _delay(target: Any, chance: random.Random) -> None:
    """Let copies start late: the device idles on that stream for up to half a millisecond."""
    copy_now = target.copy

    def late(*args: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda._sleep(chance.randrange(1_000_000))
        else:
            time.sleep(chance.random() * 5e-4)
        return copy_now(*args)

    target.copy = late


def sanitize() -> Result:
    """compute-sanitizer's memcheck over a few steps, where it is installed."""
    import shutil
    import subprocess
    import sys

    tool = shutil.which("compute-sanitizer")
    if tool is None or not torch.cuda.is_available():
        return {"not measured": "compute-sanitizer or a GPU is missing"}
    code = "from benchmarks.gpu.ours import against_eager as run; run('llama', 'bfloat16', True, 2, '4GB')"
    done = subprocess.run(
        [tool, "--error-exitcode", "9", sys.executable, "-c", code], capture_output=True, text=True
    )
    summary = next((x for x in reversed(done.stdout.splitlines()) if "ERROR SUMMARY" in x), "no summary")
    return {"summary": summary.strip("= "), "right": done.returncode == 0}


def step(
    model: str, budget: str, tokens: int, sequence: int, clip: bool, repeats: int, state: str, kernels: bool,
    rates: Result,
) -> Result:  # fmt: skip
    """One row of the step table: measured beside predicted and beside the bound."""
    if model == "tiny":
        module, vocabulary = tiny("llama"), 512
        flops = 6.0 * tokens * sum(p.numel() for p in module.parameters())
    else:
        described, module = shaped(model)
        flops = described.step_flops(max(1, tokens // sequence), min(tokens, sequence))
        vocabulary = described.config.vocab_size
    batch = batch_of(tokens, sequence, vocabulary)
    began = time.perf_counter()
    try:
        program = compiled(module, budget, max_grad_norm=1.0 if clip else None, example_batch=batch,
                           kernels=kernels, optimizer_state=state)  # fmt: skip
    except megacompile.BudgetError as error:  # no fault: what was asked for does not fit
        return {"not measured": str(error)}
    ready = time.perf_counter() - began
    seconds = _timed(program, batch, repeats)
    memory, predicted = program.memory, program.schedule.predicted_seconds
    resident = len(program.schedule.step.resident)
    bound = beside_bound(program.schedule, flops, seconds, rates, adam=state == "fp32")
    idle = _idle(program)
    program.close()
    return {
        "tokens": tokens, "step_seconds": seconds, "predicted_seconds": predicted,
        "real_tokens_per_second": tokens / seconds, "model_tflops": flops / seconds / 1e12,
        "compute_idle": idle, "device_peak_gb": memory.device_peak_bytes / 1e9,
        "predicted_peak_gb": memory.predicted_peak_bytes / 1e9, "host_peak_gb": _host_peak() / 1e9,
        "groups_on_device": resident, "compile_seconds": ready,
    } | bound  # fmt: skip


def _timed(program: Program, batch: Any, repeats: int) -> float:
    """Median seconds from one step's end to the next one's, in steady state."""
    program.train_step(batch)
    ends = []
    for _ in range(repeats + 1):
        float(program.train_step(batch).loss)
        ends.append(time.perf_counter())
    program.synchronize()
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def _idle(program: Program) -> float:
    """Share of the last step's compute stream, from its first to its last operation, that is idle."""
    runtime = program._session.runtime
    assert runtime is not None
    scheduled, trace = runtime.traces[-1]
    streams = {op.event: op.stream for op in scheduled.ops}
    spans = [(start, end) for event, start, end in trace if streams.get(event) == "compute"]
    busy = sum(end - start for start, end in spans)
    return 1.0 - busy / (max(e for _, e in spans) - min(s for s, _ in spans))


def _host_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _host_now() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def endurance(steps: int, tokens: int, budget: str) -> Result:
    """A day in small: memory flat, step time steady, and a resumed run equal to one that went on."""
    model = tiny("llama")
    resumed_model = copy.deepcopy(model)
    program = compiled(model, budget, max_grad_norm=1.0)
    seconds, losses, host = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(steps):
            if index == steps // 2:
                program.save(folder)
            start = time.perf_counter()
            losses.append(float(program.train_step(batch_of(tokens, 64, 512, index)).loss))
            seconds.append(time.perf_counter() - start)
            host.append(_host_now())
        program.close()
        resumed = compiled(resumed_model, budget, max_grad_norm=1.0, example_batch=batch_of(tokens, 64, 512))
        resumed.load(folder)
    again = [
        float(resumed.train_step(batch_of(tokens, 64, 512, index)).loss) for index in range(steps // 2, steps)
    ]
    resumed.close()
    quarter = steps // 4
    drift = statistics.median(seconds[-quarter:]) / statistics.median(seconds[quarter : 2 * quarter])
    return {
        "steps": steps,
        "step_time_drift": drift,
        "host_growth_mb": (host[-1] - host[quarter]) / 1e6,
        "resumed_equal": again == losses[steps // 2 :],
        "last_loss": losses[-1],
    }
