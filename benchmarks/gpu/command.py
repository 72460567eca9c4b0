"""``megacompile train`` as it is called from a shell: its speed, and one that is killed and goes on."""

from __future__ import annotations

import csv
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.campaign import environment
from benchmarks.gpu.findings import Recorder
from benchmarks.gpu.work import described, device, missing
from tests.support.text import CHARACTERS, tokenizer

Rows = dict[int, dict[str, str]]  # those of log.csv, by update


def fine_tune(
    to: Recorder, model: str, budget: str, length: int, rows: int, updates: int, kill: int, wait: float
) -> None:
    """Train all weights of a model by the command, on packed rows; kill it, and call it again.

    It saves after ``kill`` - 2 updates and is killed after ``kill``. Those that the second call makes once
    more must have the losses that they had, digit for digit. Each call may take ``wait`` seconds.
    """
    what = f"megacompile train: {model} in {budget}, {rows * length} tokens"
    with to.finding(what, model=model, budget=budget, tokens=rows * length) as finding:
        if why := missing("trl", "datasets", "PIL", "matplotlib"):
            finding["not measured"] = why
            return
        folder = Path(tempfile.mkdtemp())
        try:
            keys = _prepare(folder, model, length, rows * updates) | {
                "hbm_budget": budget, "max_length": length, "per_device_train_batch_size": rows,
                "max_steps": updates, "save_steps": kill - 2,
            }  # fmt: skip
            (folder / "config.yaml").write_text(json.dumps(keys))
            before = _train(folder, wait, kill)
            start = time.perf_counter()
            after = _train(folder, wait)  # its log begins with what the checkpoint knew
            seconds = {n: float(row["train_runtime"]) for n, row in after.items()}
            # what the second call did not make again keeps the time that it had
            again = {n: row for n, row in before.items() if row["train_runtime"] != after[n]["train_runtime"]}
            losses = {n: (row["loss"], after[n]["loss"]) for n, row in again.items()}
            went_on = min(again, default=1)
            tokens = {n: int(row["num_input_tokens_seen"]) for n, row in after.items()}
            speeds = [
                (tokens[n] - tokens[n - 1]) / (seconds[n] - seconds[n - 1])
                for n in range(went_on + 2, updates + 1)  # the first two touch memory
            ]
            finding |= {
                "updates before": max(before), "went on with": went_on, "made again": losses,
                "second call s": time.perf_counter() - start, "tokens/s": statistics.median(speeds),
            }  # fmt: skip
            finding["right"] = went_on > 1 and all(a == b for a, b in losses.values())
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _prepare(folder: Path, model: str, length: int, count: int) -> dict[str, object]:
    """Write a config, a tokenizer of characters, and text for so many rows; the keys of the training."""
    described(model).config.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    line = (CHARACTERS.strip() * (length // 8))[: length // 4 - 1]  # and a mark of its end
    (folder / "text.txt").write_text("\n".join([line] * (5 * count)))
    return {
        "model_name_or_path": str(folder / "model"), "data": str(folder / "text.txt"), "method": "sft",
        "output_dir": str(folder / "out"), "from_scratch": True, "packing": True, "device": device(),
        "learning_rate": 1e-5, "logging_steps": 1, "eval_strategy": "no", "report_to": "none",
        "include_num_input_tokens_seen": True, "disable_tqdm": True, "save_total_limit": 1,
    }  # fmt: skip


def _train(folder: Path, wait: float, kill: int | None = None) -> Rows:
    """Run the command in a folder to its end, or kill it after the update ``kill``; what it had logged."""
    command = [sys.executable, "-m", "megacompile", "train", "config.yaml"]
    until = time.monotonic() + wait
    with subprocess.Popen(command, cwd=folder, env=environment()) as child:
        try:
            while child.poll() is None:
                if kill is not None and max(_logged(folder), default=0) >= kill:
                    return _logged(folder)
                if time.monotonic() > until:
                    raise TimeoutError(f"megacompile train is not over after {wait:.0f} s.")
                time.sleep(0.05)
        finally:
            child.kill()
    if child.returncode or kill is not None:
        raise RuntimeError(f"megacompile train ended with exit code {child.returncode}.")
    return _logged(folder)


def _logged(folder: Path) -> Rows:
    """What log.csv says of updates."""
    path = folder / "out" / "log.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {int(row["step"]): row for row in csv.DictReader(file) if row.get("loss")}
