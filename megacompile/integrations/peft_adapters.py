"""Adapters of PEFT whose values a program has: what PEFT's virtual tokens change, and how all are written."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megacompile.api.program import Program

_PREFIXES = {"PREFIX_TUNING", "CARTRIDGE"}  # of keys and values
Within = Callable[[Path], contextlib.AbstractContextManager[Path]]
"""Where files of others' code go that are for a folder: it, or one whose files replace those in it."""


def learns_prompts(model: Any) -> bool:
    """Return whether what is trained are virtual tokens or a prefix, which PEFT computes by a prompt
    encoder."""
    return bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))


def start_without_effect(model: Any) -> bool:
    """Return whether adapters are known to leave the model as it is until they are trained."""
    settings = vars(model.active_peft_config).items()
    initial = [how for name, how in settings if name.startswith("init_") and name.endswith("weights")]
    return bool(initial) and all(how is True or how == "gaussian" for how in initial)


def save_adapters(model: Any, program: Program, folder: Path, within: Within) -> None:
    """Write the adapters of a model that a program has."""
    values = program.state_dict(trained=True)
    if program.world.rank == 0:
        with _with_prompts(model, values), within(folder) as fresh:
            card = folder / "README.md"  # which PEFT adds to
            if card.is_file() and not card.is_symlink() and fresh != folder:
                shutil.copyfile(card, fresh / card.name)
            model.save_pretrained(os.fspath(fresh), state_dict=values)


@contextlib.contextmanager
def _with_prompts(model: Any, values: Mapping[str, Tensor]) -> Iterator[None]:
    """The model has a copy of its prompt encoder, with these values: PEFT saves what this computes."""
    if not learns_prompts(model):
        yield
        return
    encoder = model.prompt_encoder
    known = {f"prompt_encoder.{name}": parameter for name, parameter in encoder.named_parameters()}
    copies = {id(p): nn.Parameter(values[name].to(p.dtype)) for name, p in known.items() if name in values}
    model.prompt_encoder = copy.deepcopy(encoder, copies)
    try:
        yield
    finally:
        model.prompt_encoder = encoder


def virtual_tokens(model: Any) -> int:
    """Return the number of positions that PEFT puts before those of a batch; those of a prefix have no
    outputs."""
    if not learns_prompts(model) or model.active_peft_config.peft_type in _PREFIXES:
        return 0
    return int(model.active_peft_config.num_virtual_tokens)
