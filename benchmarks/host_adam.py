"""Host Adam against its alternatives and against the memory it runs on, in one process.

In:  a number of elements, thread counts.
Out: a Markdown table per thread count: G parameters per second, GB/s of memory traffic (bytes per
     parameter stated), and the fraction of a non-temporal copy's bandwidth in the same run.

Every row is one AdamW step on the same flat state (coded moments: on the same values). The rows are
interleaved, repeated, and their medians compared. "Bytes" counts what the job must read and write in
memory, nothing a method adds by itself: a row that makes temporary copies shows it as lost speed. A
copy counts 2 x 4 bytes; an ordinary one also reads the lines that it is about to overwrite, which is
why it is slower.

All arrays lie in a host arena, as in programs. (malloc places arrays of 2**k bytes 2**k + 4096 bytes
apart, which alone costs every row up to 35 % on a Zen 4.)
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacompile.state import adam
from megacompile.state.adam import AdamHyper, adamw_step, torch_fused
from megacompile.state.coded_adam import Coded, coded_adamw_step, encode
from megacompile.state.host_arena import HostArena, padded
from megacompile.state.moment_formats import CODINGS

HYPER = AdamHyper(lr=1e-4, weight_decay=0.01, step=10)
TILE = 1 << 19


@dataclass(frozen=True)
class Row:
    """One way to take the step; `run` takes the thread count. `traffic`: bytes per parameter."""

    name: str
    traffic: int
    run: Callable[[int], object]


@dataclass(frozen=True)
class State:
    """Flat tensors (n): fp32 master and moments, both gradients, 16-bit weight and its rest."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad32: Tensor
    grad16: Tensor
    hi: Tensor
    lo: Tensor
    spare: Tensor

    @classmethod
    def random(cls, n: int) -> State:
        master, grad = torch.randn(n), torch.randn(n)
        hi, lo = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
        adam.split(master, hi, lo)
        moments = torch.randn(n).mul_(0.1), torch.rand(n).mul_(0.01)
        return cls(*in_arena(master, *moments, grad, grad.bfloat16(), hi, lo, torch.zeros(n)))


def in_arena(*tensors: Tensor) -> list[Tensor]:
    """Copies in memory such as programs keep their state in: one mapping, on huge pages where allowed."""
    arena = HostArena(sum(padded(x.nbytes) for x in tensors))
    return [arena.take(x.shape, x.dtype).copy_(x) for x in tensors]


def one_pass(p: Tensor, m: Tensor, v: Tensor, g: Tensor, out: Tensor) -> None:
    """The same step as tensor code, for Inductor to fuse: fp32 state, bf16 gradient and weight."""
    h = HYPER
    g32 = g.float()
    m.lerp_(g32, 1 - h.beta1)
    v.mul_(h.beta2).addcmul_(g32, g32, value=1 - h.beta2)
    denominator = v.sqrt() / (1 - h.beta2**h.step) ** 0.5 + h.eps
    p.mul_(1 - h.lr * h.weight_decay)
    p.addcdiv_(m, denominator, value=-h.lr / (1 - h.beta1**h.step))
    out.copy_(p)


def one_pass_split(hi: Tensor, lo: Tensor, m: Tensor, v: Tensor, g: Tensor) -> None:
    """`one_pass` on split weights, both halves as int16."""
    bits = (hi.to(torch.int32) << 16) + lo.to(torch.int32)
    p = bits.view(torch.float32).clone()
    one_pass(p, m, v, g, torch.empty_like(p, dtype=torch.bfloat16))
    bits = p.view(torch.int32)
    lo.copy_(bits.to(torch.int16))
    hi.copy_(((bits + 0x8000) >> 16).to(torch.int16))


def cast_fused_cast(s: State, buffer: Tensor | None) -> None:
    """Whole tensors: bf16 gradient to fp32, fused step, fp32 weight to bf16."""
    grad = s.grad16.float() if buffer is None else buffer.copy_(s.grad16)
    torch_fused(s.master, s.exp_avg, s.exp_avg_sq, grad, HYPER)
    s.hi.copy_(s.master)


