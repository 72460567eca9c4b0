"""``megacompile export``: from a trainer's checkpoint to a folder that plain transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megacompile.errors import MegacompileError


def run_export(options: argparse.Namespace) -> int:
    """Write the masters of a checkpoint, in the dtype that is asked for, with its config and tokenizer."""
    try:
        import transformers

        from megacompile.integrations.checkpoints import check_checkpoint
    except ImportError as error:
        text = f"export needs transformers ({error}): pip install 'megacompile[transformers]'."
        raise MegacompileError(text) from error
    from megacompile.pretrained import build_empty
    from megacompile.storage.export import describe, export_model
    from megacompile.storage.saved_values import saved_values

    checkpoint, folder = _checkpoint(Path(options.source).expanduser()), Path(options.folder).expanduser()
    state = check_checkpoint(checkpoint)
    if (checkpoint / "adapter_config.json").is_file():
        raise MegacompileError(
            f"{checkpoint} holds adapters, as PEFT loads them: PeftModel.from_pretrained(model, "
            f"{str(checkpoint)!r}).merge_and_unload().save_pretrained({str(folder)!r})."
        )
    if not (checkpoint / "config.json").is_file():
        raise MegacompileError(f"{checkpoint} has no config.json, so what model it is of is not known.")
    model = describe(build_empty(checkpoint))
    dtype = _dtype(options.dtype, transformers.AutoConfig.from_pretrained(checkpoint, local_files_only=True))
    export_model(folder, model, saved_values(state, model), dtype)
    if (checkpoint / "tokenizer_config.json").is_file():
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
        tokenizer.save_pretrained(folder)
    print(f"{checkpoint} in {str(dtype).removeprefix('torch.')}: {folder}")
    return 0


def _dtype(given: str | None, config: Any) -> Any:
    """The dtype that was asked for, or that of the model as it was given for training."""
    import torch

    return getattr(torch, given) if given else config.dtype or torch.float32


def _checkpoint(source: Path) -> Path:
    """A checkpoint, or the newest whole one of a run's output folder."""
    from megacompile.integrations.checkpoints import STATE, last_checkpoint

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
