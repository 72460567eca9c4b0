"""What fits, as a command: a question as ``megacompile plan`` takes it, and as whatever trains does.

In: parsed options, an answer, and a :class:`~megacompile.cli.alternatives.Fit`. Out: a :class:`Command`.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass

from megacompile.cli.alternatives import Fit, size_text
from megacompile.cli.plan_answer import Question
from megacompile.state.torch_optimizer import TorchOptimizer

_KEPT_FLAGS = ("model", "lora", "lora_targets", "frozen", "optimizer", "max_grad_norm", "machine",
               "host_budget", "host_bandwidth", "nvme_rates", "link", "gpus", "nodes", "fabric", "network",
               "tokens", "price")  # fmt: skip
_FOLDER = "DIR"  # on a drive, which the user has to name


@dataclass(frozen=True)
class Command:
    """A command that fits, with the keywords of ``megacompile.compile`` that differ from the question's. The
    keys of ``megacompile train`` beside them are also fields of TrainingArguments and MegacompileConfig."""

    plan: str
    tokens_per_second: float
    compile: dict[str, str | None]
    train: dict[str, str | int]


def command(options: argparse.Namespace, asked: Question, fit: Fit) -> Command:
    """Tell how to ask for what fits."""
    q = fit.question
    keywords: dict[str, str | None] = {}
    keys: dict[str, str | int] = {}
    if q.hbm_budget != asked.hbm_budget:
        keywords["hbm_budget"] = keys["hbm_budget"] = size_text(q.hbm_budget)
    if q.optimizer_state != asked.optimizer_state:
        keywords["optimizer_state"] = keys["optimizer_state"] = str(q.optimizer_state)
    if q.nvme_budget != asked.nvme_budget:
        keywords["offload_dir"] = keys["offload_dir"] = _FOLDER
    if not fit.clip and not options.no_clip:
        keywords["max_grad_norm"], keys["max_grad_norm"] = None, 0
    if (q.batch, q.micro_batches) != (asked.batch, asked.micro_batches):
        keys["per_device_train_batch_size"] = q.batch
        keys["gradient_accumulation_steps"] = q.micro_batches
    if q.seq != asked.seq:
        keys["max_length"] = q.seq
    return Command(shlex.join(_words(options, asked, fit)), fit.tokens_per_second, keywords, keys)


def _words(options: argparse.Namespace, asked: Question, fit: Fit) -> list[str]:
    q = fit.question
    numbers = {"gpus": 1, "nodes": 1, "optimizer": "adamw"}  # their defaults; others have none
    flags: dict[str, object] = {
        name: value
        for name in _KEPT_FLAGS
        if (value := getattr(options, name)) is not None and value != numbers.get(name)
    }
    if not fit.clip:
        flags.pop("max_grad_norm", None)
    flags |= {"batch": q.batch, "seq": q.seq, "dtype": q.dtype}
    if q.micro_batches > 1:
        flags["micro_batches"] = q.micro_batches
    if q.hbm_budget != asked.hbm_budget:
        flags["hbm_budget"] = size_text(q.hbm_budget)
    elif options.hbm_budget is not None:
        flags["hbm_budget"] = options.hbm_budget
    if q.nvme_budget is not None:
        changed = q.nvme_budget != asked.nvme_budget
        flags["nvme_budget"] = size_text(q.nvme_budget) if changed else options.nvme_budget
    if q.optimizer_state != "fp32" and not isinstance(q.optimizer_state, TorchOptimizer):
        flags["optimizer_state"] = q.optimizer_state
    words = ["megacompile", "plan"]
    for name, value in flags.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *(_text(v) for v in values)]
    return words if fit.clip else [*words, "--no-clip"]


def _text(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)
