"""The ``megacompile`` command: plan, train, export, inspect, diff, models, machines, doctor, bench.

A user's mistake is answered by one sentence on stderr and exit code 2; near names are suggested.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from megacompile.cli import examples
from megacompile.cli.bench import add_bench
from megacompile.errors import MegacompileError


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


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0.")
    return int(text)


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else _positive(text)


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0.")
    return value


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
        epilog=examples.ALL, formatter_class=raw, allow_abbrev=False,
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
    add("--batch", type=_positive, default=1, help="sequences per micro-batch (1)")
    add("--seq", type=_positive, default=4096, help="tokens per sequence (4096)")
    text = "micro-batches per step (1); auto: cut --batch into as many as make the fastest step"
    add("--micro-batches", type=_count_or_auto, default=1, metavar="N", help=text)
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="what blocks compute in (bf16)")
    clip = plan.add_mutually_exclusive_group()
    text = "show the details with clipping (the default; its value changes no figure)"
    clip.add_argument("--max-grad-norm", type=_above_zero, metavar="NORM", help=text)
    clip.add_argument("--no-clip", action="store_true", help="show the details without clipping")
    text = "Adam's moments, in FP32 or in blocks of codes (fp32)"
    add("--optimizer-state", choices=("fp32", "int8", "int4"), default="fp32", help=text)
    text = "train PEFT's LoRA adapters of this rank; the rest is frozen, a checkpoint in bfloat16"
    add("--lora", type=_positive, metavar="RANK", help=text)
    text = "modules that get adapters, as PEFT's target_modules (all linear layers but the head)"
    add("--lora-targets", nargs="+", metavar="NAME", help=text)
    add = plan.add_argument_group("on which machine").add_argument
    add("--machine", required=True, help="a built-in name, a machine.json, or this-cpu")
    add("--hbm-budget", metavar="SIZE", help="device memory to use (90%% of the card)")
    add("--host-budget", metavar="SIZE", help="host memory there is")
    add("--nvme-budget", metavar="SIZE", help="room on a drive for state that the host has none for")
    add("--host-bandwidth", type=_above_zero, metavar="GB/S", help="sustained host memory bandwidth")
    add("--nvme-rates", type=_above_zero, nargs=2, metavar="GB/S", help="what the drive reads, and writes")
    add("--link", type=_above_zero, metavar="GB/S", help="sustained bandwidth to the card, each way")
    add("--gpus", type=_positive, default=1, metavar="N", help="cards of each machine, which share the state")
    add(
        "--nodes",
        type=_positive,
        default=1,
        metavar="N",
        help="machines that train together; one state for all, or a copy in each: the faster that fits",
    )
    add("--fabric", type=_above_zero, metavar="GB/S", help="sustained bandwidth between cards, each way")
    add("--network", type=_above_zero, metavar="GB/S", help="sustained bandwidth of a machine, each way")
    _answer_arguments(plan)


def _answer_arguments(plan: argparse.ArgumentParser) -> None:
    add = plan.add_argument_group("what to answer").add_argument
    add("--tokens", type=_above_zero, help="tokens to train on: adds the hours")
    add("--price", type=_above_zero, help="price of the machine per hour: adds the cost")
    add("--largest", action="store_true", help="find the largest batch and context exactly (minutes)")
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
    from megacompile.estimate.presets import PRESETS

    print(f"{'model':<18}{'parameters':>11}{'active':>9}  geometry from")
    for name, p in PRESETS.items():
        active = f"{p.active:g} B" if p.active != p.billions else ""
        print(f"{name:<18}{f'{p.billions:g} B':>11}{active:>9}  {p.source}")
    return 0


def _run_machines(_: argparse.Namespace) -> int:
    from megacompile.machine.catalog import PROFILES

    for profile in PROFILES.values():
        print(f"{profile.name:<16}{profile.title}")
        for figure, source in profile.sources.items():
            print(f"  {figure:<17} {source}")
    return 0


def _run_profile(options: argparse.Namespace) -> int:
    from megacompile.machine.catalog import profile_json
    from megacompile.machine.kept import keep_profile
    from megacompile.machine.profile import describe, profile

    nvme = folder_of(options.nvme, "--nvme") if options.nvme else None
    measured = profile(nvme)
    try:
        Path(options.out).expanduser().write_text(profile_json(measured) + "\n")
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
    """What ``--help`` says of a command, its arguments, and what runs it."""

    help: str
    description: str
    examples: str
    run: Callable[[argparse.Namespace], int]
    arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None


_COMMANDS = {
    "plan": _Command(
        "will it fit and how fast, before you rent the machine",
        "Plan a training step and predict its time and memory.",
        examples.PLAN, _later("run", "run_plan"), _plan_arguments),
    "new": _Command(
        "write a commented example of what train reads", "Write a commented YAML file for megacompile train.",
        examples.NEW, _later("new", "run_new"), _new_arguments),
    "train": _Command(
        "fine-tune a model on your data as a YAML file says",
        "Fine-tune a language model, by TRL's trainers, in the device memory that you name.",
        examples.TRAIN, _later("train", "run_train"), _train_arguments),
    "export": _Command(
        "a checkpoint as a folder that plain transformers loads",
        "Write the weights of a trainer's checkpoint, with config and tokenizer, as transformers loads them.",
        examples.EXPORT, _later("export", "run_export"), _export_arguments),
    "inspect": _Command(
        "look at a dumped schedule: a page of timeline, memory and code",
        "Write a schedule as one page: its timeline, its memory and its code, linked to each other.",
        examples.INSPECT, _later("inspect", "run_inspect"), _inspect_arguments),
    "diff": _Command(
        "what changed between two plans", "Compare two dumps or two plans, equal layers folded.",
        examples.DIFF, _later("inspect", "run_diff"), _diff_arguments),
    "models": _Command(
        "built-in models and their sizes", "List the built-in models.", examples.MODELS, _run_models),
    "machines": _Command(
        "built-in machines, their rates and sources",
        "List the built-in machines with the source of each figure.", examples.MACHINES, _run_machines),
    "profile": _Command(
        "measure this machine into a machine.json",
        "Measure products, copies, host memory, Adam, and a drive; takes up to a minute.",
        examples.PROFILE, _run_profile, _profile_arguments),
    "doctor": _Command(
        "what this machine would limit", "Show in one screen what this machine would limit.",
        examples.DOCTOR, _later("doctor", "run_doctor"),
        lambda parser: parser.add_argument(
            "--gpu", action="store_true", help="also train a tiny model on the GPU, and by plain PyTorch")),
    "bench": _Command(
        "measure parts of megacompile on this machine", "Measure parts of megacompile on this machine.",
        examples.BENCH, lambda options: _later(f"bench_{options.part}", f"run_{options.part}")(options),
        add_bench),
}  # fmt: skip


def write_json(value: object) -> None:
    """Print strict JSON."""
    print(json.dumps(value, indent=1, allow_nan=False))


def folder_of(text: str, what: str = "--dump") -> Path:
    """A directory that can be written to; made where it is missing."""
    path = Path(text).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MegacompileError(f"{what} {text}: {error.strerror or error}.") from error
    return path
