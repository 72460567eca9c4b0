"""Fine-tune every weight of a language model on text files, in the device memory that you name.

    python examples/finetune.py --model FOLDER --text notes/*.txt --budget 20GB
    python examples/finetune.py --tiny                # makes a small model first; needs nothing

FOLDER is a transformers folder: config.json, safetensors, and a tokenizer (without one, bytes are tokens).
Run the same command again after an interruption and training goes on from the last checkpoint, bit for bit.
At the end OUT/model holds the trained model, which plain transformers loads.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import megacompile
from megacompile.units import format_bytes


@dataclass(frozen=True)
class Settings:
    """What is trained, on what, and for how long; one option of the command line each."""

    model: Path | None
    text: tuple[Path, ...] = ()
    out: Path = Path("runs/finetune")
    budget: str = "auto"
    optimizer_state: str = "fp32"
    offload_dir: Path | None = None
    steps: int = 200
    batch: int = 4
    length: int = 256
    micro_batches: int = 1
    learning_rate: float = 1e-5
    save_every: int = 50


def tiny_model(folder: Path) -> Path:
    """A byte-level Llama of 0.6 M parameters with random weights, written as a transformers folder."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tokenizer_of(model: Path) -> Any:
    """The tokenizer in a model's folder; None where there is none."""
    if not (model / "tokenizer_config.json").exists():
        return None
    return transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)


def tokens_of(files: Sequence[Path], tokenizer: Any) -> Tensor:
    """All files as one row of token ids; without a tokenizer, bytes are tokens."""
    text = "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    if tokenizer is not None:
        return torch.tensor(tokenizer(text)["input_ids"])
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8).long()


def batches_of(tokens: Tensor, step: int, settings: Settings) -> list[dict[str, Tensor]]:
    """The micro-batches of a step: windows at places that depend on the step's number alone."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(
        0, len(tokens) - settings.length + 1, (settings.micro_batches, settings.batch), generator=generator
    )
    rows = [[tokens[s : s + settings.length] for s in micro] for micro in starts.tolist()]
    return [{"input_ids": torch.stack(r), "labels": torch.stack(r)} for r in rows]


def warm_cosine(settings: Settings) -> Callable[[int], float]:
    """Factor of the learning rate: 5 % of the steps up, then a cosine down to a tenth."""
    warm = max(1, settings.steps // 20)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, settings.steps - warm))

    return factor


def save(program: megacompile.Program, scheduler: LambdaLR, out: Path, step: int) -> None:
    """Program and scheduler in a folder of their own; ``latest`` names it once both are whole."""
    folder = out / f"step-{step:06d}"
    program.save(folder / "program")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    fresh = out / "latest.new"
    fresh.write_text(folder.name)
    fresh.replace(out / "latest")
    for other in out.glob("step-*"):
        if other != folder:
            shutil.rmtree(other)


def resume(program: megacompile.Program, scheduler: LambdaLR, out: Path) -> int:
    """Go on from the last checkpoint; the number of steps that were taken."""
    if not (out / "latest").exists():
        return 0
    folder = out / (out / "latest").read_text()
    program.load(folder / "program")
    scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))
    return scheduler.last_epoch


def main(settings: Settings) -> None:
    """Train, or go on training, and export."""
    transformers.utils.logging.set_verbosity_error()
    folder = settings.model or tiny_model(settings.out / "tiny")
    files = settings.text or tuple(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    tokenizer = tokenizer_of(folder)
    tokens = tokens_of(files, tokenizer)
    if len(tokens) < settings.length:
        sys.exit(f"finetune: the text has {len(tokens)} tokens, fewer than one window of {settings.length}.")
    program = megacompile.from_pretrained(
        folder,
        settings.budget,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=settings.learning_rate),
        max_grad_norm=1.0,
        optimizer_state=settings.optimizer_state,
        offload_dir=settings.offload_dir,
        example_batch=batches_of(tokens, 0, settings),
    )
    scheduler = LambdaLR(program.optimizer, warm_cosine(settings))
    done = resume(program, scheduler, settings.out)
    bar = tqdm(range(done, settings.steps), initial=done, total=settings.steps, desc="training", ncols=90)
    for step in bar:
        out = program.train_step(batches_of(tokens, step, settings))
        scheduler.step()
        peak = format_bytes(program.memory.device_peak_bytes)
        bar.set_postfix_str(f"loss {float(out.loss):.3f}, device {peak}")
        if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
            save(program, scheduler, settings.out, step + 1)
    program.export(settings.out / "model")
    if tokenizer is not None:
        tokenizer.save_pretrained(settings.out / "model")
    print(f"{settings.out / 'model'}: the trained model, for transformers\n{program.memory}")
    program.close()


def read_arguments(arguments: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, help="a transformers folder")
    which.add_argument("--tiny", action="store_true", help="make a small model and train that")
    parser.add_argument("--text", type=Path, nargs="+", default=(), help="text files (Python's own sources)")
    parser.add_argument("--budget", default=Settings.budget, help="device memory, as 20GB (%(default)s)")
    parser.add_argument("--optimizer-state", choices=("fp32", "int8", "int4"), default="fp32")
    parser.add_argument("--offload-dir", type=Path, help="a folder on an NVMe drive, for state beyond RAM")
    parser.add_argument("--out", type=Path, default=Settings.out, help="output folder (%(default)s)")
    for name in ("steps", "batch", "length", "micro_batches", "save_every"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Settings, name))
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    read = vars(parser.parse_args(arguments))
    read.pop("tiny")
    return Settings(**read | {"text": tuple(read["text"])})


if __name__ == "__main__":
    try:
        main(read_arguments())
    except megacompile.MegacompileError as error:
        sys.exit(f"finetune: {error}")
