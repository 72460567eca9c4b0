"""Show how a training goes, beside what a trainer logs: speed, memory, and that a program is compiled.

Logged entries stay those of transformers; what is told here goes to its progress bar, or after its lines.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PrinterCallback, ProgressCallback

from megacompile.units import format_bytes

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
            if self._trainer._steps.flops_per_token:
                found.append(f"{speed * self._trainer._steps.flops_per_token / 1e12:.3g} TFLOP/s")
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
