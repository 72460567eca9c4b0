"""Several ranks over gloo beside one process with their batches as micro-batches: the same bits."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile import Program
from megacompile.api import frontend
from tests.support.models import Plain, batch_for, build
from tests.support.ranks import on_devices, on_host, partly_on_devices, raising, run_ranks, saved, whole
from tests.support.reference import EagerTrainer
from tests.support.zoo import cases

STEPS = 3
LONG = 480  # tokens, of which the whole takes most of a budget
collectives = importlib.import_module("megacompile.passes.insert_collectives")  # not the pass of that name
Case = tuple[str, dict[str, Any]]
FP32: dict[str, Any] = {"compute_dtype": torch.float32}
HOST: dict[str, Any] = FP32 | {"planner": on_host}


CASES: dict[str, Case] = {
    "plain": ("plain", HOST),
    "llama": ("llama", HOST),
    "llama in bf16": ("llama", {}),
    "gpt2 with dropout": ("gpt2-dropout", {}),
    "dropout in bf16": ("dropping", {}),
    "noise of NumPy": ("noisy", HOST),
    "in small pieces": ("plain", HOST),  # of what ranks exchange at once
    "experts": ("mixtral", FP32),
    "tied and frozen": ("gpt2", FP32),
    "frozen in bf16": ("adapted", {}),
    "in 8 bits": ("wide", FP32 | {"optimizer_state": "int8"}),
    "in 4 bits": ("wide", FP32 | {"optimizer_state": "int4"}),
    "clipped": ("plain", HOST | {"max_grad_norm": 0.1}),
    "never clipped": ("plain", HOST | {"max_grad_norm": 1e9}),
    "state on devices": ("llama", {"planner": on_devices}),
    "some on devices": ("plain", FP32 | {"planner": partly_on_devices}),
    "clipped on devices": ("plain", FP32 | {"max_grad_norm": 0.1, "planner": partly_on_devices}),
    "never clipped on devices": ("plain", FP32 | {"max_grad_norm": 1e9, "planner": partly_on_devices}),
}


SIZES: dict[str, dict[str, int]] = {
    "llama": {"layers": 2},
    "adapted": {"layers": 2},
    "wide": {"width": 72, "depth": 2},  # whose matrices are large enough for codes, and end within a block
}
LENGTHS: dict[str, dict[str, int]] = {"mixtral": {"size": 1, "length": 4}}  # experts get no token
PLAIN = ("dropping", "noisy", "wide")  # models that read what "plain" reads


class Dropping(Plain):
    """A model without transformers that drops features."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = nn.functional.dropout(x, 0.25, self.training)
        return super().forward(kept.to(self.first.weight.dtype), y.to(self.first.weight.dtype))


class Noisy(Plain):
    """A model without transformers that draws by NumPy."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + torch.from_numpy(numpy.random.randn(*x.shape)).float(), y)  # noqa: NPY002


def compiled(name: str, options: dict[str, Any], seed: int = 0, budget: float | str = 1) -> Program:
    torch.manual_seed(seed)
    kind = "plain" if name in PLAIN else "llama" if name == "adapted" else name
    if name == "mixtral":
        model = cases()["mixtral, experts without tokens"].build()
    else:
        own = {"dropping": Dropping, "noisy": Noisy}
        model = own[name]() if name in own else build(kind, seed, **SIZES.get(name, {}))
    if name == "adapted":
        for path, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in path)
            if seed == 0:  # what rank 0 has is whole in bf16, and what others have is not
                parameter.data = parameter.data.bfloat16().float()
    if name == "gpt2":
        model.transformer.h[0].requires_grad_(False)  # type: ignore[operator, union-attr]
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    return megacompile.compile(model, budget, optimizer=optimizer, device="cpu", **options)


def batches(name: str, step: int, ranks: range, micro: int = 1) -> list[dict[str, Any]]:
    """The micro-batches of some ranks in a step, those of all ranks taking turns."""
    size = ranks.stop
    return [
        batch_for("plain" if name in PLAIN else name, 100 * step + m * size + r, **LENGTHS.get(name, {}))
        for m in range(micro)
        for r in ranks
    ]


def facts(program: Program, losses: list[Tensor], norms: list[Any], folder: Path) -> dict[str, Any]:
    program.save(folder)
    memory = program.memory
    return {
        "losses": losses,
        "norms": norms,
        "peak": memory.device_peak_bytes,
        "predicted": memory.predicted_peak_bytes,
        "host": memory.host_bytes["masters"] + memory.host_bytes["moments"],
        "source": program.source,
    }


def train(
    rank: int, size: int, names: list[str], folder: Path, micro: int = 1, **options: Any
) -> dict[str, Any]:
    """On one rank; of one process, which is given all ranks' micro-batches, ``rank`` is -1."""
    found = {}
    for name in names:
        model, case = CASES[name]
        piece = 1000 if name == "in small pieces" else collectives.PIECE_BYTES
        with (
            mock.patch.object(collectives, "PIECE_BYTES", piece),
            compiled(model, case | options, seed=max(0, rank)) as program,  # rank 0's values count
        ):
            losses, norms = [], []
            for step in range(STEPS):
                ranks = range(size) if rank < 0 else range(rank, size, size)
                out = program.train_step(batches(model, step, ranks, micro))
                losses.append(torch.stack([out.loss, *out.losses]))
                norms.append(out.grad_norm)
            found[name] = facts(program, losses, norms, folder / name)
    return found


