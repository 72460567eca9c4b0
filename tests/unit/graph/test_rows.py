"""Rows of tables that the host gathers: what is looked up, what comes back, and training with it."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.api import compile
from megacompile.api.frontend import Frontend
from megacompile.api.pipeline import Compiler
from megacompile.blocks.weight_groups import GroupLayout, Parameter, Slot
from megacompile.capture.batch import read_batch
from megacompile.capture.parameter_forms import parameter_forms
from megacompile.errors import ProgramError
from megacompile.graph.tile_cuts import LEAST_PIECE, tables
from megacompile.graph.tile_rewriter import tile
from megacompile.runtime import executor
from megacompile.runtime.backends import Backend, open_backend
from megacompile.runtime.cuda import CudaDevice
from megacompile.state import adam
from megacompile.state.embedding_rows import add_rows, gather_rows
from megacompile.state.masters import HostState
from megacompile.state.row_updates import RowUpdate
from tests.support.fake_cuda import FakeCuda
from tests.support.graphs import capture
from tests.support.reference import Habits, train_eager

VOCABULARY, WIDTH = 8192, 64  # a table of 2.1 MB in fp32


class Reader(nn.Module):
    """A table, a layer, a head that may be the table; ``how`` says by which ids it is read."""

    def __init__(self, how: str = "plain", *, tied: bool = False, rows: int = VOCABULARY) -> None:
        super().__init__()
        self.how = how
        by_count = how == "by frequency"
        self.table = nn.Embedding(rows, WIDTH, padding_idx=3, scale_grad_by_freq=by_count)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, rows if tied else 32, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if self.how == "shifted":
            ids = torch.cat([torch.full_like(ids[:, :1], 7), ids[:, :-1]], 1).view(-1, ids.shape[1])
        elif self.how == "computed":
            ids = (self.mix.bias[ids % WIDTH] > 0).long()
        hidden = self.table(ids)
        if self.how == "twice":
            hidden = hidden + self.table(labels)
        return nn.functional.cross_entropy(
            self.head(torch.tanh(self.mix(hidden))).flatten(0, 1), labels.flatten()
        )


def batch(seed: int = 0, *, rows: int = VOCABULARY) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, rows, (2, 12), generator=source)
    ids[1, 4:7] = ids[0, 2]
    ids[0, 5] = 3
    return {"ids": ids, "labels": torch.randint(0, 32, (2, 12), generator=source)}


def start(model: nn.Module, budget: str, habits: Habits, **options: Any) -> megacompile.Program:
    options.setdefault("compute_dtype", torch.float32)
    return megacompile.compile(
        model, budget, optimizer=habits.optimizer(model), max_grad_norm=habits.max_grad_norm, **options
    )


def looks_up(program: megacompile.Program) -> bool:
    return "rt.gather(" in program.source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stops", [(50,), (1, 20, 50)])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("code", ["auto", "torch"])
def test_gradients_of_rows_are_those_of_the_whole_table(
    dtype: torch.dtype, stops: tuple[int, ...], fresh: bool, code: str, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    adam.set_backend(code)
    request.addfinalizer(lambda: adam.set_backend("auto"))
    ids, grad = torch.randint(0, 50, (4, 30)), torch.randn(4, 30, 8).to(dtype)
    before = torch.randn(50, 8)
    whole = torch.ops.aten.embedding_dense_backward(grad, ids, 50, 7, False).float()
    pieces = list(before.clone().split([b - a for a, b in zip((0, *stops), stops, strict=False)]))
    looked_up = torch.empty(4, 30, 8)
    gather_rows(pieces, stops, ids, looked_up)
    assert torch.equal(looked_up, before[ids])
    add_rows(pieces, [fresh] * len(pieces), stops, ids, grad, 7)
    assert torch.equal(torch.cat(pieces), whole if fresh else before + whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", ["auto", "torch"])
@pytest.mark.parametrize("pushes", [1, 2])
def test_gradients_of_named_rows_alone_are_those_rows_of_the_whole_table(
    dtype: torch.dtype, code: str, pushes: int, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    adam.set_backend(code)
    request.addfinalizer(lambda: adam.set_backend("auto"))
    stops, ids, grads = (20, 50), torch.randint(0, 40, (pushes, 30)), torch.randn(pushes, 30, 8).to(dtype)
    ids[0, :3] = 7
    named = torch.unique(ids[ids != 7])
    rows = [named[named < 20], named[named >= 20] - 20]
    whole = [torch.full((20, 8), 9.0), torch.full((30, 8), 9.0)]
    compact = [torch.full((len(own), 8), 9.0) for own in rows]
    for first, (one, grad) in enumerate(zip(ids, grads, strict=True)):
        fresh = [first == 0] * 2
        add_rows(whole, fresh, stops, one, grad, 7)
        add_rows(compact, fresh, stops, one, grad, 7, rows, 1)
    for table, own, alone in zip(whole, rows, compact, strict=True):
        assert torch.equal(table[own], alone)


@pytest.mark.parametrize("wrong", [-1, 50])
def test_an_id_that_is_no_row_is_named(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"the id {wrong} is not in a table of 50 rows"):
        gather_rows([torch.randn(50, 2)], (50,), torch.tensor([4, wrong]), torch.empty(2, 2))


def found(model: nn.Module, given: dict[str, Tensor]) -> tuple[bool, int]:
    """Whether the host may gather rows, and how many inputs of rows the graph then has."""
    one = read_batch(given, model)
    graph = capture(model, one.args, one.kwargs, forms=parameter_forms(model, torch.float32))
    may = tables(graph)
    rows = tile(graph, may or {"table.weight": (0, VOCABULARY)}, gather=True).captured.rows
    for name, one_row in rows.items():
        leaves = read_batch(given, model).leaves
        shape = tile(graph, may, gather=True).captured.placeholder(name).meta["val"].shape
        assert one_row.find(leaves).shape == shape[:-1]
    return bool(may), len(rows)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("plain", 1), ("shifted", 1), ("twice", 2), ("computed", 0), ("by frequency", 0)],
)
def test_the_host_gathers_what_the_batch_alone_decides(how: str, expected: int) -> None:
    assert found(Reader(how), batch()) == (expected > 0, expected)


@pytest.mark.parametrize("row", [None, 0, 3, -1])
def test_the_row_of_padding_gets_no_gradient(row: int | None) -> None:
    model = Reader()
    model.table.padding_idx = None if row is None else row % VOCABULARY
    one = read_batch(batch(), model)
    graph = capture(model, one.args, one.kwargs, forms=parameter_forms(model, torch.float32))
    (rows,) = tile(graph, tables(graph), gather=True).captured.rows.values()
    assert rows.padding == (-1 if row is None else row % VOCABULARY)


def test_a_batch_of_many_tokens_or_a_small_table_is_no_case_for_it() -> None:
    many = {n: t.repeat(1, 200) for n, t in batch().items()}
    assert found(Reader(), many) == (False, 0)
    rows = LEAST_PIECE // (4 * WIDTH) - 1
    model = Reader(rows=rows)
    one = read_batch(batch(rows=rows), model)
    graph = capture(model, one.args, one.kwargs, forms=parameter_forms(model, torch.float32))
    assert tables(graph) == {}


HABITS = [Habits(None), Habits(0.1), Habits(0.1, ((1e-3, 0.1), (1e-2, 0.0)))]


def steps(micro: int) -> list[list[dict[str, Tensor]]]:
    return [[batch(3 * s + m) for m in range(micro)] for s in range(3)]


def trained(model: nn.Module, budget: str, habits: Habits, given: Sequence[Any], **options: Any) -> Any:
    program = start(model, budget, habits, **options)
    losses = [float(program.train_step(list(micro)).loss) for micro in given]
    gathers, memory, state = looks_up(program), program.memory, program.state_dict()
    assert memory.device_peak_bytes == memory.predicted_peak_bytes <= memory.budget_bytes
    program.close()
    return losses, state, gathers


@pytest.mark.slow_cases(r"habits(0-2|1-1)")
@pytest.mark.parametrize("how", ["plain", "shifted", "twice"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("habits", HABITS[:2])
def test_training_is_bitwise_that_of_eager(how: str, micro: int, habits: Habits) -> None:
    torch.manual_seed(0)
    model = Reader(how)
    expected = train_eager(habits.trainer(copy.deepcopy(model)), steps(micro))
    losses, state, gathers = trained(model, "1MB", habits, steps(micro))
    assert gathers
    assert losses == expected.losses
    if micro == 1 or how != "twice":  # else the order of a sum is the plan's
        assert all(torch.equal(state[n], v) for n, v in expected.weights.items())


@pytest.mark.slow_cases(r"(True-dtype0|False-dtype1)")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_gathered_rows_train_as_a_streamed_table(
    tied: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, options = Reader(tied=tied), {"compute_dtype": dtype}
    budget = "7MB"  # enough for the whole table, not for its state
    losses, state, gathers = trained(copy.deepcopy(model), budget, HABITS[2], steps(2), **options)
    assert gathers
    monkeypatch.setattr(
        "megacompile.api.compile.Frontend", lambda *a, **k: Frontend(*a, **k | {"gathers": False})
    )
    plain, expected, gathers = trained(model, budget, HABITS[2], steps(2), **options)
    assert not gathers
    assert losses == plain
    assert all(torch.equal(state[n], v) for n, v in expected.items())


def test_a_frozen_table_is_read_and_never_written() -> None:
    torch.manual_seed(0)
    model = Reader()
    model.table.requires_grad_(False)
    expected = train_eager(Habits(0.1).trainer(copy.deepcopy(model)), steps(1))
    losses, state, gathers = trained(model, "1MB", Habits(0.1), steps(1))
    assert gathers and losses == expected.losses
    assert all(torch.equal(state[n], v) for n, v in expected.weights.items())


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_by_hand_and_in_eval_mode(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Reader()
    exact = copy.deepcopy(model)
    program = start(model, "1MB", Habits(0.1))
    trainer = Habits(0.1).trainer(exact)
    for given in steps(2):
        longer = {n: t.repeat(1, 2) for n, t in given[1].items()}
        trainer.backward([given[0], longer], [0.25, 0.75], by_hand=True)
        trainer.apply()
        program.forward_backward(given[0], weight=0.25)
        program.forward_backward(longer, weight=0.75)
        assert looks_up(program)
        program.optimizer_step()
        with torch.no_grad():
            want = exact(**given[0])
        assert float(program.evaluate(given[0])) == float(want)
    state = program.state_dict()
    assert all(torch.equal(state[n], p) for n, p in exact.named_parameters())
    program.save(tmp_path / "checkpoint")
    program.close()
    again = start(copy.deepcopy(exact), "1GB", Habits(0.1), example_batch=batch())
    again.load(tmp_path / "checkpoint")
    assert not looks_up(again)
    assert all(torch.equal(again.state_dict()[n], v) for n, v in state.items())
    again.close()


def test_an_id_outside_of_the_table_stops_the_step_and_changes_nothing() -> None:
    program = start(Reader(), "1MB", Habits(0.1), example_batch=batch())
    before, bad = program.state_dict(), batch()
    bad["ids"][1, 1] = VOCABULARY
    with pytest.raises(ProgramError, match=r"table.weight.*the id 8192 is not in a table of 8192 rows"):
        program.train_step(bad)
    assert all(torch.equal(before[n], v) for n, v in program.state_dict().items())
    program.train_step(batch())
    program.close()


def test_where_everything_fits_the_table_stays_on_the_device() -> None:
    program = start(Reader(), "1GB", Habits(0.1), example_batch=batch())
    assert not looks_up(program)
    program.close()


def test_with_state_on_a_drive_the_table_is_streamed(tmp_path: Any) -> None:
    program = start(
        Reader(), "3MB", Habits(None), example_batch=batch(), offload_dir=str(tmp_path), host_budget="7MB"
    )
    assert not looks_up(program)
    program.train_step(batch())
    program.close()


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_rows_are_not_gathered_from_state_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long batch streams a cut table of which pieces stay on the device; a short one gathers its rows."""
    for module in ("megacompile.graph.tile_cuts", "megacompile.planner.tiling"):
        monkeypatch.setattr(f"{module}.LEAST_PIECE", 1 << 14)
    torch.manual_seed(0)
    model, habits = Reader(tied=True, rows=512), Habits(0.1)
    model.table.weight.requires_grad_(False)
    long, short = ({k: v.repeat(1, n) for k, v in batch(rows=512).items()} for n in (11, 1))
    trainer = habits.trainer(copy.deepcopy(model))
    program = start(model, "740kB", habits, example_batch=long)
    assert program._session.scheduled().planned.step.resident
    for given in (long, short, long, short):
        wanted = trainer.train_step([given])
        assert float(program.train_step(given).loss) == pytest.approx(wanted, rel=1e-6)
        assert looks_up(program) is (given is short)
    assert float(program.evaluate(short)) == pytest.approx(float(trainer.model(**short).detach()), rel=1e-6)
    state = program.state_dict()
    for name, value in trainer.model.named_parameters():  # cut heads round otherwise
        torch.testing.assert_close(state[name], value.detach(), rtol=0, atol=1e-6)
    program.close()


