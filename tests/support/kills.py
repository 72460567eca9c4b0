"""Kill a training at random moments, from a process that imports once and forks each training.

A training that has begun tells of each file operation and each update by a byte. The process that watches
kills it after a random number of them, while it goes on; nothing sleeps.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from megacompile.api.generate_with_cache import Rollout
from megacompile.integrations.transformers import Trainer
from tests.e2e.test_trainer import logs, trainer

OPERATIONS = {"open", "write", "close", "rename", "replace", "unlink", "rmdir", "mkdir", "fsync"} | {
    "pwrite",
    "ftruncate",  # of shards
    "write_record",  # of torch.save
}


def watch(see: Callable[[str], Any] | None) -> None:
    """Call ``see`` with the name of each file operation of this thread, before it and after it, and of those
    that it starts; None ends it."""

    def profile(frame: Any, event: str, function: Any) -> None:
        assert see is not None
        if event in ("c_call", "c_return") and function.__name__ in OPERATIONS:
            see(function.__name__)

    sys.setprofile(profile if see is not None else None)
    threading.setprofile(profile if see is not None else None)


class Tells(TrainerCallback):
    """A byte for each update, and from the first one on for each file operation."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        os.write(self.pipe, b".")
        watch(lambda name: os.write(self.pipe, b"."))


def small() -> nn.Module:
    """One block, with dropout."""
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=2))


def train(folder: Path, pipe: int) -> None:
    """Train on from the newest whole checkpoint to the end; ``result.json`` has the logs and the weights."""
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "eval_strategy": "no"}
    one = trainer(Trainer, folder, make=small, callbacks=[Tells(pipe)], **settings)
    end(one, folder, logs)


def several(folder: Path, pipe: int) -> None:
    """The same by Muon, an optimizer that keeps rows and columns, one that steps over chunks, and AdamW."""
    model = small()
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and ".h." in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or ".h." not in n]
    kinds: list[tuple[Any, list[nn.Parameter]]] = [
        (torch.optim.Muon, matrices[::2]),
        (torch.optim.Adafactor, matrices[1::2]),
        (torch.optim.RMSprop, others[::2]),
        (torch.optim.AdamW, others[1::2]),
    ]
    given = {"optimizers": ([kind(over, lr=1e-3) for kind, over in kinds], None)}
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    settings |= {"eval_strategy": "no", "max_steps": 4, "of_trainer": given}
    one = trainer(Trainer, folder, make=lambda: model, callbacks=[Tells(pipe)], **settings)
    end(one, folder, logs)


def learn(folder: Path, pipe: int) -> None:
    """The same by completions of its own, to one prompt: a byte for each forward of a rollout too."""
    from tests.e2e.test_policy_trainers import logs, ours, policy

    run = Rollout.run
    Rollout.run = lambda *arguments: (os.write(pipe, b"."), run(*arguments))[1]  # type: ignore[method-assign, assignment]
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 3}
    one = policy(ours.GRPOTrainer, folder, samples=True, **settings)
    one.train_dataset = one.train_dataset.select([0] * 8)
    one.add_callback(Tells(pipe))
    end(one, folder, logs)


def end(one: Any, folder: Path, logs: Callable[[Any], Any]) -> None:
    """Train on to the end, and write its result."""
    one.train(resume_from_checkpoint=True)
    watch(None)
    digest = hashlib.sha256()
    for value in one.program.state_dict().values():
        digest.update(value.numpy().tobytes())
    result = {"weights": digest.hexdigest(), "logs": logs(one)[:-1]}  # the last is of the steps made here
    (folder / "writing").write_text(json.dumps(result, sort_keys=True))
    (folder / "writing").rename(folder / "result.json")


def killed(train: Callable[[Path, int], None], folder: Path, moments: int | None) -> int:
    """Fork a training and kill it after so many bytes; how many came."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            train(folder, write)
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    os.close(write)
    seen = 0
    while (moments is None or seen < moments) and (told := os.read(read, 1)):
        seen += len(told)
    if moments is not None:
        os.kill(child, signal.SIGKILL)
    os.close(read)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return seen


def main(train: Callable[[Path, int], None], folder: Path, kills: int, seed: int) -> None:
    """Print how often a training was killed, and how many results are that of the undisturbed, and not."""
    chance = random.Random(seed)
    total = killed(train, folder / "whole", None)
    expected = (folder / "whole" / "result.json").read_text()
    done, equal, other = 0, 0, 0
    while done < kills or not equal + other:
        run = folder / str(equal + other)
        while not (run / "result.json").exists():
            killed(train, run, chance.randrange(1, total // 2) if done < kills else None)
            done += not (run / "result.json").exists()
        same = (run / "result.json").read_text() == expected
        equal, other = equal + same, other + (not same)
    print(done, equal, other)


if __name__ == "__main__":
    trains = {"train": train, "several": several, "learn": learn}[sys.argv[4]]
    main(trains, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
