"""The ``megacompile`` command: plan, train, export, inspect, diff, models, machines, doctor, bench.

A user's mistake is answered by one sentence on stderr and exit code 2; near names are suggested.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from megacompile.cli.bench_arguments import add_bench
from megacompile.cli.help_examples import (
    ALL,
    BENCH,
    DIFF,
    DOCTOR,
    EXPORT,
    INSPECT,
    MACHINES,
    MODELS,
    NEW,
    PLAN,
    PROFILE,
    TRAIN,
)
from megacompile.cli.output import folder_of
from megacompile.cli.plan_arguments import add_plan
from megacompile.errors import MegacompileError
from megacompile.text_files import path_of


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
    measure.add_argument(
        "--model", help="whose layers' products are timed on a GPU: as plan takes it (llama-3.1-8b)"
    )


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

    width = max(map(len, PRESETS))
    print(f"{'model':<{width}}{'parameters':>11}{'active':>9}  geometry from")
    for name, p in PRESETS.items():
        active = f"{p.active:g} B" if p.active != p.billions else ""
        print(f"{name:<{width}}{f'{p.billions:g} B':>11}{active:>9}  {p.source}")
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
    from megacompile.hardware.product_rates import LLAMA_8B, layer_weights

    nvme = folder_of(options.nvme, "--nvme") if options.nvme else None
    name, weights = options.model or "llama-3.1-8b", LLAMA_8B
    if options.model:
        from megacompile.cli.models import load_model

        weights = layer_weights(load_model(name).module)
    measured = profile(nvme, name, weights)
    try:
        path_of(options.out, "--out").write_text(profile_json(measured) + "\n")
    except OSError as error:
        raise MegacompileError(f"--out {options.out}: {error.strerror or error}.") from error
    print(f"{describe(measured)}\nwritten to {options.out}: use it as --machine {options.out}")
    if measured.device_bytes is not None:
        print(f"megacompile.compile plans by it on this machine: kept in {keep_profile(measured)}")
    return 0


def _run_later(module: str, name: str) -> Callable[[argparse.Namespace], int]:
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
        PLAN, _run_later("check_plan_arguments", "run_plan"), add_plan),
    "new": _Command(
        "write a commented example of what train reads", "Write a commented YAML file for megacompile train.",
        NEW, _run_later("new_config", "run_new"), _new_arguments),
    "train": _Command(
        "fine-tune a model on your data as a YAML file says",
        "Fine-tune a language model, by TRL's trainers, in the device memory that you name.",
        TRAIN, _run_later("train", "run_train"), _train_arguments),
    "export": _Command(
        "a checkpoint as a folder that plain transformers loads",
        "Write the weights of a trainer's checkpoint, with config and tokenizer, as transformers loads them.",
        EXPORT, _run_later("export", "run_export"), _export_arguments),
    "inspect": _Command(
        "look at a dumped schedule: a page of timeline, memory and code",
        "Write a schedule as one page: its timeline, its memory and its code, linked to each other.",
        INSPECT, _run_later("inspect", "run_inspect"), _inspect_arguments),
    "diff": _Command(
        "what changed between two plans", "Compare two dumps or two plans, equal layers folded.",
        DIFF, _run_later("inspect", "run_diff"), _diff_arguments),
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
        DOCTOR, _run_later("doctor", "run_doctor"),
        lambda parser: parser.add_argument(
            "--gpu", action="store_true", help="also train a tiny model on the GPU, and by plain PyTorch")),
    "bench": _Command(
        "measure parts of megacompile on this machine", "Measure parts of megacompile on this machine.",
        BENCH, lambda options: _run_later(f"bench_{options.part}", f"run_{options.part}")(options),
        add_bench),
}  # fmt: skip
