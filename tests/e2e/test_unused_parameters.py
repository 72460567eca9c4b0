"""Parameters that not every batch uses: as in eager PyTorch, an update leaves alone what has no gradient."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import megacompile
from megacompile.errors import BudgetError
from tests.support.ranks import on_devices, on_host, partly_on_devices, run_ranks, whole

Batch = dict[str, Any]


@pytest.fixture(autouse=True)
def _many_programs() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Compiling another program")
        yield


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(seed: int = 0) -> Tensor:
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(seed))


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Pictures(nn.Module):
    """Words, and pictures that are projected beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.picture = nn.Embedding(32, 16), nn.Linear(12, 16)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, ids: Tensor, pixels: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        if pixels is not None:
            x = x + self.picture(pixels).mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        return (x @ self.words.weight.T).square().mean()


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.main, self.adapter = Mlp(width), Mlp(width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, adapt: bool) -> Tensor:
        return self.main(x) * self.scale + (self.adapter(x) if adapt else 0)


class Adapted(nn.Module):
    """Layers with an adapter that some batches switch on; large enough that moments are coded."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))

    def forward(self, x: Tensor, adapt: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x, adapt)
        return x.square().mean()


class Sized(nn.Module):
    """A large layer that some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = Mlp(), Mlp(128)

    def forward(self, x: Tensor, large: bool) -> Tensor:
        y: Tensor = self.small(x)
        return self.large(y.repeat(1, 8)).square().mean() if large else y.square().mean()


