"""``megacompile train``: from a YAML file and a file of chats to a model that plain transformers loads."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megacompile.cli import train
from megacompile.cli.main import main
from megacompile.cli.train import TrainConfig, _data, _parse
from megacompile.cli.train_config import read_config
from megacompile.errors import MegacompileError
from tests.e2e.test_trainer import Both
from tests.support.models import build
from tests.support.ranks import run_ranks, whole
from tests.support.text import tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
trl = pytest.importorskip("trl", reason="trl is missing: pip install trl")
datasets = pytest.importorskip("datasets", reason="datasets is missing: pip install datasets")

PAIRS = [("what is it?", "a fox."), ("who is it?", "a dog."), ("where?", "here.")]
GRADIENTS = "--gradient_accumulation_steps="
SMALL = [
    f"--{key}={value}"
    for key, value in {
        "max_length": 48,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "gradient_accumulation_steps": 2,
        "eval_steps": 4,
        "save_steps": 2,
        "logging_steps": 2,
        "hbm_budget": "5MB",
        "bf16": "false",
        "disable_tqdm": "true",
    }.items()
]


def filled(folder: Path) -> Path:
    """Put a model with its tokenizer, chats and the example file into a folder."""
    build("llama", layers=1).save_pretrained(folder / "model")  # type: ignore[operator]
    tokenizer().save_pretrained(folder / "model")
    lines = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in PAIRS * 14
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["new", str(folder / "config.yaml")]) == 0
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a command is run."""
    monkeypatch.chdir(filled(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the example file was trained to its end, and what was printed."""
    folder, before = filled(tmp_path_factory.mktemp("run")), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["train", "config.yaml", *SMALL]) == 0
    finally:
        os.chdir(before)
    return folder, printed.getvalue()


@pytest.fixture
def finished(run: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a training has ended, which no test changes."""
    monkeypatch.chdir(run[0])
    return run[0]


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_file_of_chats_becomes_a_model(
    run: tuple[Path, str], finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example file as it is written."""
    folder, printed = run
    first = transformers.AutoModelForCausalLM.from_pretrained("out/model").state_dict()
    before = build("llama", layers=1).state_dict()
    assert not torch.equal(first["lm_head.weight"], before["lm_head.weight"])
    assert transformers.AutoTokenizer.from_pretrained("out/model").chat_template
    logged = list(csv.DictReader((folder / "out" / "log.csv").open()))
    assert [row["step"] for row in logged if row["loss"]] == ["2", "4"]
    samples = [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [(4, "What can you do?")]
    assert f"What can you do? → {samples[0]['answer']}" in printed
    report = (folder / "out" / "report.md").read_text()
    assert "Answers after step 4" in report and samples[0]["answer"] in report
    assert "4 steps" in report and "of 5 MB" in report
    assert "--max_length=48" in (folder / "out" / "config.yaml").read_text()
    for name in ("loss.png", "schedule.html", "config.yaml"):
        assert (folder / "out" / name).stat().st_size
    assert re.search(r"s for 4 steps, .*\n\| tokens per second \| [\d,]+, over", report)
    assert not (folder / "out" / "README.md").exists()


def test_a_training_that_has_ended_is_not_begun_again(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where only what is told and kept differs, or where it runs; nothing is read or written."""
    monkeypatch.delattr("megacompile.cli.train._trainer")
    before = contents(finished)
    for other in ([], ["--hbm_budget=9MB", "--logging_steps=1", "--save_total_limit=7"]):
        assert main(["train", "config.yaml", *SMALL, *other]) == 0
        assert "already finished: the model is in out/model" in capsys.readouterr().out
    assert contents(finished) == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--learning_rate=0.02"], "learning_rate was 0.01, and is 0.02"),
        (["--seed=1", "--max_steps=6"], "max_steps was 4, and is 6; seed was 0, and is 1"),
        (["--use_peft=true"], "use_peft was false, and is true"),
        (["--optimizer_state=int8"], 'optimizer_state was null, and is "int8"'),
        (["--data=other.jsonl"], 'data was "./chats.jsonl", and is "other.jsonl"'),
    ],
    ids=lambda value: value[0].strip("-=") if isinstance(value, list) else "",
)
def test_another_training_in_the_same_folder_is_refused(
    flags: list[str], words: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(finished)
    assert main(["train", "config.yaml", *SMALL, *flags]) == 2
    said = capsys.readouterr().err
    assert f"megacompile: out/checkpoint-4 is of another training: {words}. Another output_dir starts" in said
    assert "--resume_from_checkpoint out/checkpoint-4 goes on from there" in said
    assert contents(finished) == before


def test_other_rows_or_another_model_of_the_same_name_are_refused(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name, key in (
        ("chats.jsonl", "data, ./chats.jsonl"),
        ("model/config.json", "model_name_or_path, ./model"),
    ):
        text = Path(name).read_text()
        Path(name).write_text(text[:-2] + " " + text[-2:])
        assert main(["train", "config.yaml", *SMALL]) == 2
        assert f"of another training: what is in {key}, has changed." in capsys.readouterr().err
        Path(name).write_text(text)


@pytest.mark.slow
def test_a_checkpoint_that_is_asked_for_by_name_is_gone_on_from(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what is given now. Shares of the updates are no other arguments than their numbers, and samples
    are kept once for each step, those of steps behind the checkpoint not at all."""
    warned: list[str] = []
    monkeypatch.setattr(transformers.trainer_utils.logger, "warning_once", warned.append)
    shutil.copytree(finished / "out", tmp_path / "out")
    for name in ("model", "chats.jsonl", "config.yaml"):
        (tmp_path / name).symlink_to(finished / name)
    monkeypatch.chdir(tmp_path)
    samples = Path("out/samples.jsonl").read_text()
    with Path("out/samples.jsonl").open("a") as file:
        file.write(samples.replace('"step": 4', '"step": 5'))
    asked = [*SMALL, "--learning_rate=0.02", "--resume_from_checkpoint=out/checkpoint-4"]
    assert main(["train", "config.yaml", *asked]) == 2
    assert "out/checkpoint-4 has made 4 updates, and 4 are asked for: give more" in capsys.readouterr().err
    asked += [
        "--max_steps=5",
        "--logging_steps=0.4",
        "--save_steps=0.4",
        "--eval_steps=0.8",
        "--eval_on_start=true",
    ]
    assert main(["train", "config.yaml", *asked]) == 0
    assert "going on from out/checkpoint-4" in capsys.readouterr().out
    assert [json.loads(line)["step"] for line in Path("out/samples.jsonl").read_text().splitlines()] == [4, 5]
    assert not warned
    assert main(["train", "config.yaml", *asked]) == 0
    assert "already finished" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("template", [True, False])
def test_prompts_are_answered_as_the_model_would_alone(template: bool, folder: Path) -> None:
    """By greedy generation of plain transformers; with a chat template as a user's turn, else as text."""
    if not template:
        plain = tokenizer()
        plain.chat_template = None
        (folder / "model" / "chat_template.jinja").unlink(missing_ok=True)
        plain.save_pretrained(folder / "model")
        lines = [json.dumps({"prompt": asked, "completion": said}) for asked, said in PAIRS * 14]
        (folder / "chats.jsonl").write_text("\n".join(lines))
        SMALLER = [*SMALL, "--assistant_only_loss=false"]
    else:
        SMALLER = SMALL
    prompts = ["what?", "who is it?"]
    given = ["--sample_tokens=5", "--max_steps=2", "--eval_steps=2", "--sample_prompts", *prompts]
    assert main(["train", "config.yaml", *SMALLER, *given]) == 0
    samples = [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]
    assert [sample["prompt"] for sample in samples] == prompts
    model = transformers.AutoModelForCausalLM.from_pretrained("out/model").eval()
    loaded = transformers.AutoTokenizer.from_pretrained("out/model")
    for sample in samples:
        text = sample["prompt"]
        if template:
            chat = [{"role": "user", "content": text}]
            text = loaded.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = loaded(text, add_special_tokens=not template, return_tensors="pt")["input_ids"]
        tokens = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=loaded.pad_token_id)
        assert sample["answer"] == loaded.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


def test_tensorboard_is_written_where_it_is_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trl

    from megacompile.cli.train import _parse

    for there, given, expected in (
        (True, [], ["tensorboard"]),
        (False, [], []),
        (True, ["--report_to", "none"], []),
    ):
        monkeypatch.setattr("transformers.integrations.is_tensorboard_available", lambda there=there: there)
        assert _parse(trl, folder / "config.yaml", given)[2].report_to == expected


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT] * 2], ids=str)
def test_a_stopped_training_writes_no_model(
    signals: list[signal.Signals],
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """It says at once what it will do, and when it has ended how it goes on; the exit code is a shell's."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}[signals[0]]
    before = signal.signal(signals[0], usual)  # which a suite's runner may have replaced
    request.addfinalizer(lambda: signal.signal(signals[0], before))
    said_at_once: list[str] = []

    def stop(*args: Any, **kwargs: Any) -> None:
        for number in signals:
            os.kill(os.getpid(), number)
            said_at_once.append(capfd.readouterr().err)

    monkeypatch.setattr("megacompile.integrations.training_report.Logbook.on_step_begin", stop)
    assert main(["train", "config.yaml", *SMALL]) == 128 + signals[0]
    assert "Finishing the update, then saving a checkpoint; Ctrl-C again stops now." in said_at_once[0]
    said = capfd.readouterr()
    if len(signals) == 1:
        assert f"{signals[0].name} stopped the training after update 1: " in said.err
        assert "the same command goes on with the training; no model was written" in said.out
    else:
        assert said.err.endswith("\nmegacompile: stopped by Ctrl-C\n") and "Traceback" not in said.err
    assert (folder / "out" / "checkpoint-1").exists() == (len(signals) == 1)
    assert not (folder / "out" / "model").exists() and not (folder / "out" / "report.md").exists()


def test_an_error_stands_on_a_line_of_its_own(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also where a progress bar is shown."""
    assert main(["train", "config.yaml", *SMALL, "--hbm_budget=10kB", "--disable_tqdm=false"]) == 2
    assert re.search(r"\nmegacompile: hbm_budget=10 kB is too small: .*\n$", capfd.readouterr().err)


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    """The exit code of a dry run, and what it said; nothing is left of it."""
    code = main(["train", "config.yaml", "--dry_run", "true", *SMALL, *flags])
    said = capsys.readouterr()
    assert not Path("out").exists()
    return code, said.out + said.err


def test_a_dry_run_says_what_the_training_will_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the rows that are left: a short batch at the end of an epoch, evaluation and samples are planned."""
    code, said = planned(capsys, f"{GRADIENTS}4", "--max_length=32", "--max_steps=10")
    assert code == 0 and "FITS" in said
    assert "data      39 rows to train on, of 30 to 32 tokens, 26 of them as long as max_length" in said
    assert "the first row begins 'u s e r :" in said
    names = [
        line.split(": ")[0].removeprefix("program   ") for line in said.splitlines() if "program   " in line
    ]
    assert names == ["training", "the last update of an epoch", "evaluation", "samples"]
    assert "10 updates of" in said and "6 batches of evaluation" in said and "128 tokens of samples" in said
    assert "warm-up" not in said


def test_a_training_that_is_all_warm_up_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it makes one update at a learning rate of 0, and learns nothing."""
    code, said = planned(capsys, f"{GRADIENTS}4", "--max_steps=1", "--warmup_steps=0.03")
    assert code == 0 and "warning   all updates (1) are warm-up, the first at a learning rate of 0" in said


def test_no_bar_cuts_the_report_of_a_dry_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "config.yaml", *SMALL, "--disable_tqdm", "false", "--dry_run", "true"]) == 0
    printed = capfd.readouterr()
    assert re.search(r"^data .*^FITS .*^time ", printed.out, re.MULTILINE | re.DOTALL)
    assert not re.search(r"0/\d+ \[00:00<\?, \?it/s\]$", printed.err), "a bar that was left open"


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--use_peft=true", "--optimizer_state=int8"], ids=["LoRA", "int8"])
def test_a_dry_run_is_of_the_adapters_and_moments_that_are_trained(
    flag: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the least budget that the training names, and fits where that trains."""
    code, said = planned(capsys, "--hbm_budget=10kB", flag)
    assert code == 2 and "FITS" not in said
    assert main(["train", "config.yaml", *SMALL, "--hbm_budget=10kB", flag]) == 2
    refusal = "hbm_budget=10 kB is too small"
    assert said[said.index(refusal) :] == (told := capsys.readouterr().err)[told.index(refusal) :]
    assert [p.name for p in (folder / "out").iterdir()] == ["config.yaml"]
    shutil.rmtree(folder / "out")
    (least,) = re.findall(r"needs (\d+) bytes", said)
    code, said = planned(capsys, f"--hbm_budget={least}B", flag)
    assert code == 0 and "FITS" in said


@pytest.mark.slow
def test_the_least_budget_trains_evaluates_and_samples_to_the_end(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where evaluation needs more than training does; 1 % less is refused before the first step. Without
    matplotlib the report has no picture."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    large = ["--per_device_eval_batch_size=16", "--test_split_size=0.5", "--sample_tokens=8"]
    code, said = planned(capsys, "--hbm_budget=100kB", *large)
    assert code == 2 and "evaluation needs" in said
    (least,) = re.findall(r"needs (\d+) bytes", said)
    assert said.count(least) == 1
    less = f"--hbm_budget={int(least) * 99 // 100}B"
    assert main(["train", "config.yaml", *SMALL, *large, less]) == 2
    assert f"evaluation needs {least} bytes" in capsys.readouterr().err
    assert not (folder / "out" / "log.csv").exists()
    assert main(["train", "config.yaml", *SMALL, *large, f"--hbm_budget={least}B"]) == 0
    report = (folder / "out" / "report.md").read_text()
    assert "loss of held-out data" in report and "Answers after step 4" in report
    assert "No picture: pip install" in report and not (folder / "out" / "loss.png").exists()


@pytest.mark.slow
def test_a_dry_run_of_preferences_computes_no_reference(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": asked, "chosen": said, "rejected": "no."} for asked, said in PAIRS * 4]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "config.yaml").unlink()
    assert main(["new", "config.yaml", "--method", "dpo"]) == 0
    monkeypatch.setattr("megacompile.api.session.Session.run", None)
    code, said = planned(capsys, "--data=pairs.jsonl")
    assert code == 0 and "FITS" in said and "batches of the reference" in said


@pytest.mark.parametrize(
    "flag", ["--data=nosuch.jsonl", "--model_name_or_path=./nosuch", "--report_to=nosuch"]
)
def test_a_dry_run_finds_what_would_end_the_training(
    flag: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "config.yaml", "--dry_run", "true", *SMALL, flag]) == 2
    said = capsys.readouterr()
    assert "nosuch" in said.err and "FITS" not in said.out


@pytest.mark.parametrize(
    "rows",
    [
        {"instruction": "what is it?", "input": "", "output": "a fox."},
        {"conversations": [{"from": "human", "value": "what is it?"}, {"from": "gpt", "value": "a fox."}]},
        {
            "messages": [
                {"role": "user", "content": "what is it?"},
                {"role": "assistant", "content": "a fox."},
            ]
        },
    ],
    ids=lambda row: next(iter(row)),
)
def test_kinds_of_chats(rows: dict[str, Any]) -> None:
    from megacompile.cli.chat_rows import as_messages

    (row,) = as_messages(datasets.Dataset.from_list([rows]))
    asked, said = row["messages"]
    assert (asked["role"], asked["content"], said["role"], said["content"]) == (
        "user",
        "what is it?",
        "assistant",
        "a fox.",
    )


def test_an_instruction_with_an_input() -> None:
    from megacompile.cli.chat_rows import as_messages

    rows = [{"instruction": "translate", "input": "ein fuchs", "output": "a fox"}]
    (row,) = as_messages(datasets.Dataset.from_list(rows))
    assert row["messages"][0]["content"] == "translate\n\nein fuchs"


@pytest.mark.parametrize("said", ["be brief", "", None])
def test_what_the_system_says_comes_first(said: str | None) -> None:
    from megacompile.cli.chat_rows import as_messages

    turns = [{"from": "human", "value": "what is it?"}, {"from": "gpt", "value": "a fox."}]
    (row,) = as_messages(datasets.Dataset.from_list([{"system": said, "conversations": turns}]))
    roles = ["user", "assistant"]
    assert [turn["role"] for turn in row["messages"]] == (["system", *roles] if said else roles)
    assert not said or row["messages"][0]["content"] == said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["train", "config.yaml", "--learning_rat", "1"],
            "there is no key 'learning_rat': did you mean learning_rate?",
        ),
        (["train", "config.yaml", "--learning_rate", "fast"], "invalid float value: 'fast'"),
        (["train", "config.yaml", "--data", "nothing.jsonl"], "data: nothing.jsonl cannot be read"),
        (["train", "config.yaml", "--model_name_or_path", "./nowhere"], "there is no folder ./nowhere"),
        (["train", "config.yaml", "--optim", "galore_adamw"], "optim='galore_adamw'"),
        (["train", "config.yaml", "--method", "ppo"], "invalid choice: 'ppo'"),
        (
            ["train", "config.yaml", "--data", "broken.jsonl"],
            "cannot be read: line 4 of broken.jsonl is no JSON: Expecting value: ",
        ),
        (["train", "config.yaml", "--data", "silent.jsonl"], "data: row 4 is a chat without a turn"),
        (["train", "config.yaml", "--output_dir", "/proc/x"], "output_dir /proc/x: "),
        (
            ["train", "config.yaml", "--max_length", "1000000000"],
            "max_length 1000000000: give 1 to 16,777,216",
        ),
        (
            ["train", "config.yaml", "--report_to", "nowhere"],
            "report_to: nowhere is not supported",
        ),
        (
            ["train", "config.yaml", "--report_to", "clearml"],
            "report_to: ClearMLCallback requires",
        ),
        (["train", "config.yaml", "--chat_template_path", "no.jinja"], "path: no.jinja is no file."),
        (
            ["train", "config.yaml", "--chat_template_path", "open.jinja"],
            "open.jinja is no template: line 1: un",
        ),
        (
            ["train", "config.yaml", "--chat_template_path", "plain.jinja"],
            "chat_template_path: plain.jinja does not mark what the assistant says",
        ),
        (
            ["train", "config.yaml", "--model_name_or_path", "base"],
            "of base has no chat template: give chat_t",
        ),
        (["train", "config.yaml", "--model_name_or_path", "silent"], "silent has no tokenizer"),
        (["train", "missing.yaml"], "missing.yaml is no YAML file that can be read"),
        (["train", "model/config.json", "--output_dir", "x"], "there is no key 'architectures'"),
        (["train", "config.yaml", "--eval_strategy", "no"], "sample_prompts are answered at evaluations"),
        (["new", "config.yaml"], "config.yaml was not written: File exists"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (folder / "chats.jsonl").read_text().splitlines()[:3]
    (folder / "broken.jsonl").write_text("\n".join([*rows, '{"messages": [']))
    (folder / "silent.jsonl").write_text("\n".join([*rows, '{"messages": []}', *rows]))
    (folder / "open.jinja").write_text("{% for m in messages %}{{ m['role']")
    (folder / "plain.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    shutil.copytree(folder / "model", folder / "base")
    (folder / "base" / "chat_template.jinja").unlink()
    (folder / "silent").mkdir()
    shutil.copy(folder / "model" / "config.json", folder / "silent")
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said and said.count(words) == 1
    assert "Traceback" not in said


def test_links_in_its_folder_are_not_followed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One to another model is refused before anything is trained; the kept configuration replaces one."""
    before = contents(folder)
    (folder / "out").mkdir()
    (folder / "out" / "model").symlink_to(folder / "model")
    assert main(["train", "config.yaml", *SMALL]) == 2
    said = capsys.readouterr().err
    assert "it is a link, which is not followed: remove it" in said and "out/model" in said
    (folder / "out" / "config.yaml").symlink_to(folder / "chats.jsonl")
    train._keep_keys(Path("config.yaml"), [], folder / "out" / "config.yaml")
    assert before.items() <= contents(folder).items()
    assert (folder / "out" / "config.yaml").read_text() == Path("config.yaml").read_text()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("env: {PATH: /tmp}", "env sets 'PATH'"),
        ("env: {LD_PRELOAD: /tmp/a.so}", "env sets 'LD_PRELOAD'"),
        ("env: {CC: /tmp/cc}", "env sets 'CC'"),
        ("env: {PYTHONPATH: /tmp}", "env sets 'PYTHONPATH'"),
        ("env: {WANDB__EXECUTABLE: /tmp/a}", "env sets 'WANDB__EXECUTABLE'"),
        ("env: {HF_HOME: [1]}", "HF_HOME must be a text"),
        ("env: [PATH]", "env must be names and values"),
        ("learning_rate: .nan", "learning_rate nan cannot be meant"),
        ("learning_rate: 1.0e+308", "learning_rate 1e+308 cannot be meant"),
        ("learning_rate: -1", "learning_rate -1 cannot be meant"),
        ("learning_rate: [1]", "learning_rate is [1]"),
        (f"per_device_train_batch_size: {2**63}", f"per_device_train_batch_size {2**63} cannot be meant"),
        ("per_device_train_batch_size: 1.5", "per_device_train_batch_size is 1.5: give a whole number"),
        ("gradient_accumulation_steps: 0", "gradient_accumulation_steps 0 cannot be meant"),
        ("sample_tokens: -1", "sample_tokens -1 cannot be meant"),
        ("adam_beta1: 2.0", "adam_beta1 2.0 cannot be meant"),
        ("lr_scheduler_kwargs: {a: .nan}", "lr_scheduler_kwargs nan cannot be meant"),
        ("data: 5", "data is 5, which is no text"),
        ("bf16: 5", "bf16 is 5: give true or false"),
        ("method: 5", "method is 5"),
        ('offload_dir: "a\\0b"', "zero byte"),
        ("sample_prompts: What?", "sample_prompts must be a list of texts"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("seed: 2024-99-99", "month must be"),
        ("seed: !!python/object/apply:os.getpid []", "could not determine a constructor"),
        ("# \udcff", "can't decode byte 0xff"),
    ],
)
def test_a_config_is_checked_before_it_is_believed(
    line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"model_name_or_path: ./model\n{line}\n", errors="surrogateescape")
    before = dict(os.environ)
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"megacompile: {path}") and words in said
    assert {k: v for k, v in os.environ.items() if before.get(k) != v} in (
        {},
        {"HF_HUB_DISABLE_TELEMETRY": "1"},
    )


