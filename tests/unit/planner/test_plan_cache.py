"""Plans kept between runs: a second search tries nothing, and what is kept decides nothing wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megacompile.hardware.machine import Machine
from megacompile.planner import plan_cache as cache
from megacompile.planner import search as search_module
from megacompile.planner.plan_evaluator import Planned
from megacompile.planner.search import search
from megacompile.schedule.plan import Mode
from tests.support.problems import chain

MACHINE = Machine("made up", 1000.0, 1000.0, 500.0, 500.0, 2000.0)
TRAIN, CLIPPED = Mode("train"), Mode("train", deferred=True)
WORK, BUDGET = chain(6), 6000


@pytest.fixture(autouse=True)
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of plans, empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "megacompile" / "plans"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The searches that try any plan."""
    found: list[object] = []
    run = search_module._try_starts

    def counted(candidates: object, also: object) -> None:
        found.append(candidates)
        run(candidates, also)  # type: ignore[arg-type]

    monkeypatch.setattr(search_module, "_try_starts", counted)
    yield found


def find(budget: int = BUDGET, mode: Mode = TRAIN, machine: Machine = MACHINE) -> Planned:
    return search(WORK, mode, machine, budget)


def test_the_second_search_tries_nothing_and_finds_the_same(searches: list[object]) -> None:
    first, second = find(), find()
    assert len(searches) == 1
    assert first == second and first.step == second.step and first.timeline == second.timeline


def test_what_a_search_depends_on_searches_again(searches: list[object]) -> None:
    find()
    find(BUDGET + 1)
    find(mode=CLIPPED)
    find(machine=replace(MACHINE, flops=2000.0))
    search(WORK, TRAIN, MACHINE, BUDGET, host_budget=10**6)
    search(WORK, TRAIN, MACHINE, BUDGET, residents=(0,))
    for name in ("state_bytes", "update_moved", "update_flops"):  # those of other optimizers
        groups = tuple(replace(g, **{name: getattr(g, name) + 8}) for g in WORK.groups)
        search(replace(WORK, groups=groups), TRAIN, MACHINE, BUDGET)
    assert len(searches) == 9


def test_other_code_searches_again(searches: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    find()
    monkeypatch.setattr(cache, "_code", lambda: "another version")
    find()
    assert len(searches) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "binary", "gone"])
def test_a_damaged_file_is_as_none(damage: str, searches: list[object], plans: Path) -> None:
    first = find()
    (file,) = plans.iterdir()
    text = file.read_text()
    if damage == "gone":
        file.unlink()
    elif damage == "binary":
        file.write_bytes(b"\xff\x00" * 100)
    else:
        file.write_text({"cut": text[:-9], "empty": "", "changed": text.replace("stream", "step", 1)}[damage])
    assert find() == first and len(searches) == 2
    assert file.read_text() == text  # written anew


def test_a_plan_that_does_not_fit_is_not_taken(searches: list[object], plans: Path) -> None:
    roomy = find(10**9)
    find()
    (file,) = (f for f in plans.iterdir() if cache.read(f) != roomy.plan)
    cache.write(file, roomy.plan)
    assert find().peak_bytes <= BUDGET and len(searches) == 3


def test_the_newest_files_stay(plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST", 3)
    for budget in range(BUDGET, BUDGET + 5):
        find(budget)
    assert len(list(plans.iterdir())) == 3


def test_where_nothing_can_be_written_searches_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert find() == find()


def test_a_folder_that_others_may_write_to_is_not_read(plans: Path, searches: list[object]) -> None:
    budget = BUDGET + 9  # of no other test: what is found without a cache stays with the process
    first = find(budget)
    plans.parent.chmod(0o777)
    with pytest.warns(UserWarning, match="may be written to by others"):
        second = find(budget)
    assert len(searches) == 2 and first == second
    assert find(budget) == first and len(searches) == 2, "this process keeps its own"


def test_an_interrupted_search_is_not_kept(monkeypatch: pytest.MonkeyPatch, plans: Path) -> None:
    run = search_module._try_starts

    def interrupted(candidates: object, also: object) -> None:
        run(candidates, also)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(search_module, "_try_starts", interrupted)
    assert find().peak_bytes <= BUDGET and not plans.exists()
