"""Progress of a training that a trainer runs: its log, the report at its end, and samples."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from megacompile.json_codec import from_plain, parse_json
from megacompile.own_files import replace_text, replacing_file
from megacompile.text_files import read_text
from megacompile.units import format_bytes

# ------------------------------------------------------------------------------------------------------------
# What a trainer shows while it trains, beside what it logs: speed, memory, and that a program is compiled.
#
# Logged entries stay those of transformers; what is told here goes to its progress bar, or after its lines.


_OFTEN = 0.5  # seconds; no eye reads faster, and the figures take a part of a millisecond
_SELDOM = 60  # seconds: into a file each drawing of a bar is a line that stays
_LOG = logging.getLogger("megacompile.compiler")


def _is_terminal(bar: Any) -> bool:
    return bool(bar.fp.isatty())


@dataclass
class _Kept:
    """Stands where a bar is written to."""

    write: Callable[[str], None]


class Bar(ProgressCallback):
    """transformers' progress bar. What is logged faster than an eye reads is written together: each writing
    draws the bar anew, which takes most of the time of a log. Into a file the bar is drawn seldom."""

    training_bar: Any
    prediction_bar: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lines: list[str] = []
        self._written = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        if self.training_bar is not None:
            self.training_bar.mininterval = _OFTEN if _is_terminal(self.training_bar) else _SELDOM

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        super().on_prediction_step(*args, **kwargs)
        if self.prediction_bar is not None and not _is_terminal(self.prediction_bar):
            self.prediction_bar.mininterval = _SELDOM

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        bar = self.training_bar
        if bar is not None:
            self.training_bar = _Kept(self._lines.append)
        try:
            super().on_log(*args, **kwargs)
        finally:
            self.training_bar = bar
        if time.perf_counter() - self._written >= _OFTEN:
            self.flush()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.flush()
        super().on_train_end(*args, **kwargs)

    def flush(self) -> None:
        """Write what was logged so far."""
        if self._lines and self.training_bar is not None:
            text = "\n".join(self._lines)
            self.training_bar.write(text) if _is_terminal(self.training_bar) else print(text)
        self._lines.clear()
        self._written = time.perf_counter()


class TrainingProgress(logging.Handler):
    """Tells of one trainer's training; as a handler, of programs that are compiled meanwhile."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(logging.INFO)
        self._trainer = trainer
        self._tokens, self._since = 0, 0.0  # of updates since the last log, and when these began
        self._text, self._shown = "", 0.0
        self._compiled = False  # for this update
        self._told = False  # and the bar still says so

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Hear of compilation."""
        level, propagate = _LOG.level, _LOG.propagate
        _LOG.propagate = propagate and _LOG.isEnabledFor(logging.INFO)  # else only this one asked for it
        _LOG.addHandler(self)
        _LOG.setLevel(logging.INFO)
        try:
            yield
        finally:
            self._flush()
            _LOG.removeHandler(self)
            _LOG.setLevel(level)
            _LOG.propagate = propagate

    def emit(self, record: logging.LogRecord) -> None:
        """A program is about to be compiled, or was."""
        self._compiled = self._told = True
        self._tell(record.getMessage())

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """An update, which does not count for the speed where a program is compiled for it."""
        self._compiled = False
        yield
        if self._compiled:
            self._tokens, self._since = 0, 0.0
        if self._told and (bar := self._bar()) is not None:
            bar.set_postfix_str(self._text)
        self._told = False

    def count(self, inputs: Mapping[str, Any]) -> None:
        """Count the tokens of a micro-batch that is about to be trained on; padding is none."""
        self._since = self._since or time.perf_counter()
        mask, ids = (inputs.get(name) for name in ("attention_mask", "input_ids"))
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self._tokens += int(mask.sum())
        elif isinstance(ids, Tensor):
            self._tokens += ids.numel()

    def show(self, logs: Mapping[str, Any]) -> None:
        """The loss that was logged, and what was reached since the last one that was shown."""
        now = time.perf_counter()
        if "loss" in logs and self._trainer.program is not None and now - self._shown >= _OFTEN:
            figures = ", ".join(self._figures(now))
            self._text = f"loss {logs['loss']:.4g}, {figures}"
            self._tell(self._text, figures)
            self._shown, self._tokens, self._since = now, 0, 0.0
        elif "loss" not in logs:  # an evaluation, whose time is none of training
            self._tokens, self._since = 0, 0.0

    def _figures(self, now: float) -> list[str]:
        found, memory = [], self._trainer.program.memory
        if self._tokens:
            speed = self._tokens * self._trainer.args.world_size / (now - self._since)  # ranks take alike
            found.append(f"{speed:,.0f} tokens/s")
            if self._trainer.flops_per_token:
                found.append(f"{speed * self._trainer.flops_per_token / 1e12:.3g} TFLOP/s")
        found.append(f"device {format_bytes(memory.device_peak_bytes)}")
        return [*found, f"host {format_bytes(sum(memory.host_bytes.values()))}"]

    def write(self, text: str) -> None:
        """A line of its own."""
        self._flush()
        bar = self._bar()
        print(text) if bar is None else bar.write(text)

    def end(self) -> None:
        """Leave the bar as it is, so that an error stands on a line of its own."""
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                callback.training_bar.close()

    def _tell(self, text: str, beside: str | None = None) -> None:
        """Show a text in the bar, or ``beside`` the logged entry as a line of its own where none is seen."""
        if (bar := self._bar()) is not None:
            bar.set_postfix_str(text)
        elif self._trainer.is_world_process_zero() and any(
            isinstance(c, (PrinterCallback, ProgressCallback))
            for c in self._trainer.callback_handler.callbacks
        ):
            self._flush()
            print(beside or text)

    def _flush(self) -> None:
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, Bar):
                callback.flush()

    def _bar(self) -> Any:
        """The bar that somebody sees, on a terminal."""
        callbacks = self._trainer.callback_handler.callbacks
        bar = next((c.training_bar for c in callbacks if isinstance(c, ProgressCallback)), None)
        return bar if bar is not None and _is_terminal(bar) else None


# ------------------------------------------------------------------------------------------------------------
# What is left of a trainer's run: every logged number as CSV, and a report with its picture and schedule.


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
    """``report.md``, with ``loss.png`` and ``schedule.html`` beside it."""
    from megacompile.report.plots import loss_curve

    history, program = trainer.state.log_history, trainer.program
    train = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    held_out = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    with replacing_file(folder / "schedule.html") as written:
        program.largest_schedule.to_html(written)
    lines = [f"# {type(trainer.model).__name__}, {trainer.state.global_step} steps", ""]
    if train:
        with replacing_file(folder / "loss.png") as written:
            loss_curve(train, held_out, written)
        lines += ["![Loss during training](loss.png)", ""]
    sizes = [parameter.numel() for parameter in trainer.model.parameters()]
    trained = [p.numel() for p in trainer.model.parameters() if p.requires_grad]
    rows = {
        "parameters": f"{sum(sizes):,}, of which {sum(trained):,} are trained",
        "loss": f"{train[0][1]:.4f} at step {train[0][0]}, {train[-1][1]:.4f} at step {train[-1][0]}"
        if train
        else "",
        "loss of held-out data": f"{held_out[-1][1]:.4f}" if held_out else "",
        **_speed(trainer.state, logbook.began),
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
    samples = _read_lines(path)
    last = [sample for sample in samples if sample["step"] == samples[-1]["step"]]
    quoted = [f"**{sample['prompt']}**\n\n```\n{sample['answer']}\n```\n" for sample in last]
    return [f"Answers after step {last[0]['step']}:", "", *quoted]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines that :class:`Samples` wrote; :class:`MegacompileError` where one is damaged."""
    lines = []
    texts = read_text(path).split("\n")  # an answer may hold what ``splitlines`` takes for an end of a line
    for number, text in enumerate(filter(None, texts), 1):
        where = f"{path}, line {number},"
        line = from_plain(dict[str, Any], parse_json(text, where), where)
        for name, kind in (("step", int), ("prompt", str), ("answer", str)):
            from_plain(kind, line.get(name), f"{where} {name}")
        lines.append(line)
    return lines


