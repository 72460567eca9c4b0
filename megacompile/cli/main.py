"""The ``megacompile`` command: its subcommands, their arguments, and the examples that ``--help`` shows."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megacompile.errors import MegacompileError
from megacompile.text_files import path_of

OPTIMIZERS = ("adamw", "muon", "sgd", "adadelta", "adafactor", "adagrad", "adamax", "asgd", "nadam", "radam",
              "rmsprop", "rprop")  # fmt: skip
"""Classes of ``torch.optim`` that ``plan`` prices, in lower case; ``optimizer_of`` makes them."""

# ------------------------------------------------------------------------------------------------------------
# What ``--help`` shows below the options of each command.


ALL = """examples:
  megacompile plan --model llama-3.1-8b --machine rtx-4090 --batch 1 --seq 4096
  megacompile plan --model llama-3.1-70b --machine h100-pcie --batch 4 --hbm-budget 80 --dump out
  megacompile inspect out -o schedule.html
  megacompile doctor

`megacompile COMMAND --help` says more. Exit code: 0 yes, 1 no (it does not fit, the plans differ),
2 the question is wrong."""
PLAN = """examples:
  megacompile plan --model llama-3.1-8b --machine rtx-4090 --batch 1 --seq 4096
  megacompile plan --model llama-3.1-70b --machine h100-pcie --batch 4 --seq 4096 \\
      --hbm-budget 80 --host-budget 1500GB --tokens 1e9 --price 2.5
  megacompile plan --model ./config.json --machine machine.json --sweep hbm-budget
  megacompile plan --model qwen2.5-7b --machine a6000 --explain layers.7 --html schedule.html

Budgets are GB (10^9 bytes) or text such as 24GiB, 90%, auto. Exit code: 0 it fits, 1 it does not,
2 the question is wrong. No weights, no GPU and no triton are needed."""
INSPECT = """examples:
  megacompile plan --model llama-3.1-8b --machine rtx-4090 --dump out
  megacompile inspect out -o schedule.html
  megacompile inspect out/train/plan.json --trace trace.json    # after editing the plan

A dump is what --dump, compile(dump=…) or MEGACOMPILE_DUMP wrote. The page needs no network; the trace
opens at ui.perfetto.dev. Nothing in a dump is executed."""
DIFF = """examples:
  megacompile diff out-24GB out-48GB
  megacompile diff a/plan.json b/plan.json

Exit code: 0 the plans are equal, 1 they differ, 2 they cannot be compared."""
MODELS = """example:
  megacompile models

Any path to a config.json and any hub id works as well; of these only the geometry is read."""
PROFILE = """example:
  megacompile profile --out machine.json --nvme /mnt/drive
  megacompile plan --model llama-3.1-8b --machine machine.json"""
MACHINES = """example:
  megacompile machines

Each figure stands with its source; what no datasheet says is marked as assumed. A machine.json
replaces a built-in machine."""
TRAIN = """examples:
  megacompile new config.yaml
  megacompile train config.yaml --dry_run true
  megacompile train config.yaml --learning_rate 2e-5

The keys are those of TRL's scripts and configs, and method, data, hbm_budget, host_budget, offload_dir,
optimizer_state, optimizer, device, from_scratch, sample_prompts, sample_tokens. The same command goes on
after an interruption. Needs megacompile[trl,plots]."""
NEW = """examples:
  megacompile new config.yaml
  megacompile new preferences.yaml --method dpo"""
EXPORT = """examples:
  megacompile export out out-model
  megacompile export out/checkpoint-200 out-model --dtype bfloat16
  megacompile export out out-model --merge    # adapters, into their model

The weights come from the FP32 masters. Needs megacompile[transformers], and no training script."""
DOCTOR = """examples:
  megacompile doctor
  megacompile doctor --gpu    # exit code 1 where something failed"""
BENCH = """examples:
  megacompile bench kernels
  megacompile bench kernels --op rms_norm --shape 8192x4096 --check
  megacompile bench nvme --dir /mnt/nvme"""


# ------------------------------------------------------------------------------------------------------------
# The arguments of ``megacompile bench``: what parts of megacompile reach on this machine.


