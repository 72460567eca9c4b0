"""Train a model whose state is several times the RAM that the process may take, bitwise as in RAM.

    python -m benchmarks.beyond_ram --dir /mnt/nvme                # 1e9 parameters: 12 GB of state in 2.6 GB
    python -m benchmarks.beyond_ram --dir /mnt/nvme --size small   # 59 million parameters: a minute

Two processes run the same steps: one with its state on NVMe and a hard limit on its memory (a memory
control group where this user may make one, else a limit on its private memory), one in RAM without a limit,
which needs all of the state there (``--no-reference`` leaves it out). No process ever holds the model's
initial weights: every tensor comes from a generator of its own, seeded by its name. Losses and
digests of all masters and moments are compared. Exit code 1 where anything differs or the peak is more
than 5 % above the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import machine_line

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Size:
    """A Llama, and what its training may take: ``ram`` for the process, of it ``device`` and ``own``.

    ``own`` is left to Python, torch and the compiler; host_budget is the rest.
    """

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    ram: int
    device: int
    own: int

    @property
    def host_budget(self) -> int:
        return self.ram - self.device - self.own


SIZES = {
    "small": Size(512, 1408, 16, 8192, 1_000_000_000, 150_000_000, 700_000_000),
    "1b": Size(1536, 4096, 34, 16384, 2_600_000_000, 400_000_000, 950_000_000),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beyond_ram")
    parser.add_argument("--dir", required=True, help="a directory on an NVMe drive")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--no-reference", action="store_true", help="leave out the run in RAM")
    parser.add_argument("--child", choices=("stored", "in-ram"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train(SIZES[options.size], options.steps, options.dir, options.child == "stored")))
        return 0
    print(machine_line())
    size = SIZES[options.size]
    stored = _run(options, "stored", size.ram)
    _show("state on NVMe", stored)
    times = stored["state_bytes"] / size.ram
    print(
        f"limit {size.ram / 1e9:.2f} GB by {stored['limit']}: the state is {times:.1f} times that; "
        f"peak RSS {stored['peak_bytes'] / 1e9:.2f} GB"
    )
    fits = (
        stored["peak_bytes"] <= 1.05 * size.ram
    )  # RSS also counts pages of libraries, which the limit may not
    if options.no_reference:
        return 0 if fits else 1
    reference = _run(options, "in-ram", None)
    _show("state in RAM", reference)
    equal = all(stored[key] == reference[key] for key in ("losses", "digest"))
    print("losses, masters and moments are " + ("bitwise equal" if equal else "DIFFERENT"))
    return 0 if fits and equal else 1


def train(size: Size, steps: int, folder: str, stored: bool) -> dict[str, Any]:
    """A few steps in this process; what came out and what it took."""
    import torch

    import megacompile
    from megacompile.state.host_arena import resident_peak_bytes

    model, batch = _model(size)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    before = resident_peak_bytes()
    program = megacompile.compile(
        model,
        f"{size.device}B",
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        host_budget=f"{size.host_budget}B" if stored else None,
        offload_dir=folder if stored else None,
        weights=lambda name: initial(name, shapes[name]),
        example_batch=batch(0),
    )
    losses, seconds = [], []
    for step in range(steps):
        start = time.perf_counter()
        losses.append(float(program.train_step(batch(step)).loss))
        program.synchronize()
        seconds.append(time.perf_counter() - start)
    state = program._session.runtime.state  # type: ignore[union-attr]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": sum(12 * g.elements for g in state.groups),
        "states": sorted({g.state for g in program.plan.groups}),
        "losses": losses,
        "digest": _digest(state),
        "seconds": seconds,
        "before_bytes": before,
        "peak_bytes": resident_peak_bytes(),
        "memory": str(program.memory),
        "limit": os.environ.get("LIMIT", "nothing"),
    }


def _digest(state: Any) -> str:
    """Hash all masters and moments."""
    import torch

    digest = hashlib.blake2b()
    for group in range(len(state.groups)):
        for name, array in sorted(state.open(group, change=False).items()):
            digest.update(name.encode())
            digest.update(memoryview(array.view(torch.uint8).numpy()))
    return digest.hexdigest()


def _model(size: Size) -> tuple[Any, Any]:
    """A Llama whose parameters are on the meta device, and its batches by step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from megacompile.api.pretrained import parameters_on_meta

    config = LlamaConfig(
        hidden_size=size.hidden, intermediate_size=size.intermediate, num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 128, num_key_value_heads=size.hidden // 128,
        vocab_size=size.vocabulary, tie_word_embeddings=False,
    )  # fmt: skip
    with parameters_on_meta():
        model = LlamaForCausalLM(config).train()

    def batch(step: int) -> dict[str, Any]:
        ids = torch.randint(size.vocabulary, (1, 128), generator=torch.Generator().manual_seed(step))
        return {"input_ids": ids, "labels": ids}

    return model, batch


def initial(name: str, shape: Any) -> Any:
    """A parameter's first value, the same in every process: ones for norms, else N(0, 0.02²)."""
    import torch

    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape).normal_(0.0, 0.02, generator=generator)


def _run(options: argparse.Namespace, child: str, limit: int | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.beyond_ram", "--dir", options.dir, "--size", options.size,
               "--steps", str(options.steps), "--child", child]  # fmt: skip
    with _limited(limit) as (start, how):
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=start, env=os.environ | {"LIMIT": how}
        )
    if done.returncode != 0:
        raise SystemExit(f"The run with its state {child} ended with code {done.returncode} ({how}).")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@contextlib.contextmanager
def _limited(limit: int | None) -> Iterator[tuple[Any, str]]:
    """What a child process does first so that it cannot take more than ``limit``, and how it is called."""
    if limit is None:
        yield None, "nothing"
        return
    group = _control_group(limit)
    if group is None:
        yield (lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))), "RLIMIT_DATA"
        return
    try:
        yield (lambda: (group / "cgroup.procs").write_text(str(os.getpid()))), "a memory control group"
    finally:
        group.rmdir()


def _control_group(limit: int) -> Path | None:
    """A new control group below this process's own with a memory limit, where that is allowed."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version1 = controllers == "memory"
        if not version1 and controllers:
            continue
        root = _CGROUPS / "memory" if version1 else _CGROUPS
        group = root / path.lstrip("/") / f"megacompile-{os.getpid()}"
        file = "memory.limit_in_bytes" if version1 else "memory.max"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / file).exists():
                raise FileNotFoundError(file)
            (group / file).write_text(str(limit))
        except OSError:
            group.rmdir()
            continue
        return group
    return None


def _show(title: str, result: dict[str, Any]) -> None:
    print(
        f"\n{title}: {result['parameters'] / 1e6:.0f} M parameters, {result['state_bytes'] / 1e9:.2f} GB "
        f"of state ({', '.join(result['states'])})"
    )
    print("  losses " + ", ".join(f"{x:.6f}" for x in result["losses"]))
    print("  seconds per step " + ", ".join(f"{x:.2f}" for x in result["seconds"]))
    print(
        f"  RSS {result['before_bytes'] / 1e9:.2f} GB before compiling, at most "
        f"{result['peak_bytes'] / 1e9:.2f} GB"
    )
    print("  " + result["memory"].replace("\n", "\n  "))


if __name__ == "__main__":
    raise SystemExit(main())