def _reached(state: Any) -> tuple[int, float, int]:
    """Steps, FLOPs and tokens so far."""
    return state.global_step, state.total_flos, state.num_input_tokens_seen


def _speed(state: Any, began: tuple[int, float, int]) -> dict[str, str]:
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


# ------------------------------------------------------------------------------------------------------------
# Answers to a few prompts at each evaluation of a trainer: shown, and kept in a file of JSON lines.


class Samples(TrainerCallback):
    """Answers ``prompts`` by the most likely tokens, ``length`` at most, so no random number is drawn.

    Where the tokenizer has a chat template, a prompt is what the user says. ``path`` gets one line for each
    answer: step, prompt, answer; of a training that goes on from a checkpoint those up to there stay in it.
    """

    def __init__(self, trainer: Any, prompts: Sequence[str], length: int, path: Path) -> None:
        self._trainer, self._prompts, self.tokens, self._path = trainer, list(prompts), length, path
        self._lines: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kept = _read_lines(self._path) if state.global_step and self._path.exists() else []
        self._lines = [line for line in kept if line["step"] <= state.global_step]

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        answers = self._answers()  # of all ranks, which compute each token together
        if not state.is_world_process_zero:
            return
        lines = [
            {"step": state.global_step, "prompt": prompt, "answer": answer}
            for prompt, answer in zip(self._prompts, answers, strict=True)
        ]
        self._lines = [line for line in self._lines if line["step"] != state.global_step] + lines
        replace_text(self._path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self._lines))
        for line in lines:
            self._trainer._progress.write(f"{line['prompt']} → {line['answer']}")

    def forward(self) -> None:
        """Ask for the last token that answers may get."""
        asked = self._asked()
        missing = (self.tokens - 1, 0)
        ids = nn.functional.pad(asked["input_ids"], missing, value=self._tokenizer.pad_token_id)
        mask = nn.functional.pad(asked["attention_mask"], missing)
        self._trainer.program.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)

    def _answers(self) -> list[str]:
        tokenizer, asked = self._tokenizer, self._asked()
        options = {"max_new_tokens": self.tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
        tokens = self._trainer.program.generate(**asked, **options)
        answers: list[str] = tokenizer.batch_decode(tokens[:, asked["input_ids"].shape[1] :], True)
        return answers

    @property
    def _tokenizer(self) -> Any:
        """The tokenizer, of a processor for images too."""
        processing = self._trainer.processing_class
        return getattr(processing, "tokenizer", processing)

    def _asked(self) -> dict[str, Tensor]:
        """The prompts as rows of tokens, padded on the left."""
        template, tokenizer = self._trainer.processing_class, self._tokenizer
        padded = {"padding": True, "padding_side": "left"}
        if template.chat_template is not None:
            said = [
                prompt if template is tokenizer else [{"type": "text", "text": prompt}]
                for prompt in self._prompts
            ]
            chats = [[{"role": "user", "content": content}] for content in said]
            texts = template.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
            given = tokenizer(texts, add_special_tokens=False, return_tensors="pt", **padded)
        else:
            given = tokenizer(self._prompts, return_tensors="pt", **padded)
        return {name: given[name] for name in ("input_ids", "attention_mask")}
