"""Write a report of a trainer's run, with its picture and schedule, and every logged number as CSV."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from megacompile.integrations.samples import read_samples
from megacompile.own_files import replace_text, replacing_file
from megacompile.units import format_bytes


class Logbook(TrainerCallback):
    """Writes what a trainer logged to a CSV file, a row for each entry: at checkpoints and at the end."""

    reads_checkpoints = False  # so the trainer need not wait for them

    def __init__(self, path: Path) -> None:
        self._path = path
        self.began = (0, 0.0, 0)  # at which step, FLOPs and tokens this training started or went on

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = _reached(state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        names = dict.fromkeys(["step", "epoch", *(name for entry in state.log_history for name in entry)])
        with replacing_file(self._path) as written, written.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(names))
            writer.writeheader()
            writer.writerows(state.log_history)

    on_train_end = on_save


def write_report(trainer: Any, logbook: Logbook, folder: Path) -> None:
    """``report.md``, with ``loss.png``, if matplotlib is installed, and ``schedule.html`` beside it."""
    from megacompile.report.plots import NO_PICTURE, can_draw, loss_curve

    history, program = trainer.state.log_history, trainer.program
    train = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    held_out = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    with replacing_file(folder / "schedule.html") as written:
        program.largest_schedule.to_html(written)
    lines = [f"# {type(trainer.model).__name__}, {trainer.state.global_step} steps", ""]
    if train and can_draw():
        with replacing_file(folder / "loss.png") as written:
            loss_curve(train, held_out, written)
        lines += ["![Loss during training](loss.png)", ""]
    elif train:
        lines += [NO_PICTURE, ""]
    sizes = [parameter.numel() for parameter in trainer.model.parameters()]
    trained = [p.numel() for p in trainer.model.parameters() if p.requires_grad]
    rows = {
        "parameters": f"{sum(sizes):,}, of which {sum(trained):,} are trained",
        "loss": f"{train[0][1]:.4f} at step {train[0][0]}, {train[-1][1]:.4f} at step {train[-1][0]}"
        if train
        else "",
        "loss of held-out data": f"{held_out[-1][1]:.4f}" if held_out else "",
        **_speed_of_training(trainer.state, logbook.began),
        "device memory": f"{format_bytes(program.memory.device_peak_bytes)} at most, "
        f"of {format_bytes(program.memory.budget_bytes)}",
        "host memory": ", ".join(f"{k} {format_bytes(v)}" for k, v in program.memory.host_bytes.items() if v),
    }
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items() if value), ""]
    lines += _last_samples(folder / "samples.jsonl")
    lines += ["The model is in `model`, every logged number in `log.csv`, the keys in `config.yaml`.", ""]
    lines += ["[The schedule of a step](schedule.html), with its timeline, memory and code.", ""]
    replace_text(folder / "report.md", "\n".join(lines))


def _last_samples(path: Path) -> list[str]:
    """Yield what the last evaluation's answers were, if there were prompts."""
    if not path.is_file():
        return []
    samples = read_samples(path)
    last = [sample for sample in samples if sample["step"] == samples[-1]["step"]]
    quoted = [f"**{sample['prompt']}**\n\n```\n{sample['answer']}\n```\n" for sample in last]
    return [f"Answers after step {last[0]['step']}:", "", *quoted]


def _reached(state: Any) -> tuple[int, float, int]:
    """Steps, FLOPs and tokens so far."""
    return state.global_step, state.total_flos, state.num_input_tokens_seen


def _speed_of_training(state: Any, began: tuple[int, float, int]) -> dict[str, str]:
    """Say how long the training took that ended, since it ``began``, and what it did per second."""
    ended = next((entry for entry in reversed(state.log_history) if "train_runtime" in entry), None)
    if ended is None or not ended["train_runtime"]:
        return {}
    seconds = ended["train_runtime"]
    steps, flos, tokens = (now - then for now, then in zip(_reached(state), began, strict=True))
    since = f", from step {began[0]} on" if began[0] else ""
    found = {"time": f"{seconds:,.0f} s for {steps:,} steps{since}, with compilation and evaluation"}
    if tokens:
        found["tokens per second"] = f"{tokens / seconds:,.0f}, over all of that time"
    if flos:
        found["model TFLOP/s"] = f"{flos / seconds / 1e12:.3g}, over all of that time"
    return found
