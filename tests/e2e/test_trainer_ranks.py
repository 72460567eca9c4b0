"""The Trainer on several ranks: what one process does that takes their batches as micro-batches.

A signal to one rank stops all, and a rank that fails is named by the others.
"""

from __future__ import annotations

import errno
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megacompile import ProgramError
from megacompile.state import checkpoint
from tests.support.models import build
from tests.support.ranks import run_ranks, whole

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
pytest.importorskip("accelerate", reason="accelerate is missing: pip install accelerate")
Trainer = pytest.importorskip("megacompile.integrations.transformers").Trainer
test_trainer = pytest.importorskip("tests.e2e.test_trainer")
TrainerSteps = pytest.importorskip("megacompile.integrations.trainer_steps").TrainerSteps
MegacompileConfig = pytest.importorskip("megacompile.integrations.training_arguments").MegacompileConfig
last_checkpoint = pytest.importorskip("megacompile.integrations.trainer_checkpoints").last_checkpoint

RANKS = 2
SAVING = {"save_strategy": "steps", "save_steps": 3}


class Halved(Trainer):  # type: ignore[misc]
    """Whose loss is its own code."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **kwargs)
        return (found[0] / 2, *found[1:]) if isinstance(found, tuple) else found / 2


def of(rank: int, folder: Path, kind: Any = Trainer, size: int = RANKS, **given: Any) -> Any:
    """The trainer of one rank; of one process, for which ``rank`` is -1, with as many micro-batches as there
    are ranks."""
    if rank >= 0:
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
        os.environ.update({name: str(value) for name, value in told.items()})  # as torchrun does
    micro = 1 if rank >= 0 else RANKS
    settings = {
        "gradient_accumulation_steps": micro,
        "max_grad_norm": 1e9,
        "per_device_eval_batch_size": 2 * micro,
    }
    given.setdefault("of_trainer", {"hbm_budget": "20MB"})
    one = test_trainer.trainer(kind, folder, **settings | given)
    one.train_dataset = test_trainer.rows(24, 1)
    return one


def values(one: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = one.program.state_dict()
    return found


def trained(rank: int, folder: Path, **given: Any) -> dict[str, Any]:
    one = of(rank, folder, **given)
    one.train()
    return {"logs": test_trainer.logs(one), "values": values(one)}


def resumed(rank: int, folder: Path, **given: Any) -> dict[str, Any]:
    one = of(rank, folder, **given)
    one.train(resume_from_checkpoint=True)
    return {"logs": test_trainer.logs(one), "values": values(one)}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(v, expected[n]) for n, v in found.items())


def trained_twice(rank: int, folder: Path) -> list[dict[str, Any]]:
    """The run with checkpoints, and one that goes on from the first of them."""
    first = trained(rank, folder, **SAVING, save_total_limit=2, max_steps=6)
    for newer in folder.glob("checkpoint-6/trainer_state.json"):
        newer.unlink(missing_ok=True)  # as a writer that was killed leaves it
    return [first, resumed(rank, folder, save_strategy="no", max_steps=6)]


def test_ranks_log_and_learn_what_one_process_does_and_go_on_from_each_other_s_checkpoints(
    tmp_path: Path,
) -> None:
    """Bitwise where nothing is clipped, but for the norm, and evaluation, whose batches are other ones."""
    first, second = whole(run_ranks(RANKS, trained_twice, tmp_path / "ranks"))
    one = trained(-1, tmp_path / "one", max_steps=6)
    assert [first[0]["logs"], second[1]["logs"][:-1]] == [second[0]["logs"], first[1]["logs"][:-1]]
    assert first[1]["logs"][:-1] == first[0]["logs"][:-1]
    assert len(first[0]["logs"]) == len(one["logs"])
    for mine, theirs in zip(first[0]["logs"], one["logs"], strict=True):
        sums = {"eval_loss", "grad_norm"} & mine.keys()
        assert {n: mine.pop(n) for n in sums} == pytest.approx({n: theirs.pop(n) for n in sums}, rel=1e-6)
        assert mine == theirs
    assert [same(run["values"], one["values"]) for run in first] == [True, True]
    assert [run["values"] for run in second] == [{}, {}]
    alone = resumed(-1, tmp_path / "ranks", save_strategy="no", max_steps=6)
    assert same(alone["values"], one["values"])
    files = {file.name for file in (tmp_path / "ranks" / "checkpoint-3").iterdir()}
    assert {"model.safetensors", "program", "rng_state_0.pth", "rng_state_1.pth"} <= files


def clipped(rank: int, folder: Path) -> dict[str, Any]:
    return trained(
        rank, folder, max_grad_norm=0.5, max_steps=4, eval_strategy="no", label_smoothing_factor=0.1
    )


@pytest.mark.parametrize(("scaled", "weight"), [(True, 1.0), (False, 1 / 6)])
def test_micro_batches_weigh_alike_unless_their_count_weighs_them(scaled: bool, weight: float) -> None:
    """Of two ranks and three micro-batches of each."""
    one = mock.Mock(args=mock.Mock(world_size=2), current_gradient_accumulation_steps=3, _outside=None)
    steps = mock.Mock(_trainer=one, _is_scaled=lambda count: scaled)
    assert TrainerSteps.micro_batch(steps, {}, None).weight == weight


@pytest.mark.slow
def test_clipped_ranks_are_one_process_within_the_norm_s_rounding(tmp_path: Path) -> None:
    first, second = whole(run_ranks(RANKS, clipped, tmp_path / "ranks"))
    one = clipped(-1, tmp_path / "one")
    assert first["logs"] == second["logs"]
    for mine, theirs in zip(first["logs"], one["logs"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    for name, value in first["values"].items():
        torch.testing.assert_close(value, one["values"][name], rtol=1e-4, atol=1e-6)


def on_a_mesh(rank: int, folder: Path) -> dict[str, Any]:
    config = MegacompileConfig("20MB", mesh=init_device_mesh("cpu", (2, RANKS)))
    given = {"max_steps": 3, "eval_strategy": "no", "of_trainer": {"config": config}}
    return trained(rank, folder, size=2 * RANKS, **given)


def with_more_micro_batches(rank: int, folder: Path) -> dict[str, Any]:
    return trained(rank, folder, gradient_accumulation_steps=2, max_steps=3, eval_strategy="no")


@pytest.mark.slow
def test_replicas_of_a_mesh_learn_what_one_does_with_their_batches(tmp_path: Path) -> None:
    first, *others = whole(run_ranks(2 * RANKS, on_a_mesh, tmp_path / "mesh"))
    expected, _ = whole(run_ranks(RANKS, with_more_micro_batches, tmp_path / "ranks"))
    assert same(first["values"], expected["values"])
    assert len(first["logs"]) == len(expected["logs"])
    for mine, theirs in zip(first["logs"], expected["logs"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    assert [run["values"] for run in others] == [{}] * len(others)


def virtual_tokens() -> nn.Module:
    """Which an encoder of several layers computes."""
    peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
    torch.manual_seed(3)
    settings = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16)
    model: nn.Module = peft.get_peft_model(build("llama", layers=2), settings)
    return model


def saves_modules() -> nn.Module:
    """Of which PEFT asks for the names of the modules that it saves whole."""
    model: nn.Module = test_trainer.lora(modules_to_save=["norm"])
    return model


def with_adapters(rank: int, folder: Path, make: Callable[[], nn.Module]) -> list[Any]:
    return trained(rank, folder, make=make, max_steps=3, eval_strategy="no", **SAVING)["logs"]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("make", [virtual_tokens, saves_modules])
def test_ranks_train_and_save_adapters_as_one_process_does(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    first, second = whole(run_ranks(RANKS, with_adapters, tmp_path / "ranks", make))
    one = with_adapters(-1, tmp_path / "one", make)
    assert first == second
    for mine, theirs in zip(first, one, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
    name = "checkpoint-3/adapter_model.safetensors"
    ranks, alone = load_file(tmp_path / "ranks" / name), load_file(tmp_path / "one" / name)
    assert same(ranks, alone) and alone


def unlike(rank: int, folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Rows of unlike lengths, padded on the right to the longest of a batch, and metrics of them."""
    data = [{n: v[: 3 + 5 * i % 9] for n, v in row.items()} for i, row in enumerate(test_trainer.rows(24, 1))]
    one = of(
        rank,
        folder,
        max_steps=6,
        eval_steps=6,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=test_trainer.most_likely,
        **given,
    )
    one.train_dataset, one.eval_dataset, one.data_collator = data, data[:8], padded
    one.train()
    return {
        "logs": test_trainer.logs(one),
        "values": values(one),
        "programs": len(one.program._session.decided.programs),
    }


