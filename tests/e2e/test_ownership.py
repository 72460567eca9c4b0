"""Who owns model and optimizer: nothing before a program takes over, all of it then, nothing after."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch
from torch.utils.flop_counter import FlopCounterMode

import megacompile
from megacompile.errors import ProgramError
from megacompile.state import host_arena
from megacompile.state.masters import HostState
from tests.support.models import Plain, batch_for


def owned(**options: Any) -> tuple[megacompile.Program, Plain, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options.setdefault("example_batch", batch_for("plain"))
    program = megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, **options)
    return program, model, optimizer


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    before = [p.detach().clone() for p in model.parameters()]
    model(**batch_for("plain")).backward()
    optimizer.step()
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert optimizer.state_dict()["state"]


@pytest.mark.parametrize("refused", [{"hbm_budget": "1kB"}, {"optimizer_state": "int7"}])
def test_a_refused_compile_leaves_model_and_optimizer_as_they_were(refused: dict[str, str]) -> None:
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"hbm_budget": "1GB", "optimizer": optimizer, "compute_dtype": torch.float32}
    with pytest.raises(megacompile.MegacompileError):
        megacompile.compile(model, **(options | refused), example_batch=batch_for("plain"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no program is left that would have to train it
        train_plainly(model, optimizer)


def test_ctrl_c_while_values_are_taken_over_leaves_them_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    before = copy.deepcopy(Plain().state_dict())
    write, written = HostState.write_whole, []

    def interrupted(self: HostState, *given: Any) -> None:
        written.append(given)
        if len(written) == 4:
            raise KeyboardInterrupt
        write(self, *given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HostState, "write_whole", interrupted)
        program, model, optimizer = owned(example_batch=None)
        program.train_step(batch_for("plain"))
    assert len(written) == 4
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    program.train_step(batch_for("plain"))  # takes over what is there
    program.sync_to(model)
    train_plainly(model, optimizer)


def test_a_model_that_was_given_back_trains_in_plain_pytorch() -> None:
    program, model, optimizer = owned()
    program.train_step(batch_for("plain"))
    program.sync_to(model)
    program.close()
    train_plainly(model, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_steps_taken_between_compile_and_the_first_batch_are_not_lost_silently() -> None:
    program, model, optimizer = owned(example_batch=None)
    with pytest.warns(UserWarning, match="in plain PyTorch"):
        train_plainly(model, optimizer)
    with pytest.raises(megacompile.MegacompileError, match="already taken steps"):
        program.train_step(batch_for("plain"))


def test_schedulers_made_before_and_after_taking_over_do_not_warn() -> None:
    program, _, optimizer = owned(example_batch=None)
    early = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    program.train_step(batch_for("plain"))
    late = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    program.train_step(batch_for("plain"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        early.step()
        late.step()
    program.close()


def test_an_owned_model_and_its_optimizer_refuse_with_the_way_out() -> None:
    program, model, optimizer = owned()
    with pytest.raises(ProgramError, match=r"program\.train_step"):
        model(**batch_for("plain"))
    with pytest.raises(ProgramError, match=r"program\.train_step"):
        model.blocks[0](torch.ones(1, 32))
    for part in (model, model.blocks[0]):
        with pytest.raises(ProgramError, match="load_state_dict"):
            part.load_state_dict({})
    with pytest.raises(ProgramError, match=r"program\.save"):
        optimizer.state_dict()
    with pytest.raises(ProgramError, match=r"program\.load"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(ProgramError, match="compile the model again"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ProgramError, match=r"program\.train_step"):
        optimizer.step()
    nn.GELU()(torch.ones(1))  # what holds no values works as ever
    program.sync_to(model)
    assert model.state_dict().keys() == program.state_dict().keys()
    program.close()


class Tied(nn.Module):
    """An embedding that is the head too, a buffer, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.lower = nn.Linear(4, 4)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.lower(h) * self.scale
        return nn.functional.cross_entropy(self.head(h), x)


