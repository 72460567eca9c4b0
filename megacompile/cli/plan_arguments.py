"""The arguments of ``megacompile plan``: its flags, and what each takes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

OPTIMIZERS = ("adamw", "muon", "sgd", "adadelta", "adafactor", "adagrad", "adamax", "asgd", "nadam", "radam",
              "rmsprop", "rprop")  # fmt: skip
"""Classes of ``torch.optim`` that ``plan`` prices, in lower case; ``optimizer_of`` makes them."""


def _up_to(most: int) -> Callable[[str], int]:
    """A reader of whole numbers from 1 to ``most``, beyond which nobody has a machine."""

    def read(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} must be a whole number from 1 to {most:,}.")
        return value

    return read


sequences, tokens, count = _up_to(1 << 20), _up_to(1 << 24), _up_to(1 << 16)


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else count(text)


def _completions(text: str) -> tuple[int, int]:
    sizes = text.split("x")
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} must be tokens of prompts and of completions, as 512x512."
        )
    return tokens(sizes[0]), tokens(sizes[1])


def _optimizer(text: str) -> str:
    if text not in OPTIMIZERS and "." not in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be one of {', '.join(OPTIMIZERS)}, or module.Class, as lion_pytorch.Lion."
        )
    return text


def _number_between(least: float, most: float) -> Callable[[str], float]:
    """A reader of numbers in these bounds; NaN is in none."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} must be a number from {least:g} to {most:g}.")
        return value

    return read


_rate, _amount = _number_between(1e-3, 1e9), _number_between(1e-9, 1e18)  # GB/s; of tokens and money


def add_plan(plan: argparse.ArgumentParser) -> None:
    add = plan.add_argument_group("what to train").add_argument
    add(
        "--model",
        required=True,
        help="a built-in name, a config.json or its folder, a hub id, or a config's class",
    )
    add("--batch", type=sequences, default=1, help="sequences per micro-batch (1)")
    add("--seq", type=tokens, default=4096, help="tokens per sequence (4096)")
    text = "micro-batches per step (1); auto: cut --batch into as many as make the fastest step"
    add("--micro-batches", type=_count_or_auto, default=1, metavar="N", help=text)
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="what blocks compute in (bf16)")
    clip = plan.add_mutually_exclusive_group()
    text = "show the details with clipping (the default; its value changes no figure)"
    clip.add_argument("--max-grad-norm", type=_amount, metavar="NORM", help=text)
    clip.add_argument("--no-clip", action="store_true", help="show the details without clipping")
    text = f"whose update the host makes: {', '.join(OPTIMIZERS)} (adamw), or another class as module.Class"
    add("--optimizer", type=_optimizer, default="adamw", metavar="NAME", help=text)
    text = "Adam's moments, in FP32 or in blocks of codes (fp32)"
    add("--optimizer-state", choices=("fp32", "int8", "int4"), default="fp32", help=text)
    text = "train PEFT's LoRA adapters of this rank; the rest is frozen, a checkpoint in bfloat16"
    add("--lora", type=count, metavar="RANK", help=text)
    text = "modules that get adapters, as PEFT's target_modules (all linear layers but the head)"
    add("--lora-targets", nargs="+", metavar="NAME", help=text)
    text = "the frozen linear layers but the head: in bfloat16, or in bitsandbytes' codes (bf16)"
    add("--frozen", choices=("bf16", "8bit", "4bit"), help=text)
    add = plan.add_argument_group("on which machine").add_argument
    add("--machine", required=True, help="a built-in name, a machine.json, or this-cpu")
    add("--hbm-budget", metavar="SIZE", help="device memory to use (90%% of the card)")
    add("--host-budget", metavar="SIZE", help="host memory there is")
    add("--nvme-budget", metavar="SIZE", help="room on a drive for state that the host has none for")
    add("--host-bandwidth", type=_rate, metavar="GB/S", help="sustained host memory bandwidth")
    add("--nvme-rates", type=_rate, nargs=2, metavar="GB/S", help="what the drive reads, and writes")
    add("--link", type=_rate, metavar="GB/S", help="sustained bandwidth to the card, each way")
    add("--gpus", type=count, default=1, metavar="N", help="cards of each machine, which share the state")
    add(
        "--nodes",
        type=count,
        default=1,
        metavar="N",
        help="machines that train together; one state for all, or a copy in each: the faster that fits",
    )
    add("--fabric", type=_rate, metavar="GB/S", help="sustained bandwidth between cards, each way")
    add("--network", type=_rate, metavar="GB/S", help="sustained bandwidth of a machine, each way")
    _add_answer(plan)


def _add_answer(plan: argparse.ArgumentParser) -> None:
    add = plan.add_argument_group("what to answer").add_argument
    add("--tokens", type=_amount, help="tokens to train on: adds the hours")
    add("--price", type=_amount, help="price of the machine per hour: adds the cost")
    add("--largest", action="store_true", help="find the largest batch and context exactly (minutes)")
    text = "prompts and completions, as 512x512, of all rows of a step: does a rollout fit, and how fast"
    add("--rollout", type=_completions, metavar="PxC", help=text)
    axes = ("hbm-budget", "batch", "seq", "gpus", "machine")
    add("--sweep", choices=axes, help="a table along an axis")
    add("--values", metavar="A,B,C", help="the sweep's values, instead of usual ones")
    add("--plot", metavar="PNG", help="also draw the sweep, as a picture at this path")
    add("--json", action="store_true", help="print JSON")
    add("--explain", metavar="LAYER", help="why this layer is planned so, and what other choices cost")
    add("--html", metavar="FILE", help="write the schedule as a page: timeline, memory, code")
    add("--dump", metavar="DIR", help="write the schedule and every stage's output there")