def accuracy(predicted: Any) -> dict[str, float]:
    labels = predicted.label_ids[:, 1:]
    return {"accuracy": float((predicted.predictions[:, :-1] == labels)[labels != -100].mean())}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    filled = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    full = [row | {"attention_mask": torch.ones_like(row["labels"])} for row in rows]
    return {
        n: torch.stack([nn.functional.pad(row[n], (0, longest - len(row[n])), value=v) for row in full])
        for n, v in filled.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"label_smoothing_factor": 0.1}, {"kind": Halved}])
def test_ranks_whose_batches_are_of_unlike_lengths_train_as_one_process(
    given: dict[str, Any], tmp_path: Path
) -> None:
    """By the model's own loss, one that is compiled with it, and one that is computed outside."""
    first, second = whole(run_ranks(RANKS, unlike, tmp_path / "ranks", given))
    one = unlike(-1, tmp_path / "one", given)
    assert first["logs"] == second["logs"] and first["programs"] == second["programs"]
    assert first["logs"] == [pytest.approx(entry, rel=1e-6) for entry in one["logs"]]
    assert same(first["values"], one["values"])


class At(transformers.TrainerCallback):  # type: ignore[misc]
    """Call a function before a step, counted from 1."""

    def __init__(self, step: int, call: Callable[[], Any]) -> None:
        self.step, self.call = step, call

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.call()