_KERNELS = """providers: eager, torch.compile, megacompile, Liger if it is installed, and the functions of
each --provider FILE.py, named as the operations and called as their eager forms:

    def rms_norm(x, weight): ...                 def glu(gate, up): ...
    def add_rms_norm(x, residual, weight): ...   def rope(x, cos, sin): ...

Correctness is checked against float64 before anything is timed. Without a GPU nothing is timed: the
ceilings of the compiled kernels are printed instead, and --check compares results on the CPU."""


def add_bench(bench: argparse.ArgumentParser) -> None:
    """Add the parts of ``bench`` to its parser."""
    parts = bench.add_subparsers(dest="part", metavar="PART", required=True, title="parts")
    _add_nvme(parts)
    _add_kernels(parts)


def _add_nvme(commands: Any) -> None:
    nvme = commands.add_parser(
        "nvme",
        help="what the drive behind a directory gives, and the storage engine's part of it",
        allow_abbrev=False,
        description="Read and write a scratch file past the page cache at several block sizes and queue "
        "depths, then with the engine that offload_dir uses.",
    )
    nvme.add_argument("--dir", required=True, metavar="DIR", help="a directory on the drive")
    nvme.add_argument("--size", default="2GB", metavar="SIZE", help="bytes of the scratch file (2GB)")
    nvme.add_argument("--json", action="store_true", help="print JSON")


def _add_kernels(commands: Any) -> None:
    kernels = commands.add_parser(
        "kernels",
        help="the fused kernels against eager, torch.compile and Liger",
        epilog=_KERNELS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        description="Time forward, backward and both of each kernel on this machine's GPU.",
    )
    add = kernels.add_argument
    add("--op", action="append", metavar="NAME", help="an operation (all); may be given several times")
    add(
        "--dtype",
        action="append",
        choices=("bfloat16", "float16", "float32"),
        help="bfloat16; may be given several times",
    )
    add("--shape", action="append", metavar="AxB", help="a shape of the one --op, such as 8192x4096")
    add("--provider", action="append", default=[], metavar="FILE", help="a Python file with more functions")
    add("--plan", metavar="JSON", help="the shapes of this plan, and what each kernel is worth in its step")
    add("--compare", metavar="JSON", help="a kernels.json of an earlier run")
    add("--out", metavar="DIR", default="bench-kernels", help="where the tables go (bench-kernels)")
    add("--check", action="store_true", help="check correctness alone")


# ------------------------------------------------------------------------------------------------------------
# The ``megacompile`` command: plan, train, export, inspect, diff, models, machines, doctor, bench.
#
# A user's mistake is answered by one sentence on stderr and exit code 2; near names are suggested.


