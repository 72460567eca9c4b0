"""The file that ``megacompile train`` reads: its text, its environment variables, bounds for its numbers.

A config is trusted as a script is: it names models, data and folders. Its ``env`` is set for the training
alone, so that names which choose programs or libraries (PATH, LD_PRELOAD, CC, PYTHONPATH) are the shell's.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megacompile.errors import MegacompileError
from megacompile.text_files import read_text

_ENV = re.compile(
    r"(HF|HUGGINGFACE|TRANSFORMERS|TRL|ACCELERATE|TOKENIZERS|TENSORBOARD|MLFLOW|COMET|CLEARML|MEGACOMPILE)_\w+"
    r"|WANDB_[A-Z]\w*"  # WANDB__EXECUTABLE names a program
    r"|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|NCCL_(DEBUG|SOCKET_IFNAME|IB_DISABLE|P2P_DISABLE)|GLOO_SOCKET_IFNAME|https?_proxy|HTTPS?_PROXY|no_proxy"
)  # NCCL, OpenMP and Triton have variables that name libraries and programs, so theirs are single names
_LARGEST, _MOST = 1e9, 1 << 31  # of any real number, of any count
_FROM_ONE = {
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "sample_tokens", "lora_r",
}  # fmt: skip
_TO_ONE = {"adam_beta1", "adam_beta2", "label_smoothing_factor", "lora_dropout"}
_BUDGETS = {"hbm_budget", "host_budget"}  # which may be numbers of GB


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a YAML file; raises MegacompileError, which names it, for whatever else it holds."""
    import yaml

    try:
        keys = yaml.safe_load(read_text(path))
    except (MegacompileError, yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-99-99
        reason = " ".join(str(error).split()).rstrip(".")
        raise MegacompileError(f"{path} is no YAML file that can be read: {reason}.") from error
    except RecursionError as error:
        raise MegacompileError(
            f"{path} is no YAML file that can be read: it is nested too deeply."
        ) from error
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys):
        raise MegacompileError(f"{path} holds no keys: write one by megacompile new.")
    _check_env(path, keys.get("env", {}))
    return keys


def _check_env(path: Path, env: Any) -> None:
    if not isinstance(env, dict):
        raise MegacompileError(f"{path}: env must be names and values, as  HF_HOME: /data/hf.")
    for name, value in env.items():
        if not isinstance(name, str) or not _ENV.fullmatch(name):
            raise MegacompileError(
                f"{path}: env sets {name!r}, which is not known to be harmless: set it in the shell, before "
                "the command."
            )
        if not isinstance(value, (str, int, float)) or "\0" in str(value):
            raise MegacompileError(f"{path}: env: {name} must be a text or a number.")


def check_values(path: Path, parsed: Iterable[Any]) -> None:
    """Refuse values of parsed dataclasses of another kind than their field's, and numbers that are not
    finite, out of all bounds, negative unless the default is, or fractions for counts."""
    for arguments in parsed:
        hints = get_type_hints(type(arguments))
        for field in dataclasses.fields(arguments):
            value = getattr(arguments, field.name)
            kinds = _kinds_of_hint(hints[field.name])
            if kinds <= {int, float} and not (value is None or type(value) in (int, float)):
                raise MegacompileError(f"{path}: {field.name} is {value!r:.40}, which is no number.")
            if kinds == {bool} and not isinstance(value, (bool, NoneType)):
                raise MegacompileError(f"{path}: {field.name} is {value!r:.40}: give true or false.")
            if kinds == {int} and isinstance(value, float):
                raise MegacompileError(f"{path}: {field.name} is {value!r}: give a whole number.")
            if kinds == {str} and field.name not in _BUDGETS and not isinstance(value, (str, NoneType)):
                raise MegacompileError(f"{path}: {field.name} is {value!r:.40}, which is no text.")
            if isinstance(value, str) and "\0" in value:
                raise MegacompileError(f"{path}: {field.name} is {value!r:.40}, which has a zero byte.")
            choices = [choice for kind in kinds for choice in get_args(kind) if get_origin(kind) is Literal]
            if choices and not isinstance(value, (str, NoneType)):
                raise MegacompileError(f"{path}: {field.name} is {value!r:.40}: choose from {choices}.")
            for number in _numbers(value):
                _check(path, field, number, nested=number is not value)


def _check(path: Path, field: dataclasses.Field[Any], number: float, *, nested: bool) -> None:
    most = _MOST if isinstance(number, int) else _LARGEST
    signed = nested or (isinstance(field.default, (int, float)) and field.default < 0)
    least = -most if signed else 1 if field.name in _FROM_ONE else 0
    most = 1 if field.name in _TO_ONE else most
    if not (math.isfinite(number) and least <= number <= most):
        raise MegacompileError(
            f"{path}: {field.name} {number!s:.40} cannot be meant: give a number from {least:g} to {most:g}."
        )


def _kinds_of_hint(hint: Any) -> set[Any]:
    """The types that a field's hint allows, None left out."""
    found = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return set(found) - {NoneType}


def _numbers(value: Any, depth: int = 8) -> Iterator[float]:
    """The numbers in a value, and in its lists and dicts."""
    if type(value) in (int, float):
        yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from _numbers(item, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item, depth - 1)
