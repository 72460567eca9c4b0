"""The Trainer's checkpoints are written while it trains on: when a folder counts, and who waits for it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megacompile
from megacompile.distributed.world import World
from tests.e2e.test_interruptions import At, of
from tests.e2e.test_trainer import lora, trainer

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
pytest.importorskip("accelerate", reason="accelerate is missing: pip install accelerate")
saving = pytest.importorskip("megacompile.integrations.saving")
Trainer = pytest.importorskip("megacompile.integrations.transformers").Trainer
last_checkpoint = pytest.importorskip("megacompile.integrations.trainer_checkpoints").last_checkpoint


class Gate:
    """Holds whoever writes weights of a checkpoint, until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def held(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.opened.wait(60)  # rather than hang where a test fails
            return call(*args, **kwargs)

        return called


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(saving, "export_model", made.held(saving.export_model))
    yield made
    made.opened.set()


def name_of_last(folder: Path) -> str:
    return Path(last_checkpoint(str(folder)) or "none").name


def every_two(folder: Path, steps: int, **given: Any) -> Any:
    """Saves after each second update; all updates are by one program, as a new one waits for the writer."""
    settings = {"gradient_accumulation_steps": 1, "lr_scheduler_type": "constant", "warmup_steps": 0}
    return of(folder, save_steps=2, max_steps=steps, **settings, **given)


def test_training_goes_on_and_nothing_counts_before_it_is_whole(gate: Gate, tmp_path: Path) -> None:
    """The one before stays meanwhile, though one is the most that are kept."""
    seen: list[str] = []

    def look() -> None:
        seen.append(name_of_last(tmp_path))
        if len(seen) == 3:
            gate.opened.set()

    gate.opened.set()
    every_two(tmp_path, 2).train()
    gate.opened.clear()
    looks = [At("on_step_end", step + 1, look) for step in (3, 4, 5)]
    one = every_two(tmp_path, 6, callbacks=looks, save_total_limit=1)
    one.train(resume_from_checkpoint=True)
    assert seen == ["checkpoint-2"] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-6"]
    assert not (tmp_path / "checkpoint-6" / "unfinished").exists()


def test_what_is_written_is_the_state_of_its_step(gate: Gate, tmp_path: Path) -> None:
    """Weights are read from the files of the state, which updates do not reach."""
    opens = At("on_step_end", 4, gate.opened.set)
    for folder, steps in ((tmp_path / "four", 4), (tmp_path / "two", 2)):
        one = every_two(folder, steps, callbacks=[opens])
        one.train()
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "four" / "checkpoint-2").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in one.program.state_dict().items())


class Reads(transformers.TrainerCallback):  # type: ignore[misc]
    """Notes whether the checkpoint is whole when it is told of it."""

    def __init__(self) -> None:
        self.whole: list[bool] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.whole.append((folder / "model.safetensors").exists() and not (folder / "unfinished").exists())


class DoesNotRead(Reads):
    reads_checkpoints = False


def test_a_callback_that_reads_checkpoints_finds_them_whole(tmp_path: Path) -> None:
    callback = Reads()
    of(tmp_path, max_steps=2, callbacks=[callback]).train()
    assert callback.whole == [True] * 2


def test_one_that_does_not_is_not_waited_for(gate: Gate, tmp_path: Path) -> None:
    callback = DoesNotRead()
    of(tmp_path, max_steps=1, callbacks=[callback, At("on_epoch_end", 2, gate.opened.set)]).train()
    assert callback.whole == [False]


def test_a_failure_of_the_thread_that_is_not_the_disks_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(saving, "export_model", broken)
    with pytest.raises(ValueError, match="broken"):
        of(tmp_path, max_steps=4).train()
    assert last_checkpoint(str(tmp_path)) is None
    with pytest.raises(megacompile.MegacompileError, match="it was not written to its end"):
        of(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_what_the_disk_did_not_take_is_not_the_best(tmp_path: Path) -> None:
    state = transformers.TrainerState(best_model_checkpoint="checkpoint-1")
    writing = saving.Writing(tmp_path / "checkpoint-2", state, None, World())
    writing.begin()
    state.best_model_checkpoint = str(writing.folder)
    writing.end(OSError(errno.ENOSPC, "no space"))
    with pytest.warns(UserWarning, match="The disk did not take .*checkpoint-2, which was removed"):
        writing.wait()
    assert state.best_model_checkpoint == "checkpoint-1" and not writing.folder.exists()


def test_weights_alone_and_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    one = of(tmp_path / "weights", max_steps=1, save_only_model=True)
    one.train()
    files = {path.name for path in (tmp_path / "weights" / "checkpoint-1").iterdir()}
    assert "model.safetensors" in files and not files & {"program", "unfinished"}
    given = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "eval_strategy": "no"}
    two = trainer(Trainer, tmp_path / "lora", make=lora, **given)
    two.train()
    config = peft.PeftConfig.from_pretrained(tmp_path / "lora" / "checkpoint-1")
    assert config.r == 2
    assert (tmp_path / "lora" / "checkpoint-1" / "program").is_dir()
