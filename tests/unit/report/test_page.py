"""The page of a schedule: its structure without a browser, and its behaviour in a headless Chromium.

Where no Chromium is installed the second part is skipped; ``apt-get install chromium`` brings one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megacompile.errors import MegacompileError
from megacompile.hardware.catalog import PROFILES
from megacompile.hardware.measured_step import align
from megacompile.json_codec import sealed
from megacompile.report import schedule as schedules
from megacompile.report.schedule import Schedule
from megacompile.report.schedule_page import page_data, render_page
from megacompile.schedule.op_table import SPECS
from megacompile.schedule.plan import BlockPlan, GroupPlan, Mode, Plan
from tests.support.browser import Browser, find_browser, texts
from tests.support.problems import chain

MEGA = 10**6


def schedule_of(layers: int, micro_batches: int, *, title: str = "A chain.") -> Schedule:
    """A chain with the sizes of a large model, planned by hand so that every kind of operation occurs."""
    work = chain(layers)
    blocks = tuple(
        replace(b, name=f"model.layers.{i}", policies=tuple(_enlarged(c) for c in b.policies))
        for i, b in enumerate(work.blocks)
    )
    groups = tuple(
        replace(g, name=f"model.layers.{i}", nbytes=g.nbytes * MEGA, elements=g.elements * MEGA)
        for i, g in enumerate(work.groups)
    )
    values = tuple(replace(v, nbytes=v.nbytes * MEGA) for v in work.values)
    plan = Plan(
        tuple(
            BlockPlan("all" if i % 3 else "none", "host" if i < layers // 2 else "device")
            for i in range(layers)
        ),
        (GroupPlan("stream", 2),) * len(groups),
    )
    work = replace(work, blocks=blocks, groups=groups, values=values)
    mode = Mode("train", micro_batches, deferred=True)
    return Schedule(title, work, plan, mode, PROFILES["h100-pcie"].machine, 80 * 10**9, tokens=8192)


def test_every_kind_of_operation_has_a_colour_in_both_themes() -> None:
    styles = (Path(schedules.__file__).parent / "page.css").read_text()
    for kind in SPECS:
        assert len(re.findall(rf"--{kind}: #", styles)) == 2, kind


def _enlarged(policy: Any) -> Any:
    def call(given: Any) -> Any:
        return given and replace(
            given, peak_bytes=given.peak_bytes * MEGA, end_bytes=given.end_bytes * MEGA, flops=10**12
        )

    return replace(
        policy, forward=call(policy.forward), recompute=call(policy.recompute),
        backward=call(policy.backward), saved_bytes=policy.saved_bytes * MEGA,
    )  # fmt: skip


def with_run(schedule: Schedule) -> Schedule:
    """The schedule with a run in which everything took twice as long as predicted, from second 100 on."""
    trace = [
        (op.event, 100 + 2 * start, 100 + 2 * end)
        for op, start, end in zip(
            schedule.step.ops, schedule.timeline.starts, schedule.timeline.ends, strict=True
        )
    ]
    return replace(schedule, measured=align(schedule.step, trace))


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.names: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.names.append(tag)
        self.ids |= {i for i in [given.get("id")] if i}
        self.links += [v for k in ("src", "href", "action") if (v := given.get(k))]


def test_the_page_is_one_file_and_names_nothing_outside_itself() -> None:
    page = render_page(with_run(schedule_of(6, 1)))
    tags = _Tags()
    tags.feed(page)
    assert {"stage", "lines", "facts", "detail", "plan", "estimates", "search", "data"} <= tags.ids
    assert tags.links == ["data:,"]
    assert "default-src 'none'" in page, "the browser itself refuses to load anything"
    assert not re.search(r"https?://|@import|url\(|\bfetch\(|XMLHttp|WebSocket", page)
    assert not re.search(r"/\*(style|script|data)\*/", page)


def test_names_of_a_model_cannot_become_markup() -> None:
    schedule = schedule_of(3, 1, title="</script><script>alert(1)</script>")
    page = render_page(schedule)
    assert page.count("</script>") == 2 and "alert(1)<" not in page
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["title"] == schedule.title


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_operation_points_to_its_own_line(micro_batches: int) -> None:
    schedule = schedule_of(9, micro_batches)
    data = page_data(schedule)
    ops, source = data["ops"], data["source"]
    for index, op in enumerate(schedule.step.ops):
        line, turn = source[ops["line"][index] - 1], ops["turn"][index]
        assert f"rt.{op.kind}(" in line
        for field, value in (("block", op.block), ("group", op.group)):
            found = re.search(rf"[( ]{field}=([^,)]+)", line)
            if found and value >= 0:
                assert eval(found.group(1), {"i": turn}) == value, line
    runs = {number for number, text in enumerate(source, 1) if text.strip().startswith("rt.")}
    assert set(ops["line"]) == runs


def test_the_columns_say_what_the_step_says() -> None:
    schedule = with_run(schedule_of(6, 2))
    data, step = page_data(schedule), schedule.step
    ops, count = data["ops"], len(step.ops)
    assert all(len(column) == count for column in ops.values())
    assert max(total for _, total in data["memory"]) == data["peak"] == schedule.peak_bytes
    assert data["stepSeconds"] == pytest.approx(
        max(
            e
            for e, s in zip(ops["end"], ops["stream"], strict=True)
            if data["streams"][s]["name"] == "compute"
        )
    )
    for index, waits in enumerate(ops["waits"]):
        named = [step.ops[w if w >= 0 else ~w].event for w in waits]
        assert named == [e for e in step.ops[index].waits if e in {op.event for op in step.ops}]
        assert all(w < index for w in waits)
    covered = sorted(b for _, _, members, _ in data["plan"]["rows"] for b in members)
    assert covered == list(range(6))
    ratios = [row[3] / row[2] for row in data["measured"]["rows"] if row[2]]
    assert ratios == pytest.approx([2.0] * len(ratios)) and len(ratios) > 5


def test_its_weight_slots_are_those_of_the_printed_schedule() -> None:
    schedule = schedule_of(6, 1)
    plan = replace(schedule.plan, groups=(GroupPlan(state="device"), *schedule.plan.groups[1:]))
    schedule = replace(schedule, plan=plan)
    data, printed = page_data(schedule), str(schedule)
    assert data["slots"] and data["stays"] > schedule.work.constant_bytes
    for name, nbytes in (
        ("weight slots", data["slots"]),
        ("weights and state that stay", data["stays"] - schedule.work.constant_bytes),
        ("peak", data["peak"]),
    ):
        assert re.search(rf"^  {name} +{nbytes:,} ", printed, re.MULTILINE), name


LARGE = (126, 4)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = find_browser()
    if binary is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    found = Browser(binary, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[[Schedule], Browser]]:
    """Open a schedule's page; after the test nothing may have been complained of."""
    browser.problems.clear()

    def open_page(schedule: Schedule) -> Browser:
        browser.open(schedule.to_html(tmp_path / "page.html"))
        return browser

    yield open_page
    assert browser.problems == []


