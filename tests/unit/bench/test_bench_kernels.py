"""``megacompile bench kernels``: what it checks, computes, writes and refuses; times only with a GPU."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megacompile
from benchmarks.gpu import kernel_table
from megacompile.bench import kernel_bench
from megacompile.bench.kernel_bench import Bench, Row
from megacompile.bench.operations import OPERATIONS
from megacompile.bench.program_targets import read_calls, targets, worth
from megacompile.bench.providers import providers
from megacompile.bench.results import compare, markdown, read_rows, write
from megacompile.bench.timing import Roofline, Times
from megacompile.cli.main import main
from megacompile.errors import MegacompileError
from megacompile.kernels.eager_form import Shape
from tests.support.models import batch_for, build

CPU = torch.device("cpu")
SMALL: dict[str, Shape] = {
    "rms_norm": (33, 96), "add_rms_norm": (33, 96), "layer_norm": (33, 96), "glu": (33, 96),
    "clamped_glu": (33, 96), "rope": (2, 4, 33, 16), "qk_norm_rope": (2, 4, 33, 16),
    "linear_cross_entropy": (33, 32, 300),
    "attention": (2, 4, 2, 33, 16), "capped_attention": (2, 4, 2, 33, 16),
    "gated_delta_rule": (2, 2, 4, 70, 16, 8), "mamba2_chunk_scan": (2, 2, 4, 300, 16, 8),
    "decode_4bit": (33, 128), "decode_8bit": (33, 96),
}  # fmt: skip
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


class FakeTimer:
    """Every call takes 2 ms and holds 1000 bytes; it runs once, so that what fails fails here too."""

    def __init__(self) -> None:
        self.calls = 0

    def time(self, call: Callable[[], object]) -> Times:
        call()
        self.calls += 1
        return Times(1.0, 2.0, 3.0)

    def peak_bytes(self, call: Callable[[], object]) -> int:
        return 1000

    def scope(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


def bench(*files: Path, timer: FakeTimer | None = None) -> Bench:
    roof = Roofline(1e9, {torch.float32: 1e12, torch.bfloat16: 1e12}) if timer else None
    return Bench(providers([str(f) for f in files], CPU), CPU, timer, roof)


def rows(name: str, *files: Path, timer: FakeTimer | None = None) -> list[Row]:
    return list(bench(*files, timer=timer).rows(OPERATIONS[name], SMALL[name], torch.float32))


def test_the_cases_alone_bring_every_operator_and_the_dearest_is_timed_first() -> None:
    asked = "from megacompile.bench.operations import OPERATIONS; print(*OPERATIONS)"
    ran = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    order = kernel_table.dearest_first(Roofline(3e12, {torch.bfloat16: 8e14}))
    assert sorted(order) == sorted(SMALL) == sorted(ran.stdout.split())
    assert order[:2] == ["linear_cross_entropy", "attention"]
    assert order[-3:] == ["decode_4bit", "gated_delta_rule", "mamba2_chunk_scan"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_every_operation_is_right_in_both_forms(name: str, dtype: torch.dtype) -> None:
    found = list(bench().rows(OPERATIONS[name], SMALL[name], dtype))
    assert {r.provider: r.note for r in found} == {"eager": "checked", "megacompile": "checked"}
    assert all(0 < r.error < 0.05 for r in found)


def test_three_passes_are_timed_and_rated() -> None:
    timer = FakeTimer()
    found = [r for r in rows("rms_norm", timer=timer) if r.provider == "megacompile"]
    assert [r.mode for r in found] == ["forward", "backward", "full"] and timer.calls == 6
    assert [r.mode for r in rows("decode_4bit", timer=FakeTimer())] == ["forward"] * 2  # no gradient
    one = 33 * 96 * 4
    moved = [2 * one, 3 * one, 5 * one]
    assert [r.gigabytes_per_second for r in found] == pytest.approx([n / 2e-3 / 1e9 for n in moved])
    assert [r.roofline for r in found] == pytest.approx([n / 1e9 / 2e-3 for n in moved])
    product = next(iter(rows("linear_cross_entropy", timer=timer)))
    assert product.teraflops == pytest.approx(2 * 33 * 32 * 300 / 2e-3 / 1e12)


def test_a_provider_that_fails_while_it_is_timed_is_a_row() -> None:
    class Broken(FakeTimer):
        def time(self, call: Callable[[], object]) -> Times:
            raise RuntimeError("CUDA error: a capture failed\nmore")

    notes = {row.provider: row.note for row in rows("glu", timer=Broken())}
    assert notes == dict.fromkeys(("eager", "megacompile"), "fails: CUDA error: a capture failed")


def test_an_operation_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory\nmore")

    monkeypatch.setattr(kernel_bench, "check", fail)
    (row,) = rows("glu", timer=FakeTimer())
    assert row.note == "fails: no memory"


def provider(folder: Path, name: str, body: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(f"import torch\n{body}\n")
    return path


def test_a_wrong_provider_is_not_timed(tmp_path: Path) -> None:
    glu = "def glu(gate, up): return torch.nn.functional.silu(gate) * up"
    right = provider(tmp_path, "right", glu)
    wrong = provider(tmp_path, "wrong", f"{glu} * 1.01")
    failing = provider(tmp_path, "failing", "def glu(gate, up): raise RuntimeError('no such chip')")
    other = provider(tmp_path, "other", "def rope(x, cos, sin): return x")
    found = rows("glu", right, wrong, failing, other, timer=FakeTimer())
    notes = {r.provider: r.note for r in found}
    assert notes.keys() == {"eager", "megacompile", "right", "wrong", "failing"} and notes["right"] == ""
    assert notes["wrong"].startswith("wrong: result 0") and notes["failing"] == "fails: no such chip"
    assert not any(r.median_ms for r in found if r.provider in ("wrong", "failing"))


def test_results_are_written_and_compared(tmp_path: Path) -> None:
    new = rows("glu", timer=FakeTimer())
    paths = write(tmp_path / "out", new, {"device": "a test"})
    assert read_rows(tmp_path / "out" / "kernels.json") == new
    assert {p.name for p in paths} >= {"kernels.json", "kernels.csv", "kernels.md"}
    assert all(p.stat().st_size for p in paths)
    assert len((tmp_path / "out" / "kernels.csv").read_text().splitlines()) == 1 + len(new)
    text = markdown(new, {"device": "a test"})
    assert "### glu float32 33x96" in text and "| megacompile | backward | 2.0000 | 1.0000–3.0000 |" in text
    old = [replace(r, median_ms=1.0 if r.provider == "megacompile" else 2.0) for r in new]
    said = compare(old, new)
    assert said.count("slower") == 3 and "| 1.0000 | 2.0000 | 2.00 | slower |" in said
    assert compare([], new) == "Nothing was timed both then and now."
    with pytest.raises(MegacompileError, match=r"no kernels\.json"):
        read_rows(tmp_path / "out" / "kernels.csv")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of a small program with kernels, in its dump."""
    folder = tmp_path_factory.mktemp("dump")
    model = build("llama")
    megacompile.compile(
        model, "100MB", example_batch=batch_for("llama"),
        optimizer=torch.optim.AdamW(model.parameters()), kernels=True, dump=folder,
    ).close()  # fmt: skip
    return next(folder.glob("*/plan.json"))


