"""What compiling takes of a tiny Llama's training, beside another tree: batches, starts, a short DPO.

    python -m benchmarks.small_models [--layers 2 6 24] [--against PYTHON]
    python -m benchmarks.small_models --starts [--layers 2 24] [--against PYTHON]
    python -m benchmarks.small_models --dpo [--layers 2 12] [--against PYTHON]

``--against`` names the interpreter of another installed tree, measured right after this one. Each measurement
runs in a process of its own, without a plan that is known from before, and the lesser of two counts: other
work only adds time.
Public names alone are used, as other trees have these too. Kinds of batches are CPU seconds without imports;
a DPO is the seconds of its whole training, beside plain TRL's.

A start is ``compile`` and one step in a process that has transformers' model, with the CPU time of compilers
that it calls: with empty caches, then with those that the first one left. Beside it stand a step of a
further length, and ``megacompile plan`` of a model of 8B with its imports. These are medians of three, in
trees that take turns; modules have their bytecode, as pip leaves it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

_RUNS = 2
_PLAN = "--model llama-3.1-8b --machine rtx-4090 --host-budget 128GB"
_IMPORTS = "from transformers import LlamaForCausalLM; import megacompile.cli.plan_command"
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


def measure_start(layers: int) -> dict[str, float]:
    """CPU seconds of ``compile`` with a first step, and of a step of another length."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, found = _model(layers), {}

    def step(name: str, tokens: int) -> None:
        ids = torch.randint(0, 256, (2, tokens))
        float(program.train_step({"input_ids": ids, "labels": ids}).loss)
        found[name] = sum(os.times()[:4]) - begun

    begun = sum(os.times()[:4])
    import megacompile

    program = megacompile.compile(model, "1GB", device="cpu")
    step("start", 64)
    begun = sum(os.times()[:4])
    step("further length", 96)
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


def _child(env: dict[str, str], cache: str, *command: str) -> tuple[str, float]:
    """What a command prints, with its caches in a folder, and the CPU seconds that it takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=cache,
        env=env | {"XDG_CACHE_HOME": cache},
    ).stdout  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return out, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _starts_of(python: str, sizes: list[int], env: dict[str, str]) -> dict[str, float]:
    """CPU seconds of one tree, by what takes them."""
    found = {}
    for layers in sizes:
        one = [python, str(Path(__file__).resolve()), "--one", "start", "--layers", str(layers)]
        with tempfile.TemporaryDirectory() as cache:
            first, second = (json.loads(_child(env, cache, *one)[0].splitlines()[-1]) for _ in range(2))
        found[f"{layers} layers, first start"] = first["start"]
        found[f"{layers} layers, second start"] = second["start"]
        found[f"{layers} layers, further length"] = first["further length"]
    with tempfile.TemporaryDirectory() as cache:
        found["imports of plan"] = _child(env, cache, python, "-c", _IMPORTS)[1]
        found["plan of 8B"] = _child(env, cache, python, "-m", "megacompile", "plan", *_PLAN.split())[1]
    return found


def _starts(sizes: list[int], trees: dict[str, str]) -> None:
    """Print what starts take, and ``plan``."""
    with tempfile.TemporaryDirectory() as bytecode:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        env |= {"PYTHONPYCACHEPREFIX": bytecode, "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
        rounds = [[_starts_of(python, sizes, env) for python in trees.values()] for _ in range(4)]
    print(f"| CPU seconds | {' | '.join(trees)} |{' ratio |' if len(trees) > 1 else ''}")
    print("|:--" + "|--:" * (len(trees) + (len(trees) > 1)) + "|")
    for what in rounds[0][0]:  # which compiled the bytecode, and does not count
        medians = [statistics.median(found[what] for found in tree) for tree in zip(*rounds[1:], strict=True)]
        ratio = f" {medians[0] / medians[1]:.2f} |" if len(medians) > 1 else ""
        print(f"| {what} | {' | '.join(f'{seconds:.2f} s' for seconds in medians)} |{ratio}")


def _dpo(sizes: list[int], trees: dict[str, str]) -> None:
    """Print what a short DPO takes."""
    print(f"| layers | {' | '.join(trees)} | plain TRL |")
    print("|--:" * (len(trees) + 2) + "|")
    for layers in sizes:
        found = [_least(python, "dpo", layers)["seconds"] for python in trees.values()]
        found.append(_least(sys.executable, "plain", layers)["seconds"])
        print(f"| {layers} | {' | '.join(f'{seconds:.1f} s' for seconds in found)} |", flush=True)


def main() -> None:
    """Print Markdown tables, of kinds of batches, of starts or of a DPO."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+")
    parser.add_argument("--dpo", action="store_true", help="a short DPO, not each kind of batch")
    parser.add_argument("--starts", action="store_true", help="whole starts, and plan")
    parser.add_argument("--against", metavar="PYTHON", help="the interpreter of another installed tree")
    parser.add_argument("--one", choices=["kinds", "start", "dpo", "plain"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.layers or ([2, 12] if options.dpo else [2, 24] if options.starts else [2, 6, 24])
    if options.one:
        warnings.simplefilter("ignore")
        if options.one in ("kinds", "start"):
            found = (measure_kinds if options.one == "kinds" else measure_start)(sizes[0])
        else:
            found = measure_dpo(sizes[0], plain=options.one == "plain")
        print(json.dumps(found))
        return
    from benchmarks.report import machine_line  # not from a child, which runs this file alone

    print(f"{machine_line()}\n")
    trees = {"here": sys.executable} | ({"there": options.against} if options.against else {})
    if options.dpo:
        _dpo(sizes, trees)
    elif options.starts:
        _starts(sizes, trees)
    else:
        for layers in sizes:
            _kinds(layers, trees)


if __name__ == "__main__":
    main()