def test_a_state_dict_of_an_owned_model_holds_what_was_trained() -> None:
    """In the model's dtypes, tied values as one tensor; of a part, too, and of what has it as a part."""
    torch.manual_seed(0)
    model, x = Tied().to(torch.bfloat16), torch.arange(8)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    program = megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32)
    program.train_step(x)  # whose updates are awaited
    state, masters = model.state_dict(), program.state_dict()
    assert list(state) == list(before)
    assert state._metadata == before._metadata  # type: ignore[attr-defined]
    for name, value in state.items():
        assert type(value) is Tensor and value.dtype == before[name].dtype
        assert torch.equal(value, masters[name].to(value.dtype)), name
        assert torch.equal(value, before[name]) == (name == "scale" or name.startswith("unused")), name
    assert state["embed.weight"] is state["head.weight"]
    around = nn.ModuleDict({"inner": model}).state_dict()
    assert all(torch.equal(around[f"inner.{name}"], value) for name, value in state.items())
    part = model.head.state_dict()["weight"]
    assert torch.equal(part, state["head.weight"]) and part is not state["head.weight"]
    assert model.state_dict(keep_vars=True)["head.weight"] is model.head.weight
    state["head.weight"].zero_()  # a copy
    with FlopCounterMode(display=False):
        assert torch.equal(model.state_dict()["head.weight"], part)
    program.close()
    assert torch.equal(model.state_dict()["head.weight"], part)


def test_gradients_are_not_looked_for_where_they_are_not() -> None:
    program, model, optimizer = owned()
    program.forward_backward(batch_for("plain"))
    with pytest.raises(ProgramError, match="max_grad_norm"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ProgramError, match="max_grad_norm"):
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(ProgramError, match="forward_backward"):
        next(model.parameters()).grad = torch.zeros(16, 16)
    program.optimizer_step()
    optimizer.zero_grad()
    model.zero_grad()
    program.sync_to(model)
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())


def by_assignment(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


DROPS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "the optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "the model": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "another optimizer": lambda model, optimizer: torch.optim.SGD(model.parameters(), 1.0).zero_grad(),
    "parts": lambda model, optimizer: [part.zero_grad() for part in model.children()],
    "assignment": by_assignment,
}


@pytest.mark.parametrize("faulty", [False, True])
def test_every_way_to_drop_gradients_drops_those_of_the_program(faulty: bool) -> None:
    """Those of micro-batches whose loss was not finite, too; their norms go with them."""
    program, model, optimizer = owned(max_grad_norm=1.0)
    before, batch = program.state_dict(), batch_for("plain")
    for name, drop in DROPS.items():
        program.forward_backward(batch, weight=float("nan") if faulty else 1e3)
        drop(model, optimizer)
        with pytest.raises(ProgramError, match="No gradient is waiting"):
            program.optimizer_step()
        assert all(torch.equal(value, before[key]) for key, value in program.state_dict().items()), name
    fresh, *_ = owned(max_grad_norm=1.0)
    for each in (program, fresh):
        each.forward_backward(batch)
        norm = each.optimizer_step().grad_norm
        assert norm is not None and torch.isfinite(norm)
    after = fresh.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in program.state_dict().items())


def test_gradients_that_are_dropped_in_part_are_refused_by_name() -> None:
    torch.manual_seed(0)
    model = Plain()
    halves = [list(part.parameters()) for part in (model.blocks, model)]
    ids = {id(p) for p in halves[0]}
    optimizers = [
        torch.optim.SGD([p for p in half if half is halves[0] or id(p) not in ids], 0.1) for half in halves
    ]
    program = megacompile.compile(model, "1GB", optimizer=optimizers, compute_dtype=torch.float32)
    program.forward_backward(batch_for("plain"))
    optimizers[0].zero_grad()
    for call in (program.optimizer_step, lambda: program.forward_backward(batch_for("plain"))):
        with pytest.raises(ProgramError, match=r"not those of .*program\.drop_gradients"):
            call()
    optimizers[1].zero_grad()
    with pytest.raises(ProgramError, match="No gradient is waiting"):
        program.optimizer_step()
    program.train_step(batch_for("plain"))


