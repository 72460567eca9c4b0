"""Stop a training on Ctrl-C or SIGTERM: the update is finished, a checkpoint saved, and ``train`` returns."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from megacompile.integrations.trainer_checkpoints import last_checkpoint

_DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}


class Interruption(TrainerCallback):
    """Stops a training behind the update in which a signal came; ``stopped`` is set then, ``stopped_by`` is
    the signal.

    At the end of an epoch it stops behind what is due there, so that a resumed run misses none of it.
    """

    def __init__(self) -> None:
        self._trainer: Any = None
        self.stopped = False
        self._signal: signal.Signals | None = None

    @property
    def stopped_by(self) -> signal.Signals | None:
        """The signal that stopped the training, if any did."""
        return self._signal if self.stopped else None

    @contextlib.contextmanager
    def handled(self, trainer: Any) -> Iterator[None]:
        """Take the signals for which the script has no handler of its own; only the main thread can."""
        self._trainer, self._signal, self.stopped = trainer, None, False
        main = threading.current_thread() is threading.main_thread()
        taken = [n for n, default in _DEFAULTS.items() if main and signal.getsignal(n) == default]
        process = os.getpid()
        saving = "" if trainer.args.save_strategy == SaveStrategy.NO else ", then saving a checkpoint"
        text = f"\nFinishing the update{saving}; Ctrl-C again stops now.\n".encode()

        def note(number: int, frame: object) -> None:
            if os.getpid() != process:
                return  # a worker of the data loader, a fork, whose batches the update may still need
            if self._signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._signal = signal.Signals(number)
            os.write(2, text)  # print may be under way

        for number in taken:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, _DEFAULTS[number])
        if self.stopped and trainer.is_world_process_zero():
            print(self._told(trainer.args, trainer.state), file=sys.stderr)

    def _told(self, args: Any, state: Any) -> str:
        assert self._signal is not None
        saved = last_checkpoint(args.output_dir) if args.save_strategy != SaveStrategy.NO else None
        way = (
            f"train(resume_from_checkpoint=True) goes on from {saved}" if saved else "no checkpoint was saved"
        )
        return f"{self._signal.name} stopped the training after update {state.global_step}: {way}."

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.epoch.is_integer():
            self._stop(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stopped:  # in the middle of the epoch: nothing is due yet
            control.should_log = control.should_evaluate = control.should_save = False
        else:
            self._stop(args, state, control)

    def _stop(self, args: Any, state: Any, control: Any) -> None:
        self._hear(state)
        if self._signal is not None and not control.should_training_stop:
            self.stopped = control.should_training_stop = True
            control.should_save = args.save_strategy != SaveStrategy.NO

    def _hear(self, state: Any) -> None:
        """Take a signal that came to any rank: all stop behind the same update."""
        world, own = self._trainer.program.world, int(self._signal or 0)
        if world.size > 1:
            said = world.compare(lambda: {"trained": state.global_step, "signal": own})
            number = own or max(rank["signal"] for rank in said)
            self._signal = signal.Signals(number) if number else None