def test_a_plan_gives_shapes_and_calls(plan: Path) -> None:
    checkpoints = [b["checkpoint"] for b in json.loads(plan.read_text())["blocks"]]
    made, unknown = targets(read_calls(plan))
    found = {(t.operation, t.shape): (t.forward, t.backward) for t in made}
    assert set(checkpoints) == {"all"}, "the counts below are those of a plan that keeps everything"
    # the backward of all norms but one adds the gradient of what passes the norm by
    assert found == {
        ("rms_norm", (48, 32)): (5, 1), ("add_rms_norm", (48, 32)): (4, 8), ("glu", (48, 64)): (4, 4),
        ("rope", (2, 4, 24, 8)): (4, 4), ("rope", (2, 2, 24, 8)): (4, 4),
        ("attention", (2, 4, 2, 24, 8)): (4, 4), ("linear_cross_entropy", (48, 32, 128)): (1, 1),
    }  # fmt: skip
    assert unknown == []
    times = {"eager": 3.0, "megacompile": 1.0}
    head = [(t.operation, t.dtype, "x".join(map(str, t.shape))) for t in made]
    timed = [Row(*h, n, m, ms) for h in head for n, ms in times.items() for m in ("forward", "backward")]
    table = worth(made, timed).splitlines()
    calls = sum(f + b for f, b in found.values())
    assert table[-1] == f"| all |  |  | {3.0 * calls:.2f} | {calls:.2f} | {2.0 * calls:.2f} |"


@no_gpu
def test_without_a_gpu_nothing_is_timed(capsys: pytest.CaptureFixture[str], plan: Path) -> None:
    assert main(["bench", "kernels"]) == 0
    assert main(["bench", "kernels", "--plan", str(plan)]) == 1
    out, err = capsys.readouterr()
    assert "no GPU here" in err and "| attention_forward_kernel |" in out and "sm_120" in out


@no_gpu
def test_check_runs_on_the_cpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = provider(tmp_path, "mine", "def glu(gate, up): return gate + 0 * up")
    command = ["bench", "kernels", "--check", "--op", "glu", "--shape", "9x33", "--dtype", "float32"]
    assert main([*command, "--provider", str(wrong)]) == 0
    assert "wrong: result 0" in capsys.readouterr().out
    again = ["--compare", "bench-kernels/kernels.json"]
    assert main([*command, *again]) == 0
    assert "Nothing was timed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "rmsnorm"], "choose from add_rms_norm"),
        (["--shape", "3x4"], "give one --op"),
        (["--op", "glu", "--shape", "3xa"], "it takes tokensxwidth"),
        (["--op", "glu", "--provider", "missing.py", "--check", "--shape", "1x1"], "no such file"),
        (["--compare", "missing.json"], "missing.json"),
        (["--plan", "missing.json"], "no such file"),
        (["--dtype", "int8"], "int8"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_timed(tmp_path: Path) -> None:
    command = ["bench", "kernels", "--op", "rms_norm", "--shape", "4096x4096", "--out", str(tmp_path)]
    assert main(command) == 0
    found = [r for r in read_rows(tmp_path / "kernels.json") if r.provider == "megacompile"]
    assert len(found) == 3 and all(0 < r.roofline < 1.5 and r.peak_bytes > 0 for r in found)
