"""Steps of models of published shapes, beside their prediction and their bound."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
from typing import Any

import torch

import megacompile
from benchmarks.gpu.campaign import TIMELINE, append
from benchmarks.gpu.correct import HeldBytes, kernels_found_wrong
from benchmarks.gpu.findings import Recorder, watch
from benchmarks.gpu.machine import touched_bytes
from benchmarks.gpu.work import SEQUENCE, batch_of, described, device, make_buffers, weights_of
from megacompile.units import host_available, parse_bytes

_SETTLING = 3  # steps before what is measured: the driver's share, first touch of moments, clocks
_LARGER = 90e9  # bytes of a card on which another budget than 80 GB is worth a stage
_ENOUGH_SECONDS = 100.0  # after which a step that was measured is enough


def step(
    to: Recorder,
    model: str,
    budget: str,
    tokens: int,
    steps: int = 7,
    clip: bool = False,
    muon: bool = False,
    state: str = "fp32",
    sequence: int = SEQUENCE,
    host: str = "",
    completions: tuple[int, int, int] | None = None,
) -> None:
    """Time a step: tokens per second, model TFLOP/s, peak, each stream, beside what was predicted.

    Without ``budget`` it has a card larger than 80 GB for itself. Within ``host``, a budget of RAM, state is
    on the drive. ``completions`` are rows, and tokens of a prompt and of a completion: such a rollout
    follows the steps.
    """
    if not budget:
        total = torch.cuda.get_device_properties(0).total_memory
        if total < _LARGER:
            to.note("not measured: the card has no more than 80 GB")
            return
        budget = f"{int(0.94 * total / 1e9)}GB"
    ways = {", clipped": clip, ", Muon": muon, f", {host} of RAM": host}
    name = f"{model} in {budget}, {tokens} tokens" + "".join(way for way, chosen in ways.items() if chosen)
    sequence = min(sequence, tokens)
    with (
        to.finding(f"step: {name}", model=model, budget=budget, tokens=tokens) as finding,
        HeldBytes() as held,
        tempfile.TemporaryDirectory(dir=to.folder) as drive,
    ):
        start = time.perf_counter()
        published = described(model)
        module = published.module.train()
        make_buffers(module, published.config)
        flops = published.step_flops(tokens // sequence, sequence)
        batch = batch_of(tokens, sequence, published.config.vocab_size)
        with megacompile.compile(
            module, budget, optimizer=_optimizer(module, muon), max_grad_norm=1.0 if clip else None,
            device=device(), example_batch=batch, weights=weights_of(module), kernels=kernels_found_wrong(to),
            optimizer_state=state, host_budget=host or _host_budget(to), offload_dir=drive if host else None,
        ) as program:  # fmt: skip
            watch(program)
            finding["compile s"] = time.perf_counter() - start
            schedule = program.schedule
            finding |= {
                "predicted s": schedule.predicted_seconds, "bound s": schedule.bound.seconds,
                "bound by": schedule.bound.binding, "groups on the device": len(schedule.step.resident),
                "groups": len(schedule.work.groups), "machine": schedule.machine.name,
            }  # fmt: skip
            to.note(f"planned: {name}", **finding)
            seconds = _timed(to, program, batch, steps, start)
            memory = program.memory
            finding |= {
                "step s": seconds, "tokens/s": tokens / seconds, "model TFLOP/s": flops / seconds / 1e12,
                "peak": memory.device_peak_bytes, "predicted peak": memory.predicted_peak_bytes,
                "held": held.most, "host": sum(memory.host_bytes.values()), "by kind": memory.host_bytes,
                "page-locked": memory.page_locked_bytes, "staged": memory.staged_bytes,
            }  # fmt: skip
            schedule = program.schedule
            print(schedule, flush=True)
            finding |= _streams(schedule)
            append(to.folder, stage=to.stage, what=TIMELINE, operations=_timeline(schedule))
            if completions:
                finding |= _rollout(program, published.config.vocab_size, *completions)
            finding["right"] = held.most <= parse_bytes(budget, what="budget", available=10**18)


def _rollout(program: Any, vocabulary: int, rows: int, prompt: int, new: int) -> dict[str, Any]:
    """Seconds of a rollout in which each row samples so many tokens, and tokens of completions per second."""
    ids = batch_of(rows * prompt, prompt, vocabulary)["input_ids"]
    start = time.perf_counter()
    with program.rollout() as policy:
        ready = time.perf_counter()
        made = policy.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=True,
            pad_token_id=0,
        )  # fmt: skip
        seconds = time.perf_counter() - ready
    whole = made.shape == (rows, prompt + new)
    return {"rollout s": time.perf_counter() - start, "completions whole": whole,
            "completions' tokens/s": rows * new / seconds}  # fmt: skip


def _optimizer(module: torch.nn.Module, muon: bool) -> Any:
    """AdamW, or Muon for the layers' matrices and AdamW for the rest.

    Rates are small enough that random weights on one batch do not diverge.
    """
    matrices = {n: p for n, p in module.named_parameters() if muon and p.dim() == 2 and ".layers." in n}
    adam = torch.optim.AdamW([p for n, p in module.named_parameters() if n not in matrices], lr=1e-6)
    return [torch.optim.Muon(matrices.values(), lr=1e-5), adam] if muon else adam


def _host_budget(to: Recorder) -> str | None:
    """None, or what memory was seen to grow to where that is more than is free."""
    touched = touched_bytes(to)
    return f"{touched // 10**6}MB" if touched > host_available() else None


def _timed(to: Recorder, program: Any, batch: Any, steps: int, start: float) -> float:
    """Median seconds from one step's end to the next one's, once they are steady; a line for each."""
    ends = []
    for number in range(steps):
        loss = float(program.train_step(batch).loss)
        ends.append(time.perf_counter())
        to.note("step ended", number=number, at=ends[-1] - start, loss=loss)
        if number > _SETTLING and ends[-1] - start > _ENOUGH_SECONDS:
            break
    program.synchronize()
    spans = [b - a for a, b in itertools.pairwise(ends)]
    return statistics.median(spans[_SETTLING - 1 :] or spans)


def _timeline(schedule: Any) -> list[list[Any]]:
    """Operation, stream, start and end in microseconds, of the last step."""
    if schedule.measured is None:
        return []
    ran = zip(schedule.step.ops, schedule.measured.starts, schedule.measured.ends, strict=True)
    return [
        [str(op.event), op.stream, round(start * 1e6), round(end * 1e6)]
        for op, start, end in ran
        if start is not None and end is not None
    ]


def _streams(schedule: Any) -> dict[str, Any]:
    """Seconds that each stream was busy, measured and predicted, and the share that compute was idle."""
    if schedule.measured is None:
        return {}
    busy: dict[str, float] = {}
    ran = zip(schedule.step.ops, schedule.measured.starts, schedule.measured.ends, strict=True)
    for op, start, end in ran:
        if start is not None and end is not None:
            busy[op.stream] = busy.get(op.stream, 0.0) + end - start
    predicted = {stream: seconds for stream, seconds in schedule.timeline.busy.items() if seconds}
    return {
        "compute idle": 1 - busy.get("compute", 0.0) / schedule.measured.step_seconds,
        "busy s": busy, "predicted busy s": predicted,
    }  # fmt: skip


def compile_ahead(
    model: str, budget: str, tokens: int, clip: bool = False, muon: bool = False, state: str = "fp32",
    sequence: int = SEQUENCE, host: str = "", **_: Any,
) -> None:  # fmt: skip
    """Plan a step and compile its kernels as :func:`step` does, without the memory that its state takes."""
    from megacompile.api.session import Session

    class Ready(Exception):
        pass

    def stop(session: Session, scheduled: Any) -> None:
        session._bindings.make_ready(scheduled, session.settings.device)
        raise Ready

    Session._take_over = stop  # type: ignore[method-assign]  # the process ends after it
    published = described(model)
    module = published.module.train()
    make_buffers(module, published.config)
    batch = batch_of(tokens, sequence, published.config.vocab_size)
    with contextlib.suppress(Ready), tempfile.TemporaryDirectory() as drive:
        megacompile.compile(
            module, budget, optimizer=_optimizer(module, muon), device=device(),
            max_grad_norm=1.0 if clip else None, example_batch=batch, weights=weights_of(module),
            optimizer_state=state, host_budget=host or "120GB", offload_dir=drive if host else None,
        )  # fmt: skip