def tiled(s: State) -> None:
    """The same in tiles, so that the fp32 gradient never leaves the cache."""
    buffer = torch.empty(TILE)
    for begin in range(0, s.master.numel(), TILE):
        w, m, v, g, hi = (
            x[begin : begin + TILE] for x in (s.master, s.exp_avg, s.exp_avg_sq, s.grad16, s.hi)
        )
        torch_fused(w, m, v, buffer[: g.numel()].copy_(g), HYPER)
        hi.copy_(w)


def deepspeed_row(s: State) -> Row | None:
    """DeepSpeed's CPUAdam on fp32 weights and gradients, where it is installed and builds."""
    try:
        module = importlib.import_module("deepspeed.ops.adam")
        weight = torch.nn.Parameter(s.master)
        weight.grad = s.grad32
        optimizer = module.DeepSpeedCPUAdam([weight], lr=HYPER.lr, weight_decay=0.01)
        optimizer.step()
    except Exception as error:  # whatever a foreign build does, the other rows are still wanted
        print(f"No DeepSpeed CPUAdam row: {type(error).__name__}.\n")
        return None
    return Row("DeepSpeed CPUAdam, fp32 gradient", 28, lambda threads: optimizer.step())


def inductor_rows(s: State) -> list[Row]:
    """One pass generated by torch.compile, where it finds a C++ compiler."""
    whole = torch.compile(one_pass, dynamic=False)
    halves = torch.compile(one_pass_split, dynamic=False)
    arguments = s.exp_avg, s.exp_avg_sq, s.grad16
    hi = s.hi.view(torch.int16)

    def run_whole(threads: int) -> None:
        whole(s.master, *arguments, s.hi)

    def run_halves(threads: int) -> None:
        halves(hi, s.lo, *arguments)

    try:
        run_whole(0)
        run_halves(0)
    except Exception as error:  # as above
        print(f"No Inductor rows: {type(error).__name__}.\n")
        return []
    return [
        Row("Inductor one pass, bf16 gradient and weight", 28, run_whole),
        Row("Inductor one pass, split", 26, run_halves),
    ]


def our_rows(s: State) -> list[Row]:
    """This project's step: both layouts, both gradients, and the fallback without a compiler."""
    moments = s.exp_avg, s.exp_avg_sq

    def fallback(threads: int) -> None:
        adam._choice = "torch"  # set_backend would look for a compiler again
        adamw_step((s.hi, s.lo), *moments, s.grad16, HYPER, threads)
        adam._choice = "c"

    def step(weight: Tensor | tuple[Tensor, Tensor], grad: Tensor) -> Callable[[int], object]:
        return lambda threads: adamw_step(weight, *moments, grad, HYPER, threads)

    return [
        Row("ours, unsplit, fp32 gradient", 28, step(s.master, s.grad32)),
        Row("ours, unsplit, bf16 gradient", 26, step(s.master, s.grad16)),
        Row("ours, split, fp32 gradient", 28, step((s.hi, s.lo), s.grad32)),
        Row("**ours, split, bf16 gradient**", 26, step((s.hi, s.lo), s.grad16)),
        Row("ours without a compiler (tiled torch), split", 26, fallback),
    ]


def coded_rows(s: State) -> list[Row]:
    """The same step on moments in 8 and 4 bits, by the kernel and by its fallback."""
    rows = []
    for form, coding in CODINGS.items():
        n = s.master.numel()
        codes, scales = torch.zeros(coding.code_bytes(n), dtype=torch.uint8), torch.zeros(coding.blocks(n))
        arrays = in_arena(codes, scales, codes, scales)
        first, second = Coded(*arrays[:2]), Coded(*arrays[2:])
        encode(s.exp_avg, first, coding, coding.first_book)
        encode(s.exp_avg_sq, second, coding, coding.second_book)
        arguments = (s.hi, s.lo), first, second, s.grad16, HYPER, coding

        def step(threads: int, arguments: Any = arguments) -> None:
            coded_adamw_step(*arguments, threads)

        traffic = 10 + 4 * coding.bits // 8  # and the scales
        rows.append(Row(f"**ours, {form} moments, split, bf16 gradient**", traffic, step))
    return rows


