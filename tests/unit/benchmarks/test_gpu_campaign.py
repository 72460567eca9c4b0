"""The driver of a campaign on a GPU: stages that end, fail or hang, calls that go on, the page."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import campaign, carry, command, features, peers, work
from benchmarks.gpu.campaign import (
    LOG,
    RESULTS,
    ROOT,
    Stage,
    append,
    boot,
    drive,
    earlier,
    entries,
    environment,
)
from benchmarks.gpu.correct import kernels_found_wrong
from benchmarks.gpu.findings import Recorder
from benchmarks.gpu.page import page, screen, timetable
from benchmarks.gpu.stages import stages

_CHILD = """
import faulthandler, os, signal, sys
faulthandler.enable()
kind = sys.argv[sys.argv.index("--stage") + 1].split()[0]
folder = sys.argv[sys.argv.index("--out") + 1]
with open(os.path.join(folder, "order"), "a") as order:
    order.write(kind + "\\n")
print("this is", kind)
if kind == "raises":
    raise ValueError("no such device")
while kind == "hangs":
    signal.pause()
sys.exit({"wrong": 3, "useless": 4}.get(kind, 0))
"""


@pytest.fixture
def child(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "child.py"
    script.write_text(_CHILD)
    return sys.executable, str(script)


def stage(name: str, needs: str = "", **more: object) -> Stage:
    return replace(Stage(name, "machine.where", {}, 60, 0, needs), **more)  # type: ignore[arg-type]


def test_a_stage_that_fails_or_hangs_costs_itself_and_what_needs_it(
    tmp_path: Path, child: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    every = [
        stage("good"), stage("raises"), stage("of it", "raises"), stage("hangs", limit=1), stage("wrong"),
        stage("useless"), stage("needs wrong", "wrong"), stage("needs useless", "useless"),
    ]  # fmt: skip
    folder, copies = tmp_path / "out", tmp_path / "copies"
    status = drive(every, folder, 1000, copies=copies, command=child)
    assert status == {
        "good": "ok", "raises": "failed: exit status 1", "of it": "left out: raises failed",
        "hangs": "not over after 1 s", "wrong": "wrong", "useless": "failed", "needs wrong": "ok",
        "needs useless": "left out: useless failed",
    }  # fmt: skip
    told = {e["stage"]: e for e in entries(folder)}
    assert "ValueError: no such device" in told["raises"]["tail"]
    assert "signal.pause" in (folder / LOG).read_text() or "child.py" in told["hangs"]["tail"]
    assert "no such device" in capsys.readouterr().out
    assert (copies / RESULTS).read_text() == (folder / RESULTS).read_text()


def test_what_has_no_time_left_is_left_out_by_name(tmp_path: Path, child: tuple[str, ...]) -> None:
    status = drive([stage("good"), stage("long", expected=50)], tmp_path / "out", 30, command=child)
    assert status["good"] == "ok" and status["long"].startswith("left out: ")


def test_a_later_call_takes_what_is_missing_then_what_failed(tmp_path: Path, child: tuple[str, ...]) -> None:
    folder = tmp_path / "out"
    every = [stage("good"), stage("raises"), stage("useless"), stage("of it", "useless"), stage("new")]
    drive(every, folder, 1000, only=["good", "raises", "useless"], command=child)
    assert (folder / "order").read_text().split() == ["good", "raises", "useless"]
    drive(every, folder, 1000, command=child)
    assert (folder / "order").read_text().split()[3:] == ["useless", "new", "raises"]


def test_what_holds_for_a_machine_is_asked_of_the_next_one(tmp_path: Path) -> None:
    every = [stage("where", here=True), stage("kernels")]
    for name in ("where", "kernels"):
        append(tmp_path, stage=name, status="ok", seconds=1, boot="another")
    assert earlier(every, tmp_path) == {"kernels": "ok"}
    append(tmp_path, stage="where", status="wrong", seconds=1, boot=boot())
    assert earlier(every, tmp_path) == {"kernels": "ok", "where": "wrong"}


def test_what_a_stage_checks_is_checked_again_where_the_source_has_changed(
    tmp_path: Path, child: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [stage("checks", checks=True), stage("figures")]
    digests = {s.name: campaign.source(s) for s in [*every, stage("of peers", call="peers.peer")]}
    assert digests["checks"] == digests["figures"] != digests["of peers"]
    drive(every, tmp_path, 1000, command=child)
    drive(every, tmp_path, 1000, command=child)
    assert (tmp_path / "order").read_text().split() == ["checks", "figures"]
    monkeypatch.setattr(campaign, "_package", lambda: "another")
    assert drive(every, tmp_path, 1000, command=child) == {"checks": "ok", "figures": "ok"}
    assert (tmp_path / "order").read_text().split() == ["checks", "figures", "checks"]


def test_a_stage_that_is_begun_again_replaces_what_it_had_learnt(
    tmp_path: Path, child: tuple[str, ...]
) -> None:
    append(tmp_path, stage="kernels", what="kernel rope", kernel="rope", right=False)
    append(tmp_path, stage="peers", what="plain", right=True)
    drive([stage("kernels")], tmp_path, 1000, command=child)
    told = entries(tmp_path)
    assert [e.get("what", e.get("status")) for e in told] == ["plain", "ok"]
    assert kernels_found_wrong(Recorder(tmp_path, "a step")) is None


def test_a_checkout_that_is_not_installed_imports_whole() -> None:
    asked = "import importlib.util as u; print(*u.find_spec('megacompile').submodule_search_locations)"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", asked], cwd=ROOT, env=environment(), capture_output=True, text=True
    )  # -S: without what is installed
    package = Path(ran.stdout.strip())
    assert (package / "kernels" / "rms_norm.py").exists() and (package / "passes").exists()


def test_an_unknown_stage_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="There is no stage 'x': there are where"):
        drive([stage("where")], tmp_path / "out", 10, only=["x"])


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    append(tmp_path, stage="a", what="b", value=1)
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"stage": "a", "wh')
    assert [e["value"] for e in entries(tmp_path)] == [1]


def test_a_finding_that_raises_is_recorded_and_raises_nothing(tmp_path: Path) -> None:
    to = Recorder(tmp_path, "primitives")
    with to.finding("good") as finding:
        finding["value"] = 2
    assert to.all_right
    with to.finding("bad"):
        raise ValueError("no such thing")
    assert not to.all_right and to.some_right
    good, bad = entries(tmp_path)
    assert good["right"] and good["value"] == 2
    assert bad["error"] == "ValueError: no such thing" and "test_gpu_campaign" in bad["trace"]
    assert bad["memory"]["MemTotal"]
    to.require("good")
    with pytest.raises(RuntimeError, match="bad"):
        to.require("good", "bad")


def test_the_page_has_a_row_for_what_was_measured_and_a_reason_for_what_was_not(tmp_path: Path) -> None:
    step = {
        "model": "m", "budget": "24GB", "tokens": 16384, "step s": 1.25, "predicted s": 1.2, "bound s": 1.0,
        "bound by": "compute", "tokens/s": 13107.2, "model TFLOP/s": 300.0, "peak": 20e9,
        "predicted peak": 19e9, "held": 23e9, "compute idle": 0.125, "groups on the device": 3,
        "groups": 30, "compile s": 9.0, "right": True,
    }  # fmt: skip
    lines = [
        {"stage": "where", "what": "card", "said": "NVIDIA H100 80GB HBM3, 580"},
        {"stage": "a", "what": "step: m in 24GB, 16384 tokens", **step},
        {"stage": "b", "what": "fsdp2: m", "peer": "fsdp2", "model": "m", "budget": "24GB", "tokens": 16384,
         "not measured": "out of device memory", "right": True},
        {"stage": "kernels", "what": "kernel rope", "error": 0.5, "wrong": "off", "right": False},
        {"stage": "3B in 24 GB", "status": "ok", "seconds": 41.0, "boot": "x"},
    ]  # fmt: skip
    for line in lines:
        append(tmp_path, **line)
    text = page(tmp_path, stages())
    assert "# Measured on NVIDIA H100 80GB HBM3\n" in text
    assert "| m | 24GB | 16384 | 1.25 | 1.2 | 1.0 | compute |" in text and "| 12% | 3 of 30 |" in text
    assert "| fsdp2 | m | 24GB | 16384 | out of device memory |" in text
    assert "- kernels: kernel rope: 0.5" in text
    assert "| 3B in 24 GB | ok | 41.0 |" in text and "| ncu | not run | – |" in text
    assert screen(tmp_path).startswith("kernels: kernel rope")


def test_a_feature_is_right_where_plain_torch_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = features.FEATURES["gradients of one's own"]()
    given = features.FEATURES["Muon, of given gradients"]()
    tried = {"own": own, "given": given, "missing": replace(own, package="no_such_package")}
    monkeypatch.setattr(features, "FEATURES", {n: lambda f=f: f for n, f in tried.items()})
    features.features(Recorder(tmp_path, "features"))
    told = {e["what"]: e for e in entries(tmp_path)}
    assert told["own"]["right"] and told["own"]["bits repeat"] and told["own"]["weights off by"] < 1e-5
    assert told["given"]["right"] and told["given"]["bits of plain torch"]
    assert told["missing"]["not measured"] == "no_such_package: No module named 'no_such_package'"

    plain = features._plain(own)
    losses, values, _ = plain

    def right(**change: object) -> bool:
        finding: dict[str, object] = {}
        first = (change.get("losses", losses), change.get("values", values), change.get("held", 0))
        features._compare(finding, [first, change.get("second", first)], plain, own)  # type: ignore[list-item]
        return bool(finding["right"])

    start = own.make().state_dict()
    assert right() and not right(losses=[x * 1.01 for x in losses])
    assert not right(values=values | {"step": start["step"]} | {"layers.0.weight": start["layers.0.weight"]})
    exact, finding = features._plain(given), dict[str, object]()
    features._compare(finding, [exact, exact], ([x * (1 + 1e-9) for x in exact[0]], *exact[1:]), given)
    assert not finding["right"]  # near, and not the same bits
    assert not right(held=3e9) and not right(second=(losses, start, 0))


def test_the_first_call_fits_into_its_seconds_and_every_stage_exists() -> None:
    import importlib

    for every in (stages(), stages(small=True)):
        names = [s.name for s in every]
        assert len(set(names)) == len(names)
        for s in every:
            module, function = s.call.split(".")
            assert callable(getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function))
            assert s.expected <= s.limit
            assert not s.needs or s.needs in names[: names.index(s.name)]
    whole = [s for s in stages() if not s.beside]
    names = [s.name for s in whole]

    def until(name: str) -> int:
        """Seconds from the start of the first call to the end of a stage."""
        return sum(s.expected for s in whole[: names.index(name) + 1])

    assert until("8B on the whole card") <= 415
    checked = max(names.index(s.name) for s in stages() if s.checks)
    assert until(names[checked]) <= 500
    again = sum(s.expected for s in whole if s.here)  # on another machine
    assert until("megacompile train") + again <= 415 + 395 + until("primitives")
    assert "| 0 | where |" in timetable(stages())
    assert json.dumps([s.settings for s in stages()])


def test_peers_make_the_step_of_plain_transformers(tmp_path: Path) -> None:
    """Whatever the rows of a micro-batch, with the logits of one row at a time."""
    published = work.described("tiny")
    batch = work.batch_of(256, 64, published.config.vocab_size)
    module = work.fill(published.module.train(), published.config, "cpu")
    exact = float(module(**batch).loss.detach())
    for rows in (1, 4):
        to = Recorder(tmp_path, f"plain, {rows}")
        peers.peer(to, "plain", "tiny", 4, 256, 2, rows=rows, profiled=rows == 4, sequence=64)
    told = {e["stage"]: e for e in entries(tmp_path) if "peer" in e}
    for found in told.values():
        assert found["right"] and abs(found["losses"][0] - exact) < 1e-3 * exact
        assert found["losses"][1] < found["losses"][0]
    assert {"forward", "backward", "update"} <= told["plain, 4"]["dearest, ms"].keys()
    assert "| plain | tiny | update |" in page(tmp_path, stages())


def test_a_peer_whose_package_is_missing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_PACKAGES", {"megatrain": ["no_such_package"]})
    peers.peer(Recorder(tmp_path, "peer"), "megatrain", "tiny", 4, 256)
    (told,) = entries(tmp_path)
    assert told["not measured"].startswith("no_such_package: ") and "step s" not in told


def test_what_is_carried_is_unpacked_where_stages_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "megacompile-packages"
    packages.mkdir()
    (packages / "carried.py").write_text("value = 3")
    monkeypatch.setattr(carry, "CARRIED", tmp_path / "carried")
    monkeypatch.setattr(carry, "ROOT", tmp_path)
    monkeypatch.setattr(carry, "CACHE", tmp_path / "no kernels")
    monkeypatch.setattr(carry, "PACKAGES", packages)
    monkeypatch.setattr(campaign, "PACKAGES", packages)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    carry._pack(packages)
    shutil.rmtree(packages)
    carry.unpack()
    command = [sys.executable, "-c", "import carried; print(carried.value)"]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert ran.stdout == "3\n"


@pytest.mark.slow
def test_a_training_by_the_command_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="trl is missing: pip install trl")
    to = Recorder(tmp_path, "megacompile train")
    command.fine_tune(to, "tiny", "1GB", 64, 2, 12, 6, 120)
    (told,) = entries(tmp_path)
    assert told["right"] and told["went on with"] > 1 and told["made again"] and told["tokens/s"] > 0