class Run:
    """The cases on several ranks and in one process."""

    def __init__(self, size: int, names: list[str], folder: Path, micro: int = 1) -> None:
        self.size = size
        self.ranks = whole(run_ranks(size, train, size, names, folder / "ranks", micro))
        self.one = train(-1, size, names, folder / "one", micro)
        self.state = {n: (saved(folder / "ranks" / n), saved(folder / "one" / n)) for n in names}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    names = [
        "plain",
        "llama in bf16",
        "in small pieces",
        "in 8 bits",
        "in 4 bits",
        "clipped",
        "never clipped",
    ]
    names += ["state on devices", "some on devices", "clipped on devices", "never clipped on devices"]
    names += ["frozen in bf16", "noise of NumPy"]
    return Run(2, names, tmp_path_factory.mktemp("two"))


def test_masters_and_moments_are_bitwise_those_of_one_process(two: Run) -> None:
    for name in two.state.keys() - {"clipped", "clipped on devices"}:
        ranks, one = two.state[name]
        assert ranks.keys() == one.keys()
        assert [n for n in one if not torch.equal(ranks[n], one[n])] == [], name


def test_losses_are_those_of_all_ranks_on_each_of_them(two: Run) -> None:
    """Where they clip, up to the rounding of the norm by which the weights of later steps were updated."""
    for name, one in two.one.items():
        first, *others = ([*rank[name]["losses"]] for rank in two.ranks)
        assert all(all(map(torch.equal, first, other)) for other in others), name
        if name in ("clipped", "clipped on devices"):
            assert torch.equal(first[0], one["losses"][0])
            torch.testing.assert_close(first, [*one["losses"]], rtol=1e-6, atol=0)
        else:
            assert all(map(torch.equal, first, one["losses"])), name


@pytest.mark.parametrize("case", ["clipped", "clipped on devices"])
def test_every_rank_clips_by_one_norm(case: str, two: Run) -> None:
    first, second = (rank[case]["norms"] for rank in two.ranks)
    assert all(map(torch.equal, first, second))
    assert all(n > 0.1 for n in first)
    torch.testing.assert_close(first, two.one[case]["norms"], rtol=1e-6, atol=0)
    ranks, one = two.state[case]
    for name in one:
        torch.testing.assert_close(ranks[name], one[name], rtol=1e-4, atol=1e-6)


def test_each_rank_keeps_its_predicted_peak_and_its_share_of_the_state(two: Run) -> None:
    for name, one in two.one.items():
        shares = [rank[name]["host"] for rank in two.ranks]
        padding = 12 * 512 * 20  # 256 elements of each rank in a group
        assert one["host"] <= sum(shares) <= one["host"] + padding, name
        assert len(set(shares)) == 1
        for rank in two.ranks:
            assert rank[name]["peak"] == rank[name]["predicted"], name
            assert rank[name]["source"] == two.ranks[0][name]["source"]


def test_state_on_the_devices_needs_no_link(two: Run) -> None:
    source = two.ranks[0]["state on devices"]["source"]
    assert "rt.add_shard(" in source and "rt.push_shard(" not in source
    mixed = two.ranks[0]["some on devices"]["source"]
    assert "rt.add_shard(" in mixed and "rt.push_shard(" in mixed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "name"),
    [
        (3, "dropout in bf16"),
        (4, "dropout in bf16"),
        (3, "llama in bf16"),
        (3, "gpt2 with dropout"),
        (2, "llama"),
        (2, "experts"),
        (3, "in 4 bits"),
        (3, "in 8 bits"),
    ],
)
def test_more_ranks_and_models_are_bitwise_one_process(size: int, name: str, tmp_path: Path) -> None:
    ranks, one = Run(size, [name], tmp_path).state[name]
    assert [n for n in one if not torch.equal(ranks[n], one[n])] == []