def give_fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compile open a CUDA device over a fake of CUDA."""
    monkeypatch.setattr(Compiler, "_may_reside", lambda *_: ())  # Adam of another kind
    fake = FakeCuda()
    opened = functools.partial(CudaDevice, fake)
    backend = Backend(fake.device, None, None, lambda budget: budget, opened)
    monkeypatch.setattr(
        compile,
        "open_backend",
        lambda device, dtype: backend if device == "cuda" else open_backend(device, dtype),
    )


def test_on_the_cuda_device_rows_travel_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    give_fake_cuda(monkeypatch)
    torch.manual_seed(0)
    model = Reader("twice")
    expected = trained(copy.deepcopy(model), "1MB", HABITS[0], steps(2))
    program = start(model, "1MB", HABITS[0], device="cuda")
    losses = [float(program.train_step(micro).loss) for micro in steps(2)]
    assert looks_up(program)
    assert losses == expected[0]
    assert all(torch.equal(program.state_dict()[n], v) for n, v in expected[1].items())
    program.close()


def test_a_batch_may_be_filled_anew_as_soon_as_the_step_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    give_fake_cuda(monkeypatch)
    torch.manual_seed(0)
    model, habits, filled = Reader(), Habits(None), threading.Event()
    trainer = habits.trainer(copy.deepcopy(model))
    program = start(model, "1MB", habits, device="cuda")

    def late(*arguments: Any) -> None:
        assert filled.wait(60)
        add_rows(*arguments)

    monkeypatch.setattr(executor, "add_rows", late)
    given = batch()
    trainer.train_step([batch()])
    program.train_step(given)
    given["ids"].fill_(7)
    filled.set()
    state = program.state_dict()
    for name, value in trainer.model.named_parameters():
        torch.testing.assert_close(state[name], value.detach(), rtol=0, atol=1e-6)
    program.close()


def as_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one update be of all rows of a table, as of one that is not gathered."""
    module = importlib.import_module("megacompile.passes.insert_gradients")
    monkeypatch.setattr(module, "named_bytes", lambda *arguments: 0)