def test_the_environment_that_trainers_need_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("HF_DATASETS_CACHE", "WANDB_PROJECT", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS")
    for name in names:
        monkeypatch.setenv(name, "0")
    (tmp_path / "a.yaml").write_text("env: {" + ", ".join(f"{name}: 7" for name in names) + "}\n")
    read_config(tmp_path / "a.yaml")
    _parse(trl, tmp_path / "a.yaml", ["--output_dir", str(tmp_path)])
    assert [os.environ[name] for name in names] == ["7"] * len(names)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "\xff"}]}\n', "a.jsonl cannot be read"),
        ("b.jsonl", b'{"messages": ' + b"[" * 100_000, "line 1 of b.jsonl is no JSON"),
        ("c.jsonl", b'{"messages": NaN}\n', "row 1 is no chat"),
        ("d.jsonl", b'{"messages": [5]}\n', "row 1 is no chat"),
        ("e.jsonl", b'{"conversations": [5]}\n', "row 1 is no chat"),
        ("f.jsonl", b'{"instruction": 5, "output": 6}\n', "row 1 is no chat"),
        ("g.csv", b"text\n\xff\xfe\n", "g.csv cannot be read"),
        ("h.txt", b"\xff\xfe\n", "h.txt cannot be read"),
        ("i.parquet", b"PAR1abc", "i.parquet cannot be read"),
        ("j.json", b"\xff", "j.json cannot be read"),
    ],
)
def test_damaged_data_is_one_sentence(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    script, arguments = trl.ScriptArguments(), SimpleNamespace(eval_strategy="no", seed=0)
    with pytest.raises(MegacompileError) as refused:
        _data(TrainConfig(data=str(tmp_path / name)), script, trl.DatasetMixtureConfig(), arguments)
    assert words in str(refused.value) and str(refused.value).startswith("data: ")


def test_the_example_for_preferences_is_understood(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "preferences.yaml", "--method", "dpo"]) == 0
    assert main(["train", "preferences.yaml", "--data", "nothing.jsonl"]) == 2
    assert "data: nothing.jsonl cannot be read" in capsys.readouterr().err


