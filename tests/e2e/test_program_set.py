"""Programs of a run, planned together before anything is allocated: they fit, or one least is named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import megacompile
from megacompile.api.pipeline import Compiler
from megacompile.api.program import Program
from megacompile.units import format_bytes
from tests.support.models import batch_for, build
from tests.support.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")

pytestmark = pytest.mark.filterwarnings("ignore:Compiling another program")
VOCABULARY = 8192  # of a head that is most of the model


def large_head() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=VOCABULARY,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def of_rows(count: int, vocabulary: int = VOCABULARY, length: int = 8) -> dict[str, Tensor]:
    ids = torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(count))
    return {"input_ids": ids, "labels": ids}


def compiled(budget: int | str, model: Any = None, **options: Any) -> Program:
    model = model or large_head()
    budget = f"{budget}B" if isinstance(budget, int) else budget
    return megacompile.compile(
        model, optimizer=torch.optim.AdamW(model.parameters()), hbm_budget=budget, device="cpu",
        compute_dtype=torch.float32, **{"max_grad_norm": None} | options,
    )  # fmt: skip


def calls(program: Program, held_out: int = 8) -> dict[str, Callable[[], object]]:
    return {
        "training": lambda: program.prepare(of_rows(1)),
        "evaluation": lambda: program.evaluate(of_rows(held_out)),
    }


def test_no_other_thread_runs_anything_while_programs_are_planned() -> None:
    program = compiled("1GB", build("plain"))
    taken = []

    def other() -> None:
        taken.append(program._session.lock.acquire(blocking=False))

    def prepare() -> None:
        program.prepare(batch_for("plain"))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    program.plan_all({"training": prepare})
    assert taken == [False]
    program.close()


def least_of(budget: int | str, held_out: int = 8) -> int:
    program = compiled(budget)
    with pytest.raises(megacompile.BudgetError, match="the least that suffices for all of") as refused:
        program.plan_all(calls(program, held_out))
    assert refused.value.least_bytes is not None
    assert str(refused.value).count(str(refused.value.least_bytes)) == 1
    return refused.value.least_bytes


def test_the_least_budget_of_all_is_one_that_suffices_and_no_less() -> None:
    least = least_of("100kB")
    assert least_of(least * 99 // 100) == least_of(least - 1) == least
    program = compiled(least)
    programs = dict(program.plan_all(calls(program)))
    assert list(programs) == ["training", "evaluation"] and program.memory.host_bytes == {}
    program.prepare(of_rows(1))
    loss = program.train_step(of_rows(1)).loss
    plain = large_head()
    assert float(loss) == pytest.approx(plain(**of_rows(1)).loss.item(), rel=1e-6)
    program.evaluate(of_rows(8))
    assert program.memory.device_peak_bytes == max(s.peak_bytes for s in programs.values()) == least


@pytest.mark.slow
def test_the_program_that_needs_most_decides_how_far_weights_are_cut() -> None:
    """A budget in which training by itself would leave the head whole, and evaluation needs it in pieces."""
    budget = 2 * least_of("100kB")
    by_turns = compiled(budget)
    by_turns.prepare(of_rows(1))
    with pytest.raises(megacompile.BudgetError, match="How far weights are cut was decided"):
        by_turns.evaluate(of_rows(8))
    program = compiled(budget)
    program.plan_all(calls(program))
    program.prepare(of_rows(1))
    loss = program.evaluate(of_rows(8))
    assert float(loss) == pytest.approx(large_head()(**of_rows(8)).loss.item(), rel=1e-6)
    assert program.memory.device_peak_bytes <= budget


def test_what_was_planned_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And sources are those of programs that were planned when their turn came."""
    planned, plan = [], Compiler.plan

    def noting(self: Compiler, *given: Any) -> Any:
        planned.append(given)
        return plan(self, *given)

    monkeypatch.setattr(Compiler, "plan", noting)
    whole, short, held_out = (batch_for("plain", size=size) for size in (4, 2, 3))
    batches = [[whole] * 2, [whole, short]]  # the end of an epoch
    sources = []
    for ahead in (False, True):
        program = compiled("150kB", build("plain"), max_grad_norm=1.0)
        if ahead:
            program.plan_all(
                {
                    "training": lambda program=program: program.prepare(batches[0]),
                    "the end": lambda program=program: program.prepare(batches[1]),
                    "evaluation": lambda program=program: program.evaluate(held_out),
                }
            )
        planned.clear()
        for batch in batches:
            program.train_step(batch)
        program.evaluate(held_out)
        programs = program._session.decided.programs.values()
        sources.append(sorted(s.source for s in programs))
    assert sources[0] == sources[1] and len(sources[0]) == 5 and planned == []


def test_a_host_without_room_is_told_of_too() -> None:
    """Before anything is allocated, in the words of a training that begins."""
    said = []
    for ahead in (True, False):
        program = compiled("300kB", build("llama", layers=2), host_budget="400kB")  # 356 kB of state
        first = {"training": lambda program=program: program.prepare(of_rows(4, 60))}
        with pytest.raises(
            megacompile.BudgetError, match=r"host_budget=400 kB is too small: masters"
        ) as error:
            program.plan_all(first) if ahead else first["training"]()
        said.append(str(error.value))
    assert said[0] == said[1]


def refused(rank: int) -> tuple[str, int | None]:
    program = compiled("10kB", build("llama", layers=2))
    with pytest.raises(megacompile.BudgetError) as error:
        program.plan_all(
            {
                "training": lambda: program.prepare(of_rows(1, 60)),
                "evaluation": lambda: program.evaluate(of_rows(16, 60)),
            }
        )
    return str(error.value), error.value.least_bytes


@pytest.mark.slow
def test_all_ranks_are_refused_alike() -> None:
    (one, least), (other, same) = run_ranks(2, refused)
    assert one == other and least == same is not None and "the least that suffices" in one


def test_what_never_ran_is_planned_again_where_the_device_has_less_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = compiled("1GB", build("llama", layers=2))
    program.plan_all(
        {
            "training": lambda: program.prepare(of_rows(2, 60)),
            "more rows": lambda: program.prepare(of_rows(4, 60)),
        }
    )
    program.train_step(of_rows(2, 60))
    session = program._session
    ran, _ = before = list(session.decided.programs.values())
    less = session.decided.room.less()
    monkeypatch.setattr(session, "_shorter_room", lambda: less)
    program.evaluate(of_rows(2, 60))
    assert [known in before for known in session.decided.programs.values()] == [True, False]
    program.train_step(of_rows(4, 60))
    kept, _, again = session.decided.programs.values()
    assert kept is ran and again.source == before[1].source.replace("1 GB", format_bytes(less.budget_bytes))
