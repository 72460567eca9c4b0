"""The ceilings of Liger's kernels beside ours, compiled the same way, without a GPU.

    pip install --no-deps liger-kernel
    python -m benchmarks.liger_ceilings            # for compute capability 9.0
    python -m benchmarks.liger_ceilings --arch 100

In:  an installed ``liger_kernel``, nothing of which is kept here. Its launches on tensors without memory are
recorded instead of done, as the ahead-of-time gate records ours. Out: a Markdown table with registers, bytes
that a multiprocessor waits for at a time, ceiling and what binds. Both have the same shapes and bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from benchmarks.kernel_gate import compile_launch
from megacompile.bench.ceilings import CHIPS, Ceiling, Resources, read_ceilings, read_table
from megacompile.kernels._triton import Launch, triton

ROWS, WIDTH, INNER, CLASSES = 8192, 4096, 14336, 128256
Row = tuple[Resources, Ceiling]


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Within, every launch of a Triton kernel is appended to the list and not done."""
    found: list[Launch] = []

    def record(kernel: Any, *given: Any, grid: Any, warmup: bool, num_warps: int = 4, num_stages: int = 3,
               **named: Any) -> None:  # fmt: skip
        values = {p.name: p.default for p in kernel.params if p.has_default}
        values |= dict(zip(kernel.arg_names, given, strict=False)) | named
        constant = {p.name for p in kernel.params if p.is_constexpr} | {
            n for n, v in values.items() if v is None
        }
        constants = {name: values[name] for name in kernel.arg_names if name in constant}
        arguments = tuple(values[name] for name in kernel.arg_names if name not in constant)
        found.append(Launch(kernel, grid, arguments, constants, num_warps, num_stages))

    kind = triton.runtime.JITFunction
    run, kind.run = kind.run, record
    try:
        yield found
    finally:
        kind.run = run


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rms_norm() -> None:
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward

    x, weight = _meta(ROWS, WIDTH), _meta(WIDTH)
    y, x, rstd, block, warps, casting = rms_norm_forward(x, weight, 1e-6, 0.0, "llama", False)
    rms_norm_backward(y, x, weight, rstd, 0.0, casting, block, warps, False, False)


def _layer_norm() -> None:
    from liger_kernel.ops.layer_norm import layer_norm_backward, layer_norm_forward

    y, x, mean, rstd, *_ = layer_norm_forward(_meta(ROWS, WIDTH), _meta(WIDTH), _meta(WIDTH), 1e-6)
    layer_norm_backward(y, x, _meta(WIDTH), _meta(WIDTH), mean, rstd)


def _swiglu() -> None:
    from liger_kernel.ops.swiglu import swiglu_backward, swiglu_forward

    gate, up, y = swiglu_forward(_meta(ROWS, INNER), _meta(ROWS, INNER))
    swiglu_backward(gate, up, y)


def _rope() -> None:
    from liger_kernel.ops.rope import rope_backward, rope_forward

    q, k = (_meta(2, 4096, heads, 128).transpose(1, 2) for heads in (32, 8))
    q, k, cos, sin = rope_forward(q, k, _meta(1, 4096, 128), _meta(1, 4096, 128))
    rope_backward(q, k, cos, sin)


def _cross_entropy() -> None:
    """Its fused linear cross-entropy launches the same kernels on chunks of the tokens."""
    from liger_kernel.ops.cross_entropy import cross_entropy_backward, cross_entropy_forward

    # it looks at labels and at the gradient, so these have memory; that of logits is never touched
    logits = torch.empty(4096, CLASSES, dtype=torch.bfloat16).requires_grad_()
    labels = torch.zeros(4096, dtype=torch.long)
    cross_entropy_forward(logits, labels, None, -100, 0.0, 0.0, "mean", None, False)
    cross_entropy_backward(logits.detach(), torch.tensor(2.0))


# What is compared: our module, case and kernels; Liger's launches, in their order.
PAIRS: dict[str, tuple[str, str, tuple[str, ...], Callable[[], None]]] = {
    "RMSNorm, 4096": ("rms_norm", "4096 bf16", ("rms_norm_forward", "rms_norm_backward"), _rms_norm),
    "LayerNorm, 4096": (
        "layer_norm",
        "4096 bf16",
        ("layer_norm_forward", "layer_norm_backward"),
        _layer_norm,
    ),
    "SwiGLU, 14336": ("glu", "silu bf16", ("glu_forward", "glu_backward"), _swiglu),
    "RoPE, 32 × 128": ("rope", "32x128 bf16", ("rope", "rope"), _rope),
    "cross-entropy, 128256": (
        "linear_cross_entropy",
        "128256 bf16",
        ("accumulate", "gradient"),
        _cross_entropy,
    ),
}


def theirs(call: Callable[[], None], arch: int) -> list[Row]:
    """The rows of what a call launches; a grid of one program is one per multiprocessor on a GPU."""
    with launches() as found:
        call()
    rows = []
    for launch in found:
        if launch.grid == (1,):
            launch = replace(launch, grid=(CHIPS[arch].processors,))
        rows.append(compile_launch(launch, arch, ("liger", "", launch.kernel.__name__, 0)))
    return rows


def ours(module: str, case: str, kernels: tuple[str, ...], arch: int) -> list[Row]:
    """The rows of our kernels in the gate's tables; the n-th of a name is its n-th variant."""
    used, limits = ({row.key: row for row in rows} for rows in (read_table(), read_ceilings()))
    keys = [
        (module, case, f"{name}_kernel", kernels[:place].count(name), arch)
        for place, name in enumerate(kernels)
    ]
    return [(used[key], limits[key]) for key in keys]  # type: ignore[return-value,index]


def table(arch: int) -> str:
    """The comparison as Markdown."""
    columns = "registers | bytes in flight | ceiling"
    lines = [
        f"| {CHIPS[arch].name} | ours | {columns} | Liger | {columns} |",
        "|---" + "|---|--:|--:|---" * 2 + "|",
    ]
    for name, (module, case, kernels, call) in PAIRS.items():
        pairs = zip(ours(module, case, kernels, arch), theirs(call, arch), strict=True)
        lines += [f"| {name} | " + " | ".join(map(_cells, pair)) + " |" for pair in pairs]
    return "\n".join(lines)


def _cells(row: Row) -> str:
    used, limit = row
    spilled = f", {used.local} B spilled" if used.local else ""
    name = limit.kernel.strip("_").removesuffix("_kernel")
    return f"`{name}` | {used.registers} | {limit.in_flight:,} | {limit.text}{spilled}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Ceilings of Liger's kernels beside ours.")
    parser.add_argument("--arch", type=int, choices=sorted(CHIPS), default=90)
    print(table(parser.parse_args().arch))


if __name__ == "__main__":
    main()
