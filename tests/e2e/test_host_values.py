"""Forwards that read values of their batch: what comes from the batch alone is read on the host."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.api.frontend import Frontend
from megacompile.errors import CaptureError

LENGTHS = [[2, 4], [3, 3], [2, 4], [4, 2]]


class Splits(nn.Module):
    """Parts of a row, whose lengths are in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        parts = torch.split(self.linear(x), self.sizes(lengths))
        return torch.stack([part.mean(0) for part in parts]).square().sum()

    def sizes(self, lengths: Tensor) -> Any:
        return lengths.tolist()


class WrittenSizes(Splits):
    """Sizes in memory that is written to after it was read, and through a view."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        counts = torch.zeros(3, dtype=torch.int64)
        before, view = counts + 1, counts[1:]
        view.copy_(lengths)
        counts[0] += before.sum() - 3
        return super().forward(x, counts[counts > 0])


class Numbers(Splits):
    """Sizes and places that are numbers in tensors, in slices, views and branches."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        first, total = lengths[0], lengths.sum()
        hidden = self.linear(x).view(total, 4)
        if first > 2:
            hidden = hidden * 2
        return (hidden[:first].mean(0) + hidden[first:].mean(0) + hidden[first]).square().sum()


class Selects(nn.Module):
    """Hidden states where a token stands, read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(10, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, chosen = self.embed(ids), ids == 7
        other = hidden.clone()
        other[chosen] = self.linear(hidden[chosen])
        return (hidden + other[:, 0:1]).square().sum() + other.sum()


class Puts(Selects):
    """What is computed, put where a token stands: only its gradient needs to know how often."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        hidden[ids == 7] = self.linear(self.embed.weight[:2])
        return hidden.square().sum()


class Places(nn.Module):
    """Positions by groups of alike tokens, in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(10, 4), nn.Embedding(10, 4)

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        return (self.embed(ids) * self.place(self.places(kinds))).square().sum()

    def places(self, kinds: Tensor) -> Tensor:
        rows = []
        for row in kinds.tolist():
            groups = [len(list(group)) for _, group in itertools.groupby(row)]
            rows.append([n for n, size in enumerate(groups) for _ in range(size)])
        return torch.tensor(rows)


def trained(model: nn.Module, batches: list[Any]) -> int:
    """Train as eager does, whose losses and weights must come out; return the number of programs."""
    eager = copy.deepcopy(model)
    ours, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager))
    options: dict[str, Any] = {"optimizer": ours, "compute_dtype": torch.float32, "device": "cpu"}
    program = megacompile.compile(model, "1GB", **options)
    for batch in batches:
        micro = batch if isinstance(batch, list) else [batch]
        plain.zero_grad()
        losses = [eager(**each) / len(micro) for each in micro]
        sum(losses).backward()  # type: ignore[union-attr]
        plain.step()
        wanted = sum(loss.item() for loss in losses)
        assert program.train_step(batch).loss.item() == pytest.approx(wanted, rel=1e-6)
    state = program.state_dict()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    found = len(program._session.decided.programs)
    program.close()
    return found


def split_batches(sizes: list[list[int]]) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(6, 4, generator=draw), "lengths": torch.tensor(n)} for n in sizes]


@pytest.mark.slow_cases(r"WrittenSizes")
@pytest.mark.filterwarnings("ignore:Compiling another program")
@pytest.mark.parametrize("kind", [Splits, WrittenSizes, Numbers])
def test_each_of_the_values_that_decide_shapes_has_a_program(kind: type[nn.Module]) -> None:
    assert trained(kind(), split_batches(LENGTHS)) == 3


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_micro_batches_of_other_values_are_of_other_programs() -> None:
    one, two, three, four = split_batches(LENGTHS)
    trained(Splits(), [[one, two], [three, four]])


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_places_of_tokens_are_inputs_and_their_number_is_the_program_s() -> None:
    rows = ([[1, 7, 7], [2, 3, 4]], [[7, 2, 1], [5, 7, 4]], [[7, 2, 1], [7, 7, 4]])
    assert trained(Selects(), [{"ids": torch.tensor(ids)} for ids in rows]) == 2
    assert trained(Puts(), [{"ids": torch.tensor(ids)} for ids in rows[:2]]) == 1


def test_a_function_of_the_batch_alone_runs_as_it_is() -> None:
    """Its result is an input of one program, whatever it read."""
    kinds = [[[0, 0, 1, 0], [1, 1, 1, 1]], [[0, 1, 1, 0], [0, 1, 0, 1]], [[1, 1, 0, 0], [0, 0, 0, 0]]]
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert (
        trained(Places(), [{"ids": (ids + i) % 10, "kinds": torch.tensor(k)} for i, k in enumerate(kinds)])
        == 1
    )


class Rejoins(Splits):
    """Parts that are put together again, so that their lengths do not matter."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        parts = torch.split(self.linear(x), self.sizes(lengths))
        return (torch.cat(parts) * torch.arange(6)[:, None]).square().sum()