def _middle(browser: Browser, op: int) -> tuple[float, float]:
    """Where an operation is drawn, in the window's pixels."""
    x, y = browser.run(
        f"(() => {{ const o = page.data.ops, b = document.getElementById('stage').getBoundingClientRect();"
        f"return [b.left + page.x((o.start[{op}] + o.end[{op}]) / 2),"
        f" b.top + page.laneTop(o.stream[{op}]) + page.ROW / 2]; }})()"
    )
    return x, y


def _find(browser: Browser, kind: str, block: int) -> int:
    found: int = browser.run(
        f"page.data.ops.kind.findIndex((k, i) => page.data.kinds[k] === '{kind}'"
        f" && (page.data.ops.block[i] === {block} || page.data.ops.group[i] === {block}))"
    )
    return found


def test_the_page_shows_its_parts(opened: Callable[[Schedule], Browser]) -> None:
    schedule = with_run(schedule_of(6, 2))
    page = opened(schedule)
    assert page.run("document.getElementById('title').textContent") == schedule.title
    assert "device peak" in texts(page, ".fact .name") and "tokens per second" in texts(page, ".fact .name")
    assert texts(page, ".line") == [line or " " for line in schedule.source.splitlines()]
    assert len(texts(page, "#estimates tr")) == len(page_data(schedule)["measured"]["rows"]) + 1
    assert set(texts(page, "#legend button")) >= {"forward", "backward", "recompute", "prefetch", "adam"}
    assert page.run("page.stats.rectangles") > 50
    for scheme in ("dark", "light"):
        page.scheme(scheme)
        assert page.run("getComputedStyle(document.body).backgroundColor") == (
            "rgb(18, 21, 26)" if scheme == "dark" else "rgb(244, 245, 247)"
        )


