"""Check what ``megacompile plan`` was asked: flags that go together, the model, the machine, the budgets.

All of it is checked before torch is imported, which takes seconds: too long a wait for a misspelt name.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megacompile.cli.output import folder_of
from megacompile.cli.plan_arguments import count, sequences, tokens
from megacompile.cli.presets import find_model
from megacompile.errors import MegacompileError
from megacompile.garbage_collection import without_garbage_collection
from megacompile.hardware.catalog import (
    PROFILES,
    THIS_CPU,
    MachineProfile,
    load_machine,
    machine_key,
    this_cpu_unmeasured,
)
from megacompile.units import parse_bytes

ANY_BYTES = 1 << 60  # no machine, and no drive, has more
_MOST_TOKENS = 1 << 32  # whose activations in bytes are still 64-bit numbers


def run_plan(options: argparse.Namespace) -> int:
    """Check what was asked, and only then import what answers it."""
    _check_flags(options)
    here = machine_key(options.machine) == THIS_CPU
    profile = this_cpu_unmeasured() if here else load_machine(options.machine)
    device_budget(options, profile)
    host_budget(options, profile)
    nvme_budget(options)
    sweep_values(options)
    find_model(options.model)
    if options.dump:
        folder_of(options.dump)
    with without_garbage_collection():  # of its CPU time a sixth, most of it among what is imported here
        from megacompile.cli import plan_command

        return plan_command.run_plan(options)


def _check_flags(options: argparse.Namespace) -> None:
    _check_tokens(options.batch, options.seq)
    if options.price is not None and options.tokens is None and options.sweep is None:
        raise MegacompileError("--price needs --tokens: how many tokens are to be trained on?")
    if options.sweep is None and (options.values or options.plot):
        raise MegacompileError("--values and --plot belong to a --sweep.")
    if options.sweep:
        if options.micro_batches == "auto":
            raise MegacompileError("--micro-batches auto is about one plan: give a --sweep a number.")
        for name in ("dump", "largest", "explain", "html", "rollout"):
            if getattr(options, name):
                raise MegacompileError(
                    f"--sweep makes many plans, --{name} is about one: give one of the two."
                )
    if options.rollout and options.gpus * options.nodes > 1:
        raise MegacompileError("--rollout is of one card, as a rollout is: leave --gpus and --nodes out.")
    if options.optimizer != "adamw" and options.optimizer_state != "fp32":
        raise MegacompileError(
            f"--optimizer-state is a format of Adam's moments, which {options.optimizer} does not keep: "
            "leave it out, or plan with --optimizer adamw."
        )
    if options.explain and options.json:
        raise MegacompileError("--explain prints text, --json the whole answer: give one of the two.")
    if options.lora_targets and options.lora is None:
        raise MegacompileError("--lora-targets needs --lora RANK.")
    if options.frozen and options.lora is None:
        raise MegacompileError("--frozen needs --lora RANK: what is trained is kept in FP32.")


def device_budget(options: argparse.Namespace, profile: MachineProfile) -> int:
    """The bytes of ``--hbm-budget``."""
    given = options.hbm_budget
    available = profile.device_bytes or profile.host_bytes
    if available is None and (given is None or _relative(given)):
        raise MegacompileError(f"--hbm-budget: {profile.name} does not say how much it has; give a size.")
    return parse_bytes(_size(given or "auto"), what="--hbm-budget", available=available or ANY_BYTES)


def host_budget(options: argparse.Namespace, profile: MachineProfile) -> int | None:
    """The bytes of ``--host-budget``; None: not to be checked."""
    given = options.host_budget
    if given is None:
        return profile.host_bytes
    if profile.host_bytes is None and _relative(given):
        raise MegacompileError(f"--host-budget {given}: of what? Give a size, as 512GB.")
    # a user's own host may be larger than the profile's
    available = profile.host_bytes if _relative(given) else ANY_BYTES
    return parse_bytes(_size(given), what="--host-budget", available=available or ANY_BYTES)


def nvme_budget(options: argparse.Namespace) -> int | None:
    """The bytes of ``--nvme-budget``; None: no drive."""
    given = options.nvme_budget
    if given is None:
        return None
    if _relative(given):
        raise MegacompileError(f"--nvme-budget {given}: of what? Give a size, as 4TB.")
    if options.host_budget is None:
        raise MegacompileError("--nvme-budget needs --host-budget: what does not fit there goes to NVMe.")
    return parse_bytes(_size(given), what="--nvme-budget", available=ANY_BYTES)


def _relative(text: str) -> bool:
    return text.endswith("%") or text == "auto"


def _size(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def sweep_values(options: argparse.Namespace) -> Sequence[int | MachineProfile]:
    """The values of a sweep that the user gave; empty: usual ones."""
    over, values = options.sweep, [value.strip() for value in (options.values or "").split(",") if value]
    if over == "hbm-budget":
        return [parse_bytes(_size(v), what="--values", available=ANY_BYTES) for v in values]
    if over == "machine":
        for value in values:
            if value not in PROFILES:
                raise MegacompileError(f"--values: {value!r} is no built-in machine.")
        return [PROFILES[value] for value in values]
    read = {"batch": sequences, "seq": tokens, "gpus": count}
    numbers = []
    for value in values:
        try:
            numbers.append(read[over](value))
        except argparse.ArgumentTypeError as error:
            raise MegacompileError(f"--values, of a {over}: {error}") from error
    for number in numbers:
        _check_tokens(**({"batch": options.batch, "seq": options.seq} | {over: number}))
    return numbers


def _check_tokens(batch: int, seq: int, **_: int) -> None:
    if batch * seq > _MOST_TOKENS:
        raise MegacompileError(
            f"--batch {batch} of --seq {seq} are {batch * seq:,} tokens a micro-batch: {_MOST_TOKENS:,} are "
            "the most."
        )