def on_ranks(rank: int, folder: Path, given: list[str]) -> tuple[int, str]:
    """The command on one of two ranks, as torchrun starts it: its exit code, and what it prints."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(["train", "config.yaml", *given])
    return code, printed.getvalue()


@pytest.mark.slow
def test_two_ranks_train_what_one_process_does(folder: Path) -> None:
    """Losses and weights bitwise, from batches of unlike lengths; the first rank alone tells and writes."""
    given = [*SMALL, "--max_grad_norm=1e9", "--bf16=false", "--logging_steps=1"]
    (one, said), other = whole(
        run_ranks(2, on_ranks, folder, [*given, "--output_dir=ranks", GRADIENTS + "1"])
    )
    assert one == 0 and other == (0, "")
    assert said.count("megacompile: the model is in ranks/model") == said.count("What can you do? →") == 1
    assert main(["train", "config.yaml", *given, "--output_dir=one", GRADIENTS + "2"]) == 0
    logs = [list(csv.DictReader((folder / name / "log.csv").open())) for name in ("ranks", "one")]
    ranks, alone = (
        [(row["step"], row["loss"], row["learning_rate"]) for row in log if row["loss"]] for log in logs
    )
    assert ranks == alone and len(alone) == 4
    models = [load_file(folder / name / "model" / "model.safetensors") for name in ("ranks", "one")]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())
    assert {file.name for file in (folder / "ranks").iterdir()} == {
        file.name for file in (folder / "one").iterdir()
    }
    assert len((folder / "ranks" / "samples.jsonl").read_text().splitlines()) == 1


def test_muon_trains_as_trls_trainer_does_with_both_optimizers(folder: Path) -> None:
    """At one learning rate, schedule and weight decay. Adapters are all of them matrices."""
    given = [*SMALL, "--optimizer=muon", "--learning_rate=1e-3", "--weight_decay=0.1", "--logging_steps=1"]
    assert main(["train", "config.yaml", *given]) == 0

    def built(*flags: str) -> Any:
        keys = train._parse(trl, Path("config.yaml"), [*given, *flags, "--output_dir=plain"])
        return train._built("config.yaml", keys)

    (adapters,) = built("--use_peft=true").optimizer.optimizers
    assert isinstance(adapters, torch.optim.Muon)
    made = built()
    muon, rest = made.optimizer.optimizers
    assert type(rest) is torch.optim.AdamW
    inner = {id(p) for n, p in made.model.named_parameters() if p.dim() == 2 and ".layers." in n}
    assert {id(p) for p in muon.param_groups[0]["params"]} == inner
    rows = {"train_dataset": made.train_dataset, "eval_dataset": made.eval_dataset}
    model = transformers.AutoModelForCausalLM.from_pretrained("model")
    plain = trl.SFTTrainer(model, args=made.args, processing_class=made.processing_class, **rows)
    plain.optimizer = Both(train._muon_and_others(plain).optimizers)
    plain.train()
    logged = [row for row in csv.DictReader((folder / "out" / "log.csv").open()) if row["loss"]]
    expected = [entry for entry in plain.state.log_history if "grad_norm" in entry]
    assert len(logged) == len(expected) == 4
    for mine, theirs in zip(logged, expected, strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert float(mine[name]) == pytest.approx(theirs[name], rel=1e-6), name