def test_a_plain_step_beside_a_program_that_never_ran_is_told_once() -> None:
    program, model, optimizer = owned(example_batch=None)
    model(**batch_for("plain")).backward()
    with pytest.warns(UserWarning, match=r"plain PyTorch.*program\.train_step") as told:
        optimizer.step()
        optimizer.step()
    assert len(told) == 1 and told[0].filename == __file__
    program.close()
    several = [owned(example_batch=None) for _ in range(2)]  # and no other one's hook is left out
    several[0][1](**batch_for("plain")).backward()
    with pytest.warns(UserWarning, match="plain PyTorch"):
        several[0][2].step()
    first, second = (owned(example_batch=None) for _ in range(2))
    first[0].close()
    second[0].train_step(batch_for("plain"))
    second[0].release()
    for _, model, optimizer in (first, second):  # what is no program's any more trains as ever
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_plainly(model, optimizer)


@pytest.mark.parametrize("way", ["sync_to", "load_state_dict"])
def test_release_gives_the_values_of_the_last_step(way: str) -> None:
    program, model, _ = owned()
    program.train_step(batch_for("plain"))
    program.sync_to(model)
    if way == "load_state_dict":
        program.load_state_dict(program.state_dict())
    program.train_step(batch_for("plain"))
    trained = program.state_dict()
    assert program.release() is model
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dropped", [False, True])
def test_a_closed_program_gives_its_model_to_the_next_one(dropped: bool) -> None:
    """Also where nobody has it any more; with a warning where the optimizer's moments do not go along; not
    after a step that stopped midway."""
    first, model, optimizer = owned()
    with first:
        first.train_step(batch_for("plain"))
    trained = first.state_dict()
    if dropped:
        del first
        gc.collect()
        assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    with pytest.warns(UserWarning, match=r"moments.*start from zero"):
        second = megacompile.compile(
            model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, example_batch=batch_for("plain")
        )
    assert all(torch.equal(value, trained[name]) for name, value in second.state_dict().items())
    if not dropped:
        with pytest.raises(ProgramError, match="Another program has taken over"):
            first.train_step(batch_for("plain"))
    second._session.refuse_training("A step stopped in the middle: load a checkpoint.")
    second.close()
    with pytest.raises(ProgramError, match="stopped in the middle"):
        megacompile.compile(model, "1GB", compute_dtype=torch.float32)
    second.load_state_dict(trained)  # which heals it


def test_a_model_that_was_dropped_with_its_closed_program_leaves_its_memory_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They hold each other, so nothing but a collection of cycles frees them."""
    monkeypatch.setattr(host_arena, "_COLLECTED_FROM", 1)
    program, model, _ = owned()
    program.close()
    state = weakref.ref(program._session.runtime.state)  # type: ignore[union-attr]
    gc.disable()
    try:
        del program, model, _
        assert state() is not None
        owned()
    finally:
        gc.enable()
    assert state() is None


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "zeros_": nn.init.zeros_,
    "fill_ of data": lambda p: p.data.fill_(1.0),
    "added to what is detached": lambda p: p.detach().add_(1.0),
    "norm of what is detached": lambda p: p.detach().norm(),
    "pickled": lambda p: pickle.dumps(p.detach()),
    "assigned data": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "copy_": lambda p: p.data.copy_(torch.zeros(p.shape)),
    "foreach": lambda p: torch._foreach_mul_([p.data], 2.0),
    "norm": lambda p: p.norm(),
    "average": lambda p: torch.zeros(p.shape).lerp_(p, 0.1),
    "item": lambda p: p[0, 0].item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.data.numpy(),
    "transposed": lambda p: p.T,
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "cast": lambda p: p.to(torch.bfloat16),
}


@pytest.mark.parametrize("name", USES)
def test_values_of_an_owned_model_are_neither_read_nor_written(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would read NaN, or write what no step sees; the program goes on as if nothing had been tried."""
    program, model, _ = owned()
    monkeypatch.setattr(_python_dispatch, "_is_in_torch_dispatch_mode", True)  # as two threads leave it
    before = program.state_dict()
    with pytest.raises(
        ProgramError, match=r"read them from program\.state_dict, set them by program\.load_state"
    ):
        USES[name](model.get_parameter("last.weight"))
    for key, value in program.state_dict().items():
        assert torch.equal(value, before[key])
    assert torch.isfinite(program.train_step(batch_for("plain")).loss)
    program.sync_to(model)
    USES[name](model.get_parameter("last.weight").requires_grad_(False))
    program.close()