def test_an_operation_shows_its_line_and_a_line_its_operations(
    opened: Callable[[Schedule], Browser],
) -> None:
    page = opened(schedule_of(6, 1))
    backward = _find(page, "backward", 2)
    page.mouse("mouseMoved", *_middle(page, backward))
    assert page.run("page.state.hover.here[0]") == backward
    (line,) = texts(page, ".line.here")
    assert "rt.backward(" in line
    near = " ".join(texts(page, ".line.near"))
    assert "rt.forward(" in near and "rt.prefetch(" in near
    assert "layers.2" in " ".join(texts(page, "#detail h2"))
    box = page.run(
        "(() => { const l = [...document.querySelectorAll('.line.runs')].find(l => l.textContent.includes("
        "'rt.forward(')); l.scrollIntoView({block: 'center'}); const b = l.getBoundingClientRect();"
        "return [b.left + 120, b.top + 5, Number(l.dataset.line)]; })()"
    )
    page.mouse("mouseMoved", box[0], box[1])
    lit = page.run("page.state.hover.here")
    assert lit == [i for i, n in enumerate(page.run("page.data.ops.line")) if n == box[2]]
    page.mouse("mouseMoved", 3, 3)
    assert page.run("page.state.hover") is None and not texts(page, ".line.here")


def test_a_click_pins_and_keys_walk(opened: Callable[[Schedule], Browser]) -> None:
    page = opened(schedule_of(6, 1))
    start = _find(page, "backward", 3)
    page.click(*_middle(page, start))
    page.mouse("mouseMoved", 3, 3)
    assert page.run("page.state.pin.here[0]") == start and texts(page, ".line.here")
    page.key("c")
    assert page.run("page.state.current") == page.run(f"page.cause({start})") != start
    here = page.run("page.state.current")
    page.key("ArrowRight", "ArrowLeft")
    assert page.run("page.state.current") == here
    page.key("Escape")
    assert page.run("page.state.pin") is None
    page.run("document.querySelector('[data-tab=plan]').click()")
    rows = texts(page, "#plan tr")
    assert any("(×" in row for row in rows)
    page.run("document.querySelector('#plan tr').click()")
    page.settle()
    assert page.run("page.state.pin.here.length") > 2 and texts(page, ".line.near")


def test_the_forward_waits_for_the_adam_of_the_step_before(opened: Callable[[Schedule], Browser]) -> None:
    schedule = with_run(schedule_of(6, 1))
    page = opened(schedule)
    adam = [i for i, op in enumerate(schedule.step.ops) if op.kind == "adam"]
    late = page.run("page.late.map(streams => streams.flat())")
    assert adam and all(set(adam) <= set(drawn) for drawn in late)
    waits = _find(page, "prefetch", 0)
    assert ~adam[0] in page.run(f"page.data.ops.waits[{waits}]")
    page.click(*_middle(page, waits))
    assert any("adam layers.0, step before" in chip for chip in texts(page, "#detail .chip"))
    cause = page.run(f"page.cause({waits})")
    page.key("c")
    assert cause < -1 and page.run("page.state.current") == ~cause


