"""What compiling takes of a tiny Llama's training, beside another tree: each kind of batch, and a short DPO.

    python -m benchmarks.small_models [--layers 2 6 24] [--against PYTHON]
    python -m benchmarks.small_models --dpo [--layers 2 12] [--against PYTHON]

``--against`` names the interpreter of another installed tree, measured right after this one. Each measurement
runs in a process of its own, without a plan that is known from before, and the lesser of two counts: other
work only adds time.
Public names alone are used, as other trees have these too. Kinds of batches are CPU seconds without imports;
a DPO is the seconds of its whole training, beside plain TRL's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

_RUNS = 2
_LETTERS = "abcdefghijklmnopqrstuvwxyz ."


def _model(layers: int, words: int = 256) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def measure_kinds(layers: int) -> dict[str, float]:
    """CPU seconds of the first call for each kind of batch, by the kind, compiling included.

    Rows are padded, as a tokenizer's are.
    """
    import torch

    import megacompile

    def batch(rows: int, tokens: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (rows, tokens))
        shown = torch.ones_like(ids)
        shown[0, -4:] = 0
        return {"input_ids": ids, "attention_mask": shown, "labels": ids.masked_fill(shown == 0, -100)}

    torch.manual_seed(0)
    # imports what compiling needs, and builds the host's Adam
    megacompile.compile(_model(1), "1GB", device="cpu").train_step(batch(2, 8))
    model, found = _model(layers), {}
    start = time.process_time()
    program = megacompile.compile(model, "1GB", device="cpu")
    for name, call, rows, tokens in (
        ("first", program.train_step, 4, 48),
        ("evaluation", program.evaluate, 4, 48),
        ("longer", program.train_step, 4, 96),
        ("shorter", program.train_step, 4, 72),
        ("fewer rows", program.train_step, 3, 96),
    ):
        call(batch(rows, tokens))
        start, begun = time.process_time(), start
        found[name] = start - begun
    return found


def measure_dpo(layers: int, *, plain: bool) -> dict[str, float]:
    """Seconds of a DPO on 49 pairs of one to four sentences, evaluated at every fifth of its 13 updates."""
    import datasets
    import torch
    import trl
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *_LETTERS])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=words, merges=[])),
        pad_token="<pad>", bos_token="<s>", eos_token="</s>",
    )  # fmt: skip
    torch.manual_seed(0)
    draw = random.Random(0)

    def text() -> str:
        return ".".join(
            "".join(draw.choices(_LETTERS, k=draw.randint(5, 40))) for _ in range(draw.randint(1, 4))
        )

    data = datasets.Dataset.from_dict(
        {name: [text() for _ in range(60)] for name in ("prompt", "chosen", "rejected")}
    )
    kind, given = trl.DPOTrainer, {}
    if not plain:
        from megacompile.integrations.trl import DPOTrainer

        kind, given = DPOTrainer, {"hbm_budget": "1GB"}
    with tempfile.TemporaryDirectory() as folder:
        model = _model(layers, len(words))
        model.save_pretrained(folder)  # where plain TRL looks for the reference
        model = type(model).from_pretrained(folder, dtype=torch.float32)
        settings = trl.DPOConfig(
            output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            num_train_epochs=1, logging_steps=5, eval_strategy="steps", eval_steps=5, save_strategy="no",
            max_length=256, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        start = time.perf_counter()
        trainer = kind(
            model=model, args=settings, train_dataset=data.select(range(49)),
            eval_dataset=data.select(range(49, 60)), processing_class=tokenizer, **given,
        )  # fmt: skip
        trainer.train()
        return {"seconds": time.perf_counter() - start}


def _least(python: str, what: str, layers: int) -> dict[str, float]:
    """The lesser of each figure, of two runs of an interpreter far from this tree's folder."""
    runs: list[dict[str, float]] = []
    for _ in range(_RUNS):
        with tempfile.TemporaryDirectory() as elsewhere:
            out = subprocess.run(
                [python, str(Path(__file__).resolve()), "--one", what, "--layers", str(layers)],
                check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=elsewhere,
                env=os.environ | {"XDG_CACHE_HOME": elsewhere, "HF_HUB_DISABLE_TELEMETRY": "1"},
            ).stdout  # fmt: skip
        runs.append(json.loads(out.strip().splitlines()[-1]))
    return {name: min(run[name] for run in runs) for name in runs[0]}


def _kinds(layers: int, trees: dict[str, str]) -> None:
    """Print what each kind of batch takes at first."""
    runs = {name: [*_least(python, "kinds", layers).values()] for name, python in trees.items()}
    print(f"| {layers} layers | first | evaluation | longer | shorter | fewer rows | all |")
    print("|:--|--:|--:|--:|--:|--:|--:|")
    for values in runs.values():
        values.append(sum(values))
    for name, values in runs.items():
        print(f"| {name} | {' | '.join(f'{seconds:.2f} s' for seconds in values)} |", flush=True)
    if len(runs) > 1:
        here, there = runs.values()
        ratios = (mine / theirs for mine, theirs in zip(here, there, strict=True))
        print(f"| ratio | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    print()


def _dpo(sizes: list[int], trees: dict[str, str]) -> None:
    """Print what a short DPO takes."""
    print(f"| layers | {' | '.join(trees)} | plain TRL |")
    print("|--:" * (len(trees) + 2) + "|")
    for layers in sizes:
        found = [_least(python, "dpo", layers)["seconds"] for python in trees.values()]
        found.append(_least(sys.executable, "plain", layers)["seconds"])
        print(f"| {layers} | {' | '.join(f'{seconds:.1f} s' for seconds in found)} |", flush=True)


def main() -> None:
    """Print Markdown tables, of kinds of batches or of a DPO."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--dpo", action="store_true", help="a short DPO, not each kind of batch")
    parser.add_argument("--against", metavar="PYTHON", help="the interpreter of another installed tree")
    parser.add_argument("--one", choices=["kinds", "dpo", "plain"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.layers or ([2, 12] if options.dpo else [2, 6, 24])
    if options.one:
        warnings.simplefilter("ignore")
        kinds = options.one == "kinds"
        found = measure_kinds(sizes[0]) if kinds else measure_dpo(sizes[0], plain=options.one == "plain")
        print(json.dumps(found))
        return
    from benchmarks.report import machine_line  # not from a child, which runs this file alone

    print(f"{machine_line()}\n")
    trees = {"here": sys.executable} | ({"there": options.against} if options.against else {})
    if options.dpo:
        _dpo(sizes, trees)
    else:
        for layers in sizes:
            _kinds(layers, trees)


if __name__ == "__main__":
    main()