def all_rows(s: State) -> list[Row]:
    """The copies first (the non-temporal one is the yardstick), then the steps."""
    state = s.master, s.exp_avg, s.exp_avg_sq

    def stream_copy(threads: int) -> int:
        return adam.call_kernel("mc_stream_copy", 4 * s.spare.numel(), s.spare, s.grad32, threads)

    bypassing = "non-temporal copy" if stream_copy(1) else "copy (no non-temporal stores here)"
    rows = [
        Row(bypassing, 8, stream_copy),
        Row("copy", 8, lambda threads: s.spare.copy_(s.grad32)),
        Row("torch fused, all fp32", 28, lambda t: torch_fused(*state, s.grad32, HYPER)),
        Row("cast + fused + cast, whole tensors", 28, lambda t: cast_fused_cast(s, None)),
        Row("the same, fp32 gradient buffer kept", 28, lambda t: cast_fused_cast(s, s.spare)),
        Row("the same, in tiles of 0.5M", 28, lambda t: tiled(s)),
        *inductor_rows(s),
        *filter(None, [deepspeed_row(s)]),
    ]
    return rows + our_rows(s) + coded_rows(s)


def measure(rows: list[Row], threads: int, repeats: int) -> list[float]:
    """Median seconds per row; each repeat runs every row once."""
    torch.set_num_threads(threads)
    times: list[list[float]] = [[] for _ in rows]
    for repeat in range(repeats + 1):
        for row, seconds in zip(rows, times, strict=True):
            begin = time.perf_counter()
            row.run(threads)
            if repeat:  # the first is warm-up
                seconds.append(time.perf_counter() - begin)
    return [statistics.median(seconds) for seconds in times]


def table(rows: list[Row], medians: list[float], n: int) -> str:
    """Markdown, one line per row; the first row's bandwidth is 1."""
    yardstick = rows[0].traffic / medians[0]
    lines = ["| | bytes/parameter | G parameters/s | GB/s | of non-temporal copy |"]
    lines += ["|---|--:|--:|--:|--:|"]
    for row, seconds in zip(rows, medians, strict=True):
        rate = n / seconds / 1e9
        share = row.traffic / seconds / yardstick
        speed = "" if row.traffic == 8 else f"{rate:.2f}"
        lines += [f"| {row.name} | {row.traffic} | {speed} | {rate * row.traffic:.1f} | {share:.2f} |"]
    return "\n".join(lines)


def machine() -> str:
    """CPU, cores, versions: what a figure is worth nothing without."""
    info = Path("/proc/cpuinfo")
    names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
    cpu = names[0].partition(": ")[2] if names else platform.processor() or platform.machine()
    return (
        f"{cpu}, {os.cpu_count()} CPUs, {platform.system()}; torch {torch.__version__} "
        f"({torch.backends.cpu.get_cpu_capability()}), Python {platform.python_version()}"
    )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--elements", type=int, default=32_000_000, help="default 32,000,000")
    parser.add_argument("--threads", type=int, nargs="+", help="thread counts (default 1, 2, all)")
    parser.add_argument("--repeats", type=int, default=15, help="runs per median (default 15)")
    arguments = parser.parse_args()
    n = max(arguments.elements // 16, 1) * 16
    cores = torch.get_num_threads()
    adam.set_backend("c")
    print(f"{machine()}. {adam.describe_backend()}")
    print(f"{n / 1e6:.1f}M parameters, medians of {arguments.repeats} interleaved runs.\n")
    rows = all_rows(State.random(n))
    for threads in arguments.threads or sorted({1, min(2, cores), cores}):
        medians = measure(rows, threads, arguments.repeats)
        print(f"Threads: {threads}\n\n{table(rows, medians, n)}\n", flush=True)


if __name__ == "__main__":
    main()