def test_a_title_on_a_narrow_screen_has_the_whole_width(opened: Callable[[Schedule], Browser]) -> None:
    title = "train step of Qwen3ForCausalLM: 596.0 M parameters, budget 4 GB, peak 3.98 GB."
    page = opened(schedule_of(6, 1, title=title))
    try:
        page.call(
            "Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1, mobile=False
        )
        page.settle()
        lines = "(h => h.offsetHeight / parseFloat(getComputedStyle(h).lineHeight))"
        assert page.run(f"{lines}(document.getElementById('title'))") < 2.5
        assert page.run("document.documentElement.scrollWidth") <= 500
    finally:
        page.call(
            "Emulation.setDeviceMetricsOverride", width=1440, height=900, deviceScaleFactor=1, mobile=False
        )


def test_search_finds_whole_numbers_and_enter_goes_there(opened: Callable[[Schedule], Browser]) -> None:
    page = opened(schedule_of(30, 1))
    page.key("/")
    page.call("Input.insertText", text="backward layers.2")
    page.settle()
    assert texts(page, "#found") == ["1 found"], "layers.2 is not layers.20"
    page.key("Enter")
    assert page.run("page.state.current") == _find(page, "backward", 2)
    page.key("Escape")
    assert texts(page, "#found") == [""]


def test_the_wheel_zooms_where_the_pointer_is(opened: Callable[[Schedule], Browser]) -> None:
    page = opened(schedule_of(6, 1))
    x, y = map(round, _middle(page, _find(page, "backward", 3)))
    left = page.run("document.getElementById('stage').getBoundingClientRect().left")
    moment = page.run(f"page.time({x - left})")
    whole = page.run("page.view.to - page.view.from")
    for _ in range(5):
        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-60)
    assert page.run("page.view.to - page.view.from") < whole / 2
    assert page.run(f"page.x({moment})") + left == pytest.approx(x, abs=0.01)
    page.key("0")
    assert page.run("page.view.to - page.view.from") == pytest.approx(whole)


def test_a_large_schedule_draws_no_more_than_its_pixels(opened: Callable[[Schedule], Browser]) -> None:
    schedule = schedule_of(*LARGE)
    assert len(schedule.step.ops) > 5000
    page = opened(schedule)
    pixels = page.run("document.getElementById('base').clientWidth")
    lanes = len(page_data(schedule)["streams"])
    whole = page.run("page.stats.rectangles")
    assert 500 < whole <= pixels * lanes
    span = page.run("page.view.to")
    for share in (0.5, 0.1, 0.01):
        page.run(f"page.show({span} * 0.4, {span} * (0.4 + {share}))")
        page.settle()
        assert page.run("page.stats.rectangles") <= pixels * lanes
    drawn = page.run("page.stats.base")
    page.run("for (let i = 0; i < 50; i++) page.show(i * 0.01, 60 + i)")
    page.settle()
    assert page.run("page.stats.base") == drawn + 1, "many moves in one frame are drawn once"
    drawn = page.run("page.stats.base")
    page.mouse("mouseMoved", *_middle(page, _find(page, "forward", 5)))
    assert page.run("page.stats.base") == drawn, "pointing redraws the overlay alone"


def test_a_file_with_a_foreign_name_is_refused() -> None:
    text = schedule_of(3, 1).to_json().replace("model.layers.1", 'x\\"\\"\\"\\nimport os')
    fields = {name: value for name, value in json.loads(text).items() if name != "digest"}
    with pytest.raises(MegacompileError, match="name that no model has"):
        Schedule.from_json(json.dumps(sealed(fields)))
