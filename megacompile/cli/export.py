"""``megacompile export``: from a trainer's checkpoint to a folder that plain transformers loads."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from megacompile.errors import MegacompileError
from megacompile.json_codec import from_plain, parse_json
from megacompile.text_files import path_of, read_text


def run_export(options: argparse.Namespace) -> int:
    """Write the masters of a checkpoint in the dtype that is asked for, with what belongs to the model."""
    try:
        from megacompile.integrations.trainer_checkpoints import check_checkpoint
    except ImportError as error:
        text = f"export needs transformers ({error}): pip install 'megacompile[transformers]'."
        raise MegacompileError(text) from error
    from megacompile.state.model_export import describe, export_model, saved_tensors

    checkpoint, folder = _checkpoint(path_of(options.source)), path_of(options.folder)
    state = check_checkpoint(checkpoint)
    adapters = (checkpoint / "adapter_config.json").is_file()
    if adapters != (options.merge is not None):
        raise MegacompileError(
            f"{checkpoint} holds adapters: --merge adds them to the model that they were trained on."
            if adapters
            else f"{checkpoint} holds no adapters to merge: leave out --merge."
        )
    if adapters:
        config, merged = _merged(checkpoint, options.merge)
        model, values = describe(merged), iter(saved_tensors(merged).items())
    else:
        config, model, values = _whole(checkpoint, state)
    dtype = _dtype(options.dtype, config)
    export_model(folder, replace(model, source=checkpoint), values, dtype)
    print(f"{checkpoint} in {str(dtype).removeprefix('torch.')}: {folder}")
    return 0


def _whole(checkpoint: Path, state: Path) -> tuple[Any, Any, Any]:
    """Return the config of a checkpoint's model, its description, and its values from the masters."""
    from transformers import AutoConfig

    from megacompile.api.pretrained import build_empty
    from megacompile.state.model_export import describe
    from megacompile.state.saved_values import saved_values

    if not (checkpoint / "config.json").is_file():
        raise MegacompileError(f"{checkpoint} has no config.json, so what model it is of is not known.")
    model = describe(build_empty(checkpoint))
    config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    return config, model, saved_values(state, model)


def _merged(checkpoint: Path, name: str) -> tuple[Any, Any]:
    """Return the config of the model that adapters were trained on, and the model with them, in FP32."""
    import torch
    import transformers

    try:
        from peft import PeftModel
    except ImportError as error:
        raise MegacompileError(f"--merge needs PEFT ({error}): pip install peft.") from error
    path = checkpoint / "adapter_config.json"
    fields = from_plain(dict[str, Any], parse_json(read_text(path), str(path)), str(path))
    known = fields.get("base_model_name_or_path")
    name = name or known or ""
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        kind = getattr(transformers, config.architectures[0])
        base = kind.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise MegacompileError(
            f"The model that the adapters of {checkpoint} were trained on cannot be loaded from {name!r}: "
            "give its folder or hub id, as --merge MODEL."
        ) from error
    return config, PeftModel.from_pretrained(base, str(checkpoint)).merge_and_unload().requires_grad_(False)


def _dtype(given: str | None, config: Any) -> Any:
    """The dtype that was asked for, or that of the model as it was given for training."""
    import torch

    return getattr(torch, given) if given else config.dtype or torch.float32


def _checkpoint(source: Path) -> Path:
    """A checkpoint, or the newest whole one of a run's output folder."""
    from megacompile.integrations.trainer_checkpoints import STATE, last_checkpoint

    if not source.is_dir():
        raise MegacompileError(f"{source} is no folder: give a checkpoint, or a run's output_dir.")
    if (source / "checkpoint.json").is_file() and source.name == STATE:
        return source.resolve().parent
    if (source / "trainer_state.json").exists() or (source / STATE).is_dir():
        return source
    found = last_checkpoint(str(source))
    if found is None:
        raise MegacompileError(f"{source} is no checkpoint, and holds none that is whole.")
    return Path(found)