class Tasks(nn.Module):
    """A body, and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.heads = nn.ModuleDict({task: nn.Linear(16, 4) for task in "ab"})

    def forward(self, x: Tensor, task: str) -> Tensor:
        y: Tensor = self.heads[task](torch.tanh(self.body(x)))
        return y.square().mean()


def text(seed: int) -> Batch:
    return {"ids": ids(seed)}


def picture(seed: int) -> Batch:
    return {"ids": ids(seed), "pixels": draw(2, 4, 12, seed=seed)}


def plain(seed: int) -> Batch:
    return {"x": draw(4, 64, seed=seed)}


def adapted(seed: int) -> Batch:
    return {"x": draw(4, 64, seed=seed), "adapt": True}


def task(name: str, seed: int) -> Batch:
    return {"x": draw(4, 16, seed=seed), "task": name}


WITH_AND_WITHOUT = [picture(0), text(1), text(2), picture(3), text(4)]
TEXT_FIRST = [text(0), text(1), picture(2), text(3), picture(4)]
ADAPTED_FIRST = [adapted(0), plain(1), plain(2), adapted(3)]
PLAIN_FIRST = [plain(0), adapted(1), plain(2), adapted(3)]
BY_TURNS = [task("a", 0), task("b", 1), task("b", 2), task("a", 3)]
RUNS: list[tuple[type[nn.Module], list[Batch]]] = [
    (Pictures, WITH_AND_WITHOUT),
    (Pictures, TEXT_FIRST),
    (Adapted, ADAPTED_FIRST),
    (Adapted, PLAIN_FIRST),
    (Tasks, BY_TURNS),
]
NAMES = ["picture first", "text first", "adapted first", "plain first", "by turns"]


def made(kind: type[nn.Module]) -> tuple[nn.Module, torch.optim.AdamW]:
    """Decay and a learning rate that show in every step in which they should not."""
    torch.manual_seed(0)
    model = kind()
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2], "weight_decay": 0.5}, {"params": parameters[1::2]}]
    return model, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def compiled(kind: type[nn.Module], **options: Any) -> megacompile.Program:
    model, optimizer = made(kind)
    options = {"hbm_budget": "2MB", "compute_dtype": torch.float32, "device": "cpu"} | options
    return megacompile.compile(model, optimizer=optimizer, **options)


def eager(kind: type[nn.Module], steps: Sequence[Any], max_grad_norm: float | None = None) -> nn.Module:
    model, optimizer = made(kind)
    for step in steps:
        micro = step if isinstance(step, list) else [step]
        for batch in micro:
            (model(**batch) / len(micro)).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_close(state: dict[str, Tensor], model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(
            state[name], value, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def trained(program: megacompile.Program, steps: Sequence[Any]) -> dict[str, Tensor]:
    for step in steps:
        program.train_step(step)
    state = program.state_dict()
    program.close()
    return state


PLACES = {"host": on_host, "device": on_devices, "partly": partly_on_devices}


@pytest.mark.slow_cases(r".*-(None-partly|0\.1-(host|device))\]")
@pytest.mark.parametrize("place", [*PLACES])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(("kind", "steps"), RUNS, ids=NAMES)
def test_as_eager(kind: type[nn.Module], steps: list[Batch], clip: float | None, place: str) -> None:
    program = compiled(kind, max_grad_norm=clip, planner=PLACES[place])
    assert_close(trained(program, steps), eager(kind, steps, clip))


def test_micro_batches_of_several_kinds() -> None:
    steps = [[text(0), picture(1)], [text(2), text(3)], [picture(4), text(5)], [text(6), text(7)]]
    assert_close(trained(compiled(Pictures), steps), eager(Pictures, steps))
    tasks = [[task("a", 0), task("b", 1)], [task("b", 2), task("b", 3)], task("a", 4)]
    program = compiled(Tasks, example_batch=tasks[0], max_grad_norm=0.1)
    known = program._session.decided.keys
    assert len(known) == 2
    assert_close(trained(program, tasks), eager(Tasks, tasks, 0.1))


def test_a_batch_without_a_parameter_leaves_its_bits_alone() -> None:
    for options in ({}, {"optimizer_state": "int8"}, {"optimizer_state": "int4"}):
        program = compiled(Adapted, example_batch=adapted(0), **options)
        program.train_step(adapted(0))
        before = program.state_dict()
        program.train_step(plain(1))
        after = program.state_dict()
        moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
        assert moved == {name for name in after if "adapter" not in name}
        program.close()


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_coded_moments_of_parameters_that_are_left_out(form: str) -> None:
    """They are those of a run without the steps that left them out."""
    states = []
    for steps in ([adapted(0), plain(1), plain(2), adapted(3)], [adapted(0), adapted(3)]):
        program = compiled(Adapted, optimizer_state=form, example_batch=adapted(0))
        frozen = {n: v for n, v in program.state_dict().items() if "adapter" not in n}
        for step in steps:
            program.train_step(step)
            program.load_state_dict(program.state_dict() | frozen)  # so that both have the same gradients
        states.append(program.state_dict())
        program.close()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("steps", [PLAIN_FIRST, ADAPTED_FIRST], ids=["plain first", "adapted first"])
def test_on_nvme(steps: list[Batch], tmp_path: Path) -> None:
    program = compiled(Adapted, host_budget="850kB", offload_dir=tmp_path, example_batch=steps[0])
    assert any(group.state.startswith("nvme") for group in program.plan.groups)
    assert_close(trained(program, steps), eager(Adapted, steps))


def _of_rank(rank: int, place: str, steps: list[Any], folder: str) -> dict[str, Tensor]:
    program = compiled(Adapted, planner=PLACES[place], max_grad_norm=0.5 if place == "partly" else None)
    for step in steps[:-1]:
        program.train_step(step)
    program.save(folder)
    program.train_step(steps[-1])
    state = program.state_dict()
    program.load(folder)
    program.train_step(steps[-1])
    again = program.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in state.items())
    program.close()
    return state


@pytest.mark.slow_cases(r"host")
@pytest.mark.parametrize("place", ["host", "partly"])
def test_two_ranks(place: str, tmp_path: Path) -> None:
    state, _ = whole(run_ranks(2, _of_rank, place, PLAIN_FIRST, str(tmp_path / "saved")))
    assert_close(state, eager(Adapted, PLAIN_FIRST, 0.5 if place == "partly" else None))


@pytest.mark.slow_cases(r"fp32")  # which small parameters have in int8 too
@pytest.mark.parametrize(("kind", "steps"), RUNS, ids=NAMES)
@pytest.mark.parametrize("form", ["fp32", "int8"])
def test_resumed_bit_for_bit(kind: type[nn.Module], steps: list[Batch], form: str, tmp_path: Path) -> None:
    """By a program whose first batch is the next one, which may use other parameters."""
    program = compiled(kind, optimizer_state=form)
    for step in steps[:2]:
        program.train_step(step)
    program.save(tmp_path / "saved")
    expected = trained(program, steps[2:])
    again = compiled(kind, optimizer_state=form, example_batch=steps[2])
    again.load(tmp_path / "saved")
    state = trained(again, steps[2:])
    assert all(torch.equal(value, state[name]) for name, value in expected.items())


def test_frozen_parameters_that_a_later_batch_uses() -> None:
    steps = TEXT_FIRST
    models = [made(Pictures)[0] for _ in range(2)]
    for model in models:
        model.picture.requires_grad_(False)
    ours, plain = ([p for p in model.parameters() if p.requires_grad] for model in models)
    program = megacompile.compile(
        models[0], "2MB", optimizer=torch.optim.AdamW(ours, lr=1e-2), compute_dtype=torch.float32
    )
    optimizer = torch.optim.AdamW(plain, lr=1e-2)
    for step in steps:
        models[1](**step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(trained(program, steps), models[1])


class Detached(nn.Module):
    """A part whose gradient some batches stop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(), Mlp()

    def forward(self, x: Tensor, stop: bool) -> Tensor:
        y: Tensor = self.first(x)
        return torch.as_tensor(self.second(y.detach() if stop else y).square().mean())