class _Parser(argparse.ArgumentParser):
    """Errors in one sentence, with the nearest choice."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if found:
            names = re.findall(r"[\w.-]+", found.group(2))
            near = difflib.get_close_matches(found.group(1), names, n=1, cutoff=0.4)
            message = f"there is no {found.group(1)!r}: " + (
                f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}."
            )
        raise MegacompileError(message)

    def check_unknown(self, unknown: Sequence[str]) -> None:
        for text in unknown:
            near = difflib.get_close_matches(text.split("=")[0], self._option_string_actions, n=1)
            hint = f": did you mean {near[0]}?" if near else ": see --help."
            raise MegacompileError(f"{text!r} is not understood{hint}")


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


def _between(least: float, most: float) -> Callable[[str], float]:
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


_rate, _amount = _between(1e-3, 1e9), _between(1e-9, 1e18)  # GB/s; of tokens and money


def _new_arguments(new: argparse.ArgumentParser) -> None:
    new.add_argument("file", help="the file to write, which must not exist")
    new.add_argument("--method", choices=("sft", "dpo"), default="sft", help="what the data is for (sft)")


def _train_arguments(train: argparse.ArgumentParser) -> None:
    train.add_argument("config", help="a YAML file, such as megacompile new writes")
    text = "keys of the file, as --learning_rate 1e-5; --dry_run true only says whether it fits"
    train.add_argument("overrides", nargs=argparse.REMAINDER, metavar="--KEY VALUE", help=text)


def _export_arguments(export: argparse.ArgumentParser) -> None:
    export.add_argument("source", help="a checkpoint-N folder, or a run's output_dir: its newest whole one")
    export.add_argument("folder", help="a new folder, which from_pretrained loads")
    text = "of the weights (as the model was given)"
    export.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help=text)
    text = "add the adapters of a checkpoint to their model (as the adapters name it), in FP32 on the host"
    export.add_argument("--merge", nargs="?", const="", metavar="MODEL", help=text)


def _build() -> tuple[_Parser, dict[str, _Parser]]:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="megacompile", description="Plan and run the training of models larger than device memory.",
        epilog=ALL, formatter_class=raw, allow_abbrev=False,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    found: dict[str, _Parser] = {}
    for name, command in _COMMANDS.items():
        found[name] = commands.add_parser(
            name, help=command.help, description=command.description, epilog=command.examples,
            formatter_class=raw, allow_abbrev=False,
        )  # fmt: skip
        command.arguments(found[name])
    return parser, found


def _inspect_arguments(inspect: argparse.ArgumentParser) -> None:
    inspect.add_argument("dump", help="a dump's folder, its schedule.json, or a plan.json beside one")
    inspect.add_argument("-o", "--output", metavar="HTML", help="where the page goes (NAME.html)")
    inspect.add_argument("--trace", metavar="JSON", help="also write a trace for Perfetto")


def _diff_arguments(diff: argparse.ArgumentParser) -> None:
    diff.add_argument("first", help="a dump's folder, its schedule.json or a plan.json")
    diff.add_argument("second", help="the same for the other")


def _profile_arguments(measure: argparse.ArgumentParser) -> None:
    measure.add_argument("--out", metavar="FILE", default="machine.json", help="the file (machine.json)")
    measure.add_argument("--nvme", metavar="DIR", help="a folder on the drive to measure as well")


def _plan_arguments(plan: argparse.ArgumentParser) -> None:
    add = plan.add_argument_group("what to train").add_argument
    add("--model", required=True, help="a built-in name, a config.json, or a hub id")
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
    _answer_arguments(plan)


def _answer_arguments(plan: argparse.ArgumentParser) -> None:
    add = plan.add_argument_group("what to answer").add_argument
    add("--tokens", type=_amount, help="tokens to train on: adds the hours")
    add("--price", type=_amount, help="price of the machine per hour: adds the cost")
    add("--largest", action="store_true", help="find the largest batch and context exactly (minutes)")
    text = "prompts and completions, as 512x512, of all rows of a step: does a rollout fit, and how fast"
    add("--rollout", type=_completions, metavar="PxC", help=text)
    axes = ("hbm-budget", "batch", "seq", "gpus", "machine")
    add("--sweep", choices=axes, help="a table and a PNG along an axis")
    add("--values", metavar="A,B,C", help="the sweep's values, instead of usual ones")
    add("--plot", metavar="PNG", help="where the sweep's picture goes (sweep-AXIS.png)")
    add("--json", action="store_true", help="print JSON")
    add("--explain", metavar="LAYER", help="why this layer is planned so, and what other choices cost")
    add("--html", metavar="FILE", help="write the schedule as a page: timeline, memory, code")
    add("--dump", metavar="DIR", help="write the schedule and every stage's output there")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 2 for a user's mistake, 130 where Ctrl-C stops it."""
    warnings.simplefilter("ignore")
    parser, commands = _build()
    try:
        options, unknown = parser.parse_known_args(arguments)
        if unknown:
            commands.get(options.command, parser).check_unknown(unknown)
        if options.command is None:
            parser.print_help()
            return 2
        return _COMMANDS[options.command].run(options)
    except MegacompileError as error:
        print(f"megacompile: {str(error).strip()}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        print("\nmegacompile: stopped by Ctrl-C", file=sys.stderr)
        return 130


def _run_models(_: argparse.Namespace) -> int:
    from megacompile.cli.presets import PRESETS

    print(f"{'model':<18}{'parameters':>11}{'active':>9}  geometry from")
    for name, p in PRESETS.items():
        active = f"{p.active:g} B" if p.active != p.billions else ""
        print(f"{name:<18}{f'{p.billions:g} B':>11}{active:>9}  {p.source}")
    return 0


def _run_machines(_: argparse.Namespace) -> int:
    from megacompile.hardware.catalog import PROFILES

    for profile in PROFILES.values():
        print(f"{profile.name:<16}{profile.title}")
        for figure, source in profile.sources.items():
            print(f"  {figure:<17} {source}")
    return 0


def _run_profile(options: argparse.Namespace) -> int:
    from megacompile.hardware.catalog import profile_json
    from megacompile.hardware.kept_profile import keep_profile
    from megacompile.hardware.measure import describe, profile

    nvme = folder_of(options.nvme, "--nvme") if options.nvme else None
    measured = profile(nvme)
    try:
        path_of(options.out, "--out").write_text(profile_json(measured) + "\n")
    except OSError as error:
        raise MegacompileError(f"--out {options.out}: {error.strerror or error}.") from error
    print(f"{describe(measured)}\nwritten to {options.out}: use it as --machine {options.out}")
    if measured.device_bytes is not None:
        print(f"megacompile.compile plans by it on this machine: kept in {keep_profile(measured)}")
    return 0


def _later(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    """A command whose module, and torch with it, is imported when the command runs."""
    return lambda options: int(getattr(importlib.import_module(f"megacompile.cli.{module}"), name)(options))


class _Command(NamedTuple):
    """A command: what ``--help`` says of it, its arguments, and what runs it."""

    help: str
    description: str
    examples: str
    run: Callable[[argparse.Namespace], int]
    arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None


_COMMANDS = {
    "plan": _Command(
        "will it fit and how fast, before you rent the machine",
        "Plan a training step and predict its time and memory.",
        PLAN, _later("plan_arguments", "run_plan"), _plan_arguments),
    "new": _Command(
        "write a commented example of what train reads", "Write a commented YAML file for megacompile train.",
        NEW, _later("new_config", "run_new"), _new_arguments),
    "train": _Command(
        "fine-tune a model on your data as a YAML file says",
        "Fine-tune a language model, by TRL's trainers, in the device memory that you name.",
        TRAIN, _later("train", "run_train"), _train_arguments),
    "export": _Command(
        "a checkpoint as a folder that plain transformers loads",
        "Write the weights of a trainer's checkpoint, with config and tokenizer, as transformers loads them.",
        EXPORT, _later("export", "run_export"), _export_arguments),
    "inspect": _Command(
        "look at a dumped schedule: a page of timeline, memory and code",
        "Write a schedule as one page: its timeline, its memory and its code, linked to each other.",
        INSPECT, _later("inspect", "run_inspect"), _inspect_arguments),
    "diff": _Command(
        "what changed between two plans", "Compare two dumps or two plans, equal layers folded.",
        DIFF, _later("inspect", "run_diff"), _diff_arguments),
    "models": _Command(
        "built-in models and their sizes", "List the built-in models.", MODELS, _run_models),
    "machines": _Command(
        "built-in machines, their rates and sources",
        "List the built-in machines with the source of each figure.", MACHINES, _run_machines),
    "profile": _Command(
        "measure this machine into a machine.json",
        "Measure products, copies, host memory, Adam, and a drive; takes up to a minute.",
        PROFILE, _run_profile, _profile_arguments),
    "doctor": _Command(
        "what this machine would limit", "Show in one screen what this machine would limit.",
        DOCTOR, _later("doctor", "run_doctor"),
        lambda parser: parser.add_argument(
            "--gpu", action="store_true", help="also train a tiny model on the GPU, and by plain PyTorch")),
    "bench": _Command(
        "measure parts of megacompile on this machine", "Measure parts of megacompile on this machine.",
        BENCH, lambda options: _later("bench_commands", f"run_{options.part}")(options),
        add_bench),
}  # fmt: skip


def write_json(value: object) -> None:
    """Print strict JSON."""
    print(json.dumps(value, indent=1, allow_nan=False))


def folder_of(text: str, what: str = "--dump") -> Path:
    """A directory that can be written to; made where it is missing."""
    path = path_of(text, what)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MegacompileError(f"{what} {text}: {error.strerror or error}.") from error
    return path