def whole_state(program: megacompile.Program) -> dict[tuple[str, str], Tensor]:
    """All that is kept of each parameter, and how often it was updated."""
    program.synchronize()
    state = program._session.runtime.state
    kept = {
        (n, a): x.clone() for part in state.parts() for n, arrays in part.items() for a, x in arrays.items()
    }
    return kept | {("updates", str(g)): torch.tensor(steps) for g, steps in enumerate(state.steps)}


def after_steps(
    model: nn.Module, habits: Habits, given: Sequence[Any], apart: bool, **options: Any
) -> tuple[list[Any], dict[tuple[str, str], Tensor], int]:
    """What steps say, what they leave, and the bytes of gradients that the host keeps; with state and norms
    read right behind steps, while updates may be under way."""
    options.setdefault("compute_dtype", torch.bfloat16)
    program = start(copy.deepcopy(model), "1MB", habits, **options)
    said: list[Any] = []
    for number, micro in enumerate(given):
        result = program.train_step(list(micro))
        if number == 1:
            said += [program.state_dict(), program.evaluate(given[0][0])]
        said += [result.loss, result.grad_norm]
    assert looks_up(program) and ("rt.adam_rest(" in program.source) is apart
    kept = program._session.runtime.buffers.nbytes()["gradients"]
    state = whole_state(program)
    program.close()
    return said, state, kept


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple, dict)):
        pairs = zip(a.values(), b.values(), strict=True) if isinstance(a, dict) else zip(a, b, strict=True)
        return all(alike(x, y) for x, y in pairs)
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.filterwarnings("ignore:Compiling another program")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("policy", [None, "skip"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_named_rows_and_the_rest_are_one_update_of_the_table(
    clip: float | None, micro: int, policy: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are named twice, never, by padding, again, or by the next batch alone; one row alone."""
    give_fake_cuda(monkeypatch)
    torch.manual_seed(0)
    model, given = Reader("twice"), [*steps(micro), *steps(micro)]
    for one in given[-2]:
        one["ids"].fill_(11)
    habits = Habits(clip, ((1e-2, 0.1), (1e-3, 0.0)))
    options: dict[str, Any] = {"on_nonfinite": policy, "device": device}
    said, state, kept = after_steps(model, habits, given, True, **options)
    as_one_update(monkeypatch)
    expected, whole, kept_whole = after_steps(model, habits, given, False, **options)
    assert alike(said, expected)
    assert alike(state, whole)
    assert kept < kept_whole / 4


@pytest.mark.parametrize("update", ["immediate", "deferred"])
def test_without_clipping_the_rest_is_updated_when_the_loss_is_known_or_last(
    update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, options = Reader(), {"compute_dtype": torch.float32}
    program = start(copy.deepcopy(model), "1MB", HABITS[0], example_batch=batch(), **options)
    plan = program.plan
    program.close()
    groups = tuple(replace(group, update=update) for group in plan.groups)
    options["plan"] = replace(plan, groups=groups)
    given = steps(1)
    said, state, _ = after_steps(model, HABITS[0], given, True, **options)
    as_one_update(monkeypatch)
    expected, whole, _ = after_steps(model, HABITS[0], given, False, **options)
    assert alike(said, expected) and alike(state, whole)


@pytest.mark.parametrize("options", [{"optimizer_state": "int8"}, {"max_grad_norm": 0.1}, {"sgd": True}])
def test_other_tables_are_updated_whole(options: dict[str, Any]) -> None:
    """Of moments in codes, of a norm with the bits of FP32, and of another optimizer than Adam."""
    model = Reader()
    sgd = options.pop("sgd", False)
    optimizer = (torch.optim.SGD if sgd else torch.optim.AdamW)(model.parameters(), lr=0.01)
    program = megacompile.compile(
        model, "1MB", optimizer=optimizer, compute_dtype=torch.float32, example_batch=batch(),
        **{"max_grad_norm": None, **options},
    )  # fmt: skip
    assert looks_up(program) and "rt.adam_rest(" not in program.source
    program.train_step(batch())
    program.close()


class Infinite(Reader):
    """A model whose loss a batch can make infinite or NaN."""

    def forward(self, ids: Tensor, labels: Tensor, factor: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, labels) * factor


@pytest.mark.parametrize("policy", [None, "skip", "raise"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_loss_that_is_not_finite_changes_no_row(clip: float | None, policy: Any) -> None:
    torch.manual_seed(0)
    habits = Habits(clip)
    options = {"compute_dtype": torch.bfloat16, "on_nonfinite": policy}
    program = start(Infinite(), "1MB", habits, **options)
    fine, bad = ({**batch(seed), "factor": torch.tensor(x)} for seed, x in ((0, 1.0), (1, float("nan"))))
    program.train_step(fine)
    before = whole_state(program)
    with contextlib.suppress(megacompile.NonFiniteError):
        program.train_step(bad)
        program.synchronize()
    assert alike(whole_state(program), before)
    program.train_step(fine)
    after = whole_state(program)
    assert "rt.adam_rest(" in program.source
    changed = [name for name in after if name[0].startswith("table") and not alike(after[name], before[name])]
    assert {array for _, array in changed} == {"weights", "low", "exp_avg", "exp_avg_sq"}
    program.close()


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_a_checkpoint_right_behind_a_step_has_all_of_its_updates(tmp_path: Any) -> None:
    """While the next step goes on, and read by a program that then goes on as the first one does."""
    torch.manual_seed(0)
    model, habits, (first, second, third) = Reader(), Habits(0.1), steps(1)
    program = start(copy.deepcopy(model), "1MB", habits, compute_dtype=torch.bfloat16)
    program.train_step(first)
    program.train_step(second)
    program.save(tmp_path / "saved", wait=False)
    program.train_step(third)
    program.synchronize()
    expected = whole_state(program)
    program.close()
    again = start(model, "1MB", habits, compute_dtype=torch.bfloat16, example_batch=batch())
    again.load(tmp_path / "saved")
    again.train_step(third)
    assert alike(whole_state(again), expected)
    again.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_lookup_brings_up_to_date_what_the_step_before_has_left(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step leaves all rows that it does not name until the next one has looked its rows up."""
    give_fake_cuda(monkeypatch)
    torch.manual_seed(0)
    model, habits, given = Reader(), Habits(0.1, ((1e-2, 0.1),)), [*steps(1), *steps(1)]
    options = {"compute_dtype": torch.bfloat16, "device": device}
    said, expected, _ = after_steps(model, habits, given, True, **options)
    program = start(model, "1MB", habits, example_batch=batch(), **options)
    turns, rest = threading.Semaphore(0), RowUpdate.update_rest

    def late(self: RowUpdate, *arguments: Any) -> None:
        assert turns.acquire(timeout=60)
        rest(self, *arguments)

    def noted(*arguments: Any) -> None:
        gather_rows(*arguments)
        turns.release()

    monkeypatch.setattr(RowUpdate, "update_rest", late)
    first, *others = given
    losses = [program.train_step(first).loss]
    monkeypatch.setattr(executor, "gather_rows", noted)
    losses += [program.train_step(micro).loss for micro in others]
    turns.release()
    assert alike(whole_state(program), expected)
    assert alike(losses, [x for x in said[:2] + said[4:] if isinstance(x, Tensor)][::2])
    program.close()


def test_a_lookup_comes_before_the_rest_of_a_table_and_no_row_is_updated_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the rest is at its first rows a lookup asks for some of these, and for some of its last ones."""
    monkeypatch.setattr("megacompile.state.row_updates._AT_ONCE", 4 * WIDTH)
    parameter = Parameter("table", (16, WIDTH), (WIDTH, 1), torch.float32, 0)
    layout = GroupLayout(0, "table", torch.float32, True, (Slot(parameter, 0),), 16 * WIDTH)
    state = HostState([layout])
    update = RowUpdate(state, 0, {0: torch.tensor([1, 5])})
    asked, begun, updated = threading.Event(), threading.Event(), []
    plain = HostState.update_rows

    def noted(self: HostState, group: int, slot: int, rows: Tensor, *rest: Any, **options: Any) -> None:
        plain(self, group, slot, rows, *rest, **options)
        updated.append(rows.tolist())
        if len(updated) == 2:  # of the rest the first, of which a lookup waits for the end
            begun.set()
            assert asked.wait(60)

    monkeypatch.setattr(HostState, "update_rows", noted)
    wait_for = update._free.wait_for

    def waiting(ready: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            asked.set()
        return wait_for(ready)

    monkeypatch.setattr(update._free, "wait_for", waiting)
    hypers = [adam.AdamHyper(1e-3)]
    update.catch_up(0, torch.tensor([3]), 1)  # nothing, as long as it is not known that the step updates
    update.update_named(torch.ones(2 * WIDTH), hypers, 1)
    thread = threading.Thread(target=update.update_rest, args=(hypers, 1))
    thread.start()
    assert begun.wait(60)
    update.catch_up(0, torch.tensor([14, 0, 5, 14, 9]), 1)
    thread.join()
    update.catch_up(0, torch.arange(16), 1)
    assert updated == [[1, 5], [0, 2, 3], [9, 14], [4, 6, 7], [8, 10, 11], [12, 13, 15]]
    assert state.steps == [[1]]
