"""Schedules as files and text: exact JSON, traces, explanations, differences, and bad files."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacompile.cli.main import main
from megacompile.errors import MegacompileError
from megacompile.hardware.measured_step import align, compare
from megacompile.hardware.simulate import simulate
from megacompile.json_codec import from_plain, parse_json, to_plain
from megacompile.passes import lower
from megacompile.report.chrome_trace import chrome_trace
from megacompile.report.explain import most_offloaded
from megacompile.report.schedule import Schedule
from megacompile.schedule.plan import BlockPlan, Mode, Plan
from megacompile.schedule.step import peak_bytes
from tests.support.damage import resealed
from tests.support.problems import chain, machines, plans, uniform, workloads
from tests.unit.report.test_page import schedule_of, with_run


@settings(max_examples=20)
@given(st.data())
def test_a_schedule_survives_json_exactly(data: st.DataObject) -> None:
    work = data.draw(workloads())
    schedule = replace(schedule_of(3, 2), work=work, plan=data.draw(plans(work)))
    again = Schedule.from_json(schedule.to_json())
    assert again == schedule and again.step == schedule.step and again.source == schedule.source
    assert again.to_json() == schedule.to_json()


def test_a_measured_schedule_survives_json_exactly() -> None:
    schedule = with_run(schedule_of(4, 2))
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: f.update(version=99), "version"),
        (lambda f: f.update(extra=1), "extra"),
        (lambda f: f.update(budget_bytes=1.5), "budget_bytes"),
        (lambda f: f.update(budget_bytes=True), "budget_bytes"),
        (lambda f: f["plan"]["blocks"].pop(), "hang together|another step"),
        (lambda f: f["plan"]["blocks"][0].update(saved_on="moon"), "saved_on"),
        (lambda f: f["plan"]["groups"][0].update(prefetch_depth="2"), "prefetch_depth"),
        (lambda f: f["work"]["blocks"][0].update(name='a"""\nimport os\n"""'), "name that no model has"),
        (lambda f: f["work"]["blocks"][0]["policies"][0].update(name='a")'), "name that no model has"),
        (lambda f: f["plan"]["blocks"][0].update(checkpoint="\x1b[2J"), "name that no model has"),
        (lambda f: f["work"]["blocks"][1].update(outputs=[99]), "hang together|another step"),
        (lambda f: f["machine"].update(flops=None), "flops"),
        (lambda f: f["work"]["groups"][0].update(nbytes=1), "another step"),
        (lambda f: f["mode"].update(micro_batches=10**12), "1,000,000,000,000 micro-batches over"),
        (lambda f: f["mode"].update(micro_batches=0), "0 micro-batches over"),
        (lambda f: f["plan"].update(ring=10**12), "ring is 1000000000000"),
        (lambda f: f["plan"].update(window=10**12), "window is 1000000000000"),
        (lambda f: f["plan"].update(grad_lag=10**19 * 2), "grad_lag is 2"),
        (lambda f: f["machine"].update(flops=1e-300), "flops is 1e-300"),
        (lambda f: f.update(budget_bytes=-1), "below 0"),
        (lambda f: f.update(measured={"starts": [], "ends": [], "step_seconds": 1}), "another number of op"),
        (
            lambda f: [p["forward"].update(seconds=1e308) for p in f["work"]["blocks"][0]["policies"]],
            r"times of more than 1e\+09 s",
        ),
    ],
)
def test_a_schedule_file_that_was_tampered_with_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    """By its digest; by what it says where that was made anew."""
    file = tmp_path / "schedule.json"
    fields = json.loads(schedule_of(3, 1).to_json())
    file.write_text(json.dumps(fields))
    change(fields)
    with pytest.raises(MegacompileError, match=r"digest|is not of version"):
        Schedule.from_json(json.dumps(fields))
    resealed(file, change)
    with pytest.raises(MegacompileError, match=said):
        Schedule.from_json(file.read_text())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "[" * 100_000,
        '{"digest": NaN}',
        '{"digest": Infinity}',
        "9" * 5000,
        "\x00",
        "{}",
    ],
)
def test_text_that_is_no_schedule_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(MegacompileError) as info:
        Schedule.from_json(text)
    assert len(str(info.value)) < 300


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
    )
)
def test_no_json_at_all_gets_past_the_reader(value: Any) -> None:
    with pytest.raises(MegacompileError):
        from_plain(Schedule, value, "schedule")


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(MegacompileError, match="NaN"):
        parse_json('{"a": NaN}', "It")
    assert to_plain((1, (2.5, None))) == [1, [2.5, None]]
    with pytest.raises(MegacompileError):
        from_plain(float, math.inf, "x")


METADATA = {"process_name": str, "thread_name": str, "thread_sort_index": int}
FIELDS = {
    "M": {"name", "ph", "pid", "tid", "args"},
    "C": {"name", "ph", "pid", "tid", "ts", "args"},
    "X": {"name", "ph", "pid", "tid", "ts", "dur", "cat", "args"},
}


def nanoseconds(microseconds: object) -> int:
    """As readers keep time: each value by itself, in whole nanoseconds, cut off."""
    assert type(microseconds) in (int, float)
    found = int(microseconds * 1000.0)  # type: ignore[operator]
    assert found >= 0, "events before time zero are dropped"
    return found


def read_trace(text: str) -> tuple[dict[tuple[int, int], list[dict[str, Any]]], list[dict[str, Any]]]:
    """(slices by process and thread, counters) of a trace in the event format, nothing forgiven."""
    trace = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    counters, processes, threads = [], set(), set()
    for event in trace["traceEvents"]:
        assert set(event) == FIELDS[event["ph"]], event
        assert type(event["name"]) is str and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int and type(event["args"]) is dict
        if event["ph"] == "M":
            (value,) = event["args"].values()
            assert type(value) is METADATA[event["name"]]
            (processes if event["name"] == "process_name" else threads).add((event["pid"], event["tid"]))
        elif event["ph"] == "C":
            assert all(type(value) in (int, float) for value in event["args"].values())
            nanoseconds(event["ts"])
            counters.append(event)
        else:
            slices[event["pid"], event["tid"]].append(event)
    for events in slices.values():
        over = 0
        for event in events:
            start = nanoseconds(event["ts"])
            assert start >= over, "slices of a thread that overlap are dropped"
            over = start + nanoseconds(event["dur"])
    assert {pid for pid, _ in slices} <= {pid for pid, _ in processes} and set(slices) <= threads
    return slices, counters


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1 / 3, 7e3])
def test_the_trace_is_one_that_strict_readers_take(scale: float, tmp_path: Path) -> None:
    schedule = schedule_of(5, 2)
    rates = ("flops", "memory_bandwidth", "h2d_bandwidth", "d2h_bandwidth", "host_bandwidth")
    machine = replace(schedule.machine, **{r: getattr(schedule.machine, r) * scale for r in rates})
    schedule = with_run(replace(schedule, machine=machine))
    slices, counters = read_trace(schedule.to_chrome_trace(tmp_path / "trace.json").read_text())
    assert {pid for pid, _ in slices} == {0, 1}
    assert max(e["args"]["bytes"] for e in counters) == schedule.peak_bytes
    assert [e["ts"] for e in counters] == sorted(e["ts"] for e in counters)
    took = sum(e["dur"] for (pid, _), events in slices.items() if pid == 0 for e in events)
    timeline = schedule.timeline
    expected = 1e6 * sum(b - a for a, b in zip(timeline.starts, timeline.ends, strict=True))
    assert took == pytest.approx(expected, abs=0.125 * len(schedule.step.ops))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_steps_trace_is_one_that_strict_readers_take(data: st.DataObject) -> None:
    work = data.draw(workloads())
    schedule = replace(
        schedule_of(3, 2), work=work, plan=data.draw(plans(work)), machine=data.draw(machines())
    )
    read_trace(json.dumps(chrome_trace(schedule), allow_nan=False))


def test_a_run_is_aligned_and_compared_operation_by_operation() -> None:
    schedule = schedule_of(4, 2)
    step, timeline = schedule.step, schedule.timeline
    slow = [op.kind == "backward" for op in step.ops]
    trace = [
        (op.event, 5 + s, 5 + s + (e - s) * (3 if late else 1))
        for op, s, e, late in zip(step.ops, timeline.starts, timeline.ends, slow, strict=True)
    ]
    found = align(step, reversed(trace))  # however the entries are ordered
    assert found is not None and None not in found.starts
    first = min(timeline.starts)
    assert found.starts == pytest.approx([s - first for s in timeline.starts])
    rows = compare(step, timeline, found)
    assert rows[0].kind == "backward" and rows[0].ratio == pytest.approx(3)
    assert step.ops[rows[0].worst].kind == "backward"
    assert all(r.ratio == pytest.approx(1) for r in rows[1:] if r.predicted)
    assert align(step, []) is None
    part = align(step, trace[:5])
    assert part is not None and part.starts[5] is None
    text = str(replace(schedule, measured=found))
    assert "measured beside predicted" in text and "3.00" in text


def test_an_explanation_gives_the_cost_of_each_other_choice() -> None:
    schedule = schedule_of(6, 1)
    schedule = replace(schedule, machine=replace(schedule.machine, flops=1e12))  # compute binds
    text = schedule.explain("layers.4")
    assert "model.layers.4: keep everything, saved on device" in text
    other = replace(schedule.plan.blocks[4], checkpoint="none")
    plan = replace(schedule.plan, blocks=(*schedule.plan.blocks[:4], other, *schedule.plan.blocks[5:]))
    step = lower(schedule.work, plan, schedule.mode)
    seconds = simulate(step, schedule.machine).step_seconds - schedule.predicted_seconds
    (line,) = [t for t in text.splitlines() if t.strip().startswith("recompute everything, saved on device")]
    shown = line.split("saved on device")[1].split()
    unit = 1e3 if abs(seconds) < 1 else 1
    assert float(shown[0].replace("−", "-")) == pytest.approx(seconds * unit, rel=5e-3)
    assert seconds > 0.5, "a forward that is computed again"
    freed = schedule.peak_bytes - peak_bytes(step)
    assert freed >= 0 and most_offloaded(step) == most_offloaded(schedule.step)
    assert "simulated" in text or "would be better" in text


def test_activations_that_came_back_wait_no_more() -> None:
    work = chain(5)
    plan = uniform(work, "all", saved_on="host")
    once, often = (most_offloaded(lower(work, plan, Mode("train", n, deferred=True))) for n in (1, 3))
    assert once == often > 0


def test_what_does_not_fit_is_said_to_be_barred_by_the_budget() -> None:
    schedule = schedule_of(6, 1)
    plan = replace(schedule.plan, blocks=(BlockPlan("none", "device"),) * 6)
    machine = replace(schedule.machine, flops=1e12)  # compute binds, so keeping more is faster
    tight = replace(schedule, plan=plan, machine=machine)
    tight = replace(tight, budget_bytes=tight.peak_bytes)
    text = tight.explain("layers.0")
    assert "over the budget" in text and "“keep everything, saved on device” would be −" in text
    assert "exceeds the budget" not in replace(tight, budget_bytes=10**12).explain("layers.0")


def test_an_unknown_layer_gets_near_names() -> None:
    with pytest.raises(MegacompileError, match=r"layers\.5"):
        schedule_of(6, 1).explain("layer.5")


def test_a_difference_is_folded_over_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = schedule_of(9, 1)
    blocks = tuple(BlockPlan("none", "device") if 2 <= i <= 6 else b for i, b in enumerate(a.plan.blocks))
    b = replace(a, plan=replace(a.plan, blocks=blocks, grad_lag=2), budget_bytes=40 * 10**9)
    for name, schedule in (("a", a), ("b", b)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedule.json").write_text(schedule.to_json())
        (tmp_path / name / "plan.json").write_text(schedule.plan.to_json())
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert "layers 4–5 (×2)  keep everything, saved on device → recompute everything, saved on device" in out
    assert "layers 6" not in out, "what did not change is not told"
    assert "grad_lag  1 → 2" in out and "budget  80 GB → 40 GB" in out and "device peak" in out
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["diff", str(tmp_path / "a/plan.json"), str(tmp_path / "b/plan.json")]) == 1
    assert "blocks 4–5" in capsys.readouterr().out.replace("block 4–5", "blocks 4–5")
    (tmp_path / "c.json").write_text(Plan(a.plan.blocks[:3], a.plan.groups[:3]).to_json())
    assert main(["diff", str(tmp_path / "a/plan.json"), str(tmp_path / "c.json")]) == 2
    assert "different models" in capsys.readouterr().err


def test_inspect_writes_a_page_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = schedule_of(4, 1)
    (tmp_path / "dump" / "train").mkdir(parents=True)
    (tmp_path / "dump" / "train" / "schedule.json").write_text(schedule.to_json())
    edited = replace(schedule.plan, grad_lag=3)
    (tmp_path / "dump" / "train" / "plan.json").write_text(edited.to_json())
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert main(["inspect", str(tmp_path / "dump"), "-o", str(page), "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    assert schedule.title in out and "layers 0" in out and str(page) in out
    assert "<canvas" in page.read_text() and json.loads(trace.read_text())["traceEvents"]
    assert main(["inspect", str(tmp_path / "dump/train/plan.json"), "-o", str(page)]) == 0
    assert "within 3 operations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"version":1,"digest":"x","title":', "cut off"),
        (b'{"version": 1, "blocks": []', "cut off"),
        (b'{"digest": NaN}', "NaN"),
        (b"{}", "no plan file"),
        (b"[" * 50_000, "nested"),
    ],
)
def test_bad_files_get_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes | None, said: str
) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_bytes(text)
    for arguments in (["inspect", str(path)], ["diff", str(path), str(path)]):
        assert main(arguments) == 2
        printed = capsys.readouterr()
        assert re.search(said, printed.err) and len(printed.err.strip().splitlines()) == 1
        assert not printed.out


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schedule.json").write_text(schedule_of(3, 1).to_json())
    (tmp_path / "file").write_text("")
    assert main(["inspect", str(tmp_path), "-o", str(tmp_path / "file" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
