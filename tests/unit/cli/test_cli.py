"""The command line: what it prints, what it refuses, and its figures against hand calculations."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megacompile.api.rollout_forecast import Completions, Forecast, forecast
from megacompile.capture.padded_length import reach
from megacompile.capture.parameter_forms import parameter_forms
from megacompile.cli import models, plan_command, plan_report
from megacompile.cli.alternatives import size_text
from megacompile.cli.estimator import Study
from megacompile.cli.largest_batch import Largest, _most, estimate_largest, largest
from megacompile.cli.main import main
from megacompile.cli.models import load_model, optimizer_of
from megacompile.cli.plan_answer import Question
from megacompile.cli.plan_arguments import OPTIMIZERS
from megacompile.cli.presets import PRESETS
from megacompile.cli.rollout_report import rollout_section
from megacompile.cli.step_figures import compute_parts, waits
from megacompile.cli.workload_flops import complete_flops
from megacompile.hardware.catalog import load_machine
from megacompile.hardware.machine import Machine
from megacompile.passes import lower
from megacompile.planner.lower_bound import Bound, lower_bound
from megacompile.planner.min_feasible_budget import highest_point
from megacompile.planner.search import search
from megacompile.planner.too_small import fitting
from megacompile.report.schedule import Schedule
from megacompile.schedule.plan import BlockPlan, GroupPlan, Mode, Plan
from megacompile.schedule.workload import BlockWork, Call, CheckpointPolicy, GroupWork, ValueWork, Workload
from megacompile.state.param_group import ELEMENTWISE, name_of
from megacompile.units import format_bytes, parse_bytes
from tests.support import images

TINY = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "tie_word_embeddings": False}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2}
SHAPE = ["--batch", "2", "--seq", "128"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture(scope="module")
def study(config: str) -> Study:
    """One model for all tests here, so that each shape is captured once."""
    return Study(load_model(config), "bf16", lambda message: None)


@pytest.fixture
def plan(
    config: str, study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run ``megacompile plan`` on the tiny model; the exit code and what was printed."""
    monkeypatch.setattr(plan_command, "Study", lambda model, dtype, progress, optimizer: study)

    def run(*arguments: str, machine: str = "rtx-4090") -> tuple[int, str, str]:
        code = main(["plan", "--model", config, "--machine", machine, *SHAPE, *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    yield run


_TO_PLAN = ["plan", "--model", "llama-3.1-8b", "--machine", "h200"]


def _question(budget: int) -> Question:
    return Question(load_machine("rtx-4090"), 2, 128, budget)


def test_the_answer_holds_both_modes_and_the_bound_is_a_bound(study: Study) -> None:
    answer = study.answer(_question(3 * 10**6))
    for p in (answer.predictions[True], answer.predictions[False]):
        assert p.planned.peak_bytes <= 3 * 10**6
        assert p.seconds >= p.bound.seconds
        assert p.tokens_per_second == pytest.approx(256 / p.seconds)
        assert p.mfu == pytest.approx(study.model.step_flops(2, 128) / p.seconds / 165.2e12)
        assert sum(highest_point(p.planned.step, answer.work)[1].values()) == p.planned.peak_bytes
        parts = compute_parts(p.planned.step, p.question.terms.machine, p.model_flops)
        assert sum(parts.values()) == pytest.approx(p.planned.timeline.busy["compute"])


def test_launches_and_attention_are_priced_by_the_machine(study: Study) -> None:
    """A model so small is bound by its launches; without them attention's own rate shows."""
    profile = load_machine("rtx-4090")

    def seconds(**changes: float | None) -> float:
        machine = replace(profile.machine, **changes)
        terms = replace(_question(3 * 10**6), profile=replace(profile, machine=machine))
        return study.answer(terms).predictions[True].planned.timeline.busy["compute"]

    free = seconds(launch_seconds=0.0)
    assert seconds(launch_seconds=16e-6) > 1.5 * seconds() > 1.5 * free
    products = seconds(launch_seconds=0.0, attention_forward=None, attention_backward=None)
    slow = seconds(launch_seconds=0.0, attention_forward=1e12, attention_backward=1e12)
    assert slow > free > products


def test_each_stream_accounts_for_the_whole_step(study: Study) -> None:
    answer = study.answer(_question(3 * 10**6))
    for p in (answer.predictions[True], answer.predictions[False]):
        for stream, causes in waits(p.planned).items():
            assert sum(causes.values()) + p.planned.timeline.busy[stream] == pytest.approx(
                p.seconds, rel=0.01
            )
            assert all(t > 0 for t in causes.values())
    assert "compute" in waits(answer.predictions[True].planned)["d2h"]


@pytest.mark.slow
def test_the_estimate_of_the_largest_batch_is_about_right(study: Study) -> None:
    """From a batch that fills the multiprocessors: below it attention's scratch does not grow with it."""
    answer = study.answer(replace(_question(40 * 10**6), batch=40))
    exact, about = largest(study, answer.question), estimate_largest(answer)
    assert not about.exact and exact.exact and exact.batch > 80
    assert about.batch == pytest.approx(exact.batch, rel=0.1)
    assert about.seq_limit == exact.seq_limit and about.seq == pytest.approx(exact.seq, abs=about.seq_step)


def test_host_bytes_are_twelve_per_parameter_and_two_or_four_for_kept_gradients(study: Study) -> None:
    answer = study.answer(_question(4 * 10**6))
    clipped, streamed = answer.predictions[True], answer.predictions[False]
    parameters = sum(g.elements for g in answer.compiled.assembly.groups)
    assert parameters == pytest.approx(study.model.parameters, rel=0.01)
    assert clipped.host.masters + clipped.host.moments == 12 * parameters
    there = sum(answer.work.groups[g].elements for g in clipped.planned.step.resident)
    assert clipped.host.gradients == 2 * (parameters - there)
    assert answer.hosts()["accumulated"].gradients == 4 * parameters
    assert streamed.host.gradients < clipped.host.gradients  # of deferred updates alone
    assert streamed.host.buffers > 0


def test_the_least_budget_is_feasible_and_one_byte_less_is_not(study: Study) -> None:
    answer = study.answer(_question(10**9))
    least = answer.least.device_bytes
    assert study.answer(_question(least)).fits_device()
    assert not study.answer(_question(least - 1)).fits_device()
    with pytest.raises(ValueError, match=str(least)):
        fitting(search(answer.work, Mode("train", 1, True), _question(1).terms.machine, least - 1))


def test_the_least_host_budget_is_no_more_than_the_plan_takes(study: Study) -> None:
    """Where state stays on the device, no gradient waits on the host. A study that has planned nothing yet
    knows no plan of a smaller budget that is as fast and takes more of the host."""
    answer = Study(study.model, "bf16", lambda message: None).answer(_question(10**9))
    planned = answer.prediction(True)
    assert planned is not None and planned.planned.step.resident
    assert answer.least_host(True) == planned.host.total < answer.least.hosts[True].total


def test_the_graph_counts_the_model_flops(study: Study) -> None:
    work = study.captured(2, 128).assembly.work
    assert complete_flops(work, study.model.forward_flops(2, 128)) == (work, 0.0)
    forward = sum(b.policy("none").forward.flops for b in work.blocks)
    norms = 6 * 2 * 128 * 64 * (2 * 4 + 1)  # norm weights, counted in 6·P·T, are in no product
    assert 3 * forward == pytest.approx(study.model.step_flops(2, 128) - norms)


def _work(flops: int = 100) -> Workload:
    call = Call((), (0,), 10, 0, flops, 0)
    policy = CheckpointPolicy("none", call, None, replace(call, flops=2 * flops), 0)
    block = BlockWork("b", 0, (0,), (0,), (), ((0, 2000),), (policy,))
    return Workload((block,), (ValueWork(4, True),), (GroupWork("g", 2000, 1000),), 0)


def test_the_bound_by_hand() -> None:
    machine = Machine(
        "m", flops=100, memory_bandwidth=14_000, h2d_bandwidth=1000, d2h_bandwidth=500, host_bandwidth=7000
    )

    def bound(work: Workload, mode: Mode, machine: Machine, flops: int, state: Any = "host") -> Bound:
        step = lower(work, Plan((BlockPlan("none"),), (GroupPlan(state=state),)), mode)
        return lower_bound(work, mode, machine, step, model_flops=flops)

    streamed = bound(_work(), Mode("train"), machine, 900)
    assert (streamed.compute, streamed.down, streamed.up, streamed.adam) == (9, 2, 4, 4)
    assert (streamed.seconds, streamed.binding) == (9, "compute")
    clipped = bound(_work(), Mode("train", deferred=True), machine, 900)
    assert clipped.seconds == pytest.approx(6 + 4)
    assert clipped.binding == "backward, then host Adam"
    shared = bound(_work(), Mode("train"), replace(machine, shared_memory=True), 300)
    assert shared.seconds == shared.memory == pytest.approx((28000 + 2 * 2000) / 7000)
    assert shared.binding == "host memory"
    there = bound(_work(), Mode("train"), machine, 300, "device")
    added = 2000 / 14_000  # the gradient, to a buffer on the device
    assert (there.seconds, there.down, there.adam) == (pytest.approx(3 + 2 + added), 0, 0)
    assert there.updates == pytest.approx(2 + added)
    stored = replace(_work(), groups=(GroupWork("g", 2000, 1000, state_bytes=10_000),))
    drives = replace(machine, nvme_read_bandwidth=1000.0, nvme_write_bandwidth=100.0)
    found = bound(stored, Mode("train"), drives, 300, "nvme-all")
    assert (found.seconds, found.binding) == ((10_000 + 2000) / 100, "the drive")  # read faster than written


def test_flops_that_the_graph_misses_are_added() -> None:
    work, missed = complete_flops(_work(100), 400)
    assert missed == pytest.approx(0.75)
    assert work.blocks[0].policies[0].forward.flops == 400
    assert work.blocks[0].policies[0].backward is not None
    assert work.blocks[0].policies[0].backward.flops == 800


@pytest.mark.parametrize("most", [0, 1, 2, 7, 63, 64])
@pytest.mark.parametrize("start", [1, 5, 64])
def test_the_largest_that_fits_is_found_in_few_steps(most: int, start: int) -> None:
    seen: list[int] = []

    def excess(n: int) -> int:
        seen.append(n)
        return (n - most) * 100 - 50 + (n % 3)  # nearly linear

    assert _most(excess, start, 64) == most
    assert len(seen) <= 7


def test_it_fits(plan: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = plan("--hbm-budget", "3MB", "--tokens", "1e9", "--price", "2")
    assert code == 0
    for text in ("FITS, with clipping", "lower bound of a step", "waits for", "Host memory",
                 "accumulated", "(×", "NVIDIA Ada", "at 2 an hour"):  # fmt: skip
        assert text in out
    assert max(map(len, out.splitlines())) <= 110
    assert "building" in err and "Traceback" not in err


def test_it_does_not_fit_and_says_what_would(plan: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = plan("--hbm-budget", "1500kB", "--no-clip")
    assert code == 1
    assert "DOES NOT FIT" in out and "Ways out" in out
    assert "--batch 1 --micro-batches 2" in out and "--seq 64" in out and "--hbm-budget" in out
    assert re.search(r"enough, [\d,]+ tokens/s", out)


def test_a_length_beyond_the_models_own_is_said(
    plan: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = ("--hbm-budget", "30MB", "--seq", "512")
    code, out, _ = plan(*long)
    assert code == 1 and "FITS THE MACHINE, AND IS TOO LONG FOR THE MODEL" in out
    assert "512 tokens, and the model's config is for 256  << too long" in out
    answer = json.loads(plan(*long, "--json")[1])
    assert not answer["fits"] and answer["fits_device"] and answer["longest"] == 256
    monkeypatch.chdir(tmp_path)
    code, out, _ = plan(*long[:2], "--sweep", "seq", "--values", "128,512")
    assert not [*tmp_path.iterdir()], "a picture is drawn where it is asked for"
    assert code == 0 and [line.split()[1] for line in out.splitlines()[1:3]] == ["yes", "no"]
    code, out, _ = plan("--hbm-budget", "3MB", "--rollout", "200x200")
    assert code == 1 and "400 tokens, and the model's config is for 256  << too long" in out
    code, out, _ = plan("--hbm-budget", "1500kB", "--seq", "1024", "--batch", "1")
    shorter = re.search(r"--seq (\d+) ", out.partition("Ways out")[2])
    assert code == 1 and (shorter is None or int(shorter[1]) <= 256), "no way out is too long itself"


@pytest.mark.parametrize(
    ("changed", "longest"),
    [
        ({}, 256),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
            1024,
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 512),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1e300}}, 256),
        (GPT2 | {"n_positions": 512}, 512),
        ({"model_type": "mpt", "max_seq_len": 128, "d_model": 64, "n_heads": 4, "n_layers": 2}, 128),
        ({"model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 2}, None),
    ],
)
def test_the_length_that_a_config_is_for(
    changed: dict[str, Any], longest: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed if "model_type" in changed else TINY | changed))
    assert reach(load_model(str(path)).module) == longest


def test_a_larger_host_budget_says_what_it_is_for(plan: Callable[..., tuple[int, str, str]]) -> None:
    out = plan("--hbm-budget", "3MB", "--host-budget", "3MB")[1]
    assert "the least with which some plan fits" in out
    assert re.search(r"--host-budget .* more memory, as much as the plan below takes", out)


@pytest.mark.parametrize("nbytes", [1, 10**8 - 1, 10**8, 10**8 + 1, 79_990_000_001])
def test_a_budget_that_is_named_suffices(nbytes: int) -> None:
    assert nbytes <= parse_bytes(size_text(nbytes), what="budget", available=1 << 60) < nbytes + 10**8


def test_where_nothing_fits_no_zero_is_printed() -> None:
    row = plan_report.largest_row(Largest(0, 0, 1024, None, exact=False), _question(10**6))
    assert "no batch at " in row.text and ", none at batch " in row.text


def test_a_host_that_is_too_small_is_said(plan: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = plan("--hbm-budget", "3MB", "--host-budget", "3300kB")
    assert code == 1 and "--no-clip" in out and "too small" in out
    least = re.search(r"needs at least (\S+ \S+) of 3.3 MB", out)
    assert least is not None and f"host {least[1]} with clipping" in out, "one least in all of the output"
    code, out, _ = plan("--hbm-budget", "3MB", "--host-budget", "4100kB")
    assert code == 0, "activations need not wait on the host"
    assert "waiting activations" not in out or "FITS" in out


def test_combinations_that_fit_are_printed_as_commands_that_do(
    plan: Callable[..., tuple[int, str, str]],
) -> None:
    """Room for int8 moments without clipping, and for int4 with it: neither change is named for nothing."""
    tight = ("--hbm-budget", "3.1MB")

    def least(form: str, kind: str) -> int:
        found = json.loads(plan(*tight, "--optimizer-state", form, "--json")[1])
        return int(found["least_host_budget"][kind])

    budget = max(least("int8", "streamed"), least("int4", "clipped"))
    assert budget < min(least("int8", "clipped"), least("fp32", "streamed"))
    asked = (*tight, "--host-budget", f"{budget}B")
    code, out, _ = plan(*asked, "--json")
    answer = json.loads(out)
    enough = {w["change"]: w["enough"] for w in answer["ways_out"] if "--opt" in w["change"]}
    assert code == 1 and enough == {"--optimizer-state int8": False, "--optimizer-state int4": True}
    plain, clipped = sorted(answer["commands"], key=lambda c: "max_grad_norm" not in c["compile"])
    assert plain["compile"] == {"optimizer_state": "int8", "max_grad_norm": None}
    assert plain["train"] == {"optimizer_state": "int8", "max_grad_norm": 0}
    assert clipped["compile"] == clipped["train"] == {"optimizer_state": "int4"}
    assert answer["commands"][0]["tokens_per_second"] >= answer["commands"][1]["tokens_per_second"]
    for command, mode in ((plain, "without_clipping"), (clipped, "with_clipping")):
        words = command["plan"].split()
        assert words[:2] == ["megacompile", "plan"]
        code, out, _ = plan(*words[2:], "--json")
        planned = json.loads(out)[mode]
        assert code == 0 and planned["tokens_per_second"] == pytest.approx(command["tokens_per_second"])


def test_a_layer_is_explained_and_the_page_written(
    plan: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    code, out, err = plan("--hbm-budget", "3MB", "--explain", "layers.2", "--html", str(page))
    assert code == 0 and out.startswith("model.layers.2: ") and "as planned" in out
    assert "<canvas" in page.read_text() and str(page) in err
    code, _, err = plan("--hbm-budget", "3MB", "--explain", "layers.7")
    assert code == 2 and "layers." in err


def least_host_bytes(report: str) -> int:
    """What the report calls the least host budget without clipping."""
    found = re.search(r"least budgets: .* host .* with clipping, (.*) without", report)
    assert found is not None, report
    return parse_bytes(found[1], what="least", available=10**15)


@pytest.mark.slow_cases(r"several1")
@pytest.mark.parametrize("several", [(), ("--gpus", "2", "--fabric", "100")])
def test_what_the_host_has_no_room_for_goes_to_a_drive(
    several: tuple[str, ...], plan: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    dump = tmp_path / "dump"
    tight = ("--hbm-budget", "3.1MB", "--host-budget", "3MB", "--no-clip", *several)
    code, out, _ = plan(*tight)
    assert code == 1 and re.search(r"--nvme-budget .*enough, [\d,]+ tokens/s; state on a drive", out)
    in_ram = least_host_bytes(out)
    code, out, _ = plan(*tight, "--nvme-budget", "1GB")
    assert code == 0 and "written per step" in out and "reads from NVMe" in out
    assert least_host_bytes(out) < 3 * 10**6 < in_ram
    code, out, _ = plan(*tight, "--nvme-budget", "1GB", "--json", "--dump", str(dump))
    found = json.loads(out)
    host = found["host_bytes"]["streamed"]
    assert host["total"] <= 3 * 10**6 and host["nvme"] > 0 and found["fits"]
    schedule = Schedule.from_json((dump / "train" / "schedule.json").read_text())
    assert sum(op.nbytes for op in schedule.step.on("nvme_write")) > 0
    drive = ("--nvme-budget", "1GB", "--nvme-rates", "0.002", "0.001")
    slow = json.loads(plan(*tight, *drive, "--json")[1])
    bound = slow["without_clipping"]["lower_bound"]
    assert bound["binding"] == "the drive" and bound["seconds"] == bound["drive"]
    assert 1 - 1e-9 <= slow["without_clipping"]["step_seconds"] / bound["seconds"] <= 1.5
    code, out, _ = plan(*tight, *drive)
    assert "read at 0.002 GB/s, written at 0.001 GB/s, sustained, as given" in out
    code, out, _ = plan(*tight, "--nvme-budget", "10kB")
    assert "read at 5 GB/s, written at 2.5 GB/s, a fast consumer drive (assumed)" in out
    assert code == 1 and re.search(r"host    needs at least .*too small", out)
    assert re.search(r"--nvme-budget .*enough, [\d,]+ tokens/s; state on a drive", out)


def test_json_is_strict_and_agrees(plan: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, _ = plan("--hbm-budget", "3MB", "--json", "--dump", str(tmp_path / "dump"))
    found = json.loads(out)
    assert found["fits"] is (code == 0) is True
    assert found["least_hbm_budget"] <= found["with_clipping"]["peak_bytes"] <= 3 * 10**6
    assert found["with_clipping"]["lower_bound"]["seconds"] <= found["with_clipping"]["step_seconds"]
    assert set(found["host_bytes"]) == {"streamed", "clipped", "accumulated"}
    assert (tmp_path / "dump" / "train" / "09_step.py").exists()


@pytest.mark.slow
def test_a_rollout_is_predicted_by_what_its_forward_takes(study: Study) -> None:
    """All rows, one by one with a byte less, and blocks one by one without room for all weights."""
    model, machine = study.model.module, load_machine("rtx-4090").machine
    found = list[Forecast]()
    for budget in (10**9, lambda: found[0].need_bytes - 1, lambda: found[0].weights.whole - 1, lambda: 1):
        nbytes = budget if isinstance(budget, int) else budget()
        forms = parameter_forms(model, torch.bfloat16)
        found.append(forecast(model, forms, machine, nbytes, Completions(2, 64, 32)))
        assert found[-1].cache_bytes == 4 * 2 * 2 * 16 * 2 * 96  # layers, keys, heads, width, bf16, tokens
        assert found[-1].weights.whole == pytest.approx(2 * study.model.parameters, rel=0.02)
        assert found[-1].need_bytes <= nbytes or nbytes == 1
    assert [(f.at_once, f.streams) for f in found] == [(2, False), (1, False), (1, True), (0, True)]
    rates = [f.decode_rate for f in found[:3]]
    assert rates == sorted(rates, reverse=True) and found[2].load < found[0].load
    rows = rollout_section(found[3], study.answer(_question(10**9))).rows
    assert any("no room for one" in row.text for row in rows)


def test_a_rollout_stands_in_the_answer(plan: Callable[..., tuple[int, str, str]]) -> None:
    words = ["--no-clip", "--hbm-budget", "1GB", "--rollout", "64x32"]
    code, out, _ = plan(*words, "--json")
    rollout = json.loads(out)["rollout"]
    assert code == 0 and rollout["fits"] and rollout["completions"] == {"rows": 2, "prompt": 64, "new": 32}
    _, out, _ = plan(*words)
    assert f"completions  {rollout['decode_tokens_per_second']:,.0f} tokens/s" in out


def test_micro_batches_raise_the_tokens(plan: Callable[..., tuple[int, str, str]]) -> None:
    _, out, _ = plan("--hbm-budget", "30MB", "--json", "--micro-batches", "3", "--no-clip")
    found = json.loads(out)
    p = found["without_clipping"]
    assert p["tokens_per_second"] * p["step_seconds"] == pytest.approx(3 * 256)


def test_adapters_are_trained_alone(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft", reason="peft is missing: pip install peft")
    asked = ["plan", "--model", config, "--machine", "rtx-4090", *SHAPE, "--hbm-budget", "3MB", "--no-clip"]
    assert main([*asked, "--lora", "4", "--lora-targets", "q_proj", "v_proj", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    trained, host = planned["trained_parameters"], planned["host_bytes"]["streamed"]
    assert trained == 4 * 4 * ((64 + 64) + (64 + 32))
    assert host["moments"] == 8 * trained
    assert host["masters"] == 4 * trained + 2 * (planned["parameters"] - trained)


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"adamw", "muon"}))
def test_the_optimizers_of_plan_are_those_of_torch_that_train(name: str) -> None:
    kind = type(optimizer_of(name, nn.Linear(2, 2)))
    assert kind.__name__.lower() == name
    assert name_of(kind) in ELEMENTWISE | {"torch.optim.Adafactor"}


def test_an_optimizer_of_another_library_is_planned(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Lion keeps one moment; what is no class is refused by name."""
    asked = ["plan", "--model", config, "--machine", "rtx-4090", *SHAPE, "--json", "--optimizer"]
    assert main([*asked, "lion_pytorch.Lion"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["host_bytes"]["clipped"]["moments"] == pytest.approx(4 * planned["parameters"], rel=0.01)
    assert main([*asked, "lion_pytorch.Tiger"]) == 2
    assert "lion_pytorch.Tiger cannot be made" in capsys.readouterr().err
    assert main([*asked, "lion"]) == 2
    assert "must be one of adamw, muon" in capsys.readouterr().err


@pytest.mark.slow
def test_another_optimizer_is_planned_over_several_cards(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its state is in all that of one card, padding between owners of matrices apart."""
    moments = []
    for gpus in ("1", "2"):
        arguments = ["--machine", "h100-sxm", *SHAPE, "--optimizer", "muon", "--gpus", gpus]
        assert main(["plan", "--model", config, *arguments, "--json"]) == 0
        moments.append(json.loads(capsys.readouterr().out)["host_bytes"]["clipped"]["moments"])
    assert moments[0] <= moments[1] <= 1.3 * moments[0]


def test_the_state_and_the_update_of_another_optimizer_are_priced(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {}
    for optimizer in ("adamw", "muon", "sgd"):
        arguments = ["--machine", "rtx-4090", *SHAPE, "--optimizer", optimizer, "--host-budget", "10MB"]
        main(["plan", "--model", config, *arguments, "--json"])
        answers[optimizer] = json.loads(capsys.readouterr().out)
    model = load_model(config)
    named = dict(model.module.named_parameters())
    matrices = [p for n, p in named.items() if n.endswith("proj.weight")]
    steps = 4 * 32 * (len(named) - len(matrices))  # AdamW's count of each, padded
    host = {name: answer["host_bytes"]["clipped"] for name, answer in answers.items()}
    assert host["sgd"]["masters"] == host["muon"]["masters"] == host["adamw"]["masters"]
    assert host["sgd"]["moments"] == 4 * model.parameters
    assert host["muon"]["moments"] == 8 * model.parameters - 4 * sum(p.numel() for p in matrices) + steps
    main(["plan", "--model", config, *arguments[:-2]])
    assert "host updates" in (out := capsys.readouterr().out) and "Adam" not in out
    main(["plan", "--model", config, "--machine", "rtx-4090", *SHAPE, "--optimizer", "muon"])
    out = capsys.readouterr().out
    assert "FP32 masters and state of Muon and AdamW in host memory" in out
    nbytes = format_bytes(2 * sum(p.numel() for p in matrices))
    assert re.search(
        rf"made orthogonal on the device \S+ \S+; theirs are {nbytes}\s+of what goes each way", out
    )


def test_several_cards_share_the_state_and_bring_batches_of_their_own(
    plan: Callable[..., tuple[int, str, str]],
) -> None:
    def asked(*arguments: str) -> dict[str, Any]:
        found = plan("--hbm-budget", "30MB", "--json", *arguments, machine="h100-sxm")[1]
        return dict(json.loads(found))

    machines = ("--gpus", "4", "--nodes", "2")
    one, four, copied = asked(), asked("--gpus", "4"), asked(*machines, "--network", "0.1")
    shared_by_all, of_each = copied["meshes"]
    assert copied["replicated"] and of_each["seconds"] < shared_by_all["seconds"]
    between = (of_each["host_bytes"] + shared_by_all["host_bytes"]) // 2
    eight = asked(*machines, "--network", "0.1", "--host-budget", f"{between}B")
    assert not eight["replicated"] and eight["meshes"][1]["seconds"] is None, "the host has no room"
    masters = [found["host_bytes"]["streamed"]["masters"] for found in (one, four, eight, copied)]
    assert masters[0] <= masters[1] < 1.05 * masters[0]  # shards are equal, so padded
    assert masters[1] <= 2 * masters[2] < 1.05 * masters[1] and masters[3] == masters[1]
    for found, ranks in ((one, 1), (four, 4), (eight, 8), (copied, 8)):
        p = found["with_clipping"]
        assert p["tokens_per_second"] * p["step_seconds"] == pytest.approx(ranks * 256)
        assert (p["lower_bound"]["gathers"] > 0) == (p["busy_seconds"]["comm"] > 0) == (ranks > 1)
        assert p["lower_bound"]["seconds"] <= p["step_seconds"]
    _, out, _ = plan("--hbm-budget", "30MB", *machines, "--network", "0.1", machine="h100-sxm")
    assert "2 machines of 4 × H100" in out and "on each machine" in out and "network " in out
    assert "copied to each machine, mesh=(2, 4), taken: " in out and "state shared by all cards: " in out


@pytest.mark.slow_cases(r"machine")
@pytest.mark.parametrize("over", ["hbm-budget", "machine"])
def test_a_sweep_prints_a_table_and_draws(
    plan: Callable[..., tuple[int, str, str]], tmp_path: Path, over: str
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install matplotlib")
    path = tmp_path / "curve.png"
    values = {"hbm-budget": "2MB,3MB,1MB", "machine": "h100-pcie,gh200"}[over]
    code, out, err = plan("--hbm-budget", "3MB", "--sweep", over, "--values", values, "--plot", str(path))
    assert code == 0 and "The curve is in" in err
    assert "with clipping" in out and "without clipping" in out
    assert path.read_bytes().startswith(b"\x89PNG")
    assert all(v.split("MB")[0] in out for v in values.split(","))


TWO = ["plan", "--model", "llama-3.1-8b", "--machine", "h200", "--gpus", "2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pln"], "did you mean plan"),
        (["plan", "--machine", "h200"], "--model"),
        (["plan", "--model", "llama-3.1-8b", "--machine", "l40s", "--gpus", "2"], "give --fabric GB/s"),
        (["plan", "--model", "llama-3.1-8b", "--machine", "l40s", "--sweep", "gpus"], "give --fabric GB/s"),
        ([*TWO, "--sweep", "machine", "--values", "h200,l40s"], "l40s has no fast links"),
        (["plan", "--model", "llama-3.1-8", "--machine", "h200"], r"llama-3.1-8b"),
        (["plan", "--model", "llama-3.1-8b", "--machine", "h20"], "h200"),
        (["plan", "--model", "llama-3.1-8b", "--machine", "h200", "--bacth", "2"], "--batch"),
        (["plan", "--model", "llama-3.1-8b", "--machine", "h200", "--dtype", "fp23"], "fp32"),
        (["plan", "--model", "x", "--machine", "h200", "--batch", "0"], "from 1 to"),
        (["plan", "--model", "x", "--machine", "h200", "--lora", "0"], "from 1 to"),
        (["plan", "--model", "x", "--machine", "h200", "--lora-targets", "q_proj"], "needs --lora RANK"),
        (["plan", "--model", "x", "--machine", "h200", "--frozen", "8bit"], "needs --lora RANK"),
        (
            ["plan", "--model", "x", "--machine", "h200", "--optimizer", "sgd", "--optimizer-state", "int8"],
            "format of Adam's moments",
        ),
        (["plan", "--model", "x", "--machine", "h200", "--hbm-budget", "0.9"], "90%"),
        (["plan", "--model", "x", "--machine", "h200", "--hbm-budget", "142"], "141 GB"),
        (["plan", "--model", "x", "--machine", "h200", "--hbm-budget", "much"], "24GiB"),
        (["plan", "--model", "x", "--machine", "h200", "--host-budget", "90%"], "of what"),
        (["plan", "--model", "x", "--machine", "h200", "--price", "2"], "--tokens"),
        (["plan", "--model", "x", "--machine", "h200", "--nvme-budget", "4TB"], "--host-budget"),
        (["plan", "--model", "x", "--machine", "h200", "--plot", "a.png"], "--sweep"),
        (["plan", "--model", "x", "--machine", "h200", "--rollout", "512"], "as 512x512"),
        (["plan", "--model", "x", "--machine", "h200", "--rollout", "8x8", "--gpus", "2"], "of one card"),
        (["plan", "--model", "x", "--machine", "h200", "--sweep", "batch", "--html", "a"], "one of the two"),
        (["plan", "--model", "x", "--machine", "h200", "--explain", "a", "--json"], "one of the two"),
        (["inspct"], "did you mean inspect"),
        (["inspect"], "dump"),
        (["inspect", "nowhere"], "cannot be read"),
        (["inspect", "a", "--trce", "b"], "--trace"),
        (["diff", "a"], "second"),
        (["plan", "--model", "x", "--machine", "h200", "--no-clip", "--max-grad-norm", "1"], "not allowed"),
        ([*_TO_PLAN, "--batch", str(2**63)], "from 1 to"),
        ([*_TO_PLAN, "--batch", "1000000", "--seq", "1000000"], "the most"),
        ([*_TO_PLAN, "--micro-batches", "\u00b2"], "from 1 to"),
        ([*_TO_PLAN, "--link", "nan"], "from 0.001 to"),
        ([*_TO_PLAN, "--link", "1e308"], "from 0.001 to"),
        ([*_TO_PLAN, "--tokens", "-1"], "from 1e-09 to"),
        ([*_TO_PLAN, "--hbm-budget", "1e308GB"], "no budget"),
        ([*_TO_PLAN, "--hbm-budget", "1.2.3GB"], "not understood"),
        ([*_TO_PLAN, "--hbm-budget", "nan"], "no budget"),
        ([*_TO_PLAN, "--host-budget", "1e-30GB"], "no budget"),
        ([*_TO_PLAN, "--sweep", "batch", "--values", f"1,{2**62}"], "from 1 to"),
        (["plan", "--model", "~no-such-user/x", "--machine", "h200"], "no path"),
        (["inspect", "~no-such-user/x"], "no path"),
        (["diff", "~no-such-user/x", "a"], "no path"),
        (["export", "~no-such-user/x", "a"], "no path"),
        (["new", "~no-such-user/x"], "no path"),
        (["bench", "nvme", "--dir", "~no-such-user/x"], "no path"),
        (["plan", "--model", "x" * 5000, "--machine", "h200"], "no path"),
    ],
)
def test_mistakes_get_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    last = printed.err.strip().splitlines()[-1]
    assert last.startswith("megacompile: ") and said in last
    assert not printed.out and "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "llama", "hid', "cut off"),
        ('{"model_type": "llama", "hidden_size": NaN}', "NaN"),
        ("[" * 100_000, "nested"),
        ("[1]", "no model_type"),
        ('{"model_type": "lama"}', "llama"),
        ('{"model_type": "vit"}', "no causal language model"),
        ('{"model_type": "bert"}', "is an encoder"),
        ('{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}', "no model_type 'evil'"),
        (json.dumps(TINY | {"hidden_size": "many"}), "expected int"),
        (json.dumps(TINY | {"hidden_size": 66}), "multiple"),
        (json.dumps(TINY | {"num_hidden_layers": 10**9}), "cannot be meant"),
        (json.dumps(TINY | {"intermediate_size": 0}), "cannot be meant"),
        (json.dumps(TINY | {"num_key_value_heads": 2**31}), "cannot be meant"),
        (json.dumps(TINY | {"num_key_value_heads": 3}), "do not fit together"),
        ('{"model_type": "llama", "a": "\udcff"}', "decode"),
    ],
)
def test_a_config_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, errors="surrogateescape")
    assert main(["plan", "--model", str(path), "--machine", "h200"]) == 2
    printed = capsys.readouterr()
    last = printed.err.strip().splitlines()[-1]
    assert said in last and str(path) in last and "Traceback" not in printed.err and not printed.out


@pytest.mark.nightly
@pytest.mark.parametrize("name", PRESETS)
def test_each_model_by_name_is_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", name, "--machine", "h200", "--seq", "256", "--no-clip"]) in (0, 1)
    assert f"{name} on H200" in capsys.readouterr().out


def test_a_config_by_its_class_has_the_defaults_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_model("GPT2Config").config.n_layer == 12
    assert main(["plan", "--model", "Qwen33Config", "--machine", "h200"]) == 2
    assert "did you mean Qwen3Config" in capsys.readouterr().err


def test_a_hub_that_cannot_be_reached_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(models, "getproxies", dict)
    assert main(["plan", "--model", "someone/something-new", "--machine", "h200"]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "hub.invalid cannot be reached" in last and "give its path" in last
    assert main(["plan", "--model", str(tmp_path), "--machine", "h200"]) == 2
    assert "no config.json in this folder" in capsys.readouterr().err


def test_a_sweep_refuses_values_that_are_none(plan: Callable[..., tuple[int, str, str]]) -> None:
    for over, values, said in (("batch", "1,two", "two"), ("machine", "h1000", "h1000")):
        code, _, err = plan("--hbm-budget", "3MB", "--sweep", over, "--values", values)
        assert code == 2 and said in err


@pytest.mark.parametrize(
    ("command", "words"),
    [("models", ["llama-3.1-405b", "deepseek-v3", "report"]), ("machines", ["gh200", "datasheet", "assumed"]),
     ("doctor", ["memory", "memlock", "host Adam", str(torch.__version__).split("+")[0]])],
)  # fmt: skip
def test_lists_and_doctor(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 0
    out = capsys.readouterr().out
    assert all(w in out for w in words)


@pytest.mark.parametrize("name", ["", "plan", "inspect", "diff", "models", "machines", "doctor"])
def test_help_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*name.split(), "--help"]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "example" in out and f"megacompile {name}".strip() in out and "%%" not in out
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.slow
def test_micro_batches_auto_takes_the_fastest_split_that_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each split tried is what asking for it by itself gives, and the answer is that of the fastest."""
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
              "num_attention_heads": 4, "vocab_size": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ["plan", "--model", str(tmp_path / "config.json"), "--machine", "rtx-4090", "--seq", "256",
             "--hbm-budget", "20MB", "--json"]  # fmt: skip

    def answer(*more: str) -> dict[str, Any]:
        main([*asked, *more])
        return json.loads(capsys.readouterr().out)

    found = answer("--batch", "8", "--micro-batches", "auto")
    assert [s["micro_batches"] * s["batch"] for s in found["splits"]] == [8] * len(found["splits"])
    times = {s["micro_batches"]: s["seconds"] for s in found["splits"]}
    best = min(t for t in times.values() if t is not None)
    assert times[found["micro_batches"]] == best
    assert found["with_clipping"]["step_seconds"] == best  # what was tried is not planned again
    assert times[1] is None  # so that there is something to decide
    alone = answer("--batch", str(found["batch"]), "--micro-batches", str(found["micro_batches"]))
    assert alone["with_clipping"]["step_seconds"] == best


@pytest.mark.slow_cases(r"qwen3")
@pytest.mark.parametrize("make", [images.gemma3, images.qwen3_vl])
def test_plan_counts_the_tower_of_a_vision_language_model(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights and their state; what a batch of text does not pass through is none of its FLOPs."""
    model, _ = make()
    model.config.to_json_file(tmp_path / "config.json")
    known = load_model(str(tmp_path / "config.json"))
    tower = sum(p.numel() for n, p in model.named_parameters() if "vis" in n or "multi_modal" in n)
    count = sum(p.numel() for p in model.parameters())
    assert (known.parameters, known.tower_parameters) == (count, tower)
    assert known.active_parameters == count - tower
    assert (
        main(["plan", "--model", str(tmp_path), "--machine", "rtx-4090", "--batch=1", "--seq=32", "--json"])
        == 0
    )
    host = json.loads(capsys.readouterr().out)["host_bytes"]["streamed"]
    assert host["masters"] == pytest.approx(4 * count, rel=0.01)  # tensors begin at multiples
    assert host["moments"] == pytest.approx(8 * count, rel=0.01)