@pytest.mark.parametrize("stops", [(True, False, True, False), (False, True, True, False)], ids=str)
def test_a_part_that_some_batches_read_without_training_it(stops: tuple[bool, ...]) -> None:
    steps = [{"x": draw(4, 16, seed=i), "stop": stop} for i, stop in enumerate(stops)]
    assert_close(trained(compiled(Detached), steps), eager(Detached, steps))


class Vocabularies(nn.Module):
    """A table of words and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({task: nn.Embedding(32, 16) for task in "ab"})
        self.body = Mlp()
        self.heads = nn.ModuleDict({task: nn.Linear(16, 32) for task in "ab"})

    def forward(self, ids: Tensor, task: str) -> Tensor:
        scores = self.heads[task](self.body(self.tables[task](ids)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("part", ["tables.a", "heads.a"])
def test_pieces_of_weights_are_used_by_turns(part: str) -> None:
    steps = [{"ids": ids(seed), "task": name} for seed, name in enumerate("abba")]
    program = compiled(Vocabularies)
    session = program._session
    session.decided = session.decided.anew(session.decided.room, {f"{part}.weight": (0, 16, 32)})
    assert_close(trained(program, steps), eager(Vocabularies, steps))


def test_a_later_batch_that_needs_more_of_the_device_is_refused() -> None:
    program = compiled(Sized, hbm_budget="100kB")
    program.train_step({"x": draw(4, 16), "large": False})
    with pytest.raises(BudgetError, match="the least feasible budget for this model and batch is"):
        program.train_step({"x": draw(4, 16), "large": True})
    steps = [{"x": draw(4, 16), "large": False}] * 2
    assert_close(trained(program, steps[1:]), eager(Sized, steps))


def test_the_host_budget_counts_what_no_batch_has_used() -> None:
    program = compiled(Tasks, example_batch=task("a", 0))
    held = program.memory.host_bytes
    assert held["masters"] + held["moments"] >= 12 * sum(p.numel() for p in made(Tasks)[0].parameters())
    program.close()


class Three(Tasks):
    """A third task, which shares the head of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.heads["c"] = self.heads["a"]


@settings(max_examples=5, deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=6), st.booleans())
def test_any_order_of_tasks(order: list[str], clips: bool) -> None:
    steps = [task(name, seed) for seed, name in enumerate(order)]
    clip = 0.1 if clips else None
    assert_close(trained(compiled(Three, max_grad_norm=clip), steps), eager(Three, steps, clip))


class Captions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Pictures(), nn.Linear(16, 32)

    def forward(self, ids: Tensor, labels: Tensor, pixels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.inner.words(ids)
        if pixels is not None:
            x = x + self.inner.picture(pixels).mean(1, keepdim=True)
        scores = self.head(torch.tanh(self.inner.blocks[0](x)))
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


def row(index: int) -> dict[str, Tensor]:
    words = torch.arange(8) + index
    pixels = {"pixels": draw(4, 12, seed=index)} if index % 4 >= 2 else {}
    return {"ids": words, "labels": words} | pixels


def test_the_trainer_whose_first_batch_has_no_picture(tmp_path: Path) -> None:
    from transformers import TrainingArguments  # here, as ranks of other tests import this module

    from megacompile.integrations.transformers import Trainer

    states = []
    for kind, options in ((transformers.Trainer, {}), (Trainer, {"hbm_budget": "5MB"})):
        torch.manual_seed(0)
        arguments = TrainingArguments(
            str(tmp_path / kind.__module__), per_device_train_batch_size=2, max_steps=6, learning_rate=1e-2,
            weight_decay=0.1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
            train_sampling_strategy="sequential", remove_unused_columns=False,
        )  # fmt: skip
        trainer = kind(model=Captions(), train_dataset=[row(i) for i in range(12)], args=arguments, **options)
        trainer.train()
        program = getattr(trainer, "program", None)
        states.append(trainer.model.state_dict() if program is None else program.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-5)
