"""Adapters of PEFT whose values a program has: what PEFT's virtual tokens change, and how all are written."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from megacompile.program import Program

_PREFIXES = {"PREFIX_TUNING", "CARTRIDGE"}  # of keys and values


def learns_prompts(model: Any) -> bool:
    """Whether what is trained are virtual tokens or a prefix, which PEFT computes by a prompt encoder."""
    return bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))


def start_without_effect(model: Any) -> bool:
    """Whether adapters are known to leave the model as it is until they are trained."""
    settings = vars(model.active_peft_config).items()
    initial = [how for name, how in settings if name.startswith("init_") and name.endswith("weights")]
    return bool(initial) and all(how is True or how == "gaussian" for how in initial)


def save_adapters(model: Any, program: Program, folder: str) -> None:
    """Write the adapters of a model that a program has."""
    values = program.state_dict(trained=True)
    if program.world.rank == 0:
        with _with_prompts(model, values):
            model.save_pretrained(folder, state_dict=values)


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
    """How many positions PEFT puts before those of a batch; those of a prefix have no outputs."""
    if not learns_prompts(model) or model.active_peft_config.peft_type in _PREFIXES:
        return 0
    return int(model.active_peft_config.num_virtual_tokens)