def test_what_is_no_value_is_known_of_an_owned_parameter() -> None:
    program, model, _ = owned()
    weight = model.last.weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((3, 32), torch.float32, "cpu")
    assert (weight.numel(), weight.is_floating_point(), weight.requires_grad) == (96, True, True)
    assert str(weight) == "<kept by a megacompile program: shape (3, 32), torch.float32>"
    assert torch.equal(torch.zeros_like(weight), torch.zeros(3, 32))
    assert weight.new_ones(2).tolist() == [1.0, 1.0]
    program.close()


def test_an_owned_model_is_not_cast_and_may_be_moved_where_it_is() -> None:
    program, model, _ = owned()
    with pytest.raises(ProgramError, match="to move or cast them"):
        model.to(torch.bfloat16)
    model.to("cpu").float()
    program.train_step(batch_for("plain"))
    program.sync_to(model)
    assert all(p.dtype == torch.float32 and not p.isnan().any() for p in model.parameters())
    model.to(torch.bfloat16)
    program.close()


def test_an_owned_model_is_not_saved_without_its_values(tmp_path: Path) -> None:
    program, model, optimizer = owned()
    for thing in (model, model.last, list(model.parameters()), optimizer):
        with pytest.raises(ProgramError, match=r"program\.state_dict\(\)"):
            torch.save(thing, tmp_path / "model.pt")
    copy.deepcopy(model)  # to be filled by sync_to
    program.sync_to(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for name, value in program.state_dict().items():
        assert torch.equal(loaded.get_parameter(name), value), name
    program.close()


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.outer = inner, nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x, y) + self.outer(y).sum()


def test_a_part_of_an_owned_model_is_owned_and_what_holds_a_part_too() -> None:
    program, model, _ = owned()
    for given in (Around(model), model.blocks[0]):
        with pytest.raises(megacompile.MegacompileError, match="a part of it, already belongs"):
            megacompile.compile(given, "1GB", optimizer=torch.optim.AdamW(given.parameters()))
    program.close()


def test_a_program_gives_back_what_is_its_own() -> None:
    first, model, _ = owned()
    first.sync_to(model)
    second = megacompile.compile(
        model,
        "1GB",
        optimizer=torch.optim.AdamW(model.parameters()),
        example_batch=batch_for("plain"),
        compute_dtype=torch.float32,
    )
    with pytest.raises(megacompile.MegacompileError, match="belongs to another program"):
        first.sync_to(model)
    with pytest.raises(ProgramError, match="holds no values"):
        model(**batch_for("plain"))
    second.sync_to(model)
    first.sync_to(model)
    assert torch.isfinite(model(**batch_for("plain")))
    first.close()
    second.close()


def test_refusals_are_in_no_captured_graph() -> None:
    """Programs captured after the model was taken over are those of a model that was not."""
    other = batch_for("plain", size=4)
    program, _, _ = owned()
    with pytest.warns(UserWarning, match="another program"):
        program.train_step(other)
    fresh, _, _ = owned(example_batch=other)
    graphs = [p._session.scheduled().compiled.captured.graph for p in (program, fresh)]
    assert str(graphs[0]) == str(graphs[1])
    program.close()
    fresh.close()


def test_a_deep_copy_of_an_owned_model_has_its_values() -> None:
    program, model, _ = owned()
    program.train_step(batch_for("plain"))  # whose updates may be under way
    plain, layer = copy.deepcopy(model), copy.deepcopy(model.last)
    for name, value in program.state_dict().items():
        assert torch.equal(plain.get_parameter(name), value), name
    assert torch.equal(layer.weight, plain.last.weight)
    train_plainly(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    program.train_step(batch_for("plain"))
    assert not torch.equal(program.state_dict()["last.weight"], layer.weight)
    program.sync_to(model)
    assert torch.equal(copy.deepcopy(model).last.weight, model.last.weight)
    program.close()