def stopped(rank: int, folder: Path) -> dict[str, Any]:
    """SIGTERM comes to the last rank alone; both stop, save, return, and go on."""
    told = At(3, lambda: os.kill(os.getpid(), signal.SIGTERM) if rank == RANKS - 1 else None)
    one = of(
        rank, folder, callbacks=[told], eval_strategy="no", max_steps=5, save_strategy="steps", save_steps=100
    )
    one.train()
    steps = one.state.global_step
    released = one.release().state_dict()
    return {"stopped": steps, "released": released} | resumed(
        rank, folder, save_strategy="no", eval_strategy="no", max_steps=5
    )


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_behind_the_same_update(
    tmp_path: Path,
) -> None:
    first, second = whole(run_ranks(RANKS, stopped, tmp_path / "ranks"))
    one = trained(-1, tmp_path / "one", max_steps=5, eval_strategy="no")
    assert first["stopped"] == second["stopped"] == 3
    assert same(first["released"], second["released"])
    assert Path(last_checkpoint(str(tmp_path / "ranks"))).name == "checkpoint-3"
    assert same(first["values"], one["values"])


def full_disk(rank: int, folder: Path) -> tuple[int, list[str]]:
    """The last rank's disk does not take its part of the second checkpoint of four, rank 0's no small file of
    the third."""
    write, write_small = checkpoint.save_shard, transformers.TrainerState.save_to_json

    def full(path: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
        if "checkpoint-4" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, tensors)

    def small(state: transformers.TrainerState, path: str) -> None:
        if "checkpoint-6" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_small(state, path)

    one = of(rank, folder, max_steps=8, eval_strategy="no", save_strategy="steps", save_steps=2)
    taken = mock.patch.object(checkpoint, "save_shard", full if rank == RANKS - 1 else write)
    kept = mock.patch.object(transformers.TrainerState, "save_to_json", small)  # called on rank 0
    with taken, kept, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one.train()
    told = [str(w.message) for w in caught if "The disk did not take" in str(w.message)]
    return one.state.global_step, told


@pytest.mark.slow
def test_a_full_disk_of_one_rank_costs_a_checkpoint_and_not_the_training(tmp_path: Path) -> None:
    (steps, told), second = whole(run_ranks(RANKS, full_disk, tmp_path))
    assert steps == 8 and second == (8, [])
    of_part, of_small = told
    assert "checkpoint-4, which was removed; training goes on: Rank 1: The checkpoint was not" in of_part
    assert "checkpoint-6, which was removed; training goes on: [Errno 28] No space left" in of_small
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-8"]
    assert Path(last_checkpoint(str(tmp_path))).name == "checkpoint-8"


def fails(rank: int, folder: Path, how: str) -> str:
    """Rank 1 is killed or raises before a step; what rank 0 raises then."""

    def fail() -> None:
        if rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            raise OSError("a bad disk")

    one = of(rank, folder, callbacks=[At(3, fail)], eval_strategy="no", max_steps=5)
    try:
        one.train()
    except (ProgramError, OSError) as error:
        return str(error)
    return "trained on"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"), [("killed", "Rank 1 is gone"), ("raises", "Rank 1 stopped: OSError: a bad disk")]
)
def test_a_rank_that_fails_ends_the_training_of_the_others_by_name(
    how: str, words: str, tmp_path: Path
) -> None:
    first, second = run_ranks(RANKS, fails, tmp_path, how)
    assert words in first, first
    assert second == (None if how == "killed" else "a bad disk")
