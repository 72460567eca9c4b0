"""Judgements in processes of their own, so that one that hangs or dies costs only itself."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 300
"""CPU seconds of one judgement; one that takes ``LIMIT_SECONDS * PATIENCE`` by the clock hangs."""
PATIENCE = 8
PRELOAD = [
    "transformers.models.llama.modeling_llama", "tests.support.judge", "torch.export", "torch._export",
    "torch._dynamo", "torch._functorch.aot_autograd", "torch.onnx", "accelerate", "scipy.optimize",
]  # fmt: skip
"""What every judgement imports, 2 s of it late; imported once, before the children are forked."""
Result = dict[str, Any]
BAD = ("WRONG", "crashed", "too slow")


def judged(work: Callable[..., Result], arguments: tuple[Any, ...], place: Path) -> Result:
    """What ``work`` gives in a child, kept in ``place``; its status says if it crashed or took too long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    log = place.with_suffix(".log")
    child = context.Process(target=_write, args=(work, arguments, place, log))
    child.start()
    child.join(LIMIT_SECONDS * PATIENCE)
    hangs = child.is_alive()
    if hangs:
        child.kill()
        child.join()
    if not place.exists():
        lines = log.read_text().strip().splitlines() if log.exists() else []
        status, reason = "crashed", lines[-1] if lines else f"exit status {child.exitcode}"
        if hangs or child.exitcode == -signal.SIGXCPU:
            after = f"{LIMIT_SECONDS * PATIENCE} s" if hangs else f"{LIMIT_SECONDS} s of CPU time"
            status, reason = "too slow", f"not done after {after}"
        place.write_text(json.dumps({"status": status, "reason": reason}, indent=1))
    result: Result = json.loads(place.read_text())
    return result


def _write(work: Callable[..., Result], arguments: tuple[Any, ...], place: Path, log: Path) -> None:
    """What a child does; all that it prints goes into its log."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_SECONDS, LIMIT_SECONDS + 10))
    with log.open("w") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
        place.write_text(json.dumps(work(*arguments), indent=1))