def summed_over_ranks_first(size: int, micro: int) -> dict[str, Tensor]:
    """What plain PyTorch makes of a gradient that is summed over ranks, then over their micro-batches."""
    model = build("plain")
    eager = EagerTrainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in range(STEPS):
        given = batches("plain", step, range(size), micro)
        sums: dict[str, Tensor] = {}
        for m in range(micro):
            eager.backward(given[m * size : (m + 1) * size], [1 / len(given)] * size)
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                sums[name] = parameter.grad if m == 0 else sums[name] + parameter.grad
                parameter.grad = None
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name]
        eager.update()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_micro_batches_are_summed_over_ranks_first(tmp_path: Path) -> None:
    """Within rounding of one process, and bitwise what plain PyTorch gives in that order."""
    run, expected = Run(2, ["plain", "some on devices"], tmp_path, micro=2), summed_over_ranks_first(2, 2)
    for case, (ranks, one) in run.state.items():
        for name in one:
            torch.testing.assert_close(ranks[name], one[name], rtol=1e-4, atol=1e-5)
        for name, value in expected.items():
            assert torch.equal(ranks[f"{name}/weights"], value.reshape(-1)), name
        for rank in run.ranks:
            torch.testing.assert_close(rank[case]["losses"], run.one[case]["losses"])
            assert rank[case]["peak"] == rank[case]["predicted"]