class RejoinsAndReads(Rejoins):
    """Pieces that are put together again, and looked at too."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        sizes = self.sizes(lengths)
        parts = torch.split(self.linear(x), sizes)
        longer = [1] + sizes  # noqa: RUF005  # read by no method of its own
        return (torch.cat(parts) * torch.arange(6)[:, None]).square().sum() * longer[1] + parts[0].sum()


def captures(model: nn.Module, batches: list[Any]) -> tuple[int, int]:
    """Train as eager does; return the number of programs, and how many times the forward was captured."""
    with pytest.MonkeyPatch.context() as patch:
        theirs, count = Frontend._captured, []
        patch.setattr(Frontend, "_captured", lambda *args: count.append(1) or theirs(*args))
        programs = trained(model, batches)
    return programs, len(count)


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_sizes_that_nothing_reads_need_no_capture_and_no_program_of_their_own() -> None:
    assert captures(Rejoins(), split_batches(LENGTHS)) == (1, 1)
    assert captures(RejoinsAndReads(), split_batches(LENGTHS))[1] == 3


def test_sizes_that_do_not_fit_are_refused() -> None:
    program = compiled(Rejoins())
    good, bad = split_batches([[2, 4], [2, 3]])
    program.train_step(good)
    with pytest.raises(CaptureError, match="split"):
        program.train_step(bad)
    program.close()


def compiled(model: nn.Module) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, device="cpu")


@pytest.mark.filterwarnings("ignore:Compiling another program")
def test_checks_of_a_batch_are_made_for_each() -> None:
    class Checks(Splits):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            if (lengths > 4).any():
                raise IndexError("a part is too long")
            return super().forward(x, lengths)

    program = compiled(Checks())
    good, bad = split_batches([[2, 4], [1, 5]])
    program.train_step(good)
    with pytest.raises(CaptureError, match=r"test_host_values\.py:\d+ .*a part is too long"):
        program.train_step(bad)
    program.train_step(good)
    program.close()


def test_evaluates_and_predicts() -> None:
    model = Splits()
    (batch,) = split_batches([[2, 4]])
    wanted = float(model(**batch).detach())
    program = compiled(model)
    assert float(program.evaluate(batch)) == pytest.approx(wanted, rel=1e-6)
    assert float(program.predict(batch)) == pytest.approx(wanted, rel=1e-6)
    program.close()


class OfActivations(Splits):
    def sizes(self, lengths: Tensor) -> Any:
        return [int(self.linear.weight.sum()), 2]


class Draws(Splits):
    def sizes(self, lengths: Tensor) -> Any:
        return [2 + int(torch.randint(0, 2, ())), 4]


class Counts(Splits):
    def sizes(self, lengths: Tensor) -> Any:
        self.calls += 1
        return [1 + self.calls, 5 - self.calls] if lengths.tolist() else []


class Keeps(Splits):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        self.keep(lengths)
        return self.linear(x).sum() * self.kept.sum()

    def keep(self, lengths: Tensor) -> None:
        self.kept = torch.tensor([float(n) for n in lengths.tolist()])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OfActivations, r"test_host_values\.py:\d+ "),
        (Draws, "draws random numbers on which shapes or branches depend"),
        (Counts, "changes calls, and what it computes with it"),
        (Keeps, "keeps a tensor that it made of the batch"),
    ],
)
def test_what_is_not_of_the_batch_alone_is_refused(kind: type[nn.Module], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        compiled(kind()).train_step(split_batches([[2, 4]])[0])
