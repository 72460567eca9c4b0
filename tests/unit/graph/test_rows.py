"""Rows of tables that the host gathers: what is looked up, what comes back, and training with it."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.api import compile
from megacompile.api.frontend import Frontend
from megacompile.api.pipeline import Compiler
from megacompile.capture.batch import read_batch
from megacompile.capture.parameter_forms import parameter_forms
from megacompile.capture.trace import capture
from megacompile.errors import ProgramError
from megacompile.graph.tile_cuts import LEAST_PIECE, tables
from megacompile.graph.tile_rewriter import tile
from megacompile.runtime import executor
from megacompile.runtime.backends import Backend, open_backend
from megacompile.runtime.cuda import CudaDevice
from megacompile.state import adam
from megacompile.state.embedding_rows import add_rows, gather_rows
from tests.support.fake_cuda import FakeCuda
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
    monkeypatch.setattr(Compiler, "_may_reside", lambda self, mode: ())  # Adam of another kind
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