def resume(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Go on from a checkpoint of one process, and give all that can be given."""
    first, second = batches("plain", 7, range(max(0, rank), size, size)), batches("plain", 8, range(size))
    options = CASES["some on devices"][1] if rank >= 0 else FP32
    with compiled("plain", options, seed=3 + rank) as program:
        program.prepare(first if rank >= 0 else second)
        program.load(folder / "one" / "plain")
        if rank < 0:
            first = batches("plain", 7, range(size))
        out = program.train_step(first)
        name = "ranks" if rank >= 0 else "one"
        program.save(folder / f"resumed {name}", wait=False)
        program.synchronize()
        program.export(folder / f"exported {name}", torch.float32)
        values = program.state_dict()
        evaluated = program.evaluate(second[max(0, rank)])
        other = build("plain", 6)
        program.sync_to(other)
        program.load_state_dict({n: v + 1 + rank for n, v in plain_values(rank).items()})
        return {
            "loss": out.loss,
            "values": values,
            "synced": other.state_dict(),
            "evaluated": evaluated,
            "loaded": program.state_dict(),
            "calls": program.train_step(first).losses,
        }


def plain_values(rank: int) -> dict[str, Tensor]:
    return build("plain", 5).state_dict()


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(-1, 3, ["plain"], folder / "one")
    ranks, one = whole(run_ranks(3, resume, 3, folder)), resume(-1, 3, folder)
    resumed = saved(folder / "resumed ranks"), saved(folder / "resumed one")
    assert [n for n in resumed[1] if not torch.equal(resumed[0][n], resumed[1][n])] == []
    exported = saved(folder / "exported ranks"), saved(folder / "exported one")
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(exported[0][n], exported[1][n]) for n in exported[1])
    assert all(torch.equal(rank["synced"][n], v) for rank in ranks for n, v in one["values"].items())
    assert [sorted(rank["values"]) for rank in ranks] == [sorted(one["values"]), [], []]
    assert all(torch.equal(ranks[0]["values"][n], v) for n, v in one["values"].items())
    assert all(torch.equal(ranks[0]["loaded"][n], v + 1) for n, v in plain_values(0).items())
    assert torch.equal(ranks[0]["evaluated"], one["evaluated"])
    assert len({float(rank["evaluated"]) for rank in ranks}) == 3


@pytest.mark.slow
def test_a_tied_table_is_that_of_one_process_within_rounding(tmp_path: Path) -> None:
    """Its two contributions are added in another order; a frozen block has no gradient at all."""
    run = Run(2, ["tied and frozen"], tmp_path)
    ranks, one = run.state["tied and frozen"]
    assert ranks.keys() == one.keys()
    for name in one:
        torch.testing.assert_close(ranks[name], one[name], rtol=1e-3, atol=2e-6)
    for rank in run.ranks:
        torch.testing.assert_close(rank["tied and frozen"]["losses"], run.one["tied and frozen"]["losses"])


def in_chunks(rank: int, size: int) -> dict[str, Any]:
    """Steps and losses of sequences that do not fit whole."""
    ranks = range(size) if rank < 0 else range(rank, size, size)
    given = [[batch_for("llama", 10 * step + r, size=1, length=LONG) for r in ranks] for step in range(STEPS)]
    with mock.patch.object(frontend, "CHUNKS", ()), pytest.raises(megacompile.BudgetError) as caught:
        compiled("llama", FP32, budget="100B").prepare(given[0])
    assert caught.value.least_bytes is not None
    budget = f"{int(0.8 * caught.value.least_bytes)}B"
    with (
        mock.patch.object(frontend, "CHUNKS", (60,)),
        compiled("llama", FP32, seed=max(0, rank), budget=budget) as program,
    ):
        return {
            "losses": [torch.stack(list(program.train_step(micro).losses)) for micro in given],
            "evaluated": [program.evaluate(one) for one in given[0]],
            "loops": program.schedule.work.loops,
            "source": program.source,
        }


def test_long_sequences_are_in_the_chunks_that_the_first_rank_chose() -> None:
    ranks, one = whole(run_ranks(2, in_chunks, 2)), in_chunks(-1, 2)
    assert one["loops"] == (LONG, 60)
    for number, rank in enumerate(ranks):
        assert rank["loops"] == one["loops"] and rank["source"] == ranks[0]["source"]
        assert all(map(torch.equal, rank["losses"], one["losses"]))
        assert torch.equal(rank["evaluated"][0], one["evaluated"][number])


def outside(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Steps whose loss is computed by torch, one of them not finite on the last rank; then a prediction."""
    ranks = range(size) if rank < 0 else range(rank, size, size)
    options = FP32 | {"planner": partly_on_devices} if rank >= 0 else FP32
    with compiled("llama", options, seed=max(0, rank)) as program:

        def step(number: int, factor: float = 1.0) -> Tensor:
            micro = batches("llama", number, ranks)
            return program.train_step(micro, loss=lambda i, out: out.logits.square().mean() * factor).loss

        losses = [step(number) for number in range(2)]
        if rank >= 0:
            with raising(megacompile.NonFiniteError, "The losses of the ranks are", "inf"):
                step(2, math.inf if rank == size - 1 else 1.0)
        losses.append(step(3))
        program.save(folder / ("ranks" if rank >= 0 else "one"))
        return {
            "losses": losses,
            "predicted": [program.predict(b).logits for b in batches("llama", 5, ranks)],
        }


def by_hand(rank: int, size: int, folder: Path) -> list[Tensor]:
    """Updates by hand, then a step of micro-batches of two shapes."""
    ranks, found = range(size) if rank < 0 else range(rank, size, size), []
    options = CASES["some on devices"][1] if rank >= 0 else FP32
    with compiled("plain", options, seed=max(0, rank)) as program:
        with raising(megacompile.ProgramError, "No gradient is waiting"):
            program.optimizer_step()
        everywhere = ([0, 1], megacompile.ProgramError, "No gradient is waiting")
        on_one = ([0], megacompile.MegacompileError, "Rank 0 called zero_grad")  # which all ranks hear
        for drops, kind, said in (everywhere, on_one) if rank >= 0 else ():
            program.forward_backward(batches("plain", 7, ranks))
            if rank in drops:
                program.model.zero_grad()
            with raising(kind, said):
                program.optimizer_step()
            program.drop_gradients()
        for step in range(2):
            out = program.forward_backward(batches("plain", step, ranks), weight=1 / size)
            found.append(torch.stack([out.loss, *out.losses]))
            program.optimizer_step()
        shapes = [batch_for("plain", seed=90 + r + n, size=n) for n in (3, 4) for r in ranks]
        found.append(torch.stack(program.train_step(shapes).losses))
        program.save(folder / ("ranks" if rank >= 0 else "one"))
    return found


@pytest.mark.slow
def test_updates_by_hand_and_several_shapes_are_those_of_one_process(tmp_path: Path) -> None:
    """Within rounding where each rank has several micro-batches, as in the last step."""
    ranks, one = whole(run_ranks(2, by_hand, 2, tmp_path)), by_hand(-1, 2, tmp_path)
    for rank in ranks:
        assert all(map(torch.equal, rank[:2], one[:2]))
        torch.testing.assert_close(rank[2], one[2])
    found = saved(tmp_path / "ranks")
    for name, value in saved(tmp_path / "one").items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_losses_outside_and_predictions_are_those_of_one_process(tmp_path: Path) -> None:
    """A loss that is not finite on one rank keeps all from updating, and they go on."""
    ranks, one = whole(run_ranks(2, outside, 2, tmp_path)), outside(-1, 2, tmp_path)
    assert [
        n for n, v in saved(tmp_path / "one").items() if not torch.equal(v, saved(tmp_path / "ranks")[n])
    ] == []
    for number, rank in enumerate(ranks):
        assert rank["losses"] == one["losses"]
        assert torch.equal(rank["predicted"][0], one["predicted"][number])
